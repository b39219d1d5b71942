"""Serve wrong models with the real vLLM on the CPU, and find out which test of the level detects
each.

`python -m meta_tests.faults.model_faults` starts vLLM once for each configuration, injects one
fault after the other (`in_vllm/model_saboteur.py`), runs the tests that should detect it as a user
runs them, and writes docs/tables/model-faults.md. After an interruption it continues.
"""

import argparse
import itertools
import json
import sys
import tempfile
import time
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from meta_tests.faults import catalogue_rows
from meta_tests.faults.protocol_faults import PROFILE, record_environment_once, vllm_serving
from meta_tests.folders import DATA, FAKES, IN_VLLM, ROOT
from sm121.checkpoint import canary
from sm121.core.server import Server

TABLE = ROOT / "docs" / "tables" / "model-faults.md"
CLEAN = "nothing"

ORACLE = "test_prompt_log_probabilities_agree_with_the_oracle"
SMALL = "test_no_known_small_mistake_is_in_the_log_probabilities"
GENERATED = "test_generated_log_probabilities_agree_with_the_oracle"
ANSWERS = "test_known_answers"
CACHE = "test_cold_equals_a_hit_of_the_prefix_cache"

_DATA = tomllib.loads((DATA / "model-faults.toml").read_text("utf-8"))
#: The tests that must detect each fault.
FAULTS: dict[str, list[str]] = _DATA["faults"]
#: Faults that cannot be detected with a dtype, and the reason.
NOT_FOR: dict[str, dict[str, str]] = _DATA["not_for"]
#: The faults that are tested with a checkpoint of real width.
REAL_WIDTH: list[str] = _DATA["real_width"]["faults"]


@dataclass(frozen=True)
class Finding:
    """The results of the tests with one fault."""

    fault: str
    failed: tuple[str, ...]
    passed: tuple[str, ...]
    message: str
    seconds: float


