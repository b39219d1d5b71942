"""How the server under test is profiled: what it is started with, and what becomes of it."""

import dataclasses
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from data_rows import from_data

from sm121.core import profile, verdict
from sm121.core.configuration import ServerConfiguration
from sm121.engines.vllm import Vllm
from sm121.evidence.kernel_profile import KernelProfile, _profile, _Sum, shortened
from sm121.run import decode_profile
from sm121.session import session, target

CPU = profile.load("cpu-tiny-gpt-oss")
GB10 = profile.load("sm121-gpt-oss-120b")


def configuration(**changes: str) -> ServerConfiguration:
    plain = ServerConfiguration("tested", "vllm", sys.executable, "m", "m", ("--dtype", "float32"))
    return dataclasses.replace(plain, **changes)


def settings(directory: Path, **changes):
    plain = SimpleNamespace(
        kernel_trace="auto", engine="vllm", engine_python=sys.executable,
        engine_arguments=(), engine_environment=(), report_dir=directory,
    )  # fmt: skip
    plain.__dict__.update(changes)
    return plain


def test_where_traces_go_makes_no_other_server():
    plain, profiled = configuration(), configuration(traces="/a")
    assert plain.key != profiled.key
    assert profiled.key == configuration(traces="/b").key


def test_profiler_writes_what_is_bounded():
    command = Vllm().command(configuration(traces="/report/traces"), port=1)
    asked = json.loads(command[command.index("--profiler-config") + 1])
    assert asked == {
        "profiler": "torch",
        "torch_profiler_dir": "/report/traces",
        "torch_profiler_with_stack": False,
        "ignore_frontend": True,
    }
    assert "--profiler-config" not in Vllm().command(configuration(), port=1)


@from_data
def test_profiler_is_there_unless_somebody_else_uses_it(changes, traces, tmp_path):
    found = target._traces(settings(tmp_path, **changes), CPU)
    assert found == (str(tmp_path / "traces") if traces else None)


def test_engine_without_a_profiler_is_started_without_one(tmp_path):
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / "__init__.py").touch()
    old = settings(tmp_path, engine_environment=(("PYTHONPATH", str(tmp_path)),))
    assert target._traces(old, CPU) is None


def stub(directory: Path, chosen=CPU, **changes):
    """A run as far as profiling looks at it; `stopped` counts the stops of its server."""
    run = SimpleNamespace(
        settings=settings(directory, **changes),
        profile=chosen,
        directory=directory,
        stopped=0,
        file=SimpleNamespace(engine=SimpleNamespace(kernels=None)),
    )

    def stop() -> None:
        run.stopped += 1

    run.stop = stop
    return run


def take(run, server) -> KernelProfile:
    mode = target.profiler_mode(run.settings, run.profile)
    return decode_profile.take(run, server, mode=mode)


def server(**changes: str):
    return SimpleNamespace(
        configuration=configuration(**changes), engine="vllm", endpoint=None, managed=True
    )


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> KernelProfile:
    taken = _profile("cpu", Path("trace"), 3, [(f"k{n}", _Sum(1, 1e-3)) for n in range(50)])
    monkeypatch.setattr(decode_profile, "profile_decode", lambda *_: Path("trace"))
    monkeypatch.setattr(decode_profile.kernel_profile, "read_trace", lambda _: taken)
    return taken


@from_data
def test_server_that_a_gpu_profiler_slows_is_stopped(chosen, asked, stops, seen, tmp_path):
    run = stub(tmp_path, chosen, kernel_trace=asked)
    assert take(run, server(traces="/t")) == seen.model_copy(update={"decoding": True})
    assert run.stopped == stops


def test_profile_is_in_the_report(seen, tmp_path):
    run = stub(tmp_path)
    take(run, server(traces="/t"))
    assert "| attention | 0.0% |" in (tmp_path / "kernels-tested.md").read_text()
    whole = KernelProfile.model_validate_json((tmp_path / "kernels-tested.json").read_text())
    assert len(whole.kernels) == 50
    assert len(run.file.engine.kernels.kernels) == 40
    assert run.file.engine.kernels.seconds == whole.seconds


def test_path_of_the_server_under_test_has_what_its_kernels_prove(tmp_path):
    """Of no other configuration's, and with the calls of all kernels of known parts."""
    marlin, write = "void marlin::Marlin<(long)1>()", "vllm::reshape_and_cache_flash_kernel<float>"
    rows = [(f"k{n}", _Sum(1, 1.0)) for n in range(50)]
    rows += [(marlin, _Sum(8, 1e-6)), (write, _Sum(32, 1e-6)), (marlin + "2", _Sum(64, 1e-6))]
    taken = _profile("gpu", Path("trace"), None, rows).model_copy(update={"decoding": True})
    run = SimpleNamespace(
        file=SimpleNamespace(engine=SimpleNamespace(kernels=shortened(taken))),
        profile=SimpleNamespace(under_test="tested"), layers=4,
        _follow_log=lambda: None, _metrics_of=lambda _: None,
    )  # fmt: skip
    asked = SimpleNamespace(reader="vllm", log=None, configuration=configuration())
    path = session.Session.kernel_path(run, asked)
    assert path.requantised == ["qkv", "o", "lm_head"]
    assert path.evidence["requantised"].startswith("trace: 72 calls of dense Marlin in 8 passes")
    asked.configuration = dataclasses.replace(configuration(), name="baseline")
    assert session.Session.kernel_path(run, asked).requantised is None


@from_data
def test_what_cannot_be_profiled_is_not_run(
    run_changes, server_changes, expected, tmp_path, monkeypatch
):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(verdict.NotRun, match=expected):
        take(stub(tmp_path, **run_changes), server(**server_changes))
    attached = SimpleNamespace(configuration=None, engine="openai-compatible", managed=False)
    with pytest.raises(verdict.NotRun, match="sm121 path --trace"):
        take(stub(tmp_path), attached)
