"""The catalogue of false greens: each way to a PASS that is none, and its clean twin that passes. A
module has the cases of some items. A case is a pair of functions of a `Kit`: ``fault`` does what
must not pass, ``clean`` the same without the fault."""

import importlib
import pkgutil
import re
import sys
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from inspect import ismodule
from pathlib import Path
from typing import Any

from data_rows import meant

DATA = Path(__file__).parents[1] / "data" / "false-greens"
#: Texts of rows that are written as names are, and are none.
_WORDS = ("PASS", "FAIL", "INCONCLUSIVE", "TRITON", "FLASHINFER", "CUTLASS", "EMULATION")


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
    ``make catalogues``; `expected`: a part of what must be said."""

    item: str
    name: str
    fault: Callable[[Kit], Outcome]
    clean: Callable[[Kit], Outcome]
    expected: str
    slow: bool = False


def of_data(module: str) -> Iterator[Case]:
    """The cases of ``data/false-greens/``, by the names of the variants. `fault` and `clean` are
    calls: the name of a function of the module, what it is given, and its keywords in a table; a
    list that begins with no function is a list. The table `names` has more names. `make` is a
    function that makes the case, of its name, of `given` and of the other fields."""
    rows = tomllib.loads((DATA / f"{module.rpartition('.')[2]}.toml").read_text("utf-8"))
    of_module = {k: v for k, v in vars(sys.modules[module]).items() if not ismodule(v)}
    names = of_module | rows.pop("names", {})

    def named(text: str) -> Any:
        if text not in names and re.fullmatch(r"_?[A-Z][A-Z_]+", text) and text not in _WORDS:
            raise LookupError(f"{module}: {text} is no name of the module, and no word of {_WORDS}")
        return names.get(text, text)

    def value(term: Any) -> Any:
        return meant(term, named)

    for name, row in rows.items():
        arguments = [value(each) for each in row.pop("given", ())]
        fields = {key: value(term) for key, term in row.items()}
        make = fields.pop("make", None)
        yield make(name, *arguments, **fields) if make else Case(**{"name": name, **fields})


def cases() -> Iterator[Case]:
    """All of them, by item."""
    modules = [m.name for m in pkgutil.iter_modules(__path__) if not m.name.startswith("__")]
    loaded = [importlib.import_module(f"{__name__}.{name}") for name in modules]
    every = [case for module in loaded for case in module.CASES]
    return iter(sorted(every, key=lambda case: (int(case.item.split()[0]), case.item)))
