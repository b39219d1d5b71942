"""15: what timed requests say, which nobody read."""

from sm121.client.completions import Asker
from sm121.core.level_settings import AgreementBound, Measuring
from sm121.core.server import Endpoint, Server
from sm121.measure import cells, metrics
from sm121.measure.plan import Plan
from sm121.performance.bench import Bench
from sm121.performance.timed_texts import TimedTexts

from . import Case, Outcome, Place
from .clock import Ask

ITEM = "18 Timed answers are what the server says untimed"
PLAN = Plan(256, (32, 128), (0, 2048), Measuring(rounds=3, short_rounds=2, silent_within_s=2.0))
BOUND = AgreementBound(max_abs=1.0, mean_abs=0.25, fork=0.75, source="as sm121-gpt-oss-120b")


def measured(lie: str, *options: str) -> Ask:
    """The decode rate of a server that says something else at depth, and not before."""

    def ask(place: Place) -> Outcome:
        served = ("--rate", "400", "--lies-from", "1000", "--lie", lie, *options)
        url = place.timed_server(*served).base_url
        endpoint = Endpoint(url, "none", "gpt-oss-120b")
        server = Server(endpoint, False, "vllm", "0.32.0", None, None, None)
        with cells.MeasuredServer.open(endpoint, PLAN, place.tmp_path / url[-5:]) as opened:
            texts = TimedTexts(Asker(server), BOUND, PLAN.measuring.vocabulary)
            bench, rate = Bench(opened, PLAN, texts=texts), metrics.find("tg", tokens=32)
            shallow, deep = (bench.read(rate, bench.cell(depth)) for depth in PLAN.depths)
        assert not shallow.invalid and not shallow.unproven, "it lies at depth alone"
        reasons = [*map(str, deep.invalid), *deep.unproven]
        return Outcome("INVALID" if deep.invalid else "PASS", "; ".join(reasons))

    return ask


CASES = [
    Case(ITEM, name, measured(lie, *options), measured("ties", *options),
         f"timed_answer: {expected}", slow=lie not in ("late-noise", "always-ends"))
    for name, lie, expected, *options in (
        ("noise", "noise", "token 0 of a timed answer"),
        ("noise from the 40th token on", "late-noise", "token 40 of a timed answer"),
        ("one answer to each prompt", "constant", "token 0 of a timed answer"),
        ("128 tokens of the context are left", "window", "token 0 of a timed answer"),
        ("the first 1,024 tokens of the context are dropped, three tokens a chunk", "cut",
         "token 0 of a timed answer", "--tokens-per-chunk", "3"),
        ("the same noise to whoever asks", "always-noise", "token "),
        ("the same noise from the 40th token on, to whoever asks", "always-late-noise", "token "),
        ("another answer to whoever ignores the end of a text", "always-ends", "token 0, asked"),
        ("one answer to each prompt, to whoever asks", "always-constant", "token "),
        ("1,024 tokens are dropped, for whoever asks", "always-cut", "tokens 0 to 576 of"),
    )
]  # fmt: skip
