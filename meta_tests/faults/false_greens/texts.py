"""Item 15: wrong texts of timed requests, if nothing checks them."""

from meta_tests.two_steps import in_two_steps
from sm121.client.completions import Asker
from sm121.core.level_settings import AgreementBound, Measuring
from sm121.core.server import Endpoint, Server
from sm121.measure import metrics
from sm121.measure.measured_server import MeasuredServer
from sm121.measure.plan import Plan
from sm121.performance.bench import Bench
from sm121.performance.timed_texts import TimedTexts

from . import Case, Kit, Outcome

PLAN = Plan(256, (32, 128), (0, 2048), Measuring(rounds=3, short_rounds=2, silent_within_s=2.0))
BOUND = AgreementBound(max_abs=1.0, mean_abs=0.25, fork=0.75, source="as sm121-gpt-oss-120b")


@in_two_steps
def measured(kit: Kit, lie: str, *options: str) -> Outcome:
    """Measure the decode rate of a server whose text is wrong only at one depth."""
    served = ("--rate", "400", "--lies-from", "1000", "--lie", lie, *options)
    url = kit.timed_server(*served).base_url
    endpoint = Endpoint(url, "none", "gpt-oss-120b")
    server = Server(endpoint, False, "vllm", "0.32.0", None, None, None)
    with MeasuredServer.open(endpoint, PLAN, kit.tmp_path / url[-5:]) as opened:
        texts = TimedTexts(Asker(server), BOUND, PLAN.measuring.vocabulary)
        bench = Bench(opened, PLAN, texts=texts)
        rate = metrics.find("tg", tokens=32)
        shallow, deep = (bench.read(rate, bench.cell(depth)) for depth in PLAN.depths)
    assert not shallow.invalid and not shallow.unproven, "it lies at depth alone"
    reasons = [*map(str, deep.invalid), *deep.unproven]
    return Outcome("INVALID" if deep.invalid else "PASS", "; ".join(reasons))


CASES = [
    Case(
        item="18 Timed answers are what the server says untimed",
        name="noise",
        fault=measured("noise"),
        clean=measured("ties"),
        expected="timed_answer: token 0 of a timed answer",
        slow=True,
    ),
    Case(
        item="18 Timed answers are what the server says untimed",
        name="noise from the 40th token on",
        fault=measured("late-noise"),
        clean=measured("ties"),
        expected="timed_answer: token 40 of a timed answer",
    ),
    Case(
        item="18 Timed answers are what the server says untimed",
        name="one answer to each prompt",
        fault=measured("constant"),
        clean=measured("ties"),
        expected="timed_answer: token 0 of a timed answer",
        slow=True,
    ),
    Case(
        item="18 Timed answers are what the server says untimed",
        name="128 tokens of the context are left",
        fault=measured("window"),
        clean=measured("ties"),
        expected="timed_answer: token 0 of a timed answer",
        slow=True,
    ),
    Case(
        item="18 Timed answers are what the server says untimed",
        name="the first 1,024 tokens of the context are dropped, three tokens a chunk",
        fault=measured("cut", "--tokens-per-chunk", "3"),
        clean=measured("ties", "--tokens-per-chunk", "3"),
        expected="timed_answer: token 0 of a timed answer",
        slow=True,
    ),
    Case(
        item="18 Timed answers are what the server says untimed",
        name="the same noise to whoever asks",
        fault=measured("always-noise"),
        clean=measured("ties"),
        expected="timed_answer: token ",
        slow=True,
    ),
    Case(
        item="18 Timed answers are what the server says untimed",
        name="the same noise from the 40th token on, to whoever asks",
        fault=measured("always-late-noise"),
        clean=measured("ties"),
        expected="timed_answer: token ",
        slow=True,
    ),
    Case(
        item="18 Timed answers are what the server says untimed",
        name="another answer to whoever ignores the end of a text",
        fault=measured("always-ends"),
        clean=measured("ties"),
        expected="timed_answer: token 0, requested",
    ),
    Case(
        item="18 Timed answers are what the server says untimed",
        name="one answer to each prompt, to whoever asks",
        fault=measured("always-constant"),
        clean=measured("ties"),
        expected="timed_answer: token ",
        slow=True,
    ),
    Case(
        item="18 Timed answers are what the server says untimed",
        name="1,024 tokens are dropped, for whoever asks",
        fault=measured("always-cut"),
        clean=measured("ties"),
        expected="timed_answer: tokens 0 to 576 of",
        slow=True,
    ),
]
