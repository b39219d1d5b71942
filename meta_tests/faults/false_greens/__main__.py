"""Run all false-green scenarios, and write their table to ``--output``."""

import argparse
import sys
from pathlib import Path

from meta_tests.faults import catalogue_rows
from meta_tests.faults.false_greens import cases


def main() -> int:
    """Run all scenarios. Return 1 if one with a fault is green, or one without its fault is not."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, required=True)
    options = parser.parse_args()
    status, rows = catalogue_rows.run("faults/test_false_greens.py", "-n", "2", "--dist", "load")
    order = [(case.item, case.name) for case in cases()]
    rows.sort(key=lambda row: order.index((row["item"], row["name"])))
    options.output.write_text(catalogue_rows.page("false-greens", found=rows), "utf-8")
    return status


if __name__ == "__main__":
    sys.exit(main())
