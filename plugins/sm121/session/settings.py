"""What the user asked for, validated. A mistake is reported in one line before anything starts."""

import shlex
import shutil
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args

from sm121.answers.options import WRITTEN_BY
from sm121.core import architecture, profile, waivers
from sm121.core.engine_settings import Launcher
from sm121.core.errors import UsageError
from sm121.core.profile import Profile
from sm121.core.server import root_of
from sm121.core.waivers import Waiver
from sm121.engines import capabilities, followed_log, protocol, registry
from sm121.evidence import log_lines
from sm121.kernels import registry as kernel_providers
from sm121.measure.plan import Plan, Sizes
from sm121.oracles.formats import Rounding
from sm121.regression import hypothesis
from sm121.regression.ab import Side, parse_sides
from sm121.regression.hypothesis import Hypothesis
from sm121.run import stored_benchmarks
from sm121.session import given_key, own_options, plan_choice, trusted_runs
from sm121.session.plan_choice import PlanChoice
from sm121.session.trusted_runs import Trusted
from sm121.stress import soak

_ENGINE = "vllm"

_EXAMPLES = {"--depth": "1024", "--depths": "0,4096", "--tg": "32,128", "--concurrency": "4,8"}

#: Gives the value of an option by its name on the command line; None when it was not given.
Option = Callable[[str], Any]


@dataclass(frozen=True)
class Worker:
    """This process, as one of ``count`` that share a run. ``run`` names that run."""

    id: str
    run: str
    count: int


@dataclass(frozen=True)
class Settings:
    """What was asked for; None where an option was not given."""

    arch: str | None = None
    profile: Profile | None = None
    engine: str = _ENGINE
    #: The engine at --base-url, if the user named it.
    attached_engine: str | None = None
    engine_python: str = sys.executable
    engine_arguments: tuple[str, ...] = ()
    engine_environment: tuple[tuple[str, str], ...] = ()
    engine_debug: bool = False
    base_url: str | None = None
    api_key: str | None = None
    server_log: Path | None = None
    #: Whether that log comes on standard input.
    log_on_stdin: bool = False
    #: The container whose log it is.
    container: str | None = None
    #: The option that names a log that comes as a stream.
    log_name: str | None = None
    #: Of an attached server that spans machines, those of its other nodes.
    node_logs: tuple[Path, ...] = ()
    launcher: str | None = None
    node_commands: tuple[tuple[str, ...], ...] = ()
    master_address: str | None = None
    model: str | None = None
    served_name: str | None = None
    kernel_provider: str | None = None
    full_shapes: bool = False
    kernel_trace: str = "auto"
    planned: PlanChoice = field(default_factory=PlanChoice)
    sizes: Sizes = field(default_factory=Sizes)
    percentiles: bool = False
    ab: tuple[Side, Side] | None = None
    ab_pairs: int = 3
    hypothesis: Hypothesis | None = None
    waivers: tuple[Waiver, ...] = ()
    against: Trusted | None = None
    certify: bool = False
    report_dir: Path = Path("conformance-report")
    configuration: str | None = None
    reference: Path | None = None
    oracle: Path | None = None
    #: What the server rounds beyond the checkpoint; None: its path tells it.
    rounding: Rounding | None = None
    golden: Path | None = None
    record_golden: Path | None = None
    exam: Path | None = None
    scores: Path | None = None
    #: The axes of the matrix, by name or path (default: the profile's).
    axes: str | None = None
    #: The options given that change or add to what is measured, by name.
    options: Mapping[str, str] = field(default_factory=dict)
    #: Its `.cache` has the oracle's files and the matrix's durations.
    root: Path = Path()
    #: Which process of several this is; None where it is the only one.
    worker: Worker | None = None

    @property
    def plan(self) -> str:
        """The name of the plan."""
        return self.planned.name

    def measuring_plan(self, chosen: Profile) -> Plan:
        """What is measured under a profile."""
        return Plan.of(chosen, plan=self.plan, sizes=self.sizes)

    def without_number(self, chosen: Profile) -> list[str]:
        """The gates of decode rates that ``--depths`` leaves without a number."""
        whole = Plan.of(chosen, plan=self.plan).depths
        missing = {*whole} - {*self.measuring_plan(chosen).depths}
        gates = [gate.metric for gate in chosen.performance.gates]
        return [name for name in gates if int(name.partition("@d")[2] or -1) in missing]


