"""If a server, an address or a log is hostile, each read is limited and no secret is shown."""

import ast
import asyncio
import contextlib
import gzip
import shutil
import socket
import ssl
import subprocess
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import openai
import pytest

from meta_tests.texts import text_file
from sm121.client import exchange, jobs, load, timed
from sm121.client.patience import Patience
from sm121.core import bounded
from sm121.core.address import root_of
from sm121.core.errors import UsageError
from sm121.core.server import Endpoint
from sm121.engines import given_key
from sm121.engines.attached import attach
from sm121.evidence import failure, kernel_path, metrics
from sm121.measure import counters, validity
from sm121.regression.ab import parse_sides

SECRET = "Tr0ub4dor"
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"
STREAM = HEAD.replace(b"application/json", b"text/event-stream") + b"\r\n"
CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"
EVENT = b'data: {"choices": [{"index": 0, "text": "a"}]}\n\n'


@dataclass(frozen=True)
class Reply:
    """A server's answer: it sends `once`, then `again` several times with pauses, then `end`."""

    once: bytes = b""
    again: bytes = b""
    times: int = 1 << 30
    pause_s: float = 0.05
    end: bytes = b""

    def send(self, connection: socket.socket) -> None:
        connection.sendall(self.once)
        for _ in range(self.times if self.again else 0):
            time.sleep(self.pause_s)
            connection.sendall(self.again)
        connection.sendall(self.end)


def sized(body: bytes, packed: bytes = b"", length: int = 0) -> bytes:
    encoding = b"Content-Encoding: %s\r\n" % packed if packed else b""
    return HEAD + encoding + b"Content-Length: %d\r\n\r\n" % (length or len(body)) + body


LIST = b'{"data": []}'
REPLIES = {
    "whole": Reply(sized(LIST)),
    "packed in two": Reply(sized(gzip.compress(LIST[:4]) + gzip.compress(LIST[4:]), b"gzip")),
    "packed otherwise": Reply(sized(b"abcd", b"br")),
    "not packed": Reply(sized(b"abcd", b"gzip")),
    # 600 KB that are 600 MB after decompression
    "bomb": Reply(sized(gzip.compress(bytes(1 << 20), 9) * 600, b"gzip")),
    "flood": Reply(HEAD + b"\r\n", bytes(1 << 18), pause_s=0.0),
    "dripping": Reply(sized(b"", length=100_000), b"x"),
    "dripping headers": Reply(HEAD, b"X-A: b\r\n"),
    "endless header": Reply(HEAD + b"X-A: ", bytes([97]) * (1 << 12), pause_s=0.0),
    "endless status line": Reply(b"HTTP/1.1 200 ", b"O" * (1 << 12), pause_s=0.0),
    "dripping status line": Reply(b"HTTP/1.1 200 ", b"O"),
    "interim answers": Reply(b"", b"HTTP/1.1 100 Continue\r\n\r\n", pause_s=0.0),
    "dripping chunk size": Reply(CHUNKED, b"0"),
    "endless chunk size": Reply(CHUNKED, b"0" * (1 << 12), pause_s=0.0),
    # the header announces 2 ** 63 bytes
    "huge chunk size": Reply(CHUNKED + b"7fffffffffffffff\r\n", bytes(1 << 18), pause_s=0.0),
    "huge chunk that drips": Reply(CHUNKED + b"7fffffffffffffff\r\n", b"x"),
    "dripping trailers": Reply(CHUNKED + b"1\r\nx\r\n0\r\n", b"X-A: b\r\n"),
    "silent": Reply(again=b" ", times=1, pause_s=30.0),
    # three times the time limit that this test sets for a whole answer
    "slow stream": Reply(STREAM, EVENT, 15, 0.1, b"data: [DONE]\n\n"),
    "endless stream": Reply(STREAM, EVENT),
    "packed stream": Reply(sized(gzip.compress(EVENT * 4), b"gzip")),
    "nested": Reply(sized(b"[" * 200_000 + b"]" * 200_000)),
}


