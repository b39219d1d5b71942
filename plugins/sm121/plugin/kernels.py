"""Fixtures of the kernel level: kernel provider, cases, kernel profile and compiler."""

import functools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

import pytest

from sm121.compilation import gb10
from sm121.core import architecture
from sm121.core.server import Server
from sm121.core.unmet import Fact
from sm121.core.verdict import NotRun
from sm121.engines import registry as engines
from sm121.engines.protocol import Program
from sm121.evidence.kernel_profile import KernelProfile
from sm121.kernels import builds, cases, child, registry, serving, under_test
from sm121.kernels.ahead import Ahead, PlannedCase
from sm121.kernels.protocol import Operation
from sm121.plugin import selection, stash
from sm121.run import decode_profile as decode
from sm121.run.events import EnvironmentNoted
from sm121.session import target
from sm121.session.session import Session
from sm121.session.settings import Settings

CHILDREN = pytest.StashKey[list[child.Child]]()
#: Returns the process that runs a provider's kernels.
_PROCESS_OF = pytest.StashKey[Callable[[str], child.Child]]()
_AHEAD = pytest.StashKey[Ahead]()


def end_processes_after_the_level(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """End the kernel processes after the kernel level; the next server needs their GPU memory.

    Args:
        item: The test that has ended.
        nextitem: The next test; None after the last one.
    """
    if item.stash.get(stash.LEVEL, None) != "kernel":
        return
    if nextitem is not None and nextitem.stash.get(stash.LEVEL, None) == "kernel":
        return
    end_processes(item.config)


def end_processes(config: pytest.Config) -> None:
    """End the kernel processes.

    Args:
        config: The configuration of pytest. Its stash contains the processes.
    """
    processes = config.stash.get(CHILDREN, ())
    if _AHEAD in config.stash:
        for process in processes:
            process.kill()  # ends the case in progress
        config.stash[_AHEAD].wait()
    for process in processes:
        process.close()


def check_beside_the_start(
    config: pytest.Config, session: Session | None, items: Iterable[pytest.Item]
) -> None:
    """Have the kernel cases of this run checked while its first server starts, on a CPU.

    On a GPU they would use memory that the server measures, and slow a start that has a gate. With
    ``-n``, another worker checks them beside the start.

    Args:
        config: The configuration of pytest. Its stash gets the processes and the outcomes.
        session: The run; None without tests of levels.
        items: The tests that will run.
    """
    if session is None or session.run.target.arch != architecture.CPU:
        return
    pool = session.run.servers.pool
    settings = session.settings
    if pool is None or settings.worker is not None or settings.kernels.provider is not None:
        return
    chosen = _choose_providers(session)
    planned = []
    for item in items:
        case = _case_of(item)
        provider = None if case is None else chosen[case.operation].provider
        if case is not None and provider is not None:
            planned.append(PlannedCase(provider, case))
    if not planned:
        return
    process_of = _begin_processes(config, session)

    def check(each: PlannedCase) -> list[Fact]:
        return under_test.check(process_of(each.provider), each.provider, each.case)

    config.stash[_AHEAD] = Ahead(check, planned)
    config.add_cleanup(functools.partial(end_processes, config))
    pool.hooks = replace(pool.hooks, beside=config.stash[_AHEAD].during_a_start)


def _case_of(item: pytest.Item) -> cases.Case | None:
    """Return the kernel case that a test checks; None if the test checks none, or is skipped."""
    is_skipped = item.get_closest_marker("skip") is not None
    if is_skipped or item.get_closest_marker("kernel_cases") is None:
        return None
    case: cases.Case = item.callspec.params["case"]  # type: ignore[attr-defined]
    return case


def _choose_providers(session: Session) -> dict[Operation, serving.ProviderChoice]:
    """Choose the provider of each operation by the options or by the kernel path."""
    settings = session.settings
    path = session.run.paths.to_judge()
    chosen = {}
    for operation in serving.OPERATIONS:
        if settings.kernels.provider is not None:
            chosen[operation] = serving.ProviderChoice(None, provider=settings.kernels.provider)
        else:
            choices = serving.choices(
                settings.engine.name, session.run.target.arch, path, operation
            )
            chosen[operation] = choices[0]
    return chosen


def parametrize(metafunc: pytest.Metafunc) -> None:
    """Parametrize a test over the kernel cases that its marker names, as ``case``.

    Args:
        metafunc: The test.

    Raises:
        pytest.UsageError: The marker names a group of cases that does not exist.
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
    """The kernels of ``--kernel-provider`` or of the kernel path, run with the engine's Python.

    Args:
        conformance: The run, whose options or kernel path choose the providers.
        pytestconfig: The configuration of pytest. Its stash keeps the processes that run kernels.

    Raises:
        NotRun: The server is attached, and no ``--kernel-provider`` is given.
    """
    settings = conformance.settings
    obstacle = _obstacle(settings)
    if obstacle is not None:
        raise NotRun(obstacle)
    ahead = pytestconfig.stash.get(_AHEAD, None)
    if ahead is None:
        _begin_processes(pytestconfig, conformance)
    else:
        ahead.wait()  # a process answers one request at a time
    chosen = _choose_providers(conformance)
    yield under_test.Kernels(chosen, pytestconfig.stash[_PROCESS_OF], ahead)
    end_processes(pytestconfig)


def _begin_processes(config: pytest.Config, session: Session) -> Callable[[str], child.Child]:
    """Return the function that returns a provider's process. Put it into the stash, too."""
    processes = _Processes(session)
    config.stash[CHILDREN] = [processes.here, processes.engine]
    process_of: Callable[[str], child.Child] = functools.cache(processes.of)
    config.stash[_PROCESS_OF] = process_of
    return process_of


class _Processes:
    """The processes that run kernels: one with this Python, one with the engine's Python.

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
            self._serves = "it is not known whether the attached server uses that build"
        elif isinstance(engines.engine(settings.engine.name), Program):
            self._serves = (
                f"{settings.engine.name} has its own kernels, which the suite does not test"
            )
        else:
            configuration = run.configurations.managed(run.profile.under_test)
            self._python = configuration.python
            # The environment of a server's start, so that the server finds the kernels compiled
            # here.
            bounds = run.configurations.bound_compilers(configuration)
            self._environment = {
                **run.configurations.environment(configuration),
                **bounds,
            }
        self.engine = child.Child(self._python, self._environment, None, self.here.workers)

    def of(self, provider: str) -> child.Child:
        """Return the process that runs a provider's kernels.

        Args:
            provider: The name of the provider. It may be defined by the user.

        Raises:
            NotRun: The provider's kernels are of another build than the engine's.
        """
        # Its process can import the same modules as pytest.
        is_foreign = provider not in registry.NAMES
        names = self.here.ask("packages", provider) if is_foreign else registry.packages(provider)
        if not names:
            return self.here
        if self._serves is not None:
            line = f"the kernel tests judge {builds.here(names)} of this machine; {self._serves}"
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
    """Why no kernels can be tested, if that is known before any kernel is loaded."""
    if settings.kernels.provider is not None or settings.base_url is None:
        return None
    return (
        "kernels are tested on the machine with the engine, but this run is attached by URL; "
        "give --kernel-provider to test kernels here"
    )


def mark_what_cannot_run(settings: Settings, items: Iterable[pytest.Item]) -> None:
    """Mark numerics tests that cannot run here, so that ``--collect-only`` does not list them.

    Args:
        settings: The settings of the run.
        items: The selected tests. Those that cannot run get a mark.
    """
    obstacle = _obstacle(settings)
    if obstacle is None:
        return
    for item in items:
        if "kernels" in getattr(item, "fixturenames", ()):
            selection.skip(item, obstacle)


@pytest.fixture
def decode_profile(conformance: Session, server: Server) -> KernelProfile:
    """The kernels of some decode steps of the server. Table and trace are in the report.

    Args:
        conformance: The run.
        server: The server under test. On a GPU whose profiler slows later kernel launches, it is
            stopped afterwards.

    Raises:
        NotRun: The server is attached or has no profiler, or the profiler wrote nothing.
    """
    mode = target.profiler_mode(conformance.settings, conformance.run.profile)
    return decode.profile_decode_steps(conformance.run, server, mode=mode)


@pytest.fixture(scope="session")
def compilation(conformance: Session, tmp_path_factory: pytest.TempPathFactory) -> gb10.Compilation:
    """Compiles for GB10. Raises NotRun, with the packages to install, without nvcc or cuobjdump.

    Args:
        conformance: The run, which names the engine's interpreter.
        tmp_path_factory: Makes the folder for the results.
    """
    compiler = gb10.find(conformance.engine_interpreter, tmp_path_factory.mktemp("compilation"))
    tools = {
        "compiler": str(compiler.tools.compiler),
        "disassembler": str(compiler.tools.disassembler),
    }
    conformance.run.record.emit(EnvironmentNoted("compilation", tools))
    return compiler
