"""The table of numbers at the end of a run, in summary.md and on the first screen of the report."""

import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest

from meta_tests.fakes import report_runs
from meta_tests.fakes.box_readings import reading
from meta_tests.fakes.run_events import stand_in
from sm121.core.unmet import Fact
from sm121.core.verdict import Verdict
from sm121.plugin import selection, terminal
from sm121.plugin.stash import REPORT
from sm121.report import comparison, headline, key_numbers, metric_verdicts, page, stored, summary
from sm121.report.stored import StoredReport
from sm121.run import verdict_file
from sm121.run.details import Samples
from sm121.run.verdict_file import (
    ChangeReport,
    ConfigurationGate,
    MetricReport,
    TestReport,
    VerdictFile,
)
from sm121.session.settings import Settings

PLAN = "11 tests are not in plan quick; --plan full asks them"


def report_of(kind: str, folder: Path) -> StoredReport:
    return stored.read(report_runs.write(kind, folder / "report"))


def closing_lines(report: StoredReport, form: str = "text") -> list[str]:
    """Return the last lines of a run on a terminal, of which the verdict is the last."""
    written: list[str] = []
    config = SimpleNamespace(
        stash={REPORT: report, selection.LEFT_OUT: [PLAN]}, getoption={"--format": form}.get
    )
    reporter = SimpleNamespace(
        section=lambda _title: None, write=written.append, config=config,
        write_line=lambda text, **_: written.append(f"{text}\n"),
    )  # fmt: skip
    run = stand_in(file=report.run, ledger=(), directory=report.directory)
    session = SimpleNamespace(run=run, settings=Settings())
    terminal.closing(reporter, session)
    return "".join(written).splitlines()


@pytest.mark.parametrize("kind", ["pass", "fail", "invalid", "inconclusive"])
def test_the_last_lines_of_a_run_have_its_numbers_rates_first(kind, tmp_path):
    lines = closing_lines(report_of(kind, tmp_path))
    head = next(number for number, line in enumerate(lines) if line.startswith("metric "))
    assert lines[head].split("  ")[0] == "metric" and "interval (95%)" in lines[head]
    table = lines[head + 1 : head + 1 + key_numbers.MOST]
    assert [line.split()[0] for line in table][:2] == ["tg32@d0", "pp2048@d0"], lines
    assert all(re.search(r"\d tok/s .* (at least|at most) \d", line) for line in table), table


@pytest.mark.parametrize(
    ("device", "others", "share", "said"),
    [
        pytest.param("cpu", 0.49, 0.7, "took 49% of the CPU while the memory", id="busy"),
        pytest.param("cpu", 0.49, 1.08, "was measured (tg32@d0 is 108% of the", id="busy-above"),
        pytest.param("cpu", 0.02, 1.08, "is too low (tg32@d0 is 108% of the", id="quiet-above"),
        pytest.param("cpu", 0.02, 0.7, None, id="quiet"),
        pytest.param("cuda:0", 0.49, 0.7, None, id="gpu-beside-a-busy-cpu"),
        pytest.param("cpu", 0.49, None, None, id="no-bound"),
    ],
)
def test_a_bound_of_a_busy_machine_is_marked(tmp_path, device, others, share, said):
    report = report_of("pass", tmp_path)
    for metric in report.run.metrics.values():
        metric.roofline = None
    report.run.metrics["tg32@d0"].roofline = share
    report.run.box.before = reading(device=device, other_load=others)
    lines = [line for line in closing_lines(report) if line.startswith("bound of the rates: ")]
    assert len(lines) == (said is not None) and all(said in line for line in lines), lines
    html = page.html(report)
    first_screen = html[html.index('id="verdict"') : html.index('aria-label="Levels"')]
    for text in (first_screen, summary.markdown(report.run, report).replace("\\", "")):
        assert ("bound of the rates: not reliable" in text) == (said is not None) and (
            said or ""
        ) in text


def test_left_out_checks_are_listed_between_numbers_and_verdict(tmp_path):
    lines = closing_lines(report_of("pass", tmp_path))
    numbers = next(number for number, line in enumerate(lines) if line.startswith("tg32@d0"))
    assert numbers < lines.index(PLAN) < len(lines) - 1 and lines[-1].startswith("PASS")


