"""A run's verdict as a small picture, for a README (``sm121 badge``)."""

from pathlib import Path

from sm121.core.numbers import number
from sm121.core.printable import printable
from sm121.core.verdict import Verdict
from sm121.report import headline, page, stored

_COLOURS = {Verdict.PASS: "#2e7d32", Verdict.FAIL: "#b3261e"}
_OTHER = "#8a5a00"
_LETTER, _MARGIN = 6.6, 14.0
_RATE = "tg32@d0"


def svg(directory: Path) -> str:
    """What was judged, its verdict, and its decode rate where that passed. Raises UsageError: the
    directory has no sound verdict.json."""
    run = stored.read(directory).run
    # The page has the reasons; a picture of a green run must not be taken for a certificate.
    open_ = run.verdict is Verdict.PASS and not run.certified
    outcome = f"{run.verdict} (not certified)" if open_ else headline.of(run).word
    rate = run.metrics.get(_RATE)
    if rate is not None and rate.value is not None and rate.verdict is Verdict.PASS:
        outcome += f", tg32 {number(rate.value)} {rate.unit}"
    subject = printable(" ".join(filter(None, (run.arch, run.engine.name, run.engine.version))))
    widths = [round(_LETTER * len(text) + _MARGIN) for text in (subject, outcome)]
    template = page.environment().get_template("badge.svg.j2")
    return template.render(
        subject=subject,
        said=outcome,
        left=widths[0],
        right=widths[1],
        colour=_COLOURS.get(run.verdict, _OTHER),
    )
