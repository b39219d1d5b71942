"""A profile of decode steps: its kernels, classified, with their shares of time.

`sm121.evidence.profile_files` reads the files. Without a GPU a profile has operators.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from sm121.core import templates
from sm121.core.data_file import Record
from sm121.evidence.kernel_names import PARTS, Part, is_cut, part_of

#: Digits of the seconds and of the shares in a profile.
_SECONDS_DIGITS = 9
_SHARE_DIGITS = 6


class KernelTime(Record):
    """All launches of one kernel."""

    name: str
    part: Part
    calls: int
    seconds: float
    share: float


class PartTime(Record):
    """All kernels of one part of the model."""

    calls: int
    seconds: float
    share: float


class HostTime(Record):
    """The times of a trace's steps, with what the host did in them."""

    wall_s: float
    """Seconds from the start of the first kernel to the end of the last one."""
    busy_s: float
    """Seconds of them in which a kernel ran."""
    launches: int | None = None
    """Calls with which the host launched a kernel or a graph; null where the trace has none."""


class ExpertProducts(Record):
    """The launches of the experts' two products, which often have one name."""

    pairs: int
    """Launches of each of the two."""
    first_s: float
    second_s: float


class KernelProfile(Record):
    """Which kernels ran in some decode steps, and for how long."""

    kind: Literal["gpu", "cpu"]
    """``gpu``: kernels; ``cpu``: operators, each without those that it calls."""
    source: str
    """The trace that it was read from."""
    steps: int | None
    """Decode steps in it; null where the trace does not mark them."""
    host: HostTime | None = None
    """Null where the file has no times of single kernels, and without a GPU."""
    products: ExpertProducts | None = None
    """Null where the launches do not come in pairs."""
    decoding: bool = False
    """The suite took it while one request was decoded: there is no prefill in it."""
    seconds: float
    parts: dict[Part, PartTime]
    kernels: list[KernelTime]
    """Longest first."""

    def names(self) -> list[str]:
        """Return the names of all kernels."""
        return [kernel.name for kernel in self.kernels]

    def cut_names(self) -> list[str]:
        """Return the names whose end is missing."""
        return [name for name in self.names() if is_cut(name)]


@dataclass
class Launches:
    """The launches of one kernel, or the calls of one operator."""

    name: str
    calls: int = 0
    seconds: float = 0.0

    def add(self, seconds: float, calls: int = 1) -> None:
        """Add launches.

        Args:
            seconds: The time of all of them.
            calls: Their number.
        """
        self.calls += calls
        self.seconds += seconds


def build_profile(
    kind: Literal["gpu", "cpu"], source: Path, steps: int | None, launches: Iterable[Launches]
) -> KernelProfile:
    """Make a profile of the launches in a trace.

    Args:
        kind: Whether they are kernels (``gpu``) or operators (``cpu``).
        source: The trace.
        steps: The decode steps in it. None: the trace does not mark them.
        launches: The launches. Two may have one name, if the names are cut.
    """
    longest = sorted(launches, key=lambda one: -one.seconds)
    total_s = sum(one.seconds for one in longest)
    by_part: dict[Part, Launches] = {part: Launches(part) for part in PARTS}
    kernels: list[KernelTime] = []
    for one in longest:
        part = part_of(one.name)
        by_part[part].add(one.seconds, one.calls)
        kernels.append(
            KernelTime(
                name=one.name,
                part=part,
                calls=one.calls,
                seconds=round(one.seconds, _SECONDS_DIGITS),
                share=_share(one, total_s),
            )
        )
    parts: dict[Part, PartTime] = {}
    for part, of_part in by_part.items():
        parts[part] = PartTime(
            calls=of_part.calls,
            seconds=round(of_part.seconds, _SECONDS_DIGITS),
            share=_share(of_part, total_s),
        )
    return KernelProfile(
        kind=kind,
        source=source.name,
        steps=steps,
        seconds=round(total_s, _SECONDS_DIGITS),
        parts=parts,
        kernels=kernels,
    )


def _share(launches: Launches, total_s: float) -> float:
    return round(launches.seconds / total_s, _SHARE_DIGITS) if total_s > 0 else 0.0


def shortened(profile: KernelProfile, kernels: int = 40) -> KernelProfile:
    """Shorten a profile for verdict.json.

    Args:
        profile: The profile.
        kernels: How many of its longest kernels are kept.

    Returns:
        A copy with these kernels, and with all whose part is known.
    """
    kept = [
        kernel
        for number, kernel in enumerate(profile.kernels)
        if number < kernels or kernel.part != "other"
    ]
    return profile.model_copy(update={"kernels": kept})


def table(profile: KernelProfile, rows: int = 25) -> str:
    """Return a profile as Markdown: the parts, then the longest kernels.

    Args:
        profile: The profile.
        rows: How many kernels are shown.
    """
    return templates.rendered("kernels.md.j2", profile=profile, rows=rows)
