"""From where an engine's interpreter imports: asked of it, in the server's environment."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from sm121.errors import Sm121Error

_PROBE = (
    "import importlib.util as u, json, sys\n"
    "origins = {}\n"
    "for name in sys.argv[1:]:\n"
    "    spec = u.find_spec(name)\n"
    "    places = list(spec.submodule_search_locations or []) if spec else []\n"
    "    origins[name] = spec.origin or places[0] if spec and (spec.origin or places) else None\n"
    "print(json.dumps({'prefix': sys.prefix, 'origins': origins}))\n"
)


def import_origins(
    python: str, modules: Sequence[str], environment: Mapping[str, str]
) -> dict[str, str | None]:
    """File from which ``python`` would import each module, None for one that it does not have.

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
    origins: dict[str, str | None] = json.loads(probe.stdout)["origins"]
    return origins


def misplaced(
    origins: Mapping[str, str | None], python: str, checkouts: Mapping[str, str]
) -> list[str]:
    """Modules that do not come from the checkout expected, where that exists, else from the
    interpreter's own environment; a line each."""
    wrong = []
    own = Path(python).parent.parent
    for name, origin in origins.items():
        if origin is None:
            continue
        checkout = Path(checkouts[name]) if name in checkouts else None
        if checkout is not None and checkout.is_dir():
            if not Path(origin).is_relative_to(checkout):
                wrong.append(
                    f"{name}: required from the checkout {checkout}, seen {origin} "
                    f"(put {checkout} on PYTHONPATH)"
                )
        elif not Path(origin).is_relative_to(own) and "-packages" not in origin:
            wrong.append(
                f"{name}: required from {own} or a site-packages folder, seen {origin} "
                "(unset PYTHONPATH, or name the checkout in the profile's engine.checkouts)"
            )
    return wrong