class SabotagedServer:
    """The real vLLM on the canary, with a worker extension that injects faults into its model."""

    def __init__(
        self,
        checkpoint: Path,
        directory: Path,
        configuration: str = "float32",
        reference: Path | None = None,
        extension: str = "model_saboteur.Saboteur",
    ) -> None:
        environment = {"VLLM_SERVER_DEV_MODE": "1", "PYTHONPATH": str(IN_VLLM)}
        arguments = ["--worker-extension-cls", extension]
        # Worker and scheduler run in one process, so that faults can also be injected into the
        # scheduler, and starts are faster.
        environment["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        arguments += ["--distributed-executor-backend", "uni"]
        # The engine core is forked from the API server.
        python = str(FAKES / "fake_python.py")
        environment["SM121_META_PYTHON"] = sys.executable
        environment["SM121_META_SERVER"] = "forking_vllm.py"
        self.managed = vllm_serving(
            checkpoint, directory, configuration, *arguments, python=python, **environment
        )
        self.configuration = configuration
        self.reference = reference or checkpoint
        self.server: Server | None = None

    def __enter__(self) -> "SabotagedServer":
        self.server = self.managed.start()
        return self

    def __exit__(self, *_arguments: object) -> None:
        self.managed.stop()

    def put(self, fault: str) -> None:
        """Replace the present fault by another one; `nothing` stands for none."""
        with self.server.endpoint.http(timeout_s=120.0) as http:
            body = {"method": "sabotage", "args": [fault]}
            for path, content in (("/collective_rpc", body), ("/reset_prefix_cache", None)):
                answer = http.post(path, json=content)
                status = answer.status_code
                text = answer.text[:300]
                assert status == 200, f"{path}: {status} {text}"

    def arguments(self, tests: tuple[str, ...]) -> list[str]:
        """Return pytest's arguments for tests with these names on this server."""
        return [
            "--arch", "cpu", "--base-url", self.server.endpoint.base_url,
            "--api-key", self.server.endpoint.api_key, "--reference", str(self.reference),
            "--configuration", self.configuration,
            "tests/test_correctness.py", "tests/test_performance.py", "-k", " or ".join(tests),
        ]  # fmt: skip


def judge(server: SabotagedServer, fault: str, tests: tuple[str, ...], directory: Path) -> Finding:
    """Run tests of the level with an injected fault.

    They run in this process, which keeps the oracle's answers for the next fault."""
    server.put(fault)
    started = time.monotonic()
    report = Path(tempfile.mkdtemp(dir=directory))
    # In a second run of the same process, the plugins are already imported. pytest's warning about
    # this is ignored.
    quiet = ["-q", "-p", "no:cacheprovider", "-p", "no:unraisableexception", "-W"]
    quiet += ["ignore::pytest.PytestAssertRewriteWarning"]
    options = [*quiet, f"--report-dir={report}"]
    pytest.main([*options, *server.arguments(tests)])
    tested: list[dict[str, Any]] = json.loads((report / "verdict.json").read_text())["tests"]
    passed = {_name(test) for test in tested if test["verdict"] == "PASS"}
    not_passed = [test for test in tested if test["verdict"] != "PASS"]
    failed = []
    for test in not_passed:
        # If a test has passed cases, its cases that did not run do not count as failures.
        if test["verdict"] != "NOT_RUN" or _name(test) not in passed:
            failed.append(test)
    names = tuple(dict.fromkeys(map(_name, failed)))
    others = tuple(dict.fromkeys(_name(test) for test in tested if test not in failed))
    message = failed[0]["message"] if failed else ""
    return Finding(fault, names, others, message, round(time.monotonic() - started, 1))


def _name(test: dict[str, Any]) -> str:
    return str(test["id"]).rpartition("::")[2].partition("[")[0]


def _kept(entry: dict[str, Any]) -> Finding:
    fields = {}
    for k, v in entry.items():
        if isinstance(v, list):
            fields[k] = tuple(v)
        else:
            fields[k] = v
    return Finding(**fields)


def every_test() -> tuple[str, ...]:
    """Return the names of all tests that the table uses."""
    return tuple(dict.fromkeys(itertools.chain.from_iterable(FAULTS.values())))


def noticed(failed: Sequence[str]) -> str:
    """Return the tests that detected a fault, as the text of a table cell."""
    names = (test.removeprefix("test_").replace("_", " ") for test in failed)
    return "; ".join(names) or "**survives**"


def table(findings: dict[str, dict[str, Finding]]) -> str:
    """Return docs/tables/model-faults.md. The keys of the findings are configuration and fault."""

    def said(fault: str) -> str:
        of_fault = (of_one[fault] for of_one in findings.values() if fault in of_one)
        return next((finding.message for finding in of_fault if finding.failed), "")

    return catalogue_rows.page(
        "model-faults", found=findings, faults=FAULTS, not_for=NOT_FOR, noticed=noticed, said=said
    )


def real_width(checkpoint: Path, golden: Path) -> int:
    """Run the faults of `REAL_WIDTH` in BF16, and print the results."""
    survivors = []
    with (
        tempfile.TemporaryDirectory() as folder,
        SabotagedServer(checkpoint, Path(folder), "bfloat16", golden) as server,
    ):
        for fault in (CLEAN, *REAL_WIDTH):
            tests = FAULTS.get(fault, (ORACLE, SMALL, ANSWERS, GENERATED))
            finding = judge(server, fault, tests, Path(folder))
            if not finding.failed and fault != CLEAN:
                survivors.append(fault)
            text = finding.message.replace("\n", " ")[:160]
            print(f"== {fault}: {finding.failed or 'all passed'} ({finding.seconds} s) {text}",
                  flush=True)  # fmt: skip
    print(f"survivors: {survivors or 'none'}")
    return 1 if survivors else 0


def main() -> int:
    """Run the faults without a result, for at most `--minutes`, and write the table when all have
    one."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=TABLE)
    parser.add_argument("--state", type=Path, default=ROOT / ".cache" / "model-faults")
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--configuration", action="append", choices=sorted(PROFILE.configurations))
    files = {"type": Path, "nargs": 2, "metavar": ("CHECKPOINT", "GOLDEN")}
    real = "instead of the canary: a checkpoint of sm121 synthetic, and its file of sm121 golden"
    parser.add_argument("--real-width", **files, help=real)
    options = parser.parse_args()
    if options.real_width:
        return real_width(*options.real_width)
    checkpoint = canary.build(ROOT / ".cache" / "canary" / "bf16", "bf16")
    record_environment_once()
    deadline = time.monotonic() + 60 * options.minutes
    findings: dict[str, dict[str, Finding]] = {}
    whole = True
    for name in options.configuration or ["float32", "bfloat16"]:
        file = options.state.with_suffix(f".{name}.json")
        rows = json.loads(file.read_text()) if file.is_file() else {}
        judged = [fault for fault in FAULTS if fault not in NOT_FOR.get(name, {})]
        findings[name] = {fault: _kept(rows[fault]) for fault in judged if fault in rows}
        open_ones = [fault for fault in judged if fault not in findings[name]]
        if open_ones and time.monotonic() < deadline:
            with tempfile.TemporaryDirectory() as folder:
                directory = Path(folder)
                with SabotagedServer(checkpoint, directory, name) as server:
                    if not findings[name]:
                        clean = judge(server, CLEAN, every_test(), directory)
                        assert not clean.failed, f"the clean server fails: {clean}"
                    while open_ones and time.monotonic() < deadline:
                        fault = open_ones.pop(0)
                        finding = judge(server, fault, FAULTS[fault], directory)
                        findings[name][fault] = finding
                        content = {k: vars(v) for k, v in findings[name].items()}
                        file.write_text(json.dumps(content, indent=1))
                        print(f"== {name}: {fault}: {finding.failed or 'SURVIVES'} "
                              f"({finding.seconds} s)", flush=True)  # fmt: skip
        whole = whole and not open_ones
    survivors = []
    for name in findings:
        for f, finding in findings[name].items():
            if not finding.failed:
                survivors.append(f)
    if whole:
        options.output.write_text(table(findings), "utf-8")
    print(f"{'whole' if whole else 'not whole yet'}; survivors: {survivors or 'none'}")
    return 1 if survivors or not whole else 0


if __name__ == "__main__":
    sys.exit(main())
