"""Items 1 and 2: the measured time begins too late, because the first tokens are delayed.

As on a GPU, the delay may depend on the length of the prompt."""

from collections.abc import Callable
from dataclasses import replace
from statistics import median

from meta_tests.two_steps import in_two_steps
from sm121.core.level_settings import Measuring
from sm121.core.server import Endpoint
from sm121.measure import cells, metrics, plan
from sm121.measure.measured_server import MeasuredServer
from sm121.measure.measurement import Measurement
from sm121.measure.metrics.tg import DecodeRate

from . import Case, Kit, Outcome

#: The gate of a decode rate, in tok/s. The servers' rates are 2 % below or above it.
MINIMUM = 200.0
BELOW = 196.0
ABOVE = 204.0
#: The gate of the longest time to the first token, in ms. A correct server needs a quarter of it.
AT_MOST_MS = 300.0
_MEASURING = Measuring(rounds=3, short_rounds=2, silent_within_s=2.0)
PLAN = plan.Plan(256, (32, 128), (0,), _MEASURING)
Read = Callable[[cells.MeasuredCell], Measurement]
Ask = Callable[[Kit], Outcome]


def measured(kit: Kit, options: tuple[str, ...], read: Read, **texts: bool) -> Measurement:
    server = kit.timed_server(*options)
    records = kit.tmp_path / f"records-{server.base_url.rpartition(':')[2]}"
    endpoint = Endpoint(server.base_url, "none", "gpt-oss-120b")
    with MeasuredServer.open(endpoint, PLAN, records, **texts) as opened:
        return read(cells.MeasuredCell(opened, 0).gather(PLAN.measuring.rounds))


@in_two_steps
def judged(kit: Kit, *options: str, rate: float, tokens: int = 32, **texts: bool) -> Outcome:
    """Measure the decode rate over the first tokens, and decide on it with its gate."""
    served = ("--rate", str(rate), *options)
    rate_of_server = measured(kit, served, DecodeRate(tokens).settle, **texts)
    if rate_of_server.invalid:
        return Outcome("INVALID", "; ".join(map(str, rate_of_server.invalid)))
    value = median(rate_of_server.samples)
    text = f"{rate_of_server.name}: {value:.4g} tok/s, expected {MINIMUM:g}"
    return Outcome("PASS" if value >= MINIMUM else "FAIL", text)


@in_two_steps
def waited(kit: Kit, *options: str) -> Outcome:
    """Measure the longest time to the first token, and decide on it with its gate."""

    def read(cell: cells.MeasuredCell) -> Measurement:
        time = metrics.find("ttft", quantile=0.99).of(cell)
        errors = [
            answer.error for answer in [*cell.timed.answers, *cell.timed.short] if answer.error
        ]
        return replace(time, remarks=[*errors, *time.remarks])

    time = measured(kit, ("--rate", "200", *options), read)
    worst = max(time.samples)
    text = f"{worst:.4g} ms at worst, expected {AT_MOST_MS:g}; {'; '.join(time.remarks)}"
    return Outcome("PASS" if worst <= AT_MOST_MS else "FAIL", text)


FIRST = "1 Tokens that come with the first chunk"
WITNESS = "1 What is compared with the stream says nothing"


def _late(name: str, *options: str, item: str, expected: str, slow: bool = False) -> Case:
    """Return a case: a server whose rate is below the gate, and the same with a rate above the
    gate.

    The clean twin may also send its first tokens late."""
    fault = judged(*options, rate=BELOW)
    clean = judged(*options, rate=ABOVE)
    return Case(item, name, fault, clean, expected, slow)


def _wrong(name: str, *options: str, tokens: int = 32, expected: str, slow: bool = True) -> Case:
    """Return a case: a server whose stream cannot be timed, and the same server without the
    fault."""
    fault = judged(*options, rate=BELOW, tokens=tokens)
    clean = judged(rate=ABOVE, tokens=tokens)
    return Case(FIRST, name, fault, clean, expected, slow)


@in_two_steps
def first_token(kit: Kit, *options: str) -> Outcome:
    """Measure the time to the first token, and decide on it with its gate."""
    served = ("--rate", "200", "--prefill-rate", "500", *options)
    time = measured(kit, served, lambda cell: metrics.find("ttft", quantile=0.5).of(cell))
    if time.invalid:
        return Outcome("INVALID", "; ".join(map(str, time.invalid)))
    middle = median(time.samples)
    return Outcome("PASS" if middle <= 600.0 else "FAIL", f"{middle:.4g} ms, expected 600")


