"""The command line: options, what they default to, and which go together."""

from __future__ import annotations

import os
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from sm121.core import architecture, profile, waivers
from sm121.core.errors import UsageError
from sm121.core.profile import Profile
from sm121.core.waivers import Waiver
from sm121.engines import capabilities, devices, registry
from sm121.engines.protocol import Program
from sm121.kernels import registry as kernel_providers
from sm121.regression import hypothesis
from sm121.regression.ab import Side, parse_sides
from sm121.regression.hypothesis import Hypothesis
from sm121.stress import soak


@dataclass(frozen=True)
class Settings:
    """What the user asked for, validated; None where nothing was said."""

    arch: str | None
    profile: Profile | None
    engine: str
    #: The engine that listens at --base-url, where the user named it.
    attached_engine: str | None
    engine_python: str
    engine_arguments: tuple[str, ...]
    engine_environment: tuple[tuple[str, str], ...]
    engine_debug: bool
    base_url: str | None
    api_key: str | None
    server_log: Path | None
    model: str | None
    served_name: str | None
    kernel_provider: str | None
    full_shapes: bool
    profile_kernels: str
    nsys: bool
    depths: tuple[int, ...] | None
    rounds: int | None
    tails: bool
    ab: tuple[Side, Side] | None
    ab_pairs: int
    hypothesis: Hypothesis | None
    waivers: tuple[Waiver, ...]
    certify: bool
    report_dir: Path
    configuration: str | None
    reference: Path | None
    golden: Path | None
    record_golden: Path | None
    accuracy: Path | None
    accuracy_baseline: Path | None


