"""summary.md: the verdict, short enough for a pull request."""

import functools
import os
import re
from collections.abc import Mapping

from jinja2 import Environment, PackageLoader, StrictUndefined

from sm121.core.numbers import number
from sm121.core.printable import printable
from sm121.core.verdict import Verdict
from sm121.report import charts, findings, headline, metric_names
from sm121.report.rows import counts_shown
from sm121.report.stored import StoredReport
from sm121.run.fingerprint import profile_label
from sm121.run.verdict_file import MetricReport, VerdictFile

_MARKDOWN_SPECIAL = str.maketrans(
    {character: f"\\{character}" for character in "\\`*_[]()!#|~"}
    | {"<": "&lt;", ">": "&gt;", "&": "&amp;"}
)
#: GitHub would write to whom a model's output names; a backslash does not keep it from that.
_MENTION = re.compile(r"(?<![A-Za-z0-9])@(?=\w)")
#: A pull request is read, a report is searched: the rest is in report.html.
_MOST_FAILURES = 5
_MOST_METRICS = 12
_MOST_LENGTH = 200
#: How the lists of `AgainstReport` are called, those that decide first.
_BESIDE = {
    "new": "new", "changed": "fails in another way", "missing": "ran there, not here",
    "path": "another path", "worse": "worse",
    "path_told": "path, as asked for or not shown there", "unjudged": "worse, but not judged",
    "mended": "fixed", "listed": "listed, and passed there",
    "differs": "asked or built in another way", "not_asked": "levels not asked here",
}  # fmt: skip


class Markdown(str):
    """Text that is Markdown already, and is none of a model's."""


def plain(value: object) -> str:
    """Anything as plain text on one line of Markdown: it may come from a log or a model."""
    if isinstance(value, Markdown):
        return value
    line = str(value).replace("\n", " ").replace("\r", " ")
    text = printable(line).translate(_MARKDOWN_SPECIAL)
    return _MENTION.sub("@\u2060", text)


def _shown(name: str, metric: MetricReport) -> bool:
    """Whether a pull request wants it: what has a gate, and the first rates."""
    rate = metric_names.rate(name)
    return metric.gated or (rate is not None and rate.plain)


@functools.cache
def environment(*, trimmed: bool = False) -> Environment:
    """For templates of Markdown, not HTML: everything that is put in goes through `plain`.
    `trimmed`: lines with nothing but a statement leave no line."""
    return Environment(  # noqa: S701
        loader=PackageLoader("sm121.report"),
        undefined=StrictUndefined,
        finalize=plain,
        trim_blocks=trimmed,
        lstrip_blocks=trimmed,
    )


def asked(run: VerdictFile) -> list[tuple[str, str]]:
    """What was asked beside the profile, by name: certificate, options, waivers, sources."""
    certificate = [("certificate", run.certificate_covers or "")]
    if (fingerprint := run.fingerprint) is None:
        return [row for row in certificate if row[1]]
    rows = [
        *certificate,
        ("options", " ".join(f"{name} {value}" for name, value in fingerprint.options.items())),
        ("waivers", f"digest {fingerprint.waivers}" if fingerprint.waivers else ""),
        ("kernel provider", fingerprint.provider or ""),
        ("axes", f"digest {fingerprint.axes}" if fingerprint.axes else ""),
        ("model's digest", fingerprint.model or ""),
        ("sources", "; ".join(f"{name} {text}" for name, text in fingerprint.sources.items())),
    ]
    return [row for row in rows if row[1]]


def kernels(run: VerdictFile) -> list[tuple[str, str]]:
    """The kernels of the path that were judged, and those that were not."""
    judged = [
        f"{each.operation} ({each.backend or 'not proven'}) by {each.provider}, {each.cases} cases"
        for each in run.engine.served
        if each.judged
    ]
    others = [each.operation for each in run.engine.served if each.judged is False]
    why = "; report.html says why" if others else ""
    rows = [("kernels judged", "; ".join(judged)), ("kernels not judged", ", ".join(others) + why)]
    return [(name, value) for name, value in rows if value]


def _fenced(command: str) -> Markdown:
    """A command that can be copied: a block of code, whatever is in it."""
    line = printable(" ".join(command.splitlines()))
    fence = "`" * (max((len(run) for run in re.findall("`+", line)), default=0) + 3)
    return Markdown(f"{fence}sh\n{line}\n{fence}")


def _required(metric: MetricReport) -> str:
    if metric.minimum is not None:
        return f"at least {number(metric.minimum)}"
    return f"at most {number(metric.at_most)}" if metric.at_most is not None else ""


def _change(run: VerdictFile, name: str) -> str:
    """How a metric changed against the trusted run, in percent; empty where that is not known."""
    before = run.against.measured.get(name) if run.against is not None else None
    now = run.metrics[name].value
    if before is None or not before.value or now is None:
        return ""
    return f"{100 * (now / before.value - 1):+.1f} %"


def link(environment: Mapping[str, str]) -> str:
    """Where a job of GitHub Actions or GitLab keeps its files; empty elsewhere."""
    if server := environment.get("GITHUB_SERVER_URL"):
        names = environment.get("GITHUB_REPOSITORY"), environment.get("GITHUB_RUN_ID")
        return f"{server}/{names[0]}/actions/runs/{names[1]}#artifacts" if all(names) else ""
    job = environment.get("CI_JOB_URL")
    return f"{job}/artifacts/browse" if job else ""


def markdown(run: VerdictFile, report: StoredReport | None = None) -> str:
    """The summary of a run, finished or not. `report`: of the same run, where it is written: it
    knows the command and what to do next."""
    reason = findings.reason_of
    failures = findings.same(findings.failures(run), lambda test: (test.verdict, reason(test)))
    metrics = [name for name, metric in run.metrics.items() if _shown(name, metric)]
    metrics.sort(key=lambda name: headline.judged(run, name)[0] is Verdict.PASS)
    against = run.against
    return (
        environment(trimmed=True)
        .get_template("summary.md.j2")
        .render(
            run=run,
            headline=headline.of(run),
            action=headline.action(report) if report is not None else None,
            command=report.details.command if report is not None else None,
            label=profile_label(run.profile, run.fingerprint),
            asked=asked(run),
            kernels=kernels(run),
            counts=counts_shown(run.levels.values()),
            failures=failures[:_MOST_FAILURES],
            reason=reason,
            more=len(failures[_MOST_FAILURES:]),
            metrics={name: run.metrics[name] for name in metrics[:_MOST_METRICS]},
            more_metrics=len(metrics[_MOST_METRICS:]),
            beside=[
                (words, lines)
                for name, words in _BESIDE.items()
                if (lines := getattr(against, name))
            ]
            if against is not None
            else [],
            number=number,
            interval=charts.certainty,
            judged=lambda name: headline.judged(run, name)[1],
            required=_required,
            change=functools.partial(_change, run),
            link=Markdown(link(os.environ)),
            fenced=_fenced,
            bold=lambda text: Markdown(f"**{plain(text)}**"),
            short=lambda text: headline.brief(text, _MOST_LENGTH),
        )
    )
