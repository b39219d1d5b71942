"""Item 8: the kernel path changes after it was judged."""

from collections.abc import Callable
from types import SimpleNamespace
from urllib.parse import quote

from meta_tests.fakes.scripted_sessions import (
    ACCEPTED,
    FALLBACK,
    rate,
    run_of_pytest,
    scripted,
    tell,
)
from meta_tests.faults.false_greens import Case, Kit, Outcome
from meta_tests.two_steps import in_two_steps
from sm121.core import profile
from sm121.evidence import requirement
from sm121.evidence.kernel_path import read_log
from sm121.measure.measurement import Invalidity
from sm121.performance.bench import Bench
from sm121.performance.checks import PerformanceChecks
from sm121.session.session import Session


@in_two_steps
def says_later(session: Session, line: str) -> None:
    server = session.run.server()
    assert not session.run.paths.contradictions(server)  # the kernel level makes this check, too
    tell(session, f"do=print&text={quote(line)}")


@in_two_steps
def says_before_a_restart(session: Session, line: str) -> None:
    says_later(line)(session)
    session.run.servers.stop()
    session.run.server("bfloat16")


@in_two_steps
def on_a_gb10(kit: Kit, *lines: str) -> Outcome:
    """Compare the log of a GB10, with the given additional lines, with the path that the profile
    requires."""
    log = kit.tmp_path / f"gb10-{len(lines)}.log"
    log.write_text("\n".join(lines) + "\n", "utf-8")
    required = profile.load("sm121-gpt-oss-120b").judging("marlin", "0.33.0").path_of("marlin")
    wrong = requirement.contradictions(required, read_log(log), log, "marlin")
    return Outcome("FAIL" if wrong else "PASS", "; ".join(map(str, wrong)))


@in_two_steps
def measured(_kit: Kit, *, leaves_the_path: bool) -> Outcome:
    """Measure a rate while the log shows another kernel path than before."""
    invalid: list[Invalidity] = []
    off_path = [Invalidity(reason="kernel_path", evidence=FALLBACK)] if leaves_the_path else []
    metric = SimpleNamespace(
        of=lambda _: rate("tg32@d0"), unit="tok/s", first_visit=False, is_tail=False,
        parts=lambda _: (), settle=lambda _: None,
    )  # fmt: skip
    plan = SimpleNamespace(depths=(0,), measuring=SimpleNamespace(maximum_rounds=2))
    bench = Bench(SimpleNamespace(), plan, off_path=lambda: off_path)
    bench.cell = lambda *_, **__: None
    PerformanceChecks(bench, lambda item, *_, **__: invalid.extend(item.invalid)).judge(metric)
    return Outcome("INVALID" if invalid else "PASS", "; ".join(str(item) for item in invalid))


def path_in_a_run_of_pytest(line: str) -> Callable[[Kit], Outcome]:
    test = "tests/test_kernel.py::test_kernel_path_is_the_required_one"
    return run_of_pytest(f"do=print&text={quote(line)}", test)


BANNER = "(APIServer pid=1) INFO 11-20 10:00:00 [api_utils.py:286] vLLM API server version 0.32.0"
FLASHINFER = (
    "(EngineCore pid=2) INFO 11-20 10:00:00 [cuda.py:507] Using FLASHINFER "
    "attention backend out of potential backends: x"
)
TRITON = (
    "(EngineCore pid=2) INFO 11-20 10:00:00 [cuda.py:446] Using "
    "AttentionBackendEnum.TRITON_ATTN backend."
)
MARLIN = "(EngineCore pid=2) INFO 11-20 10:00:00 [mxfp4.py:499] Using 'MARLIN' Mxfp4 MoE backend."
OTHER_MOE = (
    "(EngineCore pid=2) INFO 11-20 10:00:00 [mxfp4.py:499] Using 'TRITON' Mxfp4 MoE backend."
)
LAYOUT = "(EngineCore pid=2) INFO 11-20 10:00:00 [utils.py:347] Using LBHNC KV cache layout."
REQUEST = (
    "(EngineCore pid=2) INFO 11-20 10:00:00 [logger.py:40] Received request "
    "cmpl-1: prompt: \"Using 'MARLIN' Mxfp4 MoE backend.\""
)


CASES = [
    Case(
        item="8 The path is judged once",
        name="a fallback is logged after the path was judged",
        fault=scripted(says_later(FALLBACK)),
        clean=scripted(says_later(ACCEPTED)),
        expected="the server to use the kernel path of the profile until it is stopped",
    ),
    Case(
        item="8 The path is judged once",
        name="a fallback is logged, and another configuration is started before the end",
        fault=scripted(says_before_a_restart(FALLBACK)),
        clean=scripted(says_before_a_restart(ACCEPTED)),
        expected="the server to use the kernel path of the profile until it is stopped",
        slow=True,
    ),
    Case(
        item="8 The path is judged once",
        name="a fallback in a run of pytest, after the kernel level",
        fault=path_in_a_run_of_pytest(FALLBACK),
        clean=path_in_a_run_of_pytest(ACCEPTED),
        expected="fallback moe_emulation",
        slow=True,
    ),
    Case(
        item="8 The path is judged once",
        name="a fallback is logged during a measurement",
        fault=measured(leaves_the_path=True),
        clean=measured(leaves_the_path=False),
        expected="kernel_path",
    ),
    Case(
        item="8 The path is judged once",
        name="FLASHINFER for some layers and TRITON_ATTN for others",
        fault=on_a_gb10(BANNER, FLASHINFER, MARLIN, LAYOUT, TRITON),
        clean=on_a_gb10(BANNER, FLASHINFER, MARLIN, LAYOUT, FLASHINFER),
        expected="attention: expected one value, got FLASHINFER and TRITON_ATTN",
    ),
    Case(
        item="8 The path is judged once",
        name="MARLIN for some layers and TRITON for others",
        fault=on_a_gb10(BANNER, FLASHINFER, MARLIN, LAYOUT, OTHER_MOE),
        clean=on_a_gb10(BANNER, FLASHINFER, MARLIN, LAYOUT, MARLIN),
        expected="moe: expected one value, got MARLIN and TRITON",
    ),
    Case(
        item="8 The path is judged once",
        name="an old start in the log has what the new one has not",
        fault=on_a_gb10(BANNER, FLASHINFER, MARLIN, LAYOUT, BANNER, FLASHINFER, LAYOUT),
        clean=on_a_gb10(BANNER, TRITON, OTHER_MOE, BANNER, FLASHINFER, MARLIN, LAYOUT),
        expected="no line ",
    ),
    Case(
        item="8 The path is judged once",
        name="a user's request has the words that must be seen",
        fault=on_a_gb10(BANNER, FLASHINFER, LAYOUT, REQUEST),
        clean=on_a_gb10(BANNER, FLASHINFER, LAYOUT, MARLIN),
        expected="no line ",
    ),
]
