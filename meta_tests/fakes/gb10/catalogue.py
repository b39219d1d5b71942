"""Healthy and faulty simulated GB10s with the expected results: the rows of ``cases.toml``."""

import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from meta_tests.fakes.gb10.machine import BUILD, HEALTHY_ONE, HERE

_DATA: dict[str, Any] = tomllib.loads((HERE / "cases.toml").read_text("utf-8"))
TAGGED: str = _DATA["tagged"]


@dataclass(frozen=True)
class Case:
    """One simulated GB10, and the result that the suite must give for it.

    Attributes:
        arguments: Arguments of pytest, in addition to the plan ``quick``.
        served: Arguments of a server that the suite attaches to.
        tail: The content of the server's log file before the server writes to it.
        verdict: The expected verdict of the run, a regular expression.
        says: Regular expressions that must match the output.
        alone: A regular expression that must match the name of each failed test.
        changes: Fields of `gb10.machine.Machine`.
        sample: Whether ``make test`` runs the case, too: its server refuses to start, so no vLLM is
            needed.
    """

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
