"""The output of an A/B run: ab.json, its metrics and changes in verdict.json, and review.md."""

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sm121.core import metric_name, templates
from sm121.core.files import write_text
from sm121.core.numbers import number
from sm121.core.verdict import Verdict
from sm121.measure import statistics
from sm121.regression import hypothesis
from sm121.regression.ab import FILE, Side, Visit
from sm121.regression.change import Change
from sm121.regression.hypothesis import CriterionResult, Hypothesis
from sm121.run.events import Changed, Measured
from sm121.run.run import Run
from sm121.run.verdict_file import MetricReport

#: The name of a review in a report directory.
REVIEW = "review.md"
#: The name of the reference in verdict.json.
_A = "A"


def note_outcomes(run: Run, outcomes: Sequence[Change]) -> None:
    """Set the metrics ``ab:NAME`` and the changes in verdict.json.

    Args:
        run: The run.
        outcomes: The changes of B against A. Prices of rounding have no ratio, and are skipped.
    """
    for outcome in outcomes:
        if outcome.difference is not None:
            continue
        allowed = outcome.allowed or 0.0
        report = MetricReport(
            value=statistics.finite(outcome.ratio),
            ci_low=statistics.finite(outcome.ci_low),
            ci_high=statistics.finite(outcome.ci_high),
            confidence=statistics.CONFIDENCE,
            unit="B/A",
            rounds=outcome.pairs,
            starts=outcome.pairs if run.servers.pool is not None else 1,
            verdict=outcome.verdict,
        )
        if outcome.higher_is_better:
            report.minimum = 1.0 - allowed
        else:
            report.at_most = 1.0 + allowed
        run.record.emit(Measured(metric_name.of_ab(outcome.metric), report))
    changes = [change for change in run.record.file.changes if change.beside != _A]
    for outcome in outcomes:
        if outcome.verdict is not Verdict.PASS:
            changes.append(outcome.report(_A))
    run.record.emit(Changed(changes))


def write_record(
    run: Run,
    sides: tuple[Side, Side],
    visits: Sequence[Visit],
    outcomes: Sequence[Change],
    void: str | None,
) -> None:
    """Write ab.json, redacted.

    Args:
        run: The run.
        sides: Both sides.
        visits: The measurements of both sides so far.
        outcomes: The changes of B against A.
        void: Why the comparison does not count; None if it does.
    """
    record = {
        "sides": [side.text for side in sides],
        "void": void,
        "visits": [dataclasses.asdict(visit) for visit in visits],
        "outcomes": [_json_of(outcome) for outcome in outcomes],
    }
    text = run.record.redact(json.dumps(record, indent=2))
    write_text(text + "\n", run.record.directory / FILE)


def _json_of(outcome: Change) -> dict[str, Any]:
    """Return a change as JSON, without empty texts; infinite numbers and NaN become null."""
    fields = {}
    for name, value in dataclasses.asdict(outcome).items():
        if isinstance(value, float):
            fields[name] = statistics.finite(value)
        elif value != "":
            fields[name] = value
    return fields


def write_review(
    run: Run,
    sides: tuple[Side, Side],
    chosen: Hypothesis,
    answers: Sequence[CriterionResult],
    gate: Sequence[CriterionResult],
    verdict: Verdict,
    outcomes: Sequence[Change],
) -> Path:
    """Write review.md.

    Args:
        run: The run.
        sides: Both sides.
        chosen: The feature's hypothesis.
        answers: The results of the hypothesis' criteria.
        gate: The results of the criteria of its phase's gate.
        verdict: The worst verdict of all results.
        outcomes: The changes of B against A.

    Returns:
        The path of the file.
    """
    phase_gate = hypothesis.gate_behind(chosen.phase)
    filled = templates.rendered(
        "review.md.j2",
        hypothesis.cell,
        hypothesis=chosen,
        answers=answers,
        gate_text=phase_gate.description if phase_gate is not None else "",
        gate=gate,
        verdict=verdict,
        sides=sides,
        outcomes=outcomes,
        number=number,
        run=run.record.file,
    )
    file = run.record.directory / REVIEW
    write_text(filled, file)
    return file