@pytest.fixture
def serve() -> Iterator[Callable[[str], Endpoint]]:
    """Start a server that gives every request the same answer of `REPLIES`."""
    listening: list[socket.socket] = []

    def start(reply: str) -> Endpoint:
        listener = socket.create_server(("127.0.0.1", 0))
        listening.append(listener)

        def one(connection: socket.socket) -> None:
            # The client may close the connection, which is correct.
            with connection, contextlib.suppress(OSError):
                connection.recv(1 << 16)
                REPLIES[reply].send(connection)

        def accept() -> None:
            with contextlib.suppress(OSError):
                while True:
                    connection, _ = listener.accept()
                    threading.Thread(target=one, args=(connection,), daemon=True).start()

        threading.Thread(target=accept, daemon=True).start()
        return Endpoint(f"http://127.0.0.1:{listener.getsockname()[1]}", "key", "canary")

    yield start
    for listener in listening:
        listener.close()


LATE = "no whole answer within 0.5 s"


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        ("bomb", "larger than 4 MiB"),
        ("flood", "larger than 4 MiB"),
        ("dripping", LATE),
        ("dripping headers", LATE),
        ("endless header", "Receive buffer too long"),
        ("endless status line", "Receive buffer too long"),
        ("dripping status line", LATE),
        ("interim answers", LATE),
        ("dripping chunk size", LATE),
        ("endless chunk size", "Receive buffer too long"),
        ("huge chunk size", "larger than 4 MiB"),
        ("huge chunk that drips", LATE),
        ("dripping trailers", LATE),
        ("silent", LATE),
        ("packed otherwise", "compressed (br)"),
        ("not packed", "cannot be decompressed"),
    ],
)
def test_every_answer_has_a_bound(serve, answer, says):
    endpoint = serve(answer)
    # The cases about sizes have more time, because they may be slow on a busy machine.
    timeout_s = 0.5 if says == LATE else 15.0
    began = time.monotonic()
    tracemalloc.start()
    try:
        with endpoint.http(timeout_s=timeout_s) as http, pytest.raises(httpx.HTTPError) as caught:
            http.get("/metrics")
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert says in str(caught.value)
    assert peak < 48 << 20, f"expected less than 48 MiB, got {peak >> 20}"
    with (
        endpoint.openai(timeout_s=timeout_s) as client,
        pytest.raises(openai.APIConnectionError) as caught,
    ):
        client.models.list()
    assert says in str(caught.value.__cause__)
    assert endpoint.page("/metrics", timeout_s=timeout_s) is None
    assert time.monotonic() - began < 15.0


@pytest.mark.parametrize("answer", ["whole", "packed in two"])
def test_an_answer_within_its_bounds_comes_whole(serve, answer):
    endpoint = serve(answer)
    assert endpoint.page("/v1/models") == '{"data": []}'
    with endpoint.openai() as client:
        assert list(client.models.list()) == []


def test_transports_use_public_names_of_the_library_alone():
    """The transports use only public names of the library, because releases change private ones."""
    tree = ast.parse(Path(bounded.__file__).read_text("utf-8"))
    private = [
        ast.unparse(node)
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and node.attr.startswith("_")
        and not node.attr.endswith("__")
        and not (isinstance(node.value, ast.Name) and node.value.id == "self")
    ]
    assert private == []


def test_json_without_a_bottom_is_no_answer(serve):
    endpoint = serve("nested")
    with pytest.raises(UsageError, match="not a list of models"):
        attach(endpoint.base_url, api_key=None, served_name=None, default_name="canary", log=None)
    assert exchange.send(endpoint, "GET", "/version", timeout_s=5.0).parsed() is None
    job = jobs.Job("one", {"model": "m", "prompt": "p"}, 8)
    outcome = load.LoadClient(endpoint, Patience(20.0, 10.0)).run([job]).outcomes[0]
    assert outcome.problem[0] == "bad_stream"


def test_a_stream_may_take_longer_than_an_answer(serve):
    with serve("slow stream").openai(timeout_s=0.5) as client:
        stream = client.completions.create(model="m", prompt="p", stream=True)
        assert sum(1 for _ in stream) == 15


