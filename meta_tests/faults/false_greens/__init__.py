"""The catalogue of false-green scenarios.

No scenario may pass, and the same scenario without its fault (the clean twin) must pass.

Each module contains the cases of some items (kinds of faults). A case is a pair of functions of a
`Kit`: ``fault`` does what must not pass, ``clean`` does the same without the fault.
"""

import importlib
import pkgutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any


@dataclass
class Kit:
    """The fixtures of ``meta_tests/conftest.py`` that a case may use."""

    run_pytest: Callable[..., Any]
    start_pytest: Callable[..., Any]
    fault_server: Callable[..., Any]
    timed_server: Callable[..., Any]
    tmp_path: Path
    #: The folder of the BF16 canary.
    canary: Path


@dataclass(frozen=True)
class Outcome:
    """The result of a scenario.

    Attributes:
        verdict: The verdict of the run, of the metric, or of the decision that the case is about.
        text: The line with the reason.
        status: pytest's exit status; None if a case calls a function.
        certified: The field ``certified`` of verdict.json.
    """

    verdict: str
    text: str
    status: int | None = None
    certified: bool = False

    @property
    def green(self) -> bool:
        """Whether a reader or a CI system would take the run for a success."""
        return self.certified or (self.status == 0 if self.status is not None else self._passed)

    @property
    def _passed(self) -> bool:
        return self.verdict.startswith("PASS")


@dataclass(frozen=True)
class Case:
    """One false-green scenario.

    Attributes:
        item: The item of the catalogue, such as "1 Tokens with the first chunk".
        name: The variant, in a few words.
        fault: Injects the fault; the result must not be green.
        clean: Does the same without the fault; the result must be green.
        slow: Whether it takes more than about ten seconds; only ``make catalogues`` runs it.
        expected: A part of the expected text.
        module: The module with the case, set by `cases`.
    """

    item: str
    name: str
    fault: Callable[[Kit], Outcome]
    clean: Callable[[Kit], Outcome]
    expected: str
    slow: bool = False
    module: str = ""


def cases() -> Iterator[Case]:
    """Return all cases. The keys are the items of the catalogue."""
    modules = [m.name for m in pkgutil.iter_modules(__path__) if not m.name.startswith("__")]
    every: list[Case] = []
    for name in modules:
        module = importlib.import_module(f"{__name__}.{name}")
        every += [replace(case, module=name) for case in module.CASES]
    return iter(sorted(every, key=lambda case: (int(case.item.split()[0]), case.item)))
