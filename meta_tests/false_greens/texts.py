"""15: what timed requests say, which nobody read."""

from two_steps import in_two_steps

from sm121.client.completions import Asker
from sm121.core.level_settings import AgreementBound, Measuring
from sm121.core.server import Endpoint, Server
from sm121.measure import cells, metrics
from sm121.measure.plan import Plan
from sm121.performance.bench import Bench
from sm121.performance.timed_texts import TimedTexts

from . import Kit, Outcome, of_data

PLAN = Plan(256, (32, 128), (0, 2048), Measuring(rounds=3, short_rounds=2, silent_within_s=2.0))
BOUND = AgreementBound(max_abs=1.0, mean_abs=0.25, fork=0.75, source="as sm121-gpt-oss-120b")


@in_two_steps
def measured(kit: Kit, lie: str, *options: str) -> Outcome:
    """The decode rate of a server that says something else at depth, and not before."""
    served = ("--rate", "400", "--lies-from", "1000", "--lie", lie, *options)
    url = kit.timed_server(*served).base_url
    endpoint = Endpoint(url, "none", "gpt-oss-120b")
    server = Server(endpoint, False, "vllm", "0.32.0", None, None, None)
    with cells.MeasuredServer.open(endpoint, PLAN, kit.tmp_path / url[-5:]) as opened:
        texts = TimedTexts(Asker(server), BOUND, PLAN.measuring.vocabulary)
        bench, rate = Bench(opened, PLAN, texts=texts), metrics.find("tg", tokens=32)
        shallow, deep = (bench.read(rate, bench.cell(depth)) for depth in PLAN.depths)
    assert not shallow.invalid and not shallow.unproven, "it lies at depth alone"
    reasons = [*map(str, deep.invalid), *deep.unproven]
    return Outcome("INVALID" if deep.invalid else "PASS", "; ".join(reasons))


CASES = list(of_data(__name__))