def test_a_stream_does_not_last_for_ever(serve, monkeypatch):
    monkeypatch.setattr(bounded, "_STREAM_PATIENCE", 2.0)
    began = time.monotonic()
    with serve("endless stream").openai(timeout_s=0.5) as client:
        stream = client.completions.create(model="m", prompt="p", stream=True)
        with pytest.raises(openai.APITimeoutError) as caught:
            sum(1 for _ in stream)
    assert "no whole answer within 1 s" in str(caught.value.__cause__)
    assert time.monotonic() - began < 3.0


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        ("packed stream", "compressed (gzip)"),
        ("flood", "larger than 64 MiB"),
    ],
)
def test_the_timed_client_takes_neither_packed_nor_endless_answers(serve, answer, says):
    endpoint = serve(answer)

    async def ask():
        request = timed.TimedRequest("/v1/completions", b"{}", 8, 4)
        async with timed.TimedClient(endpoint.base_url, endpoint.api_key) as client:
            return await client.run([request], concurrency=1, patience=Patience(20.0, 10.0))

    assert says in str(asyncio.run(ask()).answers[0].error)


@pytest.mark.parametrize(
    ("answer", "streamed", "says"),
    [
        ("packed stream", True, "compressed (gzip)"),
        ("bomb", False, "compressed (gzip)"),
        ("flood", False, "larger than 64 MiB"),
    ],
)
def test_the_load_client_takes_neither_packed_nor_endless_answers(serve, answer, streamed, says):
    job = jobs.Job("one", {"model": "m", "prompt": "p", "stream": streamed}, 8)
    result = load.LoadClient(serve(answer), Patience(20.0, 10.0)).run([job])
    assert says in str(result.outcomes[0].problem)


METRICS = text_file("metrics-of-two-engines.txt")


def findings_between(*numbers: dict[str, object]) -> tuple[dict[str, float], validity.Findings]:
    """Return the changes between two readings of /metrics, and the findings."""
    before, after = (counters.parse_counters(METRICS.format(**each)) for each in numbers)
    findings = validity.Findings()
    validity.check_counters(delta := after.since(before), [], "token_ids", findings)
    return delta, findings


@pytest.mark.parametrize("no_number", ["NaN", "+Inf", "-Inf", "nan"])
def test_a_metric_without_a_number_is_unknown(no_number):
    first = {"running": 0, "generated": no_number}
    second = {"running": no_number, "generated": 100}
    text = METRICS.format(**first)
    assert counters.parse_counters(text).no_number == {"generated", "cache_hits"}
    assert counters.parse_counters(METRICS.format(**second)).no_number == {"running"}
    delta, findings = findings_between(first, second)
    assert "running" not in delta
    assert "generated" not in delta, "what was there before is not known"
    remarks = "\n".join(findings.unproven)
    assert "other clients: /metrics does not count running" in remarks
    assert "does not count generated tokens" in remarks
    assert metrics.total(text, "vllm:prefix_cache_hits_total") is None


NAME = "vllm:num_requests_running"


@pytest.mark.parametrize(
    "text",
    [
        "".join(f'{NAME}{{engine="{n}"}} 1.0\n' for n in range(90_000)),
        f"{NAME}{{" + ",".join(f'a{n}="b"' for n in range(300_000)) + "} 1\n",
        f"{NAME}{{{'a' * 65_000}}} 1\n" * 64,
        f"{NAME}{{{'a=' * 30_000}}} 1\n" * 64,
        f'{NAME}{{a="' + "\\" * (4 << 20) + '"} 1\n',
        f"{NAME}{{{'{' * 60_000}\n" * 64,
        "<html>" + "x" * (4 << 20),
    ],
    ids=["many", "labels", "long-label", "equals", "backslashes", "braces", "html"],
)
def test_metrics_are_parsed_in_bounded_time(text):
    began = time.process_time()
    counters.parse_counters(text)
    metrics.with_metrics(kernel_path.KernelPath(), text)
    metrics.total(text, NAME)
    assert time.process_time() - began < 5.0


def test_numbers_are_read_as_before():
    first = {"running": 0, "generated": 40}
    second = {"running": 2, "generated": 100}
    texts = [METRICS.format(**each) for each in (first, second)]
    assert not any(counters.parse_counters(text).no_number for text in texts)
    delta, findings = findings_between(first, second)
    assert (delta["running"], delta["generated"]) == (2.0, 60.0)
    assert "2 requests run or wait" in findings.invalid[0].evidence


