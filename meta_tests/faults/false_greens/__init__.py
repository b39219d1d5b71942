"""The catalogue of false greens: each way to a PASS that is none, and its clean twin that passes. A
module has the cases of some items. A case is a pair of functions of a `Kit`: ``fault`` does what
must not pass, ``clean`` the same without the fault."""

import importlib
import pkgutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any


@dataclass
class Kit:
    """What a case has at hand: the fixtures of ``meta_tests/conftest.py``."""

    run_pytest: Callable[..., Any]
    start_pytest: Callable[..., Any]
    fault_server: Callable[..., Any]
    timed_server: Callable[..., Any]
    tmp_path: Path
    #: The BF16 canary's folder.
    canary: Path


@dataclass(frozen=True)
class Outcome:
    """What was said in the end. `verdict`: of the run, of the metric, or of the decision that the
    case is about; `text`: the line that gives the reason; `status`: pytest's exit status; None
    where a case asks a function; `certified`: what verdict.json says of the certificate."""

    verdict: str
    text: str
    status: int | None = None
    certified: bool = False

    @property
    def green(self) -> bool:
        """Whether a reader, or a CI, would take it for a success."""
        return self.certified or (self.status == 0 if self.status is not None else self._passed)

    @property
    def _passed(self) -> bool:
        return self.verdict.startswith("PASS")


@dataclass(frozen=True)
class Case:
    """One way to a false green. `item`: what the catalogue lists it under, as "1 Tokens with the
    first chunk"; `name`: the variant, in a few words; `fault`: does it; must not be green; `clean`:
    the same without the fault; must be green; `slow`: it takes more than about ten seconds; left to
    ``make catalogues``; `expected`: a part of what must be said; `module`: the module that has the
    case, which `cases` fills in."""

    item: str
    name: str
    fault: Callable[[Kit], Outcome]
    clean: Callable[[Kit], Outcome]
    expected: str
    slow: bool = False
    module: str = ""


def cases() -> Iterator[Case]:
    """All of them, by item."""
    modules = [m.name for m in pkgutil.iter_modules(__path__) if not m.name.startswith("__")]
    every: list[Case] = []
    for name in modules:
        module = importlib.import_module(f"{__name__}.{name}")
        every += [replace(case, module=name) for case in module.CASES]
    return iter(sorted(every, key=lambda case: (int(case.item.split()[0]), case.item)))