def read(option: Option, started_in: Path, *, names_tests: bool = False) -> Settings:
    """Read the settings from a command line.

    Args:
        option: Gives the value of an option.
        started_in: The folder to which paths of options are relative.
        names_tests: Whether the command line names levels or tests.

    Raises:
        UsageError: An option is wrong, or contradicts another one.
    """
    ab, base_url = _sides(option)
    chosen, engine = _profile_and_engine(option, base_url)
    _refuse_conflicts(option, base_url)
    logs = _server_logs(option, ab, base_url, chosen)
    if (promise := option("--hypothesis")) is not None and ab is None:
        raise UsageError("--hypothesis: expected together with --ab A B, which it is judged from")
    oracle = _path(option, "--reference")
    oracle = oracle.absolute() if oracle is not None and oracle.is_file() else None
    trusted = _against(option, started_in)
    return Settings(
        arch=_arch(option),
        profile=chosen,
        engine=engine,
        attached_engine=option("--engine") if base_url else None,
        engine_python=_program(option, engine, base_url),
        engine_arguments=_engine_arguments(option),
        engine_environment=tuple(map(_pair, option("--engine-env"))),
        engine_debug=option("--engine-debug"),
        base_url=base_url,
        api_key=given_key.api_key(option) if base_url else None,
        server_log=next(iter(logs), None),
        log_on_stdin=_is_on_stdin(option),
        container=option("--container"),
        node_logs=logs[1:],
        launcher=_launcher(option, chosen, base_url),
        node_commands=_node_commands(option, chosen),
        master_address=option("--master-addr"),
        model=_model(option, base_url),
        served_name=option("--served-model-name") or (base_url and option("--model")),
        kernel_provider=option("--kernel-provider"),
        full_shapes=option("--full-shapes"),
        kernel_trace=option("--kernel-trace"),
        planned=plan_choice.of_options(
            option,
            profile.expected(chosen, _arch(option), engine),
            trusted=trusted.newest.file if trusted is not None else None,
            names_tests=names_tests,
        ),
        sizes=Sizes(
            _counts(option, "--tg", least=2) or (),
            _counts(option, "--depths"),
            _counts(option, "--depth") or (),
            _counts(option, "--concurrency", least=1) or (),
            _count("--rounds", option("--rounds")),
        ),
        percentiles=option("--percentiles") or option("--certify"),
        ab=ab,
        ab_pairs=_count("--ab-pairs", option("--ab-pairs")) or 3,
        hypothesis=hypothesis.load(started_in / promise) if promise is not None else None,
        waivers=waivers.load(_path(option, "--waivers")),
        against=trusted,
        certify=option("--certify"),
        report_dir=(started_in / option("--report-dir")).resolve(),
        configuration=option("--configuration"),
        reference=None if oracle is not None else _reference(option),
        rounding=Rounding.parse(text) if (text := option("--rounding")) is not None else None,
        oracle=oracle,
        golden=_existing(option, "--golden"),
        record_golden=_new(option, "--record-golden"),
        exam=_existing(option, "--exam"),
        scores=_interpreter(option, "--scores"),
        axes=option("--matrix-axes"),
    )


def _profile_and_engine(option: Option, base_url: str | None) -> tuple[Profile | None, str]:
    arch, name, engine = _arch(option), option("--profile"), option("--engine")
    chosen = profile.load(name) if name else None
    if engine and base_url:
        capabilities.of(engine, None)
    started: str = (not base_url and engine) or (chosen.engine.name if chosen else _ENGINE)
    registry.engine(started)
    if chosen is not None:
        own = ("--arch", arch, chosen.arch), ("--engine", started, chosen.engine.name)
        for flag, value, other in own:
            if value not in (None, other):
                expected = f"expected a profile for {value}, this one is for {other}"
                raise UsageError(f"{flag} {value} and --profile {name}: {expected}")
    return chosen, started


def _is_on_stdin(option: Option) -> bool:
    logs: list[str] = option("--server-log")
    return logs == ["-"]


def _arch(option: Option) -> str | None:
    name = option("--arch")
    return architecture.parse(name) if name is not None else None