def test_the_row_of_a_metric_that_is_worse_than_before_says_so(tmp_path):
    """The table shows why a metric fails that passes its gate but is worse than before.

    FAIL after only `at least 52` would contradict the number."""
    report = report_of("pass", tmp_path)
    report.run.changes = [
        ChangeReport(metric="tg32@d0", unit="tok/s", here=54.0, before=60.0, worse=0.1,
                     allowed=0.05, beside="the stored run", verdict=Verdict.FAIL)
    ]  # fmt: skip
    (row,) = [line for line in closing_lines(report) if line.startswith("tg32@d0  ")]
    assert row.rstrip().endswith("FAIL: 10 % slower than the stored run"), row


def test_the_row_of_a_metric_beyond_the_limit_of_an_option_says_so(tmp_path):
    """The table shows why a metric fails that passes its gate, but not
    ``--benchmark-compare-fail``."""
    report = report_of("pass", tmp_path)
    fact = Fact("at most 2 % slower than 0001", value=3.1, unit="%")
    option = "--benchmark-compare-fail::tg32@d0"
    decision = TestReport.of(option, "regression", fact)
    decision.metrics.append("tg32@d0")
    report.run.tests.append(decision)
    (row,) = [line for line in closing_lines(report) if line.startswith("tg32@d0  ")]
    assert row.rstrip().endswith("FAIL: expected at most 2 % slower than 0001, got 3.1 %"), row


def test_a_run_without_a_number_has_no_table(tmp_path):
    report = report_of("crash", tmp_path)
    for form in ("text", "markdown", "llama-benchy"):
        assert not [
            line for line in closing_lines(report, form) if "metric" in line or "t/s" in line
        ]


def failed(name: str, level: str, *metrics: str) -> TestReport:
    fact = Fact("right", f"wrong in {name}", name)
    return TestReport(
        id=f"tests/test_{level}.py::{name}", level=level, verdict=Verdict.FAIL,
        message=str(fact), unmet=[fact], metrics=[*metrics],
    )  # fmt: skip


def test_a_gate_is_the_first_finding_and_never_one_of_those_that_are_not_shown(tmp_path):
    report = report_of("pass", tmp_path)
    run = report.run
    gate = run.metrics["tg32@d0"]
    gate.value = 20.13
    gate.verdict = Verdict.FAIL
    run.tests += [failed("test_facts", "correctness"), failed("test_moe", "kernel"),
                  failed("test_decode_rate[tg32-d0]", "performance", "tg32@d0")]  # fmt: skip
    run.judge()
    lines = closing_lines(report)
    findings = [line for line in lines[:-1] if line.startswith("FAIL: ")]
    assert "test_decode_rate[tg32-d0]" in findings[0], lines
    assert any(line.startswith("in the report: 1 more finding") for line in lines), lines


def test_every_gate_that_did_not_pass_is_named_though_the_table_is_full(tmp_path):
    run = report_of("pass", tmp_path).run
    for depth in range(8):
        run.metrics[f"tg32@d{1000 * depth}"] = MetricReport(
            value=20.0, unit="tok/s", minimum=52.0, verdict=Verdict.FAIL
        )
    assert len(key_numbers.rows(run)) == key_numbers.MOST
    assert key_numbers.not_shown(run) == ["tg32@d6000", "tg32@d7000"]
    assert "tg32" in summary.markdown(run).partition("Also not passed: ")[2].partition("\n")[0]


def test_the_table_is_markdown_where_that_is_asked(tmp_path):
    lines = closing_lines(report_of("pass", tmp_path), "markdown")
    head = lines.index("| metric | value | interval (95%) | required | of the bound | verdict |")
    assert lines[head - 1] == "" and lines[head + 1] == "| --- | ---: | ---: | ---: | ---: | --- |"
    assert re.fullmatch(
        r"\| tg32@d0 \| 54.1 tok/s \| 53.29 to 54.64 \| at least 52 \| 73 % \| PASS \|",
        lines[head + 2],
    ), lines[head + 2]
    assert lines[head + 2 + key_numbers.MOST] == "", "what is pasted ends with an empty line"


