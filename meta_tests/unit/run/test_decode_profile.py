"""The server under test is started for a profile of its kernels, and the result is stored."""

import dataclasses
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from meta_tests.fakes.run_events import new_file, stand_in, with_events
from sm121.core import profile, verdict
from sm121.core.configuration import ServerConfiguration
from sm121.engines.options import GivenEngine
from sm121.engines.vllm import Vllm
from sm121.evidence.kernel_profile import KernelProfile, Launches, build_profile, shortened
from sm121.evidence.profiler import DecodeTrace
from sm121.performance.options import MeasuringOptions
from sm121.run import decode_profile
from sm121.run.paths import KernelPaths
from sm121.session import target
from sm121.session.settings import Settings

CPU = profile.load("cpu-tiny-gpt-oss")
GB10 = profile.load("sm121-gpt-oss-120b")


def configuration(**changes: str) -> ServerConfiguration:
    plain = ServerConfiguration("tested", "vllm", sys.executable, "m", "m", ("--dtype", "float32"))
    return dataclasses.replace(plain, **changes)


def settings(directory: Path, trace: str = "auto", **engine):
    return Settings(
        measuring=MeasuringOptions(kernel_trace=trace),
        engine=GivenEngine(**engine),
        report_dir=directory,
    )


def test_the_folder_of_traces_does_not_change_the_server_key():
    plain = configuration()
    profiled = configuration(traces="/a")
    assert plain.key != profiled.key
    assert profiled.key == configuration(traces="/b").key


def test_profiler_writes_what_is_bounded():
    command = Vllm().command(configuration(traces="/report/traces"), port=1)
    config = {"torch_profiler_dir": "/report/traces", "torch_profiler_with_stack": False}
    config |= {"profiler": "torch", "ignore_frontend": True}
    assert json.loads(command[command.index("--profiler-config") + 1]) == config
    assert "--profiler-config" not in Vllm().command(configuration(), port=1)


@pytest.mark.parametrize(
    ("changes", "traces"),
    [
        pytest.param({}, True, id="traces"),
        pytest.param({"trace": "restart"}, True, id="trace restart, traces"),
        pytest.param({"trace": "off"}, False, id="trace off, not traces"),
        pytest.param(
            {"arguments": ("--profiler-config.profiler=torch",)},
            False,
            id="arguments --profiler-config.profiler=torch, not",
        ),
    ],
)
def test_profiling_is_enabled_unless_another_option_uses_the_profiler(changes, traces, tmp_path):
    folder = target._traces(settings(tmp_path, **changes), CPU)
    assert folder == (str(tmp_path / "traces") if traces else None)
    (tmp_path / "vllm").mkdir()  # this engine has no profiler
    (tmp_path / "vllm" / "__init__.py").touch()
    old = settings(tmp_path, environment=(("PYTHONPATH", str(tmp_path)),))
    assert target._traces(old, CPU) is None


def stub(directory: Path, chosen=CPU, **changes):
    """A replacement for a run with the parts that profiling uses.

    `stop` counts the stops of its server."""
    run = stand_in(
        settings=settings(directory, **changes), profile=chosen, directory=directory, stop=Mock(),
        file=new_file(),
    )  # fmt: skip
    return with_events(run)


def take(run, **changes: str) -> KernelProfile:
    """Profile a server that the suite has started."""
    mode = target.profiler_mode(run.settings, run.profile)
    started = configuration(**changes)
    server = SimpleNamespace(configuration=started, engine="vllm", endpoint=None, managed=True)
    return decode_profile.profile_decode_steps(run, server, mode=mode)


@pytest.fixture
def taken_profile(monkeypatch: pytest.MonkeyPatch) -> KernelProfile:
    launches = [Launches(f"k{n}", 1, 1e-3) for n in range(50)]
    profile_ = build_profile("cpu", Path("trace"), 3, launches)
    monkeypatch.setattr(decode_profile, "profile_decode", lambda *_: DecodeTrace(Path("trace")))
    monkeypatch.setattr(decode_profile.kernel_trace, "read_trace", lambda _: profile_)
    return profile_


@pytest.mark.parametrize(
    ("chosen", "asked", "stops"),
    [
        pytest.param(CPU, "auto", 0, id="CPU, auto, 0"),
        pytest.param(GB10, "auto", 1, id="GB10, auto, 1"),
        pytest.param(CPU, "restart", 1, id="CPU, restart, 1"),
        pytest.param(GB10, "keep", 0, id="GB10, keep, 0"),
    ],
)
def test_server_that_a_gpu_profiler_slows_is_stopped(chosen, asked, stops, taken_profile, tmp_path):
    run = stub(tmp_path, chosen, trace=asked)
    assert take(run, traces="/t") == taken_profile.model_copy(update={"decoding": True})
    assert run.servers.stop.call_count == stops


def test_profile_is_in_the_report(taken_profile, tmp_path):
    run = stub(tmp_path)
    take(run, traces="/t")
    assert "| attention | 0.0% |" in (tmp_path / "kernels-tested.md").read_text()
    whole = KernelProfile.model_validate_json((tmp_path / "kernels-tested.json").read_text())
    assert len(whole.kernels) == 50
    assert len(run.record.file.engine.kernels.kernels) == 40
    assert run.record.file.engine.kernels.seconds == whole.seconds


def test_path_of_the_server_under_test_has_what_its_kernels_prove(tmp_path):
    """The kernel path contains the values that the profiled kernels of the same configuration
    prove.

    No other configuration's path has these values. The calls of all kernels of known parts are
    included.
    """
    marlin = "void marlin::Marlin<(long)1>()"
    write = "vllm::reshape_and_cache_flash_kernel<float>"
    rows = [Launches(f"k{n}", 1, 1.0) for n in range(50)]
    rows += [Launches(marlin, 8, 1e-6), Launches(write, 32, 1e-6), Launches(marlin + "2", 64, 1e-6)]
    kernels = build_profile("gpu", Path("trace"), None, rows).model_copy(update={"decoding": True})
    run = stand_in(
        file=SimpleNamespace(engine=SimpleNamespace(kernels=shortened(kernels))),
        follow_log=lambda: None,
    )  # fmt: skip
    run._profile = SimpleNamespace(under_test="tested")
    run._metrics_of = lambda _: None
    run.layers = 4
    server = SimpleNamespace(reader="vllm", log=None, configuration=configuration())
    path = KernelPaths.of(run, server)
    assert path.requantised == ["qkv", "o", "lm_head"]
    assert path.evidence["requantised"].startswith("trace: 72 calls of dense Marlin in 8 passes")
    server.configuration = dataclasses.replace(configuration(), name="baseline")
    assert KernelPaths.of(run, server).requantised is None


@pytest.mark.parametrize(
    ("run_changes", "server_changes", "expected"),
    [
        pytest.param(
            {"trace": "off"},
            {},
            "the profile or --kernel-trace switches it off",
            id="trace off, says off",
        ),
        pytest.param({}, {}, "has no option --profiler-config", id="no option --profiler-config"),
    ],
)
def test_a_server_that_cannot_be_profiled_is_not_run(
    run_changes, server_changes, expected, tmp_path, monkeypatch
):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(verdict.NotRun, match=expected):
        take(stub(tmp_path, **run_changes), **server_changes)
    attached = SimpleNamespace(configuration=None, engine="openai-compatible", managed=False)
    run = stub(tmp_path)
    with pytest.raises(verdict.NotRun, match="sm121 path --trace"):
        decode_profile.profile_decode_steps(
            run, attached, mode=target.profiler_mode(run.settings, CPU)
        )
