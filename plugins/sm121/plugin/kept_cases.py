"""Adds the kept verdicts of a resumed run to the file of ``--junitxml``.

pytest does not run these tests, so its file would lack them, and would show no failure although a
kept failure makes the run FAIL. The suite's own junit.xml is written from verdict.json.
"""

from collections.abc import Iterable
from typing import Literal

import pytest
from _pytest.junitxml import xml_key

from sm121.plugin.stash import ID
from sm121.report import junit
from sm121.session.session import Session


def add(config: pytest.Config, session: Session, kept: Iterable[pytest.Item]) -> None:
    """Add a test case for each test whose verdict is kept.

    Args:
        config: The configuration of pytest; without ``--junitxml`` nothing happens.
        session: The run, with the events of the earlier process.
        kept: The tests that pytest will not run.
    """
    file = config.stash.get(xml_key, None)
    if file is None:
        return
    for item in kept:
        for report in _reports(session, item):
            file.pytest_runtest_logreport(report)


def _reports(session: Session, item: pytest.Item) -> list[pytest.TestReport]:
    """Return the reports of the call and of the teardown of a test."""
    name = item.stash[ID]
    test = session.run.record.ledger[name]
    failures = session.run.record.log.fold.details.failures
    texts = {failure.id: failure.text for failure in failures}
    outcome: Literal["passed", "failed", "skipped"] = "passed"
    shown: str | tuple[str, int, str] | None = None
    element = junit.element_of(test)
    if element == "skipped":
        outcome = "skipped"
        path, line, _name = item.location
        shown = (path, (line or 0) + 1, test.message)
    elif element:
        outcome = "failed"
        shown = texts.get(name) or test.message
    properties = list(item.user_properties)
    called = pytest.TestReport(
        item.nodeid, item.location, {}, outcome, shown, "call",
        duration=test.seconds, user_properties=properties,
    )  # fmt: skip
    ended = pytest.TestReport(
        item.nodeid, item.location, {}, "passed", None, "teardown", user_properties=properties
    )
    return [called, ended]