_ENGINE = "vllm"
SETTINGS = pytest.StashKey[Settings]()


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("sm121", "SM121 conformance")
    group.addoption("--arch", metavar="NAME", help="architecture of the target (default: detected)")
    group.addoption(
        "--profile",
        metavar="NAME|PATH",
        help="what the target must be and reach (default: by arch)",
    )
    group.addoption(
        "--engine",
        metavar="NAME",
        help="engine to start: vllm (default); with --base-url the engine that listens there "
        f"({', '.join(capabilities.shipped())}; default: recognised by its answers)",
    )
    group.addoption(
        "--engine-python",
        metavar="PATH",
        help="interpreter of the environment that the engine lives in (default: this one)",
    )
    group.addoption(
        "--engine-binary",
        metavar="PATH",
        help="program of an engine that is one, as llama-server (default: on the PATH)",
    )
    group.addoption(
        "--engine-arg",
        metavar="ARG",
        action="append",
        default=[],
        help="passed to the engine; repeatable; write --engine-arg=--flag",
    )
    group.addoption(
        "--engine-env",
        metavar="KEY=VALUE",
        action="append",
        default=[],
        help="in the engine's environment; repeatable",
    )
    group.addoption(
        "--engine-debug",
        action="store_true",
        help="the engine runs with blocking launches and full stack traces",
    )
    group.addoption(
        "--base-url", metavar="URL", help="attach to a running server; it is never stopped"
    )
    group.addoption("--api-key", metavar="KEY", help="key of the attached server")
    group.addoption(
        "--server-log", metavar="PATH", help="log of the attached server, for its kernel path"
    )
    group.addoption("--model", metavar="PATH|ID", help="the checkpoint (default: the profile's)")
    group.addoption(
        "--served-model-name",
        metavar="NAME",
        help="its name on the server (default: the profile's)",
    )
    group.addoption(
        "--kernel-provider",
        metavar="NAME|MODULE:ATTR",
        help="whose kernels the kernel level tests: "
        f"{', '.join(kernel_providers.NAMES)} or an object of yours (default: torch on a CPU, vllm "
        "for that engine on a GPU)",
    )
    group.addoption(
        "--full-shapes",
        action="store_true",
        help="numerics at all sizes on a CPU too, where the large ones are left out by default",
    )
    group.addoption(
        "--profile-kernels",
        metavar="MODE",
        choices=("auto", "keep", "restart", "off"),
        default="auto",
        help="decode steps of the server under test are profiled for their kernel names; then it "
        "is kept, or restarted so that no number is taken of it (default: auto, as the profile "
        "says); off: not profiled",
    )
    group.addoption(
        "--nsys",
        action="store_true",
        help="start the server under Nsight Systems, keep its report, and read the kernels from it",
    )
    group.addoption(
        "--depths",
        metavar="LIST",
        help="context before the measured prompt, in tokens: 0,4096 (default: the profile's)",
    )
    group.addoption(
        "--rounds",
        metavar="N",
        help="rounds of each measurement before a gate asks for more (default: the profile's)",
    )
    group.addoption(
        "--tails",
        action="store_true",
        help="gather the requests that the gates on percentiles need (--certify does so too)",
    )
    group.addoption(
        "--ab",
        nargs=2,
        metavar=("A", "B"),
        help="compare two configurations (engine arguments, KEY=VALUE, --engine-python PATH, on "
        "top of the one under test; '' for itself) or two URLs",
    )
    group.addoption(
        "--ab-pairs",
        metavar="N",
        help="starts of each side before --ab decides; twice as many at most (default: 3)",
    )
    group.addoption(
        "--hypothesis", metavar="FILE", help="what a feature promised, judged from the --ab run"
    )
    group.addoption(
        "--soak",
        metavar="DURATION",
        help="mixed load for so long, with every check of the stress level: 30s, 10m, 2h",
    )
    group.addoption("--waivers", metavar="PATH", help="failures tolerated by name (default: none)")
    group.addoption(
        "--certify",
        action="store_true",
        help="the merge gate: nothing required may be skipped, deselected or unproven",
    )
    group.addoption(
        "--report-dir",
        metavar="PATH",
        default="conformance-report",
        help="verdict.json, report.html, summary.md, junit.xml and logs (default: "
        "conformance-report); an earlier report is kept under earlier/",
    )
    group.addoption(
        "--configuration",
        metavar="NAME",
        help="which of the profile's configurations is judged (default: the profile's)",
    )
    group.addoption(
        "--reference",
        metavar="PATH",
        help="the checkpoint that the oracle computes from (default: the one that is served)",
    )
    group.addoption(
        "--golden", metavar="PATH", help="compare with the answers of a trusted run (a file)"
    )
    group.addoption(
        "--record-golden", metavar="PATH", help="record the answers of this run as such a file"
    )
    group.addoption(
        "--accuracy",
        metavar="PATH",
        help="questions with known answers: JSONL of prompt, answer, kind",
    )
    group.addoption(
        "--accuracy-baseline",
        metavar="PATH",
        help="accuracy.jsonl of an earlier run, to compare with question by question",
    )


def declare_markers(config: pytest.Config) -> None:
    """The markers of levels and architectures."""
    for name in profile.LEVELS:
        config.addinivalue_line("markers", f"{name}: tests of the {name} level")
    for name in architecture.NAMES:
        config.addinivalue_line(
            "markers", f"{name}: tests that apply to {name} (set by applies_to, not by hand)"
        )
    config.addinivalue_line("markers", "gpu: tests that apply to some GPU architecture")
    config.addinivalue_line(
        "markers",
        "applies_to(*names): the architectures that a test is for; 'gpu' means each of them. "
        "Every test of a level has it, on itself or its module",
    )


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    declare_markers(config)
    try:
        config.stash[SETTINGS] = _settings(config)
    except UsageError as error:
        raise pytest.UsageError(str(error)) from error


