"""A profile of decode steps: the kernels of each part of the model, with their shares of the time.

`sm121.evidence.profile_files` reads the files. Without a GPU, a profile contains operators instead
of kernels.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from sm121.core import templates
from sm121.core.data_file import Record
from sm121.evidence.kernel_names import PARTS, Part, is_cut, part_of

#: The number of decimals of seconds in a profile.
_SECONDS_DIGITS = 9
#: The number of decimals of shares in a profile.
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
    """The times of a trace, and the host's launches in it."""

    wall_s: float
    """Seconds from the start of the first kernel to the end of the last one."""
    busy_s: float
    """The part of ``wall_s`` in which a kernel ran."""
    launches: int | None = None
    """The number of the host's calls that launched a kernel or a graph; null if the trace has no
    such calls."""


class ExpertProducts(Record):
    """The launches of the experts' two matrix products, whose kernels often have the same name."""

    pairs: int
    """The number of pairs of launches: one of the first product, and one of the second."""
    first_s: float
    second_s: float


class KernelProfile(Record):
    """Which kernels ran in some decode steps, and for how long."""

    kind: Literal["gpu", "cpu"]
    """``gpu``: kernels; ``cpu``: operators, each without the operators that it calls."""
    source: str
    """The trace from which the profile was read."""
    steps: int | None
    """The number of decode steps; null if the trace does not mark steps."""
    step_tokens: int | None = None
    """The most tokens that a decode step computes for one request: 1 without speculative decoding,
    otherwise the model's own token and the drafts. Null if the trace does not show it."""
    prefill_steps: int = 0
    """The number of steps that compute a part of a prompt, as far as the trace marks them."""
    host: HostTime | None = None
    """The times of the host; null if the file has no times of single launches, or if there is no
    GPU."""
    products: ExpertProducts | None = None
    """The launches of the experts' products; null if the launches are not in pairs."""
    decoding: bool = False
    """Whether the suite took the profile while one request was decoding, so that it contains no
    prefill."""
    seconds: float
    parts: dict[Part, PartTime]
    kernels: list[KernelTime]
    """The kernels, those with the longest total time first."""

    def names(self) -> list[str]:
        """Return the names of all kernels."""
        return [kernel.name for kernel in self.kernels]

    def cut_names(self) -> list[str]:
        """Return the truncated names."""
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
            seconds: The time of all launches to add.
            calls: The number of launches to add.
        """
        self.calls += calls
        self.seconds += seconds


def build_profile(
    kind: Literal["gpu", "cpu"], source: Path, steps: int | None, launches: Iterable[Launches]
) -> KernelProfile:
    """Build a profile from the launches in a trace.

    Args:
        kind: Whether the launches are of kernels (``gpu``) or operators (``cpu``).
        source: The trace.
        steps: The number of decode steps. None if the trace does not mark steps.
        launches: The launches. If names are truncated, several may have the same name.
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
        kernels: How many of the longest kernels to keep.

    Returns:
        A copy with these kernels, and with all kernels whose part is known.
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
        rows: The number of kernels to list.
    """
    return templates.rendered("kernels.md.j2", profile=profile, rows=rows)
