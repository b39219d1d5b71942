"""A small OpenAI-compatible server with known faults, without an engine.

    python fault_server.py --port PORT --fault NAME

``data/fault-server.toml`` contains the names.
"""

import argparse
import os
import signal
import subprocess
import sys
import threading
import time
import tomllib
from http.server import ThreadingHTTPServer
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2]))  # for its imports, as it runs as a script

from meta_tests.fakes.installed import compiled
from meta_tests.fakes.loopback import JsonHandler, say
from meta_tests.folders import DATA

FAULTS = tomllib.loads((DATA / "fault-server.toml").read_text("utf-8"))
MODEL = "canary"
NAMES = {"another-model": "llama-3-8b", "unnamed": "my-model", "whole-name": f"openai/{MODEL}"}


class Handler(JsonHandler):
    fault = "none"
    completions = 0

    def do_GET(self) -> None:
        if self.fault == "html":
            self.say("<html><body>It works!</body></html>", kind="text/html")
        elif self.fault == "bare" and self.path in ("/health", "/version"):
            self.say({"error": "not found"}, 404)
        elif self.path == "/health":
            loads = self.fault in ("never-ready", "compiles-then-hangs")
            self.say("", 503 if loads else 200)
        elif self.path == "/metrics" and self.fault == "no-metrics":
            self.say("vllm:prefix_cache_hits_total 3.0", 500, kind="text/plain")
        elif self.path == "/version":
            self.say({"version": "0.29.0" if self.fault == "old" else "0.0-fault"})
        elif self.path == "/v1/models":
            expected = os.environ.get("VLLM_API_KEY")
            if expected and self.headers.get("Authorization") != f"Bearer {expected}":
                self.say({"error": "Unauthorized"}, 401)
            elif self.fault == "dripping":
                self.send_response(200)
                self.end_headers()
                for _ in range(100):
                    self.wfile.write(b" ")
                    self.wfile.flush()
                    time.sleep(2)
            elif self.fault == "no-models":
                self.say({"models": 3})
            else:
                entry = {"id": NAMES.get(self.fault, MODEL), "object": "model", "owned_by": "meta"}
                # When the suite attaches, it waits to see whether this value stops changing.
                if self.fault == "created":
                    entry["created"] = 0
                self.say({"object": "list", "data": [entry]})
        else:
            self.say({"error": "not found"}, 404)

    def do_POST(self) -> None:
        prompt = self.asked().get("prompt")
        type(self).completions += 1
        if self.fault == "obeys" and prompt == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.fault == "obeys" and prompt == "hang":
            type(self).fault = "health-only"
        if self.fault == "health-only":
            time.sleep(3600)
        if self.fault == "dies-later" and self.completions > 1:
            os.kill(os.getpid(), signal.SIGKILL)
        self.say(self.completion(" Paris", 5, 1, id="cmpl-1", created=0, model=MODEL))


def start_up(fault: str) -> None:
    say("INFO 11-20 10:00:00 [api_utils.py:347] version 0.32.0")
    if fault == "exit-0":
        time.sleep(1.0)
        say("INFO 11-20 10:00:01 [core.py:133] Initializing a V1 LLM engine (v0.32.0)")
        sys.exit(0)
    if fault == "exit-oom":
        say("(EngineCore pid=7) ERROR 11-20 10:00:01 [core.py:1510] EngineCore failed to start.")
        say("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 61.86 GiB.")
        say("RuntimeError: Engine core initialization failed. See root cause above.")
        sys.exit(1)
    if fault == "compiles-one-file":
        work("cicc", 7)
        build(0)
    elif fault.startswith("compiles"):
        build(6 if fault == "compiles" else 2)
    if fault == "slow":
        time.sleep(2.5)
    if fault == "silent":
        time.sleep(3600)
    if fault == "stubborn":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if fault == "orphan":
        ignore = "import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(3600)"
        started = f"subprocess.Popen([sys.executable, '-c', {ignore!r}], start_new_session=True)"
        launch = f"import subprocess, sys; {started}"
        subprocess.run([sys.executable, "-c", launch], check=True)
    if fault == "zombie":
        os.posix_spawn("/bin/true", ["true"], {})  # not Popen, which would collect the exit status


def work(compiler: str, seconds: int) -> None:
    """Run a process with this name, for example that of a compiler, for this many seconds."""
    program = Path(os.environ["FLASHINFER_WORKSPACE_BASE"]) / compiler
    program.parent.mkdir(parents=True, exist_ok=True)
    program.unlink(missing_ok=True)
    program.symlink_to("/bin/sleep")
    subprocess.run([str(program), str(seconds)], check=True)


def build(seconds: int) -> None:
    """Write the files that FlashInfer writes into its cache while ninja compiles, one file per
    second."""
    base = Path(os.environ["FLASHINFER_WORKSPACE_BASE"]) / ".cache" / "flashinfer"
    folder = base / "0.7.2" / "121a" / "cached_ops" / "fused_moe_120"
    compiled(folder, folder.name, seconds, lambda: work("ninja", 1))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--fault", choices=sorted(FAULTS), default="none")
    options = parser.parse_args()
    start_up(options.fault)
    Handler.fault = options.fault
    server = ThreadingHTTPServer(("127.0.0.1", options.port), Handler)
    server.daemon_threads = True
    say(f"listening on {server.server_address[1]}")
    if options.fault in ("never-ready", "compiles-then-hangs"):

        def load() -> None:
            for percent in range(100):
                say(f"Loading safetensors checkpoint shards: {percent}% Completed | {percent}/100")
                time.sleep(0.2)

        threading.Thread(target=load, daemon=True).start()
    if options.fault != "stubborn":
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    server.serve_forever()


if __name__ == "__main__":
    main()
