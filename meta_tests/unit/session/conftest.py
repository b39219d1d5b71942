"""Fixtures of the tests of `sm121 profile`."""

import contextlib
from pathlib import Path
from types import SimpleNamespace

import pytest

from meta_tests.fakes.decode_traces import LAYER_US
from sm121 import cli
from sm121.core import architecture
from sm121.core.configuration import ServerConfiguration
from sm121.evidence.decode_time import StreamTime
from sm121.evidence.kernel_path import KernelPath
from sm121.evidence.profile_files import read_profile
from sm121.session import decode_command


@pytest.fixture
def profiled(tmp_path, capsys):
    """Call the command. Return its status, its output and its errors."""

    def call(*words: str | Path):
        output = tmp_path / "report"
        status = cli.main(["profile", *map(str, words), "--output", str(output)])
        printed = capsys.readouterr()
        return status, printed.out, printed.err

    return call


@pytest.fixture
def start_with(monkeypatch, tmp_path):
    """Replace the start of a configuration on a GB10 by a trace and a kernel path."""

    def replace(trace: Path, tokens_per_step: float | None = None, **logged: str) -> None:
        @contextlib.contextmanager
        def opened(settings):
            target = settings.target
            profile = target.profile.judging(target.configuration, "0.33.0")
            started = ServerConfiguration(
                name=target.configuration,
                engine="vllm",
                python="python",
                model=profile.model.id,
                served_name="x",
                arguments=(*profile.arguments_of(None), *settings.engine.arguments),
                environment=settings.engine.environment,
                traces=str(tmp_path),
            )
            server = SimpleNamespace(endpoint=None, engine="vllm", configuration=started)
            paths = SimpleNamespace(of=lambda _server: KernelPath(**logged))
            run = SimpleNamespace(server=lambda: server, paths=paths, profile=profile)
            yield SimpleNamespace(run=run)

        stream = StreamTime(1.02 * 36 * LAYER_US / 1e6, tokens_per_step)
        profile = read_profile(trace)
        monkeypatch.setattr(architecture, "detect", lambda: architecture.Detection("sm121", ""))
        monkeypatch.setattr(decode_command, "open_session", opened)
        monkeypatch.setattr(decode_command, "_take", lambda *_: (profile, stream))

    return replace