def _settings(config: pytest.Config) -> Settings:
    option = config.getoption
    ab = _sides(config)
    arch = option("--arch")
    if arch is not None:
        architecture.parse(arch)
    chosen = option("--profile")
    loaded = profile.load(chosen) if chosen else None
    if arch and loaded and loaded.arch != arch:
        raise UsageError(
            f"--arch {arch} and --profile {chosen}: expected a profile for {arch}, "
            f"this one is for {loaded.arch}"
        )
    if (engine := option("--engine")) and option("--base-url"):
        capabilities.of(engine, None)
    started = (not option("--base-url") and engine) or (loaded.engine.name if loaded else _ENGINE)
    registry.engine(started)
    if loaded and started != loaded.engine.name:
        raise UsageError(
            f"--engine {started} and --profile {chosen}: expected a profile for {started}, "
            f"this one is for {loaded.engine.name}"
        )
    _refuse_conflicts(config)
    server_log = option("--server-log")
    if server_log and not Path(server_log).is_file():
        raise UsageError(f"--server-log {server_log}: expected the log file of the server")
    if (model := option("--model")) is not None and not option("--base-url"):
        _check_model(model)
    if (provider := option("--kernel-provider")) is not None:
        kernel_providers.check_name(provider)
    waiver_file = option("--waivers")
    if option("--soak") is not None:
        soak.parse_duration(option("--soak"))
    return Settings(
        arch=arch,
        profile=loaded,
        engine=started,
        attached_engine=engine if option("--base-url") else None,
        engine_python=_program(config, started),
        engine_arguments=tuple(option("--engine-arg")),
        engine_environment=(
            *devices.environment(os.environ.get("PYTEST_XDIST_WORKER"), architecture.gpu_count()),
            *(_pair(text) for text in option("--engine-env")),
        ),
        engine_debug=option("--engine-debug"),
        base_url=option("--base-url"),
        api_key=option("--api-key"),
        server_log=Path(server_log) if server_log else None,
        model=model,
        served_name=option("--served-model-name"),
        kernel_provider=provider,
        full_shapes=option("--full-shapes"),
        profile_kernels=option("--profile-kernels"),
        nsys=option("--nsys"),
        depths=_depths(option("--depths")),
        rounds=_count("--rounds", option("--rounds")),
        tails=option("--tails") or option("--certify"),
        ab=ab,
        ab_pairs=_count("--ab-pairs", option("--ab-pairs")) or 3,
        hypothesis=_hypothesis(config),
        waivers=waivers.load(Path(waiver_file) if waiver_file else None),
        certify=option("--certify"),
        report_dir=(config.invocation_params.dir / option("--report-dir")).resolve(),
        configuration=option("--configuration"),
        reference=_reference(option("--reference")),
        golden=_existing(config, "--golden"),
        record_golden=_new(config, "--record-golden"),
        accuracy=_existing(config, "--accuracy"),
        accuracy_baseline=_existing(config, "--accuracy-baseline"),
    )


def _reference(path: str | None) -> Path | None:
    if path is None:
        return None
    if not (Path(path) / "config.json").is_file():
        raise UsageError(f"--reference {path}: expected a checkpoint folder with config.json")
    return Path(path).absolute()


def _existing(config: pytest.Config, name: str) -> Path | None:
    path = config.getoption(name)
    if path is None:
        return None
    if not Path(path).is_file():
        raise UsageError(f"{name} {path}: expected a file, there is none")
    return Path(path).absolute()


def _new(config: pytest.Config, name: str) -> Path | None:
    path = config.getoption(name)
    if path is None:
        return None
    if Path(path).is_dir() or not Path(path).absolute().parent.is_dir():
        raise UsageError(f"{name} {path}: expected the name of a file in a folder that exists")
    return Path(path).absolute()


def _refuse_conflicts(config: pytest.Config) -> None:
    starting = (
        "--engine-python",
        "--engine-binary",
        "--engine-arg",
        "--engine-env",
        "--engine-debug",
        "--model",
    )
    attaching = ("--api-key", "--server-log")
    if config.getoption("--base-url"):
        given = [name for name in starting if config.getoption(name)]
        why = "an attached server is never started"
    else:
        given = [name for name in attaching if config.getoption(name)]
        why = "these describe an attached server: give --base-url too"
    attached_to = config.getoption("--base-url")
    engine = registry.engine((not attached_to and config.getoption("--engine")) or _ENGINE)
    for argument in config.getoption("--engine-arg"):
        flag = argument.partition("=")[0]
        if flag in engine.reserved_arguments:
            raise UsageError(
                f"--engine-arg {argument}: {flag} is set by the suite itself "
                "(--model and --served-model-name are options of their own; what a --config "
                "file says, say with --engine-arg)"
            )
    for text in config.getoption("--engine-env"):
        if _pair(text)[0] in engine.reserved_variables:
            raise UsageError(f"--engine-env {_pair(text)[0]}: it is set by the suite itself")
    if given:
        attached = "--base-url" if config.getoption("--base-url") else "no --base-url"
        raise UsageError(f"{', '.join(given)} with {attached}: {why}")


