"""From where an engine's interpreter imports: asked of it, in the server's environment."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from sm121.core.errors import Sm121Error

_PROBE = """
import importlib.util as u, json, site, sys, sysconfig
origins = {}
for name in sys.argv[1:]:
    spec = u.find_spec(name)
    places = list(spec.submodule_search_locations or []) if spec else []
    origins[name] = spec.origin or places[0] if spec and (spec.origin or places) else None
own = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib"), *site.getsitepackages()}
print(json.dumps({"own": sorted(own), "origins": origins}))
"""


@dataclass(frozen=True)
class Imports:
    """From where an interpreter imports."""

    #: File of each module, None for one that it does not have.
    origins: dict[str, str | None]
    #: The interpreter's own folders of installed packages.
    own: tuple[str, ...]


def imports(python: str, modules: Sequence[str], environment: Mapping[str, str]) -> Imports:
    """From where ``python`` would import each module.

    Raises:
        Sm121Error: the interpreter does not answer.
    """
    probe = subprocess.run(
        [python, "-c", _PROBE, *modules],
        capture_output=True,
        text=True,
        timeout=60,
        env=dict(environment),
    )
    if probe.returncode != 0:
        last = probe.stderr.strip().splitlines()[-1:] or ["no message"]
        raise Sm121Error(f"{python} cannot look up {', '.join(modules)}: {last[0]}")
    answer = json.loads(probe.stdout)
    return Imports(answer["origins"], tuple(answer["own"]))


def misplaced(found: Imports, checkouts: Mapping[str, str]) -> list[str]:
    """Modules that do not come from the checkout expected, where that exists, else from the
    interpreter's own installed packages; a line each."""
    wrong = []
    for name, origin in found.origins.items():
        if origin is None:
            continue
        checkout = Path(checkouts[name]) if name in checkouts else None
        if checkout is not None and checkout.is_dir():
            if not Path(origin).is_relative_to(checkout):
                wrong.append(
                    f"{name}: required from the checkout {checkout}, seen {origin} "
                    f"(put {checkout} on PYTHONPATH)"
                )
        elif not any(Path(origin).is_relative_to(folder) for folder in found.own):
            wrong.append(
                f"{name}: required from {' or '.join(found.own)}, seen {origin} "
                "(unset PYTHONPATH, or name the checkout in the profile's engine.checkouts)"
            )
    return wrong
