"""Healthy and sick GB10s, and what the suite must say of each: the rows of ``cases.toml``."""

import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from meta_tests.fakes.gb10.machine import BUILD, HEALTHY_ONE, HERE

_DATA: dict[str, Any] = tomllib.loads((HERE / "cases.toml").read_text("utf-8"))
TAGGED: str = _DATA["tagged"]


@dataclass(frozen=True)
class Case:
    """One of them. `arguments`: of pytest, beside the plan ``quick``; `served`: arguments of a
    server that its owner started, and that the suite is attached to; `tail`: what was in the file
    of its log before; `verdict`: of the run, as a regular expression; `says`: what must be in what
    is said, as regular expressions; `alone`: what the tests that fail are called, as a regular
    expression on all of them; `changes`: fields of `gb10.machine.Machine`; `sample`: in ``make
    test`` as well, since its server refuses to start, and no vLLM has to answer."""

    name: str
    arguments: Sequence[str]
    verdict: str
    says: Sequence[str] = ()
    release: str = "0.33.0"
    changes: dict[str, Any] = field(default_factory=dict)
    sample: bool = False
    served: Sequence[str] | None = None
    tail: str = ""
    alone: str | None = None


def _cases(kind: str, verdict: str) -> Iterator[Case]:
    for row in _DATA[kind]:
        row = {"verdict": verdict, **row}
        releases = _DATA["releases"] if row.pop("each_release", False) else [row.get("release")]
        changes = row["changes"] = row.get("changes", {})
        for name in changes.keys() & HEALTHY_ONE.keys() - {"warm"}:
            changes[name] = HEALTHY_ONE[name] | changes[name]
        if "profile" in changes:
            changes["profile"] = HERE / changes["profile"]
        if row.get("release") == BUILD:
            changes.setdefault("version", TAGGED)
        if "served" in row:
            row["served"] = row["served"].split()
        if line := row.get("tail"):
            times = (f"{second // 60:02}:{second % 60:02}" for second in range(3600))
            row["tail"] = "".join(f"{line.format(at=at)}\n" for at in times)
        levels = [f"tests/test_{level}.py" for level in row.pop("levels", ())]
        row["arguments"] = [*levels, *row.get("arguments", ())]
        for release in releases:
            changed = {} if release is None else {"release": release}
            yield Case(**{**row, **changed, "name": row["name"].format(release=release)})


HEALTHY = [*_cases("healthy", "PASS")]
SICK = [*_cases("sick", "FAIL")]
