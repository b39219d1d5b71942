"""Fixtures of the kernel level: the provider and its cases, the kernel profile, the compiler."""

import functools
from collections.abc import Iterable, Iterator

import pytest

from sm121.compilation import gb10
from sm121.core.server import Server
from sm121.core.verdict import NotRun
from sm121.engines import registry as engines
from sm121.engines.protocol import Program
from sm121.evidence.kernel_profile import KernelProfile
from sm121.kernels import builds, cases, child, registry, serving, under_test
from sm121.plugin import selection, stash
from sm121.run import decode_profile as decode
from sm121.run.events import EnvironmentNoted
from sm121.session import target
from sm121.session.session import Session
from sm121.session.settings import Settings

CHILDREN = pytest.StashKey[list[child.Child]]()


def end_processes_after_the_level(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """End the processes of the kernels: the next server needs the memory of their devices.

    Args:
        item: The test that has ended. Nothing happens within the kernel level.
        nextitem: The next test; None after the last one.
    """
    if item.stash.get(stash.LEVEL, None) != "kernel":
        return
    if nextitem is not None and nextitem.stash.get(stash.LEVEL, None) == "kernel":
        return
    end_processes(item.config)


def end_processes(config: pytest.Config) -> None:
    """End the processes of the kernels.

    Args:
        config: pytest's, whose stash has them.
    """
    for process in config.stash.get(CHILDREN, ()):
        process.close()


def parametrize(metafunc: pytest.Metafunc) -> None:
    """Parametrize a test over the cases of its marker, as ``case``.

    Args:
        metafunc: The test.

    Raises:
        pytest.UsageError: The marker names no group of cases.
    """
    if metafunc.definition.get_closest_marker("kernel_benchmarks") is not None:
        settings = metafunc.config.stash[stash.SETTINGS]
        depths = settings.expected_profile().performance.depths
        full = cases.at_full_size(settings.kernels.full_shapes)
        chosen = cases.select_timed(depths, full=full)
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
    full = cases.at_full_size(metafunc.config.stash[stash.SETTINGS].kernels.full_shapes)
    metafunc.parametrize("case", cases.select(group, full=full), ids=str)


@pytest.fixture(scope="session")
def kernels(conformance: Session, pytestconfig: pytest.Config) -> Iterator[under_test.Kernels]:
    """The kernels of ``--kernel-provider``, or of the path, in the engine's interpreter."""
    settings = conformance.settings
    obstacle = _obstacle(settings)
    if obstacle is not None:
        raise NotRun(obstacle)
    processes = _Processes(conformance)
    pytestconfig.stash[CHILDREN] = [processes.here, processes.engine]
    path = conformance.run.paths.to_judge()
    chosen = {}
    for operation in serving.OPERATIONS:
        if settings.kernels.provider is not None:
            chosen[operation] = serving.Choice(None, provider=settings.kernels.provider)
        else:
            choices = serving.choices(
                settings.engine.name, conformance.run.target.arch, path, operation
            )
            chosen[operation] = choices[0]
    yield under_test.Kernels(chosen, functools.cache(processes.of))
    end_processes(pytestconfig)


class _Processes:
    """The processes in which kernels run: with this interpreter, and with the engine's.

    Args:
        conformance: The run.
    """

    def __init__(self, conformance: Session) -> None:
        run = conformance.run
        settings = conformance.settings
        self._session = conformance
        workers = settings.worker.count if settings.worker is not None else 1
        self.here = child.of_this_process(workers)
        self._python = self.here.python
        self._environment = self.here.environment
        self._serves = None
        if settings.base_url is not None:
            self._serves = "whether the attached server serves with that build cannot be known"
        elif isinstance(engines.engine(settings.engine.name), Program):
            self._serves = f"{settings.engine.name} has kernels of its own, which are not judged"
        else:
            configuration = run.configurations.managed(run.profile.under_test)
            self._python = configuration.python
            # The environment of a start: what is compiled here is not compiled again there.
            bounds = run.configurations.bound_compilers(configuration)
            self._environment = {
                **run.configurations.environment(configuration),
                **bounds,
            }
        self.engine = child.Child(self._python, self._environment, None, self.here.workers)

    def of(self, provider: str) -> child.Child:
        """Return the process in which a provider runs.

        Args:
            provider: Its name, or that of a user's own.

        Raises:
            NotRun: Its kernels are another build's than the engine's.
        """
        is_foreign = provider not in registry.NAMES  # it imports what pytest's process imports
        names = self.here.ask("packages", provider) if is_foreign else registry.packages(provider)
        if not names:
            return self.here
        if self._serves is not None:
            line = f"the numerics judge {builds.here(names)}, of this machine; {self._serves}"
            if self._session.settings.judging.certify:
                raise NotRun(f"{line}: run the kernel level in the engine's environment")
            self._session.run.record.remark(line)
            return self.here
        if not is_foreign:
            return self.engine
        other = builds.differences(names, self._python, self._environment)
        if other is not None:
            raise NotRun(
                f"{other}: that build was not judged. Install the suite in the engine's "
                f"environment ({self._python} -m pip install sm121-conformance) and start pytest "
                "with that interpreter"
            )
        return self.here


def _obstacle(settings: Settings) -> str | None:
    """Why no kernels can be tested, as far as that is known before any are loaded."""
    if settings.kernels.provider is not None or settings.base_url is None:
        return None
    return (
        "kernels are tested where the engine is installed, this run is attached by URL; "
        "give --kernel-provider to test some here"
    )


def mark_what_cannot_run(settings: Settings, items: Iterable[pytest.Item]) -> None:
    """Keep numerics that cannot run here out of the list of ``--collect-only``.

    Args:
        settings: The settings of the run.
        items: The selected tests; those that cannot run are marked.
    """
    obstacle = _obstacle(settings)
    if obstacle is None:
        return
    for item in items:
        if "kernels" in getattr(item, "fixturenames", ()):
            selection.skip(item, obstacle)


@pytest.fixture
def decode_profile(conformance: Session, server: Server) -> KernelProfile:
    """Kernels of some decode steps of the server under test; table and trace are in the report."""
    mode = target.profiler_mode(conformance.settings, conformance.run.profile)
    return decode.take(conformance.run, server, mode=mode)


@pytest.fixture(scope="session")
def compilation(conformance: Session, tmp_path_factory: pytest.TempPathFactory) -> gb10.Compilation:
    """Compiling for GB10. NotRun without nvcc and cuobjdump, with what pip would install."""
    compiler = gb10.find(conformance.engine_interpreter, tmp_path_factory.mktemp("compilation"))
    tools = {
        "compiler": str(compiler.tools.compiler),
        "disassembler": str(compiler.tools.disassembler),
    }
    conformance.run.record.emit(EnvironmentNoted("compilation", tools))
    return compiler
