"""Two ranks that need each other, without an engine.

Rank 0 answers HTTP requests, and needs an echo from rank 1 for each token. ``/health`` always
returns 200. On SIGUSR1, rank 1 hangs. As a program, this file replaces a node's Python
(``two_ranks.py -m sm121.engines.node_agent``). The file that SM121_META_NODE names may change the
node's machine."""

import argparse
import contextlib
import mmap
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Mapping
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[2]))  # for its imports, as it runs as a script

from meta_tests.fakes.loopback import JsonHandler
from sm121.core.configuration import Rank, ServerConfiguration
from sm121.engines import node_agent, registry

COMMAND = (sys.executable, str(Path(__file__)))


class TwoRanks:
    """The engine with two ranks."""

    name = "two-ranks"
    reserved_arguments: tuple[str, ...] = ()
    reserved_variables: tuple[str, ...] = ()

    def check_interpreter(self, python: str, environment: Mapping[str, str]) -> str | None:
        return None

    def command(self, configuration: ServerConfiguration, *, port: int) -> list[str]:
        return [*COMMAND, "--port", str(port), *configuration.arguments]

    def rank_command(self, configuration: Any, *, port: int, rank: Rank) -> list[str]:
        master = ["--rank", str(rank.number), "--master", rank.address, str(rank.port)]
        return [*self.command(configuration, port=port), *master]

    def environment(self, configuration: ServerConfiguration, *, api_key: str) -> Mapping[str, str]:
        return {**os.environ, "VLLM_API_KEY": api_key, **dict(configuration.environment)}


class Handler(JsonHandler):
    peer: socket.socket
    #: The file that the variable SM121_META_NCCL names. It is mapped as long as the rank lives.
    library: mmap.mmap

    def do_GET(self) -> None:
        self.say({})

    def do_POST(self) -> None:
        self.asked()
        self.peer.sendall(b"x")
        if not self.peer.recv(1):
            print("ERROR 11-20 10:00:00 [core.py:1] rank 1 is gone", flush=True)
            os._exit(1)
        self.say({"choices": [{"text": " Paris"}]})


def wait_for_ever(*_: object) -> None:
    threading.Event().wait()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int)
    parser.add_argument("--rank", type=int)
    parser.add_argument("--master", nargs=2)
    parser.add_argument("--dies-at-start", action="store_true")
    options = parser.parse_args()
    if library := os.environ.get("SM121_META_NCCL"):
        with Path(library).open("rb") as stream:
            Handler.library = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
    host = options.master[0]
    port = int(options.master[1])
    if options.rank == 0:
        with socket.create_server((host, port)) as server:
            print("rank 0 waits", flush=True)
            Handler.peer = server.accept()[0]
        ThreadingHTTPServer(("127.0.0.1", options.port), Handler).serve_forever()
    if options.dies_at_start:
        print("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB", flush=True)
        sys.exit(1)
    while True:
        with contextlib.suppress(ConnectionRefusedError):
            peer = socket.create_connection((host, port))
            break
        time.sleep(0.1)
    print("s:1:1 [0] NCCL INFO dlvsym failed on f - libmlx5.so: undefined symbol: f", flush=True)
    signal.signal(signal.SIGUSR1, wait_for_ever)
    print("rank 1 serves", flush=True)
    while peer.recv(1):
        peer.sendall(b"x")
    print("RuntimeError: Connection closed by peer [127.0.0.1]:1", flush=True)
    sys.exit(1)


def node() -> None:
    """Run the agent of a node with this engine."""
    registry.register(TwoRanks())
    sys.argv[1:] = []
    sys.exit(node_agent.main())


if __name__ == "__main__":
    node() if sys.argv[1:2] == ["-m"] else main()
