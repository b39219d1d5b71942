"""`sm121 health` checks that a server generates one token in time."""

import http.server
import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from sm121 import cli

WITHIN_S = 1.0
TOKEN = {"choices": [{"text": " 4"}], "usage": {"completion_tokens": 1}}


class _Handler(http.server.BaseHTTPRequestHandler):
    """Answers /health always with status 200, and other paths according to `kind`."""

    kind = "healthy"
    answer: object = None
    api_key: str | None = None

    def log_message(self, *_arguments: object) -> None:
        """Print nothing."""

    def do_GET(self) -> None:
        if self.path == "/health":
            self._send(200, {})
        else:
            self._send(200, {"data": [{"id": "openai/gpt-oss-120b"}]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.kind == "healthy":
            key = self.headers.get("Authorization")
            status = 200 if self.api_key is None or key == f"Bearer {self.api_key}" else 401
            assert body["max_tokens"] == 1
            self._send(status, TOKEN)
        elif self.kind == "no token":
            self._send(200, {"choices": [], "usage": {"completion_tokens": 0}})
        elif self.kind == "answer":
            text = self.answer if isinstance(self.answer, str) else json.dumps(self.answer)
            self._send_bytes(200, text.encode())
        elif self.kind == "error":
            self._send(500, {"error": "EngineCore died"})
        elif self.kind == "no JSON":
            self._send_bytes(200, b"<html>")
        elif self.kind == "hangs":
            time.sleep(3 * WITHIN_S)
        elif self.kind == "drips":
            self.send_response(200)
            self.send_header("Content-Length", "100")
            self.end_headers()
            for _ in range(10):
                self.wfile.write(b" ")
                self.wfile.flush()
                time.sleep(0.4 * WITHIN_S)

    def _send(self, status: int, answer: object) -> None:
        self._send_bytes(status, json.dumps(answer).encode())

    def _send_bytes(self, status: int, text: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)


class _Server(http.server.ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False

    def handle_error(self, _request: object, _address: object) -> None:
        """Ignore a client that disconnected."""


@contextmanager
def serving(kind: str, api_key: str | None = None, answer: object = None) -> Iterator[str]:
    handler = type("Handler", (_Handler,), {"kind": kind, "api_key": api_key, "answer": answer})
    with _Server(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


def health(url: str, *options: str) -> tuple[int, float]:
    """Call `sm121 health`, and return its exit status and its duration in seconds."""
    started = time.monotonic()
    status = cli.main(["health", url, "--within", f"{WITHIN_S:g}", *options])
    return status, time.monotonic() - started


@pytest.mark.parametrize("output", [">&-", "| true"], ids=["closed", "without-a-reader"])
def test_the_exit_status_does_not_depend_on_the_output(output):
    command = f'set -o pipefail; "{sys.executable}" -m sm121 health "$0" {output}'
    with serving("healthy") as url:
        done = subprocess.run(["bash", "-c", command, url], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("suffix", ["", "/v1", "/"])
def test_a_server_that_generates_a_token_is_healthy(suffix, capsys):
    with serving("healthy") as url:
        status, seconds = health(url + suffix)
    assert status == 0
    assert seconds < WITHIN_S
    assert "openai/gpt-oss-120b: 1 token in " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("no token", "expected a choice, got none"),
        ("error", "expected status 200, got 500"),
        ("no JSON", "Expecting value"),
        ("hangs", "expected a token within 1 s, got none"),
        ("drips", "expected a token within 1 s, got none"),
    ],
)
def test_a_server_that_only_answers_health_is_unhealthy(kind, message, capsys):
    with serving(kind) as url:
        status, seconds = health(url)
    assert status == 1
    assert seconds < WITHIN_S + 1
    assert message in capsys.readouterr().out


ONE = {"completion_tokens": 1}
LOGPROBS = {"tokens": ["<|return|>"], "token_logprobs": [-0.1]}


@pytest.mark.parametrize(
    ("answer", "shown"),
    [
        ({"choices": [{"text": " 4"}]}, "text in "),
        ({"choices": [{"text": " 4"}], "usage": None}, "text in "),
        ({"choices": [{"text": " 4"}], "error": None, "usage": {}}, "text in "),
        ({"choices": [{"text": ""}], "usage": ONE}, "1 token in "),
        ({"choices": [{"text": None}], "usage": ONE}, "1 token in "),
        ({"choices": [{"text": "", "token_ids": [200002]}]}, "1 token in "),
        ({"choices": [{"text": "", "logprobs": LOGPROBS}]}, "1 token in "),
        ({"choices": [{"text": "4", "finish_reason": "length"}], "usage": ONE}, "1 token in "),
    ],
    ids=[
        "no usage",
        "usage null",
        "empty usage",
        "a special token has no text",
        "text null",
        "token ids",
        "log probabilities",
        "a reason to finish",
    ],
)
def test_an_answer_with_a_text_or_a_token_is_healthy(answer, shown, capsys):
    with serving("answer", answer=answer) as url:
        # The limit is long enough for a busy machine.
        status, _ = health(url, "--within", "20")
    out = capsys.readouterr().out
    assert (status, shown in out) == (0, True), out


FAULT = {"message": "EngineCore died", "code": 500}


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ({"choices": [], "usage": ONE}, "expected a choice, got none"),
        ({"choices": None, "usage": ONE}, "expected a choice, got none"),
        ({"choices": [None], "usage": ONE}, "expected a choice, got none"),
        ({"choices": [{}], "usage": ONE}, "expected a choice, got none"),
        ({"choices": [{"index": 0}], "usage": {}}, "expected one token, got none"),
        ({"choices": {"text": "4"}, "usage": ONE}, "expected a choice, got none"),
        ({"error": FAULT, "usage": ONE}, "expected one token, got an error: EngineCore died"),
        ({"error": FAULT, "choices": [{"text": "4"}], "usage": ONE}, "got an error: EngineCore"),
        ({"error": "a\x1b[2Jb", "usage": ONE}, "got an error: a"),
        ({"choices": [{"text": ""}], "usage": {"completion_tokens": 0}}, "one token, got none"),
        ({"choices": [{"text": ""}], "usage": {"completion_tokens": True}}, "one token, got none"),
        ({"choices": [{"text": "", "token_ids": []}]}, "expected one token, got none"),
        ({"choices": [{"text": "4", "finish_reason": "abort"}], "usage": ONE}, "got abort"),
        ({"choices": [{"text": "", "finish_reason": "error"}], "usage": ONE}, "got error"),
        ("[" * 100_000, "expected JSON, got "),
        ('{"choices": ' + "[" * 100_000 + "]" * 100_000 + "}", "expected JSON, got "),
    ],
    ids=[
        "no choices",
        "choices null",
        "a choice null",
        "an empty choice",
        "a choice without text",
        "choices that are an object",
        "an error object",
        "an error beside a choice",
        "an error with control characters",
        "no token",
        "a count that is true",
        "no token ids",
        "aborted",
        "ended by an error",
        "nested and cut",
        "nested deeply",
    ],
)
def test_an_answer_without_a_token_is_unhealthy(answer, message, capsys):
    with serving("answer", answer=answer) as url:
        status, _ = health(url)
    out, err = capsys.readouterr()
    assert (status, message in out, err) == (1, True, ""), out + err
    assert out.count("\n") == 1
    assert "\x1b" not in out


def test_a_port_without_a_server_is_unhealthy(capsys):
    with serving("healthy") as url:
        pass
    assert health(url)[0] == 1
    assert "Connection refused" in capsys.readouterr().out


def test_the_key_comes_from_the_environment(monkeypatch):
    with serving("healthy", api_key="secret") as url:
        assert health(url)[0] == 1
        monkeypatch.setenv("SM121_API_KEY", "secret")
        assert health(url)[0] == 0


@pytest.mark.parametrize(
    "words",
    [
        ["127.0.0.1:8000"],
        ["http://a:b"],
        ["http://127.0.0.1:1", "--within", "0"],
        ["http://127.0.0.1:1", "--within", "1e300"],
    ],
    ids=["no scheme", "no port", "no time", "for ever"],
)
def test_a_wrong_request_is_one_line(words, capsys):
    assert cli.main(["health", *words]) == 4
    assert "expected" in capsys.readouterr().err


@pytest.mark.parametrize(
    "address",
    [
        "http://me:secret@127.0.0.1:1",
        "http://127.0.0.1:1/?api_key=secret",
        "http://127.0.0.1:1/#secret",
    ],
    ids=["password", "query", "fragment"],
)
def test_a_secret_in_the_address_is_refused_and_not_shown(address, capsys):
    assert cli.main(["health", address]) == 4
    shown = "".join(capsys.readouterr())
    assert "secret" not in shown and "expected http://HOST:PORT" in shown


@pytest.mark.parametrize("key", ["two\nlines", "ключ"])
def test_an_invalid_key_in_the_environment_is_refused(key, monkeypatch, capsys):
    monkeypatch.delenv("SM121_API_KEY", raising=False)
    monkeypatch.setenv("OPENAI_API_KEY", key)
    assert cli.main(["health", "http://127.0.0.1:1"]) == 4
    said = capsys.readouterr().err
    assert "OPENAI_API_KEY: expected a key" in said and key not in said