def _server_logs(
    option: Option,
    ab: tuple[Side, Side] | None,
    base_url: str | None,
    chosen: Profile | None,
) -> tuple[Path, ...]:
    """Files of an attached server's log: one, or one of each node; empty where none is known, or
    where the log is a stream."""
    container = option("--container")
    if container is not None:
        followed_log.check_container(container)
    if container is not None or _is_on_stdin(option):
        if container is not None and option("--server-log"):
            raise UsageError("--container with --server-log: expected one of them")
        if chosen is not None and chosen.nodes is not None:
            raise UsageError(
                "--container, --server-log -: expected --server-log FILE for each node"
            )
        return ()
    logs = tuple(Path(path) for path in option("--server-log"))
    if not logs and ab is not None and base_url == ab[0].url and ab[0].log is not None:
        logs = (ab[0].log,)
    for log in logs:
        if not log.is_file():
            raise UsageError(f"--server-log {log}: expected the log file of the server")
    count = chosen.nodes.count if chosen is not None and chosen.nodes is not None else 1
    if len(logs) == 1 < count and log_lines.has_rays_workers(logs[0]):
        return logs
    if logs and len({log.resolve() for log in logs}) != count:
        whose = "of the server" if count == 1 else f"of each of its {count} nodes, rank 0 first"
        listed = ", ".join(map(str, logs))
        raise UsageError(f"--server-log: expected {count}, the log {whose}; got {listed}")
    return logs


def _launcher(option: Option, chosen: Profile | None, base_url: str | None) -> str | None:
    node_options = ("--launcher", "--node-command", "--master-addr")
    named = [name for name in node_options if option(name)]
    if named and (base_url or chosen is None or chosen.nodes is None):
        why = "an attached server is never started" if base_url else "expected a --profile of nodes"
        raise UsageError(f"{', '.join(named)}: {why}")
    launcher: str | None = option("--launcher")
    if launcher not in (None, *get_args(Launcher)):
        expected = " or ".join(get_args(Launcher))
        raise UsageError(f"--launcher {launcher}: expected {expected}")
    return launcher


def _node_commands(option: Option, chosen: Profile | None) -> tuple[tuple[str, ...], ...]:
    commands = [tuple(_words("--node-command", text)) for text in option("--node-command")]
    if () in commands:
        raise UsageError("--node-command: expected a command that runs Python on a node")
    others = chosen.nodes.count - 1 if chosen is not None and chosen.nodes is not None else 0
    if commands and len(commands) != others:
        raise UsageError(
            f"--node-command: expected {others}, one of each other node; got {len(commands)}"
        )
    return tuple(commands)


def _path(option: Option, name: str) -> Path | None:
    return Path(option(name)) if option(name) else None


def _against(option: Option, started_in: Path) -> Trusted | None:
    named = option("--against")
    if named is None:
        return None
    if named != trusted_runs.TRUSTED:
        named, report = str(started_in / named), started_in / option("--report-dir")
        if Path(named).resolve().is_relative_to(report.resolve()):
            raise UsageError(
                f"--against {named}: expected a run that is kept elsewhere: this one's report goes "
                "there; name it with --report-dir, or keep the other one with `sm121 trust`"
            )
    return trusted_runs.load(
        named, stored_benchmarks.storage_folder(option("--benchmark-storage"), started_in)
    )


def _checked(
    option: Option, name: str, holds: Callable[[Path], bool], expected: str
) -> Path | None:
    if (path := option(name)) is None:
        return None
    if not holds(Path(path)):
        raise UsageError(f"{name} {path}: expected {expected}")
    return Path(path).absolute()


def _reference(option: Option) -> Path | None:
    expected = "a checkpoint folder with config.json, or the file that `sm121 golden` made of one"
    return _checked(option, "--reference", lambda path: (path / "config.json").is_file(), expected)


def _existing(option: Option, name: str) -> Path | None:
    expected = f"a file, got none of that name. {WRITTEN_BY[name]}"
    return _checked(option, name, Path.is_file, expected)


def _interpreter(option: Option, name: str) -> Path | None:
    """A Python by its path, or by its name on the PATH."""
    if (given := option(name)) is None:
        return None
    found = Path(shutil.which(given) or given)
    if not found.is_file():
        raise UsageError(f"{name} {given}: expected a Python, by its path or its name on the PATH")
    return found.absolute()


def _new(option: Option, name: str) -> Path | None:
    def can_be_made(path: Path) -> bool:
        return path.absolute().parent.is_dir() and not path.is_dir()

    return _checked(option, name, can_be_made, "the name of a file in a folder that exists")


def _engine_arguments(option: Option) -> tuple[str, ...]:
    texts = (text.replace("\\\n", " ") for text in option("--engine-args"))
    words = (word for text in texts for word in _words("--engine-args", text))
    return (*option("--engine-arg"), *words)