def test_the_table_has_the_columns_of_llama_benchy(tmp_path):
    """The table has the columns of llama-benchy: prefill before decode, and mean ± deviation.

    The source is the README of eugr/llama-benchy ae09cab."""
    report = report_of("pass", tmp_path)
    report.details.samples["tg32@d0"] = Samples(unit="tok/s", samples=[54.0, 55.0, 53.0])
    report.details.samples["pp2048@d0"] = Samples(unit="tok/s", samples=[4096.0, 4096.0])
    lines = closing_lines(report, "llama-benchy")
    head = lines.index(
        "| model | test | t/s | peak t/s | ttfr (ms) | est_ppt (ms) | e2e_ttft (ms) |"
    )
    model = report.run.engine.model
    assert lines[head + 2] == f"| {model} | pp2048 | 4096.00 ± 0.00 |  |  |  | 500.00 ± 0.00 |"
    assert lines[head + 3] == f"| {model} | tg32 | 54.00 ± 0.82 |  |  |  |  |"
    assert lines[head + 4].startswith(f"| {model} | tg32 @ d4096 | ")
    assert len([line for line in lines if line.startswith("| ")]) == 2 + key_numbers.MOST


TIME = {"value": 1.0, "unit": "ms"}
GATED = {"unit": "tok/s", "minimum": 52.0}


@pytest.mark.parametrize(
    ("metric", "word", "shade"),
    [
        pytest.param({**TIME, "verdict": "PASS"}, "measured", "measured", id="no gate"),
        pytest.param(TIME, "measured", "measured", id="no gate, busy machine"),
        pytest.param({"value": None, "unit": "nats"}, "not measured", "NOT_RUN", id="no number"),
        pytest.param({**TIME, "verdict": "INVALID"}, "INVALID", "INVALID", id="wrong path"),
        pytest.param({"value": 53.0, **GATED, "verdict": "PASS"}, "PASS", "PASS", id="passed"),
        pytest.param({"value": 51.0, **GATED, "verdict": "FAIL"}, "FAIL", "FAIL", id="failed"),
        pytest.param({"value": 51.0, **GATED}, "NOT_RUN", "NOT_RUN", id="gate not decided"),
    ],
)
def test_a_number_without_a_gate_is_measured(metric, word, shade):
    judged = metric_verdicts.of_metric("tpot_p50", MetricReport(**metric))
    assert (judged.word, judged.shade) == (word, shade)


def test_no_number_of_a_busy_machine_is_called_not_run(tmp_path):
    """A number that was measured on a busy machine does not have the label NOT_RUN.

    Before, 22 of 31 rows had this label in a run on a simulated GB10."""
    report = report_of("pass", tmp_path)
    for metric in report.run.metrics.values():
        if not metric.gated:
            metric.verdict = Verdict.NOT_RUN
    rows = page.html(report).partition("Every metric")[2].partition("</table>")[0]
    assert "NOT_RUN" not in rows and rows.count(">measured</span>") > 5, rows
    assert json.loads(report.run.model_dump_json())["metrics"]["tg128@d0"]["verdict"] == "NOT_RUN"


def test_a_table_never_obeys_a_name(tmp_path):
    run = report_of("pass", tmp_path).run
    run.engine.model = "a|b\x1b[2J"
    table = key_numbers.llama_benchy(VerdictFile.model_validate(run.model_dump()), {})
    assert "| a\\|b\\x1b[2J | " in table


@pytest.mark.parametrize(("bound", "shown"), [(45.04, "45"), (2110.4, "2110"), (None, "")])
def test_the_verdict_of_a_release_answers_both_questions(bound, shown, tmp_path):
    """A failed gate of a release shows its limit and the gate of the configuration that it passes.

    The run is one of vLLM 0.33 on a simulated GB10, without --configuration."""
    report = report_of("pass", tmp_path)
    run = report.run
    gate = run.metrics["tg32@d0"]
    gate.value = 33.55
    gate.bound = bound
    gate.verdict = Verdict.FAIL
    gate.grade = None
    gate.configuration_gate = ConfigurationGate(
        configuration="stock", minimum=30.2, verdict=Verdict.PASS
    )
    run.tests.append(failed("test_decode_rate[tg32-d0]", "performance", "tg32@d0"))
    run.judge()
    where = f" ({shown} is the upper bound on this machine)" if bound else ""
    lines = closing_lines(report)
    assert lines[-1] == (
        f"FAIL: tg32@d0 33.55 tok/s: at least 52 FAIL{where}; gate for releases, 30.2: PASS"
    )
    assert any(line.endswith("FAIL (gate for releases, 30.2: PASS)") for line in lines), lines
    assert "FAIL; gate for releases, 30.2: PASS" in summary.markdown(run)


