"""Certificates of an honest vLLM: how many of some runs are certified, and why not the others.

``python meta_tests/certificates.py --runs 50`` runs the whole suite with ``--certify`` on the CPU,
with ``data/certifiable-cpu.toml``, one run after the other, and prints a line for each. It ends
with 0 when each was certified.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).parent
PROFILE = HERE / "data" / "certifiable-cpu.toml"


def certify(folder: Path) -> dict:
    """verdict.json of a run in a folder; {} where none was written."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}
    with (folder / "output.txt").open("w") as output:
        subprocess.run(
            [sys.executable, "-m", "pytest", "-m", "cpu", "--certify", f"--profile={PROFILE}",
             "--report-dir", str(folder / "report")],
            cwd=HERE.parent, env=kept, stdout=output, stderr=output, check=False,
        )  # fmt: skip
    file = folder / "report" / "verdict.json"
    return json.loads(file.read_text("utf-8")) if file.is_file() else {}


def runs(number: int, folder: Path) -> list[dict]:
    """Several runs; a line is printed for each as it ends."""
    found = []
    for index in range(1, number + 1):
        own = folder / f"run-{index}"
        own.mkdir(parents=True)
        begun = time.monotonic()
        found.append(verdict := certify(own))
        took = time.monotonic() - begun
        said = "certified" if verdict.get("certified") else verdict.get("reason", "no verdict")
        print(f"{index:3} {verdict.get('verdict', 'none'):12} {took:6.0f} s  {said}", flush=True)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=50)
    parser.add_argument("--keep", type=Path, help="keep the reports here")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        found = runs(options.runs, options.keep or Path(scratch))
    certified = sum(bool(verdict.get("certified")) for verdict in found)
    print(f"{certified} of {len(found)} certified")
    return 0 if certified == len(found) else 1


if __name__ == "__main__":
    raise SystemExit(main())
