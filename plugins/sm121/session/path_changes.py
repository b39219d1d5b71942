"""Finds the differences between the requests and the kernel paths of two runs."""

from dataclasses import dataclass

from sm121.core.profile_fields import FULL
from sm121.evidence.kernel_path import KernelPath
from sm121.run.fingerprint import Fingerprint
from sm121.run.verdict_file import VerdictFile

#: The fields of a kernel path that are compared.
_PARTS = (
    "attention",
    "moe",
    "cuda_graphs",
    "kv_layout",
    "speculative",
    "native_fp4",
    "kv_cache_dtype",
    "dtype",
    "quantization",
    "prefix_caching",
    "block_size",
)
#: The lists of a kernel path that must not get new entries.
_LISTS = ("fallbacks", "silent_fallbacks", "differences")


@dataclass(frozen=True)
class PathChange:
    """A part of the kernel path that differs between the trusted run and this one.

    Attributes:
        part: The field of the path, as in the id of the failure.
        difference: The two values in words.
        is_expected: Whether only one of the runs requested a value for this part, or the trusted
            run did not show the part.
    """

    part: str
    difference: str
    is_expected: bool = False

    @property
    def text(self) -> str:
        """The part and its difference."""
        return f"{self.part}: {self.difference}"


def find(trusted: VerdictFile, run: VerdictFile) -> list[PathChange]:
    """Find the parts of the kernel path that differ between two runs.

    Args:
        trusted: The trusted run.
        run: The run that is compared. If it had no server, no part differs.

    Returns:
        A change for each part that differs.
    """
    if not (run.engine.base_url or run.engine.startup_s or run.engine.path.evidence):
        return []
    there = trusted.engine.path
    here = run.engine.path
    requested = _changed_requests(there, here)
    changes = []
    for part in _PARTS:
        change = _change_of_value(part, getattr(there, part), getattr(here, part), requested)
        if change is not None:
            changes.append(change)
        known = there.also.get(part, ())
        more = [value for value in here.also.get(part, ()) if value not in known]
        if more:
            text = f"some layers run {', '.join(more)}, which no layer of the trusted run does"
            changes.append(PathChange(part, text, part in requested))
    for name in _LISTS:
        for entry in getattr(here, name):
            if entry not in getattr(there, name):
                part = name.replace("_", " ")
                changes.append(PathChange(part, f"{entry} in this run, not in the trusted run"))
    return changes


def _changed_requests(there: KernelPath, here: KernelPath) -> set[str | None]:
    """Return the fields of the path for which the requests of two runs differ."""
    requests = {(request.field, request.by) for request in there.requested}
    requests ^= {(request.field, request.by) for request in here.requested}
    return {field for field, _ in requests}


def _change_of_value(
    part: str, before: object, now: object, requested: set[str | None]
) -> PathChange | None:
    if before == now:
        return None
    if now is None:
        return PathChange(part, f"{before} in the trusted run, not shown in this run")
    if before is None:
        return PathChange(
            part, f"not shown in the trusted run, {now} in this run", is_expected=True
        )
    return PathChange(part, f"{before} in the trusted run, {now} in this run", part in requested)


def unlike(one: VerdictFile, other: VerdictFile) -> str | None:
    """Return the first difference in the requests of two runs that makes a comparison impossible.

    Args:
        one: The earlier run.
        other: The later run.

    Returns:
        ``NAME (VALUE, now VALUE)``; None for runs that can be compared.
    """
    why = other_target(one, other)
    if why is not None:
        return why
    before = one.fingerprint or Fingerprint()
    after = other.fingerprint or Fingerprint()
    if before.plan in (FULL, after.plan):
        return None
    return f"plan ({before.plan}, now {after.plan})"


def other_target(one: VerdictFile, other: VerdictFile) -> str | None:
    """Return the first difference of architecture, profile, model and engine of two runs.

    Args:
        one: The earlier run.
        other: The later run.

    Returns:
        ``NAME (VALUE, now VALUE)``; None if both runs have the same target.
    """
    before = one.fingerprint or Fingerprint()
    after = other.fingerprint or Fingerprint()
    pairs = [
        ("architecture", one.arch, other.arch),
        ("profile", one.profile, other.profile),
        ("model's digest", before.model, after.model),
    ]
    # The engine of an attached server is recognised later, so only managed engines are compared.
    if one.engine.managed and other.engine.managed:
        pairs.append(("engine", one.engine.name, other.engine.name))
    for name, value, now in pairs:
        if value != now:
            return f"{name} ({value}, now {now})"
    return None
