"""The options of the report."""

from sm121.core.options import AddOption


def add_options(add: AddOption) -> None:
    """Add the options of the group "report".

    Args:
        add: A function that adds an option.
    """
    add(
        "--report-dir",
        metavar="PATH",
        default="conformance-report",
        help=(
            "verdict.json, report.html, summary.md, junit.xml and logs (default: "
            "conformance-report); an earlier report is kept under earlier/"
        ),
    )
    add(
        "--format",
        choices=("text", "markdown", "llama-benchy"),
        default="text",
        help=(
            "format of the table of numbers at the end of the run: aligned text, Markdown, or "
            "the columns of llama-benchy (default: text)"
        ),
    )
