"""A server that looks like vLLM from outside and obeys commands, without an engine.

It prints the lines of a start of vLLM on a CPU, has a child process as its engine core, and obeys
``GET /meta?do=COMMAND``, after a delay with ``&after=SECONDS``:

- ``print&text=LINE``: print a line to the log.
- ``exit&status=N``, ``signal&number=N``: end, after the answer.
- ``core&number=N``: end the child by this signal. ``/health`` then returns 503, unless ``--heals``
  is given: then another child takes its place.

``fake_python.py`` starts it (SM121_META_SERVER names this file), or a test starts it and attaches
to it.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import threading
import time
import uuid
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import httpx

sys.path.append(str(Path(__file__).parents[2]))  # for its imports, as it runs as a script

from meta_tests.fakes.fault_server import build
from meta_tests.fakes.loopback import JsonHandler, say
from meta_tests.folders import DATA

MODEL = "canary"
#: The lines of vLLM 0.32 and of the suite's probe on a CPU, after the seconds since the epoch.
START = (DATA / "texts" / "start-of-vllm.log").read_text("utf-8")


def lines_of_a_start(at: float | None = None, **fields: object) -> str:
    """Return the log of a start at the given time (default: now).

    `fields` contains changed values."""
    moment = time.strftime("%m-%d %H:%M:%S", time.localtime(at))
    usual = {"version": "0.32.0", "model": MODEL, "path": "/models/canary", "port": 8000}
    usual |= {"attention": "CPU_ATTN", "pid": os.getpid()}
    return START.format(at=moment, **usual | fields)


class Handler(JsonHandler):
    options: argparse.Namespace
    started = time.time()
    core: subprocess.Popen[bytes] | None = None
    dead = False
    tokens = 0

    def answer(self, content: object, status: int = 200) -> None:
        if not self.options.no_access_log:
            host, port = self.client_address[:2]
            path = urlsplit(self.path).path if self.options.logs_paths_alone else self.path
            line = f'{host}:{port} - "{self.command} {path} HTTP/1.1" {status} OK'
            say(f"(APIServer pid={os.getpid()}) INFO:     {line}")
        self.say(content, status)

    def version_string(self) -> str:
        return self.options.server_header

    def forwards(self, content: bytes | None = None) -> bool:
        """Answer a request with 404 or with another server's answer.

        Return False if the request is served by this server itself."""
        if urlsplit(self.path).path in self.options.hides:
            self.say({"detail": "Not Found"}, 404)
            return True
        if self.options.forward is None:
            return False
        try:
            answer = httpx.request(
                self.command, self.options.forward.read_text() + self.path, content=content,
                headers={"Authorization": self.headers.get("Authorization", "")}, timeout=60.0,
                trust_env=False,
            )  # fmt: skip
            self.say(answer.content, answer.status_code, answer.headers.get("content-type", ""))
        except httpx.TransportError:
            self.say("<html>Bad Gateway</html>", 502, kind="text/html")
        return True

    def do_GET(self) -> None:
        if self.forwards():
            return
        parts = urlsplit(self.path)
        query = {name: values[0] for name, values in parse_qs(parts.query).items()}
        if parts.path == "/health":
            self.answer("", 503 if self.dead else 200)
        elif parts.path == "/version":
            self.answer({"version": self.options.version})
        elif parts.path == "/v1/models":
            entry: dict[str, Any] = {"id": self.options.served_model_name, "object": "model"}
            entry |= {"owned_by": "vllm", "created": int(time.time()), "root": self.options.path}
            self.answer({"object": "list", "data": [entry]})
        elif parts.path == "/metrics":
            lines = [f"vllm:generation_tokens_total {self.tokens}.0"]
            if not self.options.no_start_time:
                lines.append(f"process_start_time_seconds {self.started}")
            self.answer("\n".join(lines) + "\n")
        elif parts.path == "/meta":
            self.answer({})
            threading.Timer(float(query.get("after", 0)), self.obey, [query]).start()
        else:
            self.answer({"error": "not found"}, 404)

    def obey(self, query: dict[str, str]) -> None:
        match query["do"]:
            case "print":
                say(query["text"].replace("11-20 10:00:00", time.strftime("%m-%d %H:%M:%S")))
            case "exit":
                os._exit(int(query["status"]))
            case "signal":
                os.kill(os.getpid(), int(query["number"]))
            case "core" if self.core is not None:
                os.kill(self.core.pid, int(query["number"]))
                # Wait, so that a watcher can read the exit status before it is collected.
                time.sleep(0.5)
                self.core.wait()
                type(self).dead = not self.options.heals
                if self.options.heals:
                    start_core()

    def do_POST(self) -> None:
        body = self.asked()
        if self.forwards(json.dumps(body).encode()):
            return
        if self.dead:
            self.answer({"error": {"message": "EngineDeadError"}}, 500)
            return
        tokens = int(body.get("max_tokens", 1))
        if self.options.log_requests:
            request = f"Received request cmpl-{self.headers.get('X-Request-Id')}-0: params: x"
            say(f"(APIServer pid={os.getpid()}) INFO 11-20 10:00:00 [logger.py:40] {request}")
        time.sleep(0.005 * tokens)
        type(self).tokens += tokens
        prompt = len(str(body.get("prompt")).split())
        self.answer(
            self.completion(
                " Paris", prompt, tokens, id=f"cmpl-{uuid.uuid4().hex}", created=int(time.time()),
                model=self.options.served_model_name, system_fingerprint=self.options.fingerprint,
            )
        )  # fmt: skip


def start_core() -> None:
    named = "import ctypes, time; ctypes.CDLL(None).prctl(15, b'VLLM::EngineCor'); time.sleep(3600)"
    Handler.core = subprocess.Popen([sys.executable, "-S", "-c", named])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--served-model-name", default=MODEL)
    parser.add_argument("--version", default="0.32.0")
    parser.add_argument("--path", default="/models/canary")
    parser.add_argument("--attention", default="CPU_ATTN")
    parser.add_argument("--heals", action="store_true")
    parser.add_argument("--no-access-log", action="store_true")
    parser.add_argument("--log-requests", action="store_true", help="as --enable-log-requests")
    parser.add_argument("--logs-paths-alone", action="store_true", help="no queries")
    parser.add_argument("--crashes-at-the-end", action="store_true")
    parser.add_argument("--no-start-time", action="store_true")
    parser.add_argument("--fingerprint", help="of each answer")
    parser.add_argument("--server-header", default="uvicorn")
    parser.add_argument("--hides", action="append", default=[], help="a page that it withholds")
    parser.add_argument("--forward", type=Path, help="file with the URL of the server behind it")
    parser.add_argument("--compiles", type=int, default=0, help="a module, for so many seconds")
    parser.add_argument("--port-file", type=Path, help="where the port is written")
    arguments = [*sys.argv[1:], *os.environ.get("SM121_META_ARGUMENTS", "").split()]
    options, _ = parser.parse_known_args(arguments)
    Handler.options = options
    if options.compiles:
        build(options.compiles)
    server = ThreadingHTTPServer(("127.0.0.1", options.port), Handler)
    server.daemon_threads = True
    print(
        lines_of_a_start(
            version=options.version, model=options.served_model_name, path=options.path,
            attention=options.attention, port=server.server_address[1],
        ),
        end="", flush=True,
    )  # fmt: skip
    start_core()
    if options.port_file is not None:
        options.port_file.write_text(str(server.server_address[1]))

    def end(*_arguments: object) -> None:
        if Handler.core is not None:
            Handler.core.kill()
            Handler.core.wait()
        if options.crashes_at_the_end:
            signal.signal(signal.SIGSEGV, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGSEGV)
        threading.Thread(target=server.shutdown).start()

    signal.signal(signal.SIGTERM, end)
    server.serve_forever()


if __name__ == "__main__":
    main()
