"""The names of architectures."""

from collections.abc import Iterable

CPU = "cpu"

#: The supported GPU architectures, sorted by compute capability.
GPUS = ("sm80", "sm86", "sm87", "sm89", "sm90", "sm100", "sm103", "sm110", "sm120", "sm121")

NAMES: tuple[str, ...] = (CPU, *GPUS)

#: The marker of a test that runs on any GPU. It is not the name of an architecture.
ANY_GPU = "gpu"

#: Names of chips and their architectures.
ALIASES = {"gb10": "sm121"}


def parse(name: str) -> str:
    """Return the name of an architecture.

    Args:
        name: One of `NAMES`, or one of `ALIASES` in upper or lower case.

    Raises:
        ValueError: The name is in neither list.
    """
    known = ALIASES.get(name.lower(), name)
    if known in NAMES:
        return known
    aliases = ", ".join(f"{alias} for {meant}" for alias, meant in ALIASES.items())
    raise ValueError(f"--arch {name}: expected one of {', '.join(NAMES)} ({aliases})")


def listed(markers: Iterable[str]) -> str:
    """Return a list of architectures as text, for example ``sm120 or sm121``.

    Args:
        markers: Some of `NAMES` and `ANY_GPU`.
    """
    known = {*markers}
    gpus = [name for name in GPUS if name in known]
    if ANY_GPU in known and not gpus:
        gpus = ["a GPU"]
    cpu = [CPU] if CPU in known else []
    return " or ".join([*cpu, *gpus])


def has(markers: frozenset[str], arch: str | None) -> bool:
    """Check whether markers allow an architecture.

    Args:
        markers: Some of `NAMES` and `ANY_GPU`. If they contain a GPU architecture, `ANY_GPU` has no
            effect.
        arch: One of `NAMES`; None for a GPU that is not in that list.
    """
    if arch in markers:
        return True
    is_any_gpu = ANY_GPU in markers and markers.isdisjoint(GPUS)
    return is_any_gpu and arch != CPU
