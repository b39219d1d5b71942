"""From what pytest reports of each test to its verdict, written as soon as it is known."""

from __future__ import annotations

import datetime
from collections.abc import Generator

import pytest

from sm121.core.printable import printable
from sm121.core.profile import LEVELS
from sm121.core.verdict import Inapplicable, NotRun, Undecided, Verdict
from sm121.plugin.run import RUN, Run
from sm121.plugin.selection import ID, LEVEL
from sm121.run.verdict_file import BESIDE, TestReport

_MESSAGE_LENGTH = 600
_FINDING = pytest.StashKey[TestReport]()


def pytest_runtest_setup(item: pytest.Item) -> None:
    run = item.config.stash.get(RUN, None)
    if run is None or LEVEL not in item.stash or item.stash[LEVEL] == LEVELS[0]:
        return
    failed = [
        test
        for test in run.file.tests
        if test.level == LEVELS[0]
        and test.verdict is Verdict.FAIL
        and not test.waived
        and not test.id.startswith(BESIDE)
    ]
    if failed:
        pytest.skip(f"NOT_RUN: the smoke level failed ({failed[0].id}); what it needs comes first")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    run = item.config.stash.get(RUN, None)
    if run is None or LEVEL not in item.stash:
        return report
    error = call.excinfo.value if call.excinfo is not None else None
    if isinstance(error, Inapplicable):
        run.inapplicable |= {item.stash[ID]}
    if isinstance(error, NotRun):
        path, line, _ = item.location
        report.outcome = "skipped"
        report.longrepr = (path, (line or 0) + 1, f"NOT_RUN: {error}")
    finding = item.stash.setdefault(_FINDING, _unfinished(item))
    finding.seconds = round(finding.seconds + report.duration, 3)
    if report.skipped:
        finding.skipped = True
        finding.verdict = Verdict.NOT_RUN
        finding.message = _skip_reason(report)
    elif report.failed:
        finding.skipped = False  # what was skipped and then failed in its teardown has failed
        finding.verdict = error.verdict if isinstance(error, Undecided) else Verdict.FAIL
        finding.message = _message(run, call, report)
        _waive(run, finding, report)
    elif report.when == "call" and finding.verdict is Verdict.NOT_RUN:
        finding.verdict = Verdict.PASS
        finding.message = ""
    if report.when == "teardown":
        _store(run, finding)
        # Goes with the report to where the workers' results are put together.
        report.sm121 = finding.model_dump(mode="json")  # type: ignore[attr-defined]
    report.user_properties.append(("verdict", finding.verdict.value))
    return report


def _unfinished(item: pytest.Item) -> TestReport:
    return TestReport(
        id=item.stash[ID],
        level=item.stash[LEVEL],
        verdict=Verdict.NOT_RUN,
        message="not finished",
    )


def _message(run: Run, call: pytest.CallInfo[None], report: pytest.TestReport) -> str:
    if call.excinfo is None:  # a strict xfail that passed
        text = str(report.longrepr)
    elif isinstance(call.excinfo.value, (AssertionError, Undecided)):
        text = str(call.excinfo.value)
    else:
        text = call.excinfo.exconly()
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    first = lines[0] if lines else "failed without a message"
    return printable(run.redact(first))[:_MESSAGE_LENGTH]


def _skip_reason(report: pytest.TestReport) -> str:
    reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
    return printable(str(reason).removeprefix("Skipped: "))[:_MESSAGE_LENGTH]


def _waive(run: Run, finding: TestReport, report: pytest.TestReport) -> None:
    """Tolerate a failure that is named in the waiver file, until its day has passed."""
    today = datetime.date.today()
    for waiver in run.settings.waivers:
        if not waiver.applies_to(finding.id):
            continue
        if waiver.expired(today):
            finding.message = (
                f"waiver expired on {waiver.expires} ({waiver.issue}): {finding.message}"
            )
            continue
        finding.waived = True
        finding.message = f"waived until {waiver.expires} ({waiver.issue}): {finding.message}"
        report.outcome = "skipped"
        report.wasxfail = f"waived: {waiver.reason} ({waiver.issue})"
        return


def _store(run: Run, finding: TestReport) -> None:
    run.ledger.decide(finding)
    run.save()
