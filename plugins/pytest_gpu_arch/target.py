"""The target of a run: the architecture on which its tests run."""

from dataclasses import dataclass

import pytest

from pytest_gpu_arch import detection, names
from pytest_gpu_arch.expression import asked_for

_MARKERS = (*names.NAMES, names.ANY_GPU)


@dataclass(frozen=True)
class Known:
    """Information about the target that another plugin stores under `KNOWN`.

    Attributes:
        arch: The architecture in a file of that plugin; None if the file does not contain one.
        is_remote: Whether the tests send requests to another machine, so that this machine's GPU is
            irrelevant.
    """

    arch: str | None = None
    is_remote: bool = False


@dataclass(frozen=True)
class Target:
    """The architecture for which the tests of a run are executed.

    Attributes:
        arch: The architecture; None for a GPU that is not in `names.NAMES`.
        where: Whose architecture it is, as text for messages: this machine's or another one's.
        asked: The architectures that the user requested with ``--arch`` or ``-m``.
        missing: The requested architectures, if none of them is available; else empty.
    """

    arch: str | None
    where: str
    asked: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()

    @property
    def obstacle(self) -> str | None:
        """Why no test can run on the requested architecture; None if it is available."""
        if not self.missing:
            return None
        return f"{names.listed(self.missing)} was requested; {self.where}"


KNOWN = pytest.StashKey[Known]()
_TARGET = pytest.StashKey[Target]()


def named(config: pytest.Config) -> str | None:
    """Return the architecture that ``--arch`` names; None if the option is not given.

    Args:
        config: The configuration of the run.

    Raises:
        pytest.UsageError: The name is unknown.
    """
    value: str | None = config.getoption("--arch")
    if value is None:
        return None
    try:
        return names.parse(value)
    except ValueError as error:
        raise pytest.UsageError(str(error)) from error


def of(config: pytest.Config) -> Target:
    """Return the target of a run. The first call detects the GPU.

    Args:
        config: The configuration of the run.
    """
    if _TARGET not in config.stash:
        config.stash[_TARGET] = _resolve(config)
    return config.stash[_TARGET]


def is_asked_for(config: pytest.Config) -> bool:
    """Check whether ``--arch`` or ``-m`` requests an architecture, without detecting the GPU.

    Args:
        config: The configuration of the run.
    """
    return named(config) is not None or bool(_asked_by_marker(config))


def _asked_by_marker(config: pytest.Config) -> tuple[str, ...]:
    expression = config.getoption("markexpr", "") or ""
    return asked_for(expression, _MARKERS)


def asked_by_keyword(config: pytest.Config) -> tuple[str, ...]:
    """Return the architectures that ``-k`` names.

    ``-k sm121`` selects tests with this marker, and also unmarked tests with this name, which run
    on any machine. It therefore does not set the target.

    Args:
        config: The configuration of the run.
    """
    expression = config.getoption("keyword", "") or ""
    return asked_for(expression.lower(), _MARKERS)


def _resolve(config: pytest.Config) -> Target:
    known = config.stash.get(KNOWN, Known())
    arch = named(config) or known.arch
    by_marker = _asked_by_marker(config)
    by_name = (arch,) if arch is not None else ()
    asked = by_name or by_marker
    if known.is_remote and by_name:
        actual: str | None = by_name[0]
        where = f"the target is {actual}"
    else:
        machine = detection.detect()
        actual = machine.name
        where = f"this machine is {actual or 'a GPU without a name here'}: {machine.evidence}"
    missing: tuple[str, ...] = ()
    for wanted in (by_marker, by_name):
        if wanted and not names.has(frozenset(wanted), actual):
            missing = wanted
    return Target(arch=actual, where=where, asked=asked, missing=missing)
