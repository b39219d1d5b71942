"""junit.xml: one suite per level, with the verdicts as properties.

FAIL is a ``failure``. INVALID and INCONCLUSIVE are an ``error`` with the verdict as its type. Tests
that did not run are ``skipped``. If a run is not PASS although no test failed, a suite ``run``
contains an ``error``.
"""

import re
from xml.sax import saxutils

from markupsafe import Markup

from sm121.core import templates
from sm121.core.printable import printable
from sm121.core.verdict import Verdict
from sm121.report import headline
from sm121.report.stored import StoredReport
from sm121.run.verdict_file import TestReport

NAME = "junit.xml"
_FORBIDDEN = re.compile("[^\\t\\n\\r\\x20-\\ud7ff\\ue000-\\ufffd\\U00010000-\\U0010ffff]")
#: Characters that a parser would replace by a blank in an attribute, or treat as its end.
_ENTITIES = {'"': "&quot;", "\t": "&#9;", "\n": "&#10;", "\r": "&#13;"}


def xml(report: StoredReport) -> str:
    """Return the text of junit.xml.

    Args:
        report: The stored report.
    """
    run = report.run
    texts = {failure.id: failure.text for failure in report.details.failures}
    suites: dict[str, list[tuple[TestReport, str, str]]] = {}
    for test in run.tests:
        case = (test, element_of(test), texts.get(test.id) or test.message)
        suites.setdefault(test.level, []).append(case)
    has_failed = any(element_of(test) in ("failure", "error") for test in run.tests)
    if run.verdict is not Verdict.PASS and not has_failed:
        # A certificate was refused, or nothing was executed. Readers of this format only evaluate
        # test cases, and would show the run as passed.
        sentence = headline.headline_of(run).sentence
        judged = TestReport(id="run::verdict", level="run", verdict=run.verdict, message=sentence)
        element = "failure" if run.verdict is Verdict.FAIL else "error"
        suites["run"] = [(judged, element, run.reason or sentence)]
    template = templates.environment(_escaped, escapes=True).get_template("junit.xml.j2")
    return template.render(run=run, suites=suites, headline=headline.headline_of(run))


def element_of(test: TestReport) -> str:
    """Return the name of the XML element inside a test's ``testcase``; empty for a passed test.

    Args:
        test: The test.
    """
    if test.skipped or test.excused or test.verdict is Verdict.NOT_RUN:
        return "skipped"
    if test.verdict is Verdict.PASS:
        return ""
    return "failure" if test.verdict is Verdict.FAIL else "error"


def _escaped(value: object) -> Markup:
    """Return text that XML can contain: most control characters are invalid, even as references."""
    if isinstance(value, Markup):  # the output of a macro
        return value
    text = _FORBIDDEN.sub(lambda match: printable(match[0]), str(value))
    return Markup(saxutils.escape(text, _ENTITIES))  # noqa: S704 - it is escaped