def _words(name: str, text: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError as error:
        raise UsageError(f"{name} {text}: {error}") from error


def _refuse_conflicts(option: Option, base_url: str | None) -> None:
    if (provider := option("--kernel-provider")) is not None:
        kernel_providers.check_name(provider)
    if (duration := option("--soak")) is not None:
        soak.parse_duration(duration)
    engine_options = ("python", "binary", "arg", "args", "env", "debug")
    attaching = ("--api-key", "--api-key-file", "--server-log", "--container")
    if base_url:
        conflicting = [f"--engine-{name}" for name in engine_options if option(f"--engine-{name}")]
        why = "an attached server is never started"
        if option("--model") and option("--served-model-name"):
            raise UsageError("--model and --served-model-name: expected one of them")
    else:
        conflicting = [name for name in attaching if option(name)]
        why = "these describe an attached server: give --base-url too"
    engine = registry.engine((not base_url and option("--engine")) or _ENGINE)
    for argument in _engine_arguments(option):
        flag = argument.partition("=")[0]
        if flag in engine.reserved_arguments:
            raise UsageError(
                f"--engine-arg {argument}: {flag} is set by the suite itself "
                "(--model and --served-model-name are options of their own; what a --config "
                "file says, say with --engine-arg)"
            )
    for name, _ in map(_pair, option("--engine-env")):
        if name in engine.reserved_variables:
            raise UsageError(f"--engine-env {name}: it is set by the suite itself")
    if conflicting:
        attached = "--base-url" if base_url else "no --base-url"
        raise UsageError(f"{', '.join(conflicting)} with {attached}: {why}")


def _counts(option: Option, name: str, least: int = 0) -> tuple[int, ...] | None:
    if (text := option(name)) is None:
        return None
    parts = text.split(",")
    if not all(part.strip().isdecimal() and int(part) >= least for part in parts):
        example = _EXAMPLES[name]
        raise UsageError(
            f"{name} {text}: expected numbers of at least {least}, as in {name} {example}"
        )
    return tuple(dict.fromkeys(int(part) for part in parts))


def _count(name: str, text: str | None) -> int | None:
    if text is None:
        return None
    if not text.isdecimal() or int(text) < 1:
        raise UsageError(f"{name} {text}: expected a number, 1 or more")
    return int(text)


def _sides(option: Option) -> tuple[tuple[Side, Side] | None, str | None]:
    """What ``--ab`` compares, and the URL that the run is attached to. Of two URLs that is the
    first one, unless ``--base-url`` was given."""
    base_url = option("--base-url") and root_of(option("--base-url"), "--base-url")
    texts = option("--ab")
    if texts is None:
        if option("--ab-pairs"):
            raise UsageError("--ab-pairs: expected together with --ab A B")
        return None, base_url
    sides = parse_sides(texts, own_options.every())
    if sides[0].url is not None:
        return sides, base_url or sides[0].url
    if base_url:
        raise UsageError("--ab with --base-url: expected two URLs, as nothing is started")
    engine = registry.engine(option("--engine") or _ENGINE)
    reserved = {*engine.reserved_arguments, *engine.reserved_variables}
    for side in sides:
        for word in (*side.arguments, *dict(side.environment)):
            if word.partition("=")[0] in reserved:
                raise UsageError(f"--ab {side.text!r}: {word} is set by the suite itself")
    return sides, None


def _program(option: Option, engine: str, base_url: str | None) -> str:
    binary, program = option("--engine-binary"), registry.engine(engine)
    if not isinstance(program, protocol.Program):
        if binary:
            raise UsageError(f"--engine-binary: {engine} is started by --engine-python")
        # Links are not resolved: a virtual environment is found by its interpreter's link.
        expected = "a Python interpreter, there is no such file"
        return str(_checked(option, "--engine-python", Path.is_file, expected) or sys.executable)
    if base_url:
        return sys.executable
    path = binary or shutil.which(program.program)
    if path is None or not Path(path).is_file():
        raise UsageError(
            f"--engine {engine}: expected {program.program} on the PATH, or --engine-binary PATH"
            + (f"; there is no file {binary}" if binary else "")
        )
    return str(Path(path).absolute())


def _pair(text: str) -> tuple[str, str]:
    key, separator, value = text.partition("=")
    if not separator or not key.isidentifier():
        raise UsageError(f"--engine-env {text}: expected KEY=VALUE")
    return key, value


def _model(option: Option, base_url: str | None) -> str | None:
    model: str | None = None if base_url else option("--model")
    if model is None:
        return None
    path = Path(model)
    if path.is_file() and path.suffix == ".gguf":
        return model
    if path.exists():
        if not (path / "config.json").is_file():
            raise UsageError(f"--model {model}: expected a checkpoint folder with config.json")
    elif model.count("/") != 1 or model.startswith(("/", ".", "~")):
        raise UsageError(
            f"--model {model}: expected an existing checkpoint folder or a hub id (owner/name)"
        )
    return model
