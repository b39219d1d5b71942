"""Fixtures of the kernel level: the provider under test and its cases, the engine's kernel profile,
the compiler."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import pytest

from sm121.compilation import gb10
from sm121.compilation.gb10 import Compilation
from sm121.core.server import Server
from sm121.core.verdict import NotRun
from sm121.engines import registry as engines
from sm121.engines.protocol import Program
from sm121.evidence.kernel_profile import KernelProfile
from sm121.kernels import benchmark_cases, builds, cases, registry
from sm121.plugin import selection
from sm121.plugin.stash import LEVEL, SETTINGS
from sm121.run import decode_profile as decode
from sm121.session import target
from sm121.session.session import Session
from sm121.session.settings import Settings

if TYPE_CHECKING:
    from sm121.kernels.under_test import Kernels


def release_memory_after_the_level(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Free the device memory of the level's tensors for the next server."""
    following = nextitem.stash.get(LEVEL, None) if nextitem is not None else None
    if item.stash.get(LEVEL, None) == "kernel" and following != "kernel":
        registry.release_device_memory()


def parametrize(metafunc: pytest.Metafunc) -> None:
    """Parametrize a test over the cases that its marker asks for, as ``case``."""
    if metafunc.definition.get_closest_marker("kernel_benchmarks") is not None:
        settings = metafunc.config.stash[SETTINGS]
        chosen = benchmark_cases.of_target(
            settings.arch, settings.profile, full_shapes=settings.full_shapes
        )
        metafunc.parametrize("case", chosen, ids=str)
        return
    marker = metafunc.definition.get_closest_marker("kernel_cases")
    if marker is None:
        return
    (group,) = marker.args
    if group not in cases.GROUPS:
        raise pytest.UsageError(
            f"{metafunc.definition.nodeid}: kernel_cases({group!r}): expected one of "
            + ", ".join(cases.GROUPS)
        )
    full = benchmark_cases.at_full_size(metafunc.config.stash[SETTINGS].full_shapes)
    metafunc.parametrize("case", cases.select(group, full=full), ids=str)


@pytest.fixture(scope="session")
def kernels(conformance: Session) -> Kernels:
    """The provider of ``--kernel-provider``, or the one of the architecture and the engine.

    Raises:
        NotRun: it would judge another build than the one that the engine serves with.
    """
    settings = conformance.settings
    if (obstacle := _obstacle(settings)) is not None:
        raise NotRun(obstacle)
    from sm121.kernels import under_test

    name = settings.kernel_provider
    if name is None:
        name = registry.default(conformance.arch, settings.engine)
    if name in registry.NAMES:
        _require_the_engines_build(conformance, name)
    worker = settings.worker
    loaded = under_test.load(name, workers=1 if worker is None else worker.count)
    if name not in registry.NAMES:  # what it imports is known now
        _require_the_engines_build(conformance, name)
    return loaded


def _require_the_engines_build(conformance: Session, provider: str) -> None:
    settings = conformance.settings
    if not (names := builds.packages(provider)):
        return
    if settings.base_url is not None:
        elsewhere = "whether the attached server serves with that build cannot be known"
    elif isinstance(engines.engine(settings.engine), Program):
        elsewhere = f"{settings.engine} has kernels of its own, which are not judged"
    else:
        elsewhere = None
    if elsewhere is not None:
        line = f"the numerics judge {builds.here(names)}, of this machine; {elsewhere}"
        if settings.certify:
            raise NotRun(f"{line}: run the kernel level in the engine's environment")
        conformance.remark(line)
        return
    configuration = conformance.managed_configuration(conformance.profile.under_test)
    environment = conformance.engine_environment(configuration)
    if (other := builds.differences(names, configuration.python, environment)) is not None:
        raise NotRun(
            f"{other}: that build was not judged. Install the suite in the engine's environment "
            f"({configuration.python} -m pip install sm121-conformance) and start pytest with that "
            "interpreter"
        )


def _obstacle(settings: Settings) -> str | None:
    return registry.obstacle(settings.kernel_provider, attached=settings.base_url is not None)


def mark_what_cannot_run(settings: Settings, items: Iterable[pytest.Item]) -> None:
    """Keep numerics that cannot run here out of the list of ``--collect-only``."""
    using = [item for item in items if "kernels" in getattr(item, "fixturenames", ())]
    if using and (obstacle := _obstacle(settings)) is not None:
        for item in using:
            selection.skip(item, obstacle)


@pytest.fixture
def decode_profile(conformance: Session, server: Server) -> KernelProfile:
    """Kernels of some decode steps of the server under test; table and trace are in the report."""
    mode = target.profiler_mode(conformance.settings, conformance.profile)
    return decode.take(conformance, server, mode=mode, nsys=conformance.settings.nsys)


@pytest.fixture(scope="session")
def compilation(conformance: Session, tmp_path_factory: pytest.TempPathFactory) -> Compilation:
    """Compiling for GB10. NotRun without nvcc and cuobjdump, with what pip would install."""
    found = gb10.find(conformance.settings.engine_python, tmp_path_factory.mktemp("compilation"))
    conformance.file.environment["compilation"] = {
        "compiler": str(found.tools.compiler),
        "disassembler": str(found.tools.disassembler),
    }
    return found