@pytest.mark.parametrize(
    "url",
    [
        "http://user:SECRET@127.0.0.1:8000/v1",
        "http://user:a/SECRET@127.0.0.1:8000",
        "http://user:a@SECRET@127.0.0.1:8000",
        "https://SECRET@127.0.0.1:8000",
        "http://user:SECRET?@127.0.0.1:8000",
        "http://127.0.0.1:8000/v1?api_key=SECRET",
        "http://127.0.0.1:8000/v1#SECRET",
    ],
)
def test_a_secret_in_an_address_is_refused_and_not_shown(url):
    url = url.replace("SECRET", SECRET)
    with pytest.raises(UsageError) as caught:
        root_of(url, "--base-url")
    assert SECRET not in str(caught.value)
    assert "127.0.0.1:8000" in str(caught.value)
    with pytest.raises(UsageError) as caught:
        parse_sides([url, "http://127.0.0.1:8000"])
    assert SECRET not in str(caught.value)


@pytest.mark.parametrize(
    "url",
    [
        "http://127.0.0.1:8000",
        "https://spark.local/v1/",
        "http://[::1]:8000/v1",
        "http://h/a",
    ],
)
def test_an_address_without_a_password_is_accepted(url):
    assert root_of(url, "--base-url") == url.rstrip("/").removesuffix("/v1")


def shows_the_secret(run) -> bool:
    """Return whether the output or a file of the report contains the secret."""
    files = [path for path in run.report.rglob("*") if path.is_file()]
    return SECRET in run.output + "".join(path.read_text(errors="replace") for path in files)


def test_a_run_with_a_password_in_its_address(run_pytest):
    url = f"http://user:{SECRET}@127.0.0.1:8000/v1"
    status, run = run_pytest("--arch", "cpu", "--base-url", url)
    assert status == 4 and "OPENAI_API_KEY" in run.output
    assert not shows_the_secret(run)


def option_of(**options: object) -> Callable[[str], object]:
    return lambda name: options.get(name.removeprefix("--").replace("-", "_"))


def test_the_key_comes_from_a_file_or_a_variable(tmp_path, monkeypatch):
    file = tmp_path / "key"
    file.write_text(f"{SECRET}\n")
    in_file = option_of(api_key_file=str(file))
    monkeypatch.delenv("SM121_API_KEY", raising=False)
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    assert given_key.api_key(option_of()) is None
    for variable, key in (("OPENAI_API_KEY", "every-clients"), ("SM121_API_KEY", "the-suites")):
        monkeypatch.setenv(variable, key)
        assert given_key.api_key(option_of()) == key
        assert given_key.api_key(in_file) == SECRET
    assert given_key.api_key(option_of(api_key=SECRET)) == SECRET
    with pytest.raises(UsageError, match="one of them"):
        given_key.api_key(option_of(api_key=SECRET, api_key_file=str(file)))


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (None, "No such file"),
        ("", "expected a key"),
        pytest.param("SECRET\nSECRET", "expected a key", id="SECRET SECRET, expected a key"),
        pytest.param("SECRETé", "expected a key", id="SECRET, expected a key"),
        pytest.param(bytes([255, 254]), "it is not a text file", id="bytes 255 254, it is no text"),
    ],
)
def test_a_file_without_a_key_is_refused_and_not_shown(tmp_path, content, expected):
    file = tmp_path / "key"
    if content is not None:
        text = content if isinstance(content, bytes) else content.encode()
        file.write_bytes(text.replace(b"SECRET", SECRET.encode()))
    with pytest.raises(UsageError, match=expected) as caught:
        given_key.api_key(option_of(api_key_file=str(file)))
    assert SECRET not in str(caught.value)


def test_a_key_of_the_environment_reaches_the_server_and_no_report(run_pytest, fault_server):
    server = fault_server("none", key=SECRET)
    attached = ("--arch", "cpu", "--base-url", server.base_url)
    chosen = ("tests/test_smoke.py", "-k", "models")
    _, run = run_pytest(*attached, *chosen, environment={"SM121_API_KEY": SECRET})
    assert "accepts the key" not in run.output
    assert run.report.exists() and not shows_the_secret(run)


