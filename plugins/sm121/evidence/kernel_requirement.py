"""Compare the kernels of a profile with the backends in the log and with the required path."""

import re
from collections.abc import Iterator
from dataclasses import dataclass

from sm121.core.engine_settings import KernelPathRequirement, PathRule
from sm121.evidence.kernel_names import KernelName, Part, entry_of, load_names
from sm121.evidence.kernel_path import KernelPath
from sm121.evidence.kernel_profile import KernelProfile
from sm121.evidence.kernel_proof import with_kernels

#: The parts of the model that every decode step computes.
_PARTS: tuple[Part, ...] = ("attention", "moe")
#: How many of the longest kernels a finding names.
_NAMED_KERNELS = 5
#: The maximum length of the name of each of the longest kernels, in characters.
_SHORT_NAME = 60
#: The maximum length of the name of a wrong kernel, in characters.
_LONGEST_NAME = 200


@dataclass(frozen=True)
class _Finding:
    """A difference between the kernels and the path."""

    text: str
    #: Whether the kernels are not sufficient evidence, because names are truncated, or because the
    #: numbers of calls prove nothing.
    undecided: bool = False


def kernel_contradictions(
    required: KernelPathRequirement,
    path: KernelPath,
    profile: KernelProfile,
    layers: int | None = None,
) -> list[str]:
    """Compare the kernels of a decode step with the log and with the required path.

    The profile must contain kernels of attention and of the experts, and these must belong to the
    backends that the log shows (``fixtures/kernels/names.toml``). If no known kernel of a backend
    ran, this is a contradiction, so that an emulation is not accepted. The rules on kernels in the
    suite's profile are checked, too.

    Args:
        required: The required path.
        path: The path that the log proves.
        profile: The kernels.
        layers: The number of layers of the model. None if it is unknown.

    Returns:
        A line for each contradiction.
    """
    findings = _compare(required, path, profile, layers)
    return [finding.text for finding in findings if not finding.undecided]


def undecided_by_kernels(
    required: KernelPathRequirement,
    path: KernelPath,
    profile: KernelProfile,
    layers: int | None = None,
) -> list[str]:
    """Return the requirements that these kernels neither prove nor contradict.

    Args:
        required: As in `kernel_contradictions`.
        path: As in `kernel_contradictions`.
        profile: As in `kernel_contradictions`.
        layers: As in `kernel_contradictions`.

    Returns:
        A line for each requirement.
    """
    findings = _compare(required, path, profile, layers)
    return [finding.text for finding in findings if finding.undecided]


def backend_contradictions(path: KernelPath, profile: KernelProfile) -> list[str]:
    """Find kernels that contradict the backends in the log.

    Args:
        path: The path that the log proves.
        profile: The kernels.

    Returns:
        A line for each contradiction.
    """
    return [finding.text for finding in _compare_backends(path, profile) if not finding.undecided]


def _compare(
    required: KernelPathRequirement, path: KernelPath, profile: KernelProfile, layers: int | None
) -> Iterator[_Finding]:
    for part in _PARTS:
        if getattr(path, part) is None and part not in required.not_shown:
            yield _Finding(f"no evidence shows the {part} backend, so its kernels cannot be judged")
    yield from _compare_backends(path, profile)
    for rule in required.rules:
        if rule.where == "profile" and _applies(rule, path):
            yield from _check_rule(rule, profile)
    yield from _compare_proven(required, profile, layers)


def _applies(rule: PathRule, path: KernelPath) -> bool:
    field, pattern = next(iter(rule.when.items()))
    return re.fullmatch(pattern, str(getattr(path, field, None)), re.I) is not None


def _check_rule(rule: PathRule, profile: KernelProfile) -> Iterator[_Finding]:
    names = profile.names()
    cut_count = len(profile.cut_names())
    for pattern in rule.must_see:
        if any(re.search(pattern, name) for name in names):
            continue
        observed = "got none"
        if cut_count:
            observed = f"undecided because {cut_count} kernel names are truncated"
        text = f"expected a kernel {pattern!r}, {observed}; the longest are {_longest(profile)}"
        yield _Finding(text, undecided=cut_count > 0)
    for pattern in rule.must_not_see:
        unwanted = [name for name in names if re.search(pattern, name)]
        if unwanted:
            yield _Finding(f"expected no kernel {pattern!r}, got {unwanted[0][:_LONGEST_NAME]}")


def _compare_proven(
    required: KernelPathRequirement, profile: KernelProfile, layers: int | None
) -> Iterator[_Finding]:
    """Compare the values that the kernels prove with the required ones."""
    proven = with_kernels(KernelPath(), profile, layers)
    if required.requantised is not None:
        text = f"requantised: expected {', '.join(required.requantised)}"
        if proven.requantised is None:
            yield _Finding(f"{text}, got kernels that do not show the value", undecided=True)
        elif set(proven.requantised) != set(required.requantised):
            yield _Finding(f"{text}, got {proven.evidence['requantised']}")
    if required.moe_variant is not None:
        text = f"moe_variant: expected {', '.join(required.moe_variant)}"
        if proven.moe_variant is None:
            yield _Finding(f"{text}, got kernels that do not show the value", undecided=True)
        elif proven.moe_variant not in required.moe_variant:
            yield _Finding(f"{text}, got {proven.evidence['moe_variant']}")


def _compare_backends(path: KernelPath, profile: KernelProfile) -> Iterator[_Finding]:
    for part in _PARTS:
        names = [kernel.name for kernel in profile.kernels if kernel.part == part]
        if not names:
            yield _Finding(
                f"expected kernels of {part} in a decode step, got none (the longest are "
                f"{_longest(profile)})",
                undecided=bool(profile.cut_names()),
            )
        if getattr(path, part) is not None:
            yield from _compare_backend(path, part, names, profile)


def _compare_backend(
    path: KernelPath, part: Part, names: list[str], profile: KernelProfile
) -> Iterator[_Finding]:
    """Compare the kernels of a part with the backend in the log."""
    backend = getattr(path, part)
    #: The first kernel of each entry that belongs to a single backend.
    owned: dict[KernelName, str] = {}
    for name in names:
        entry = entry_of(name)
        if entry is not None and entry.backend:
            owned.setdefault(entry, name)
    if not _is_known(part, backend):
        yield _Finding(f"no kernel of the {part} backend {backend} is known")
    elif not any(entry.belongs_to(backend) for entry in owned):
        yield _Finding(
            f"{part}: expected a kernel of {backend}, as in the log, got none; the longest are "
            f"{_longest(profile)}",
            undecided=bool(profile.cut_names()),
        )
    if path.speculative not in (None, "none"):
        return  # the kernels may belong to the draft model, which may use other backends
    allowed = [backend, *path.also.get(part, [])]
    for entry, name in owned.items():
        if not any(entry.belongs_to(one) for one in allowed):
            yield _Finding(
                f"{part}: expected {backend}, as in the log, got a kernel of {entry.id}: "
                f"{name[:_LONGEST_NAME]}"
            )


def _is_known(part: Part, backend: str) -> bool:
    """Return whether there is an entry for kernels that only this backend runs."""
    return any(entry.part == part and entry.belongs_to(backend) for entry in load_names().name)


def _longest(profile: KernelProfile) -> str:
    """Return the names of the kernels with the longest times."""
    return ", ".join(name[:_SHORT_NAME] for name in profile.names()[:_NAMED_KERNELS])