def _unsaid(name: str, *options: str, expected: str) -> Case:
    """Return a case: a server with a sufficient rate whose reports are incomplete or contradict its
    stream, and the same server without this fault."""
    fault = judged(*options, rate=ABOVE, tokens=128)
    clean = judged(rate=ABOVE, tokens=128)
    return Case(WITNESS, name, fault, clean, expected, slow=True)


CASES = [
    Case(
        item="1 What is compared with the stream says nothing",
        name=("a first token that is counted, has no text, and comes before the prompt is done"),
        fault=first_token("--trap", "early-token"),
        clean=first_token("--trap", "three-content-free"),
        expected="early_first_chunk",
        slow=True,
    ),
    _unsaid(
        "tokens of long answers are counted and never come",
        "--lost-tokens",
        "12",
        expected="usage reports 45",
    ),
    _unsaid(
        "tokens of long answers are counted and take no time, without metrics",
        "--trap",
        "counts-what-it-skips",
        expected="usage reports 45",
    ),
    _unsaid(
        "the decode time of the metrics stands still",
        "--trap",
        "decode-time-stands",
        expected="decode time grew by 0 s",
    ),
    _unsaid(
        "the metrics vanish in the middle", "--metrics-until", "4", expected="counters_vanished"
    ),
    _unsaid("the untimed twin fails", "--fail-number", "2", expected="request_failed"),
    _unsaid("a warm-up fails", "--fail-number", "3", expected="request_failed"),
    _late(
        "three events when the third token is there",
        "--held-tokens",
        "3",
        "--decode-time-factor",
        "0",
        item="1 Tokens that come with the first chunk",
        expected="expected 200",
    ),
    _late(
        "late for no reason that shows, by less than a token",
        "--late-ms",
        "4.5",
        "--echo",
        "never",
        "--decode-time-factor",
        "0",
        item="1 Tokens that come with the first chunk",
        expected="expected 200",
        slow=True,
    ),
    _late(
        "late for no reason that shows, by several tokens",
        "--late-ms",
        "12",
        "--echo",
        "never",
        "--decode-time-factor",
        "0",
        item="1 Tokens that come with the first chunk",
        expected="expected 200",
        slow=True,
    ),
    _wrong(
        "late, and hidden by steps that are a little short",
        "--late-ms",
        "12",
        "--echo",
        "never",
        "--leak",
        "0.08",
        "--trap",
        "no-metrics",
        expected="expected 200",
    ),
    _wrong(
        "a stream that is faster than the engine from its first token to its last",
        "--late-ms",
        "90",
        "--echo",
        "never",
        "--leak",
        "0.1",
        tokens=128,
        expected="server_clock",
        slow=False,
    ),
    _wrong(
        "most of the tokens in one bunch at the start",
        "--late-ms",
        "110",
        "--echo",
        "never",
        "--trap",
        "no-metrics",
        expected="expected 200",
    ),
    _late(
        "echoed when ids are asked for, as vLLM does",
        "--late-ms",
        "12",
        item="1 A payload in the first chunk",
        expected="expected 200",
    ),
    _late(
        "echoed whether it is asked for or not",
        "--late-ms",
        "12",
        "--echo",
        "always",
        "--decode-time-factor",
        "0",
        item="1 A payload in the first chunk",
        expected="expected 200",
        slow=True,
    ),
    _late(
        "in an event of its own before the first token",
        "--late-ms",
        "12",
        "--echo",
        "apart",
        "--decode-time-factor",
        "0",
        item="1 A payload in the first chunk",
        expected="expected 200",
        slow=True,
    ),
    Case(
        item="2 A request that is sent again",
        name="held, dropped without a byte, served when it is sent again",
        fault=waited("--drop-every", "4", "--drop-after-ms", "400"),
        clean=waited("--drop-every", "4"),
        expected="connection: ",
    ),
    Case(
        item="2 A request that is sent again",
        name="held, then redirected to itself",
        fault=waited("--redirect-every", "4", "--redirect-after-ms", "400"),
        clean=waited(),
        expected="status-307: redirected to",
        slow=True,
    ),
    Case(
        item="2 A request that is sent again",
        name="a connection that was never used before is dropped",
        fault=waited("--drop-every", "4", "--trap", "drops-fresh-connections"),
        clean=waited("--trap", "closes-connections"),
        expected="connection: ",
        slow=True,
    ),
]
