"""Runs the whole catalogue of false greens and writes its table. ``python meta_tests/false_greens
--output docs/tables/false-greens.md``."""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import catalogue_rows

HEAD = """# False greens

Made by `python meta_tests/false_greens --output docs/tables/false-greens.md` (`make catalogues`). Do not edit.

Each row is a way to a PASS that is none: a server, an engine, a script or an option. The suite must
not be green on it. Its clean twin, the same without the fault, must be.
{caught} of {total} ways were caught; {clean} of {total} clean twins passed.
"""  # noqa: E501 - a line of the page


def main() -> int:
    """Run it; 1 when something is green that must not be, or a clean twin is not."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, required=True)
    options = parser.parse_args()
    status, found = catalogue_rows.run("test_false_greens.py")
    page = HEAD.format(
        total=len(found), caught=sum(not row["green"] for row in found),
        clean=sum(row["clean"] for row in found),
    )  # fmt: skip
    item = None
    for row in found:
        if row["item"] != item:
            item = row["item"]
            page += f"\n## {item}\n\n| variant | verdict | what is said | clean twin |\n"
            page += "|---|---|---|---|\n"
        said = catalogue_rows.cell(row["said"])
        verdict = "**green**" if row["green"] else row["verdict"]
        page += (
            f"| {row['name']} | {verdict} | {said} | {'passes' if row['clean'] else '**red**'} |\n"
        )
    options.output.write_text(page, "utf-8")
    return status


if __name__ == "__main__":
    sys.exit(main())
