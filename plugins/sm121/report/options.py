"""The options of the report."""

from dataclasses import dataclass

from sm121.core.options import choice, option


@dataclass(frozen=True)
class ReportOptions:
    """The options of the group "report"."""

    report_dir: str = option(
        "--report-dir",
        default_text="conformance-report",
        metavar="PATH",
        help=(
            "verdict.json, report.html, summary.md, junit.xml and logs (default: "
            "conformance-report); an earlier report is kept under earlier/"
        ),
    )
    format: str = choice(
        "--format",
        ("text", "markdown", "llama-benchy"),
        help=(
            "format of the table of numbers at the end of the run: aligned text, Markdown, or "
            "the columns of llama-benchy (default: text)"
        ),
    )