def test_pytest_itself_does_not_show_the_key(run_pytest, fault_server, tmp_path):
    server = fault_server("none", key=SECRET)
    file = tmp_path / "own.xml"
    _, run = run_pytest(
        "--arch", "cpu", "--base-url", server.base_url, "-l", "-rA", "--tb=long",
        f"--junitxml={file}", "meta_tests/whole/scenarios/tells_the_key.py",
        environment={"SM121_API_KEY": SECRET},
    )  # fmt: skip
    assert "Incorrect API key" in run.output and "printed" in run.output
    assert SECRET not in run.output and SECRET not in file.read_text("utf-8")
    written = [path for path in run.report.rglob("*") if path.is_file()]
    assert "run.jsonl" in {path.name for path in written}
    assert not [path for path in written if SECRET.encode() in path.read_bytes()]


def test_a_server_without_health_and_version_is_judged_by_the_rest(run_pytest, fault_server):
    """An attached server needs neither /health nor /version, which OpenAI's API does not have."""
    server = fault_server("bare")
    _, run = run_pytest(
        "--arch", "cpu", *server.options,
        "tests/test_smoke.py", "-k", "health or version",
    )  # fmt: skip
    tests = {test["id"].partition("::")[2]: test for test in run.verdict["tests"]}
    for name in ("test_health", "test_version_is_known"):
        assert tests[name]["verdict"] == "NOT_RUN", tests[name]
        assert "the attached server has no /" in tests[name]["message"]


@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl makes the certificate")
def test_a_certificate_authority_of_ones_own(tmp_path, monkeypatch):
    key = tmp_path / "key.pem"
    certificate = tmp_path / "own.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-keyout", key, "-out",
         certificate, "-days", "2", "-subj", "/CN=localhost",
         "-addext", "subjectAltName=IP:127.0.0.1"],
        check=True, capture_output=True,
    )  # fmt: skip
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(certificate, key)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        thread = threading.Thread(target=_answers_over_tls, args=(listening, context))
        thread.start()
        endpoint = Endpoint(f"https://127.0.0.1:{listening.getsockname()[1]}", "k", "m")
        try:
            with endpoint.http() as http, pytest.raises(httpx.ConnectError, match="verify"):
                http.get("/v1/models")
            monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
            with endpoint.http() as http:
                assert http.get("/v1/models").json() == {"data": []}
        finally:
            thread.join()


def _answers_over_tls(listening: socket.socket, context: ssl.SSLContext) -> None:
    for _ in range(2):
        connection, _ = listening.accept()
        with contextlib.suppress(ssl.SSLError), context.wrap_socket(connection, True) as client:
            client.recv(4096)
            client.sendall(sized(LIST))


def test_a_machine_without_certificates_trusts_those_of_certifi(monkeypatch):
    """If a machine has no certificates, as a slim image, every client uses those of certifi."""
    monkeypatch.setenv("SSL_CERT_FILE", "/nowhere.pem")
    monkeypatch.setenv("SSL_CERT_DIR", "/nowhere")
    assert len(bounded.tls().get_ca_certs()) > 50


def test_the_middle_of_a_long_log_is_read(tmp_path: Path):
    log = tmp_path / "server.log"
    core = "(EngineCore pid=7) "
    lines = "".join(
        f"(APIServer pid=1) INFO 11-20 10:17:{n % 60:02d} [loggers.py:1] Engine 000: {n} tokens/s\n"
        for n in range(20_000)
    )
    chosen = "Using TRITON_ATTN attention backend out of potential backends: ['FLASHINFER'].\n"
    illegal = "torch.AcceleratorError: CUDA error: an illegal memory access was encountered\n"
    with log.open("w") as out:
        for number in range(64):
            out.write(lines)
            if number == 30:
                out.write(f"{core}INFO 11-20 10:19:39 [cuda.py:482] {chosen}")
                out.write(f"{core}ERROR 11-20 10:19:39 [core.py:1] {illegal}")
        out.write(f"{core}ERROR 11-20 10:19:39 [core.py:1] EngineCore encountered a fatal error.\n")
    assert log.stat().st_size > 96 << 20
    path = kernel_path.read_log(log, "vllm")
    assert (path.attention, path.failure) == ("TRITON_ATTN", "illegal_memory_access")
    assert failure.classify(log, 1).kind == "illegal_memory_access"
