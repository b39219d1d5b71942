"""The command line: options, what they default to, and which go together."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from sm121 import architecture, profile, waivers
from sm121.engines import capabilities, registry
from sm121.errors import UsageError
from sm121.kernels import registry as kernel_providers
from sm121.profile import Profile
from sm121.waivers import Waiver


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
    waivers: tuple[Waiver, ...]
    certify: bool
    report_dir: Path


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
        f"{', '.join(kernel_providers.NAMES)} or an object of yours (default: by arch)",
    )
    group.addoption(
        "--full-shapes",
        action="store_true",
        help="numerics at all sizes on a CPU too, where the large ones are left out by default",
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
        help="verdict.json, summary.md and logs (default: conformance-report)",
    )


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
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
    try:
        config.stash[SETTINGS] = _settings(config)
    except UsageError as error:
        raise pytest.UsageError(str(error)) from error


def _settings(config: pytest.Config) -> Settings:
    option = config.getoption
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
    else:
        registry.engine(engine or _ENGINE)
    _refuse_conflicts(config)
    server_log = option("--server-log")
    if server_log and not Path(server_log).is_file():
        raise UsageError(f"--server-log {server_log}: expected the log file of the server")
    if (model := option("--model")) is not None and not option("--base-url"):
        _check_model(model)
    if (provider := option("--kernel-provider")) is not None:
        kernel_providers.check_name(provider)
    waiver_file = option("--waivers")
    return Settings(
        arch=arch,
        profile=loaded,
        engine=engine if engine and not option("--base-url") else _ENGINE,
        attached_engine=engine if option("--base-url") else None,
        engine_python=_interpreter(option("--engine-python")),
        engine_arguments=tuple(option("--engine-arg")),
        engine_environment=tuple(_pair(text) for text in option("--engine-env")),
        engine_debug=option("--engine-debug"),
        base_url=option("--base-url"),
        api_key=option("--api-key"),
        server_log=Path(server_log) if server_log else None,
        model=model,
        served_name=option("--served-model-name"),
        kernel_provider=provider,
        full_shapes=option("--full-shapes"),
        waivers=waivers.load(Path(waiver_file) if waiver_file else None),
        certify=option("--certify"),
        report_dir=(config.invocation_params.dir / option("--report-dir")).resolve(),
    )


def _refuse_conflicts(config: pytest.Config) -> None:
    starting = ("--engine-python", "--engine-arg", "--engine-env", "--engine-debug", "--model")
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
                "(--model and --served-model-name are options of their own)"
            )
    for text in config.getoption("--engine-env"):
        if _pair(text)[0] in engine.reserved_variables:
            raise UsageError(f"--engine-env {_pair(text)[0]}: it is set by the suite itself")
    if given:
        attached = "--base-url" if config.getoption("--base-url") else "no --base-url"
        raise UsageError(f"{', '.join(given)} with {attached}: {why}")


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
    if path.exists():
        if not (path / "config.json").is_file():
            raise UsageError(f"--model {model}: expected a checkpoint folder with config.json")
    elif model.count("/") != 1 or model.startswith(("/", ".", "~")):
        raise UsageError(
            f"--model {model}: expected an existing checkpoint folder or a hub id (owner/name)"
        )
