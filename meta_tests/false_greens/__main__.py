"""Runs the whole catalogue of false greens and writes its table.

``python meta_tests/false_greens --output docs/false-greens.md``
"""

from __future__ import annotations

import argparse
import html
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
HEAD = """# False greens

Made by `python meta_tests/false_greens --output docs/false-greens.md` (`make catalogues`). Do not edit.

Each row is a way to a PASS that is none: a server, an engine, a script or an option. The suite must
not be green on it. Its clean twin, the same without the fault, must be.
{caught} of {total} ways were caught; {clean} of {total} clean twins passed.
"""  # noqa: E501 - a line of the page


def main() -> int:
    """Run it; 1 when something is green that must not be, or a clean twin is not."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, required=True)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        rows = Path(folder) / "rows.jsonl"
        rows.touch()
        ran = subprocess.run(
            [sys.executable, "-m", "pytest", str(HERE.parent / "test_false_greens.py"), "--slow"],
            cwd=HERE.parent.parent,
            env={**os.environ, "SM121_META_FALSE_GREENS": str(rows)},
            check=False,
        )
        found = [json.loads(line) for line in rows.read_text("utf-8").splitlines()]
    page = HEAD.format(
        total=len(found),
        caught=sum(not row["green"] for row in found),
        clean=sum(row["clean"] for row in found),
    )
    item = None
    for row in found:
        if row["item"] != item:
            item = row["item"]
            page += f"\n## {item}\n\n| variant | verdict | what is said | clean twin |\n"
            page += "|---|---|---|---|\n"
        said = html.escape(row["said"][:240], quote=False).replace("|", "\\|").replace("\n", " ")
        verdict = "**green**" if row["green"] else row["verdict"]
        page += (
            f"| {row['name']} | {verdict} | {said} | {'passes' if row['clean'] else '**red**'} |\n"
        )
    options.output.write_text(page, "utf-8")
    return ran.returncode


if __name__ == "__main__":
    sys.exit(main())
