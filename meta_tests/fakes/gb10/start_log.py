"""The settings of the simulated server, and the log lines of its start.

The lines are those of one node, or of two nodes that serve together (``two.toml``)."""

import json
import os
import re
import time
import tomllib
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

from meta_tests.fakes.installed import compiled

HERE = Path(__file__).parent
#: The name of the MXFP4 build, which is used in place of a release.
BUILD = "mxfp4"
#: The environment variable with the folder below which FlashInfer writes its cache.
_WORKSPACE = "FLASHINFER_WORKSPACE_BASE"


@dataclass
class Settings:
    """The machine's properties, and its owner's settings."""

    release: str
    #: The version of the build.
    version: str
    #: The URL and the key of a real vLLM on the CPU that serves the same model.
    behind: str
    key: str
    #: The file of the NVML library.
    state: str
    #: The rates by the name of the experts' kernel: tokens per second of decode and prefill at each
    #: depth.
    rates: dict[str, list[tuple[int, float, float]]]
    #: How many seconds of the simulated start pass in a real second.
    faster: float = 40.0
    #: FlashInfer's modules that the first start compiles, with the seconds of each.
    compiles: dict[str, float] = field(default_factory=dict)
    #: The faults of the start: names in ``faults.toml``.
    faults: list[str] = field(default_factory=list)
    #: The share of the drafts whose token is accepted, by the token's position in the draft. It
    #: applies if the server's arguments request speculative decoding.
    accepted: list[float] = field(default_factory=lambda: [0.75, 0.6, 0.45])
    #: The decode rate is multiplied by this factor, half a minute after the first timed request.
    drift: float = 1.0
    #: The engine's process dies this many seconds after the first timed request; with 0, it does
    #: not die.
    dies_after_s: float = 0.0
    #: The last log lines of a dying engine: a key of ``deaths``.
    death: str = "illegal-address"
    #: Whether the build's start compiles the kernels that are missing in its caches.
    cold: bool = False
    #: The prefix of each line, and of the lines of the engine's worker.
    prefix: str = ""
    worker: str = ""
    #: The rate at which another client gets tokens, in tokens per second, from the start of the
    #: server on.
    tenant_rate: float = 0.0
    #: The log file of the second node, for a server on two nodes; empty for one node. The next
    #: field changes lines of single nodes: the node's rank, a pattern, and the replacement.
    node_log: str = ""
    otherwise: list[tuple[int, str, str]] = field(default_factory=list)
    #: For how many seconds the server hangs after it has lost a node, before it dies. Meanwhile,
    #: /health answers with status 200.
    hangs_s: float = 0.0
    #: The number of the timed request during which the server logs that it compiles a kernel; 0 for
    #: no such request.
    compiles_at: int = 0
    #: Whether Ray has started the server, so that the lines of all ranks are in one log.
    ray: bool = False

    @classmethod
    def load(cls) -> "Settings":
        """Load the file that GB10_SETTINGS names."""
        return cls(**json.loads(Path(os.environ["GB10_SETTINGS"]).read_text("utf-8")))


class Log:
    """Writes the lines of a start at their times. The time runs faster than real time."""

    def __init__(self, settings: Settings, values: dict[str, Any], core: int) -> None:
        self.settings = settings
        self.values = values
        self.engine = "EngineCore_DP0" if settings.release == BUILD else "EngineCore"
        self.who = {
            "api": f"(APIServer pid={os.getpid()}) ",
            "core": f"({self.engine} pid={core}) {settings.worker}",
            "bare": "",
        }
        self.began = time.monotonic()
        self.two = data("two.toml") if settings.node_log else {}
        if self.two:
            now = time.strftime("%m-%d %H:%M:%S")
            if not settings.ray:
                self._of_node(1, self.two["headless"].replace("{now}", now))

    def write(self, entry: dict[str, Any]) -> None:
        wait_s = self.began + entry["at"] / self.settings.faster - time.monotonic()
        time.sleep(max(0.0, wait_s))
        if "module" in entry:
            _compile(entry["module"], entry["seconds"])
            self.began += entry["seconds"]  # compilers take real time
        for role in ("api", "core", "bare", "bare_api", "bare_core"):
            if role in entry:
                self._say(role, entry[role])
        for text in entry.get("nccl", ()):
            for rank, (host, pid) in enumerate(
                zip(self.two["hosts"], self.two["pids"], strict=True)
            ):
                named = text.startswith("NCCL INFO")
                self._of_node(rank, f"{host}:{pid}:{pid} [0] {text}" if named else text)

    def _of_node(self, rank: int, line: str) -> None:
        """Write a line of one of two nodes, with the values of that node."""
        words = {"rank": rank, "peer": 1 - rank, "address": self.two["addresses"][rank]}
        words["version"] = self.values["version"]
        rows = [(rank, *row) for row in self.two["instead"]] + self.settings.otherwise
        for of, pattern, instead in rows:
            line = re.sub(pattern, instead, line) if of == rank else line
        line = re.sub(r"\{(\w+)\}", lambda match: str(words.get(match[1], match[0])), line)
        if self.settings.ray:
            pid = self.two["pids"][rank]
            ip = words["address"]
            line = f"{self.who['core']}(RayWorkerWrapper pid={pid}, ip={ip}) {line}"
        if rank == 0 or self.settings.ray:
            print(f"{self.settings.prefix}{line}", flush=True)
        else:
            with Path(self.settings.node_log).open("a", encoding="utf-8") as other:
                other.write(f"{line}\n")

    def _say(self, role: str, template: str) -> None:
        now = time.strftime("%m-%d %H:%M:%S")
        self.values["logging"] = time.strftime("%Y-%m-%d %H:%M:%S,000")
        text = re.sub(r"\{(\w+)\}", lambda m: str(self.values.get(m[1], m[0])), template)
        for line in text.splitlines():
            by_worker = role == "core" or template == "{lines}"
            if by_worker and self.two and not re.search(self.two["of_core"], line):
                for rank, pid in enumerate(self.two["pids"]):
                    worker = "" if self.settings.ray else f"(Worker_TP{rank} pid={pid}) "
                    self._of_node(rank, worker + _dated(line, now))
                continue
            line = line if role.startswith("bare") else _dated(line, now)
            print(f"{self.settings.prefix}{self.who[role.removeprefix('bare_')]}{line}", flush=True)


def _dated(line: str, now: str) -> str:
    has_level = line.startswith(("INFO ", "WARNING "))
    level, bracket, rest = line.partition("[") if has_level else ("INFO ", "", line)
    return f"{level}{now} {bracket}{rest}"


def data(name: str) -> dict[str, Any]:
    return tomllib.loads((HERE / name).read_text("utf-8"))


def compiling(module: str, seconds: float, at: float) -> dict[str, Any]:
    """Write the files that FlashInfer compiles for a module at the first start, one file per
    second."""
    return {"at": at, "module": module, "seconds": seconds}


def _compile(module: str, seconds: float) -> None:
    base = Path(os.environ[_WORKSPACE]) / ".cache" / "flashinfer"
    version = metadata.version("flashinfer-python")
    compiled(base / version / "121a" / "cached_ops" / module, module, int(seconds))
