"""Remove secrets from the report of a test."""

from collections.abc import Callable

import pytest


def clean(report: pytest.TestReport, redact: Callable[[str], str]) -> None:
    """Remove secrets from the text that pytest prints and writes to ``--junitxml``.

    A server may quote an invalid API key in its error, and ``-l`` shows local variables.

    Args:
        report: pytest's report on a phase of a test. It is changed.
        redact: Removes secrets from a text.
    """
    report.sections = [(name, redact(text)) for name, text in report.sections]
    if isinstance(report.longrepr, tuple):  # a skipped test
        file, line, reason = report.longrepr
        report.longrepr = (file, line, redact(reason))
        return
    content = report.longreprtext
    clean = redact(content)
    if clean != content:
        report.longrepr = clean
