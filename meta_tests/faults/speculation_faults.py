"""Serve wrong speculative decoding with the real vLLM on the CPU, and find out which test detects
each fault.

`python -m meta_tests.faults.speculation_faults` starts vLLM with the canary's Eagle3 drafter,
injects one fault after the other (`in_vllm/speculation_saboteur.py`), runs the tests that should
detect it as a user runs them, and writes the table of docs/tables/speculation-faults.md. With
`--clean-runs N` it runs all these tests N times on the intact server.
"""

import argparse
import itertools
import sys
import tempfile
import tomllib
from pathlib import Path

from meta_tests.faults import catalogue_rows
from meta_tests.faults.model_faults import CLEAN, ROOT, Finding, SabotagedServer, judge, noticed
from meta_tests.faults.protocol_faults import record_environment_once
from meta_tests.folders import DATA
from sm121.checkpoint import canary

PAGE = ROOT / "docs" / "tables" / "speculation-faults.md"
BEGIN = "## Wrong speculation"
CONFIGURATION = "eagle3"

TOKENS = "test_speculation_keeps_the_targets_tokens"
LIFE = "life of the attached server"

#: The tests that must detect each fault.
FAULTS: dict[str, list[str]] = tomllib.loads((DATA / "speculation-faults.toml").read_text("utf-8"))
EVERY = tuple(dict.fromkeys(itertools.chain.from_iterable(FAULTS.values())))


def serving(checkpoint: Path, folder: Path) -> SabotagedServer:
    """Start a server with speculative decoding into which faults can be injected."""
    saboteur = "speculation_saboteur.Saboteur"
    return SabotagedServer(checkpoint, folder, CONFIGURATION, extension=saboteur)


def table(findings: dict[str, Finding]) -> str:
    """Return the rows of docs/tables/speculation-faults.md."""
    return catalogue_rows.page("speculation-faults", found=findings, noticed=noticed)


def main() -> int:
    """Run the faults, or the runs without a fault."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clean-runs", type=int, metavar="N")
    parser.add_argument("--only", metavar="WORD", help="the faults with this word; writes nothing")
    options = parser.parse_args()
    checkpoint = canary.build(ROOT / ".cache" / "canary" / "bf16", "bf16")
    record_environment_once()
    chosen = [fault for fault in FAULTS if not options.only or options.only in fault]
    findings: dict[str, Finding] = {}
    while len(findings) < len(chosen):
        with tempfile.TemporaryDirectory() as folder, serving(checkpoint, Path(folder)) as server:
            if not findings and not options.only:
                for number in range(options.clean_runs or 1):
                    clean = judge(server, CLEAN, EVERY, Path(folder))
                    print(f"== clean run {number + 1}: {clean.failed or 'all passed'} "
                          f"({clean.seconds} s) {clean.message[:300]}", flush=True)  # fmt: skip
                    if clean.failed:
                        return 1
                if options.clean_runs:
                    return 0
            for fault in chosen[len(findings) :]:
                findings[fault] = judge(server, fault, FAULTS[fault], Path(folder))
                text = findings[fault].message.replace("\n", " ")[:160]
                failed = findings[fault].failed or "SURVIVES"
                seconds = findings[fault].seconds
                print(f"== {fault}: {failed} ({seconds} s) {text}", flush=True)
                if LIFE in findings[fault].failed:  # the next faults need another server
                    log = next(Path(folder).glob("server-*.log"))
                    text = log.read_text("utf-8", "replace").splitlines()
                    why = [line for line in text if "EngineCore pid" in line and "ERROR" in line]
                    print(*why[-9:], sep="\n", flush=True)
                    break
    survivors = [fault for fault, finding in findings.items() if not finding.failed]
    if not options.only:
        head = PAGE.read_text("utf-8").partition(BEGIN)[0]
        text = (
            f"`python -m meta_tests.faults.speculation_faults` puts {len(FAULTS)} faults into the "
            "real vLLM, one after the other, and asks the tests that are meant to notice."
        )
        PAGE.write_text(f"{head}{BEGIN}\n\n{text}\n\n{table(findings)}", "utf-8")
    print(f"survivors: {survivors or 'none'}")
    return int(bool(survivors))


if __name__ == "__main__":
    sys.exit(main())
