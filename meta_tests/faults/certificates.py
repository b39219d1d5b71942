"""Count how many of several runs on a correct vLLM get a certificate, with the reasons of the
others.

``python -m meta_tests.faults.certificates --runs 50`` runs the suite with ``--certify`` on the CPU,
with ``data/certifiable-cpu.toml``, one run after the other, and prints a line for each. The exit
status is 0 if each was certified. ``--levels smoke,performance`` requests the certificate of these
levels. With ``--state FILE``, several calls add their runs to one file: a row of JSON for each.
"""

import argparse
import datetime
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from meta_tests.folders import DATA, ROOT

PROFILE = DATA / "certifiable-cpu.toml"


def with_levels(levels: list[str], folder: Path) -> Path:
    """Return the profile with a certificate that requires these levels."""
    if not levels:
        return PROFILE
    file = folder / "profile.toml"
    rows = ['name = "certifiable-cpu"']
    rows += [f"extends = {json.dumps(str(PROFILE))}", f"certify.levels = {json.dumps(levels)}"]
    file.write_text("\n".join(rows) + "\n", "utf-8")
    return file


def certify(folder: Path, levels: list[str]) -> dict:
    """Return verdict.json of a run in a folder; if none was written, the refusal as its reason."""
    variables = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}
    profile = with_levels(levels, folder)
    with (folder / "output.txt").open("w") as output:
        subprocess.run(
            [sys.executable, "-m", "pytest", "-m", "cpu", "--certify", f"--profile={profile}",
             f"--report-dir={folder / 'report'}"],
            cwd=ROOT, env=variables, stdout=output, stderr=output, check=False,
        )  # fmt: skip
    file = folder / "report" / "verdict.json"
    if file.is_file():
        return json.loads(file.read_text("utf-8"))
    lines = (folder / "output.txt").read_text("utf-8", "replace").strip().splitlines()
    return {"reason": lines[-1] if lines else "no output"}


def row(verdict: dict, began: str, took_s: float) -> dict:
    """Return the data of a run that are stored."""
    fingerprint = verdict.get("fingerprint") or {}
    return {
        "began": began,
        "took_s": round(took_s),
        "commit": (fingerprint.get("sources") or {}).get("suite", "unknown").split()[-1][:9],
        "verdict": verdict.get("verdict", "none"),
        "certified": bool(verdict.get("certified")),
        "levels": verdict.get("certificate_levels"),
        "reason": verdict.get("reason", "no verdict"),
    }


def line(number: int, run: dict) -> str:
    """Return the line that is printed for a run."""
    outcome = f"{run['verdict']:12} {run['took_s']:6} s"
    return f"{number:3} {run['began']} {outcome}  {run['commit']}  {run['reason']}"


def runs(number: int, folder: Path, levels: list[str], state: Path | None = None) -> list[dict]:
    """Run several times; print and store a line for each run when it ends."""
    verdicts: list[dict] = []
    for _ in range(number):
        began = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        of_run = folder / f"run-{began.replace(':', '')}"
        of_run.mkdir(parents=True)
        begun = time.monotonic()
        verdicts.append(certify(of_run, levels))
        fields = row(verdicts[-1], began, time.monotonic() - begun)
        if state is not None:
            with state.open("a", encoding="utf-8") as rows:
                rows.write(json.dumps(fields) + "\n")
        print(line(len(known(state)) if state else len(verdicts), fields), flush=True)
    return verdicts


def known(state: Path) -> list[dict]:
    """Return the runs that are stored so far."""
    if not state.is_file():
        return []
    return [json.loads(text) for text in state.read_text("utf-8").splitlines()]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=50)
    parser.add_argument("--levels", default="", help="of the certificate (default: the profile's)")
    parser.add_argument("--state", type=Path, help="runs add up in this file, over several calls")
    parser.add_argument("--keep", type=Path, help="keep the reports here")
    options = parser.parse_args()
    levels = [name for name in options.levels.split(",") if name]
    with tempfile.TemporaryDirectory() as scratch:
        verdicts = runs(options.runs, options.keep or Path(scratch), levels, options.state)
    if options.state is not None:
        verdicts = known(options.state)
    certified = sum(bool(verdict.get("certified")) for verdict in verdicts)
    print(f"{certified} of {len(verdicts)} certified")
    return 0 if certified == len(verdicts) else 1


if __name__ == "__main__":
    raise SystemExit(main())
