"""Start the fault server, the timed server and the stress server as processes that run until a
block ends."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meta_tests.folders import DATA, FAKES
from meta_tests.texts import text_file
from sm121.core.configuration import ServerConfiguration
from sm121.core.server import Endpoint
from sm121.engines.ports import free_port


@dataclass
class FaultServer:
    """A running fault server with its address."""

    process: subprocess.Popen[str]
    base_url: str
    key: str

    @property
    def options(self) -> tuple[str, ...]:
        """Return the options of a run on this server."""
        return ("--base-url", self.base_url, "--api-key", self.key)


@dataclass
class TimedServer:
    """A running timed server with its address and the log of the chunks that it has sent."""

    process: subprocess.Popen[str]
    base_url: str
    log: Path

    def truth(self) -> list[dict[str, Any]]:
        """Return a record for each completed request, in the order of arrival at the server."""
        records = [json.loads(line) for line in self.log.read_text("utf-8").splitlines()]
        return sorted(records, key=lambda record: record["received_ns"])


def configuration(*arguments: str, **environment: str) -> ServerConfiguration:
    variables = tuple(sorted(environment.items()))
    return ServerConfiguration("tested", "vllm", sys.executable, "m", "m", arguments, variables)


def executable(file: Path, script: str) -> Path:
    """Write a shell script, and make it executable."""
    file.write_text(f"#!/bin/sh\n{script}\n")
    file.chmod(0o755)
    return file


def matrix_profile(folder: Path, more: str = "") -> Path:
    """Write the profile of ``matrix_engine.py``, with an invented checkpoint and additional
    lines."""
    checkpoint = folder / "checkpoint"
    checkpoint.mkdir(exist_ok=True)
    (checkpoint / "config.json").write_text("{}")
    text = (DATA / "matrix-profile.toml").read_text() + more
    text = text.replace('"CHECKPOINT"', f'"{checkpoint}"')
    text = text.replace('"AXES"', f'"{DATA / "matrix-axes.toml"}"')
    profile = folder / "meta.toml"
    profile.write_text(text)
    return profile


def matrix_variables(faults: str) -> dict[str, str]:
    """Return the variables of a run with ``matrix_engine.py`` and these faults."""
    return {"MATRIX_FAULTS": faults}


def git(folder: Path, *words: str) -> str:
    """Run git with these arguments in a folder; return its output."""
    options = ("user.name=meta", "user.email=meta@example.org", "init.defaultBranch=main")
    who = []
    for option in options:
        who += ["-c", option]
    command = ["git", "-C", str(folder), *who, *words]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


@contextmanager
def program(name: str, *arguments: str, before: tuple[str, ...] = ()) -> Iterator[subprocess.Popen]:
    """Start a program of ``data/texts/`` in its own process, with pipes.

    `before` contains words that precede the command."""
    command = [*before, sys.executable, "-c", text_file(name), *arguments]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


@contextmanager
def fault_server(fault: str = "none", key: str = "meta-key") -> Iterator[FaultServer]:
    """Start ``fault_server.py`` with a fault. If the key is empty, the server requires none."""
    with _listening("fault_server.py", "--port", "0", "--fault", fault, key=key) as (process, url):
        yield FaultServer(process, url, key)


@contextmanager
def timed_server(log: Path, *arguments: str) -> Iterator[TimedServer]:
    """Start ``timed_server.py``, which logs the chunks that it sends to ``log``."""
    with _listening("timed_server.py", "--log", str(log), *arguments) as (process, url):
        yield TimedServer(process, url, log)


@contextmanager
def stress_server(fault: str = "none", *arguments: str) -> Iterator[Endpoint]:
    """Start ``stress_server.py`` with a fault, and wait until it answers."""
    port = free_port()
    endpoint = Endpoint(f"http://127.0.0.1:{port}", "key", "canary")
    with subprocess.Popen(
        [sys.executable, str(FAKES / "stress_server.py"), "--port", str(port), *arguments],
        env={**os.environ, "VLLM_API_KEY": endpoint.api_key, "SM121_META_FAULT": fault},
    ) as process:
        try:
            while endpoint.page("/health") is None:
                assert process.poll() is None
                time.sleep(0.05)
            yield endpoint
        finally:
            process.kill()


@contextmanager
def _listening(
    file: str, *arguments: str, key: str = ""
) -> Iterator[tuple[subprocess.Popen[str], str]]:
    with subprocess.Popen(
        [sys.executable, str(FAKES / file), *arguments],
        env={**os.environ, "VLLM_API_KEY": key}, stdout=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        try:
            line = ""
            while not line.startswith("listening on "):
                line = process.stdout.readline()
                assert line, f"{file} ended with {process.wait()}"
            yield process, f"http://127.0.0.1:{line.split()[-1]}"
        finally:
            process.kill()