def test_sm121_compare_calls_a_number_without_a_gate_measured(tmp_path):
    report = report_of("pass", tmp_path)
    run = report.run
    run.metrics = {name: run.metrics[name] for name in ("tg32@d0", "tg128@d0")}
    run.metrics["tg128@d0"].verdict = Verdict.NOT_RUN
    verdict_file.write(run, report.directory / verdict_file.NAME)
    table = comparison.markdown([comparison.read_results(report.directory)])
    assert "| measured |" in table and "NOT_RUN" not in table, table


@pytest.mark.parametrize(
    ("value", "low", "high", "words"),
    [
        pytest.param(0.00002, 0.0, 0.00009, "mean KL less than 0.001 nats", id="nothing"),
        pytest.param(0.0123, 0.011, 0.014, "mean KL 0.0123 [0.011, 0.014] nats", id="a price"),
        pytest.param(0.0, -0.5, 0.5, "mean KL 0 [-0.5, 0.5] nats", id="not sure"),
    ],
)
def test_a_price_near_zero_has_its_digits(value, low, high, words, tmp_path):
    run = report_of("pass", tmp_path).run
    run.metrics["price_kl"] = MetricReport(
        value=value, ci_low=low, ci_high=high, unit="nats", verdict=Verdict.PASS
    )
    price = headline.headline_of(run).price
    assert words in price and "0 [0, 0.0001]" not in price, price


def test_deviations_of_a_release_stand_apart_from_remarks(tmp_path):
    report = report_of("pass", tmp_path)
    report.run.remarks = ["a remark"]
    report.run.tests[0].symptoms = ["wrong-key: known of vLLM >=0.14: no error object"]
    text = page.html(report)
    of_release = text.partition('id="deviations"')[2].partition("</details>")[0]
    assert "wrong-key: known of vLLM" in of_release and "a remark" not in of_release
    assert "in the report: 1 known deviation, 1 remark" in closing_lines(report)


def test_a_cell_of_the_matrix_is_written_with_the_word_cell(tmp_path):
    """A cell of the matrix is printed as ``cell 3: PASS``, because ``3 PASS`` would mean three
    cells."""
    grid = (
        page.html(report_of("pass", tmp_path)).partition("Matrix grid")[2].partition("</table>")[0]
    )
    assert ">cell 3: PASS<" in grid and ">3 PASS<" not in grid


def test_the_sentence_of_a_certificate_does_not_deny_a_level_that_ran(tmp_path):
    """The sentence about a certificate names no level as not requested if the level has run.

    Before, a page had "not asked for: stress" above "stress PASS", because --soak had run a part of
    it."""
    run = report_of("pass", tmp_path).run
    run.certificate_levels = ["smoke", "performance"]
    run.levels = {name: run.levels[name] for name in ("smoke", "performance", "stress")}
    covered = run.certificate_covers
    assert covered is not None and "stress" not in covered.partition("not selected: ")[2]
    assert "also ran, but not required by the certificate: stress" in covered


def test_the_first_screen_has_the_rates_before_anything_that_is_asked(tmp_path):
    text = page.html(report_of("fail", tmp_path))
    first = text.partition("</h1>")[2]
    order = [first.index(part) for part in ('id="verdict"', 'class="tiles"', 'class="tabs"',
                                             'class="strip"', "<dt>profile</dt>", 'id="record"',
                                             'class="facts asked"')]  # fmt: skip
    assert order == sorted(order)
    header = first.partition("</header>")[0]
    assert re.search(r'data-show-verdict="FAIL">FAIL <strong>\d+</strong>', header)
    assert "digest" not in header
