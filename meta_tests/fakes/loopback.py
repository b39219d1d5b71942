"""HTTP handlers that serve on a free loopback port until a block ends."""

import json
import socketserver
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


def say(text: str) -> None:
    """Print a line to the log of a server."""
    print(text, flush=True)


class JsonHandler(BaseHTTPRequestHandler):
    """Reads and sends JSON, and logs nothing."""

    protocol_version = "HTTP/1.1"

    def asked(self) -> dict:
        return json.loads(self.rfile.read(int(self.headers.get("Content-Length", 0))) or b"{}")

    def say(self, answer: object, status: int = 200, kind: str = "application/json") -> None:
        """Answer with JSON, or send a text or bytes unchanged."""
        text = answer if isinstance(answer, str | bytes) else json.dumps(answer)
        content = text.encode() if isinstance(text, str) else text
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def completion(self, text: str, prompt: int, tokens: int, **fields: object) -> dict:
        """Return an answer of /v1/completions that ends at the requested length, with its usage."""
        choice = {"index": 0, "text": text, "finish_reason": "length", "logprobs": None}
        usage = {"prompt_tokens": prompt, "completion_tokens": tokens}
        usage["total_tokens"] = prompt + tokens
        return {"object": "text_completion", "choices": [choice], "usage": usage, **fields}

    def log_message(self, *_arguments: object) -> None: ...


class _Server(ThreadingHTTPServer):
    request_queue_size = 64


@contextmanager
def serving(
    handler: type[BaseHTTPRequestHandler], kind: type[socketserver.TCPServer] = _Server
) -> Iterator[str]:
    """Start the server, and yield its address.

    The server also stops after an exception, because otherwise it would run for ever."""
    with kind(("127.0.0.1", 0), handler) as listening:
        loop = threading.Thread(target=listening.serve_forever, args=(0.01,), daemon=True)
        loop.start()
        try:
            yield f"http://127.0.0.1:{listening.server_address[1]}"
        finally:
            listening.shutdown()
            loop.join()