def _depths(text: str | None) -> tuple[int, ...] | None:
    if text is None:
        return None
    parts = text.split(",")
    if not all(part.strip().isdecimal() for part in parts):
        raise UsageError(f"--depths {text}: expected numbers of tokens, as in --depths 0,4096")
    return tuple(dict.fromkeys(int(part) for part in parts))


def _count(name: str, text: str | None) -> int | None:
    if text is None:
        return None
    if not text.isdecimal() or int(text) < 1:
        raise UsageError(f"{name} {text}: expected a number, 1 or more")
    return int(text)


def _sides(config: pytest.Config) -> tuple[Side, Side] | None:
    """What ``--ab`` compares. Two URLs are an attached run: of the first one, unless said."""
    texts = config.getoption("--ab")
    if texts is None:
        if config.getoption("--ab-pairs"):
            raise UsageError("--ab-pairs: expected together with --ab A B")
        return None
    sides = parse_sides(texts)
    if sides[0].url is not None and not config.getoption("--base-url"):
        config.option.base_url = sides[0].url
    if sides[0].url is None and config.getoption("--base-url"):
        raise UsageError("--ab with --base-url: expected two URLs, as nothing is started")
    if sides[0].url is not None:
        return sides
    engine = registry.engine(config.getoption("--engine") or _ENGINE)
    for side in sides:
        for argument in side.arguments:
            if argument.partition("=")[0] in engine.reserved_arguments:
                raise UsageError(f"--ab {side.text!r}: {argument} is set by the suite itself")
        for name, _ in side.environment:
            if name in engine.reserved_variables:
                raise UsageError(f"--ab {side.text!r}: {name} is set by the suite itself")
    return sides


def _hypothesis(config: pytest.Config) -> Hypothesis | None:
    path = config.getoption("--hypothesis")
    if path is None:
        return None
    if config.getoption("--ab") is None:
        raise UsageError("--hypothesis: expected together with --ab A B, which it is judged from")
    return hypothesis.load(config.invocation_params.dir / path)


def _program(config: pytest.Config, engine: str) -> str:
    """What starts the engine: an interpreter, or the engine's own program."""
    given, own = config.getoption("--engine-binary"), registry.engine(engine)
    if not isinstance(own, Program):
        if given:
            raise UsageError(f"--engine-binary: {engine} is started by --engine-python")
        return _interpreter(config.getoption("--engine-python"))
    if config.getoption("--base-url"):
        return sys.executable
    path = given or shutil.which(own.program)
    if path is None or not Path(path).is_file():
        raise UsageError(
            f"--engine {engine}: expected {own.program} on the PATH, or --engine-binary PATH"
            + (f"; there is no file {given}" if given else "")
        )
    return str(Path(path).absolute())


def _interpreter(path: str | None) -> str:
    if path is None:
        return sys.executable
    if not Path(path).is_file():
        raise UsageError(
            f"--engine-python {path}: expected a Python interpreter, there is no such file"
        )
    # Not resolved: the path of a virtual environment's link is what makes it that environment.
    return str(Path(path).absolute())


def _pair(text: str) -> tuple[str, str]:
    key, separator, value = text.partition("=")
    if not separator or not key.isidentifier():
        raise UsageError(f"--engine-env {text}: expected KEY=VALUE")
    return key, value


def _check_model(model: str) -> None:
    path = Path(model)
    if path.is_file() and path.suffix == ".gguf":
        return
    if path.exists():
        if not (path / "config.json").is_file():
            raise UsageError(f"--model {model}: expected a checkpoint folder with config.json")
    elif model.count("/") != 1 or model.startswith(("/", ".", "~")):
        raise UsageError(
            f"--model {model}: expected an existing checkpoint folder or a hub id (owner/name)"
        )
