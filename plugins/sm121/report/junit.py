"""junit.xml: a suite for each level, the verdicts as properties. FAIL is a ``failure``; INVALID and
INCONCLUSIVE are an ``error`` with the verdict as its type; what did not run is ``skipped``. A run
that is not PASS though no test failed has a suite ``run`` with an ``error``."""

import re
from xml.etree import ElementTree

from sm121.core.printable import printable
from sm121.core.verdict import Verdict
from sm121.report import headline
from sm121.report.stored import StoredReport
from sm121.run.verdict_file import TestReport, VerdictFile

NAME = "junit.xml"
_COUNTED = {"tests": "testcase", "failures": "failure", "errors": "error", "skipped": "skipped"}
_FORBIDDEN = re.compile("[^\\t\\n\\r\\x20-\\ud7ff\\ue000-\\ufffd\\U00010000-\\U0010ffff]")


def xml(report: StoredReport) -> str:
    """The file's text."""
    run = report.run
    texts = {failure.id: failure.text for failure in report.details.failures}
    root = ElementTree.Element("testsuites", name="sm121 conformance", time=f"{run.duration_s:.3f}")
    for level in dict.fromkeys(test.level for test in run.tests):
        tests = [test for test in run.tests if test.level == level]
        suite = ElementTree.SubElement(root, "testsuite", name=level, timestamp=run.started)
        _properties(suite, _of_level(run, level))
        for test in tests:
            _case(suite, test, texts.get(test.id, ""))
        suite.set("time", f"{sum(test.seconds for test in tests):.3f}")
    failed = any(element.tag in ("failure", "error") for element in root.iter())
    if run.verdict is not Verdict.PASS and not failed:
        # A certificate was refused, or nothing was executed. Readers of this format look at cases
        # alone, and would show the run as green.
        suite = ElementTree.SubElement(root, "testsuite", name="run", timestamp=run.started)
        _properties(suite, {"verdict": run.verdict.value, "run.reason": run.reason})
        sentence = headline.of(run).sentence
        judged = TestReport(id="run::verdict", level="run", verdict=run.verdict, message=sentence)
        _case(suite, judged, run.reason, always=True)
    for element in (*root, root):
        for name, tag in _COUNTED.items():
            element.set(name, str(sum(1 for _ in element.iter(tag))))
    ElementTree.indent(root)
    return '<?xml version="1.0" encoding="utf-8"?>\n' + ElementTree.tostring(root, "unicode") + "\n"


def _of_level(run: VerdictFile, level: str) -> dict[str, object]:
    report = run.levels.get(level)
    return {
        "verdict": report.verdict.value if report is not None else Verdict.NOT_RUN.value,
        "run.verdict": run.verdict.value,
        "run.headline": str(headline.of(run)),
        "run.reason": run.reason,
        "run.exit_status": run.exit_status,
        "run.finished": run.finished,
        "arch": run.arch,
        "profile": run.profile,
        "engine": f"{run.engine.name} {run.engine.version or ''}".strip(),
        "model": run.engine.model,
        "attention": run.engine.path.attention,
        "moe": run.engine.path.moe,
        "box": run.box.state,
    }


def _case(suite: ElementTree.Element, test: TestReport, text: str, *, always: bool = False) -> None:
    """Add a test. ``always``: NOT_RUN is an error, too, and not skipped."""
    file, _, name = test.id.partition("::")
    case = ElementTree.SubElement(
        suite,
        "testcase",
        classname=_clean(file.removesuffix(".py").replace("/", ".")),
        name=_clean(name or test.id),
        time=f"{test.seconds:.3f}",
    )
    if file.endswith(".py"):
        case.set("file", _clean(file))
    properties: dict[str, object] = {"verdict": test.verdict.value, "severity": test.severity.value}
    _properties(case, {**properties, "waived": test.waived or None, "tolerated": test.tolerated})
    if test.skipped or test.excused or (test.verdict is Verdict.NOT_RUN and not always):
        ElementTree.SubElement(case, "skipped", message=_clean(test.message))
    elif test.verdict is not Verdict.PASS:
        failed = test.verdict is Verdict.FAIL
        element = ElementTree.SubElement(
            case,
            "failure" if failed else "error",
            type=test.verdict.value,
            message=_clean(test.message),
        )
        element.text = _clean(text or test.message)


def _properties(parent: ElementTree.Element, values: dict[str, object]) -> None:
    listed = ElementTree.SubElement(parent, "properties")
    for name, value in values.items():
        if value is not None:
            ElementTree.SubElement(listed, "property", name=name, value=_clean(str(value)))


def _clean(text: str) -> str:
    """Text that XML can hold: most control characters it cannot, not even as references."""
    return _FORBIDDEN.sub(lambda match: printable(match[0]), text)
