"""Injected faults give the right outcome of a cell, and the failing values are found."""

import json
from pathlib import Path

import pytest

from meta_tests.texts import text_file

_HEAD = text_file("one-axis.toml")


def one_axis(folder: Path, **values: str) -> Path:
    """Return an axes file with one axis, whose values have these arguments."""
    text = _HEAD
    for name, arguments in {"usual": "", **values}.items():
        text += f"""
[axes.way.values.{name}]
settings = [{{ engine = "vllm", arguments = {json.dumps(arguments.split())}, source = "the test" }}]
unproven = "the server says nothing of it"
"""
    file = folder / "axes.toml"
    file.write_text(text)
    return file


def sets_of(matrix: dict) -> set[tuple[str, tuple[str, ...]]]:
    confirmed = [one for one in matrix["failing_sets"] if one["confirmed"]]
    found = set()
    for s in confirmed:
        found.add((s["outcome"], tuple(f"{a}={v}" for a, v in s["values"].items())))
    return found


@pytest.mark.slow(why="a run of its own")
def test_a_sound_engine_passes_with_a_boot_for_each_start_up(run_matrix, tmp_path):
    status, run, matrix = run_matrix("--matrix", "2")
    assert status == 0, run.output
    assert {cell["outcome"] for cell in matrix["cells"]} == {"PASS"}, run.output
    boots = (tmp_path / "boots.txt").read_text().splitlines()
    configurations = {cell["configuration"] for cell in matrix["cells"]}
    assert len(boots) == len(set(boots)) == len(configurations)
    (_, pairs) = matrix["coverage"]
    assert pairs["covered"] == pairs["allowed"] == pairs["ran"]
    assert "ok" in (run.report / "matrix" / "FEATURE_MATRIX.md").read_text()
    assert set(matrix["pairs"].values()) == {"works"}


@pytest.mark.slow("a run of the matrix that measures")
@pytest.mark.alone
def test_a_slower_value_is_named(run_matrix, tmp_path):
    axes = ("--matrix-axes", str(one_axis(tmp_path, slow="--load-format mapped")), "--matrix", "1")
    status, run, matrix = run_matrix(*axes, faults="slow:mapped")
    assert status == 1 and sets_of(matrix) == {("SLOWER", ("way=slow",))}, run.output


@pytest.mark.slow("twenty starts; test_level_shards.py has a fallback")
@pytest.mark.parametrize("slow", ["", "slow:mapped"])
def test_several_faults_at_once_are_isolated(run_matrix, slow):
    faults = f"fallback:triton crash:flashinfer_cutlass+enforce-eager corrupt:ngram+half {slow}"
    status, run, matrix = run_matrix("--matrix", "2", faults=faults)
    assert status == 1, run.output
    assert sets_of(matrix) == {
        ("FALLBACK", ("moe=triton",)),
        ("CRASH", ("moe=cutlass", "graphs=eager")),
        ("FAIL", ("spec=ngram", "window=half")),
        *([("SLOWER", ("load=mapped",))] if slow else []),
    }, run.output
    crashed = next(cell for cell in matrix["cells"] if cell["outcome"] == "CRASH")
    assert crashed["kind"] == "oom"
    bundle = run.report / crashed["bundle"]
    assert {item.name for item in bundle.iterdir()} == {"server.log", "cell.json", "cause.json"}
    assert "each part alone passes" in run.output
    assert matrix["pairs"]["moe=cutlass + graphs=eager"] == "broken"


@pytest.mark.slow("a run of the matrix with six starts more")
def test_a_failure_in_the_performance_sample_or_at_one_start_only(run_matrix, tmp_path):
    """A server that dies or fails requests while it is measured is a crash, and not a disturbed
    rate.

    A start that fails only once is repeated, and gives no failing set."""
    file = one_axis(tmp_path, dies="--window half", fails="--spec ngram", once="--enforce-eager")
    faults = "die-streaming:half fail-streaming:ngram crash-once:enforce-eager"
    status, run, matrix = run_matrix("--matrix-axes", str(file), "--matrix", "1", faults=faults)
    assert status == 1, run.output
    first = {c["id"]: c for c in matrix["cells"] if not c["isolating"]}
    assert {name: cell["outcome"] for name, cell in first.items()} == {
        "baseline": "PASS", "way=dies": "CRASH", "way=fails": "FAIL", "way=once": "CRASH",
    }, run.output  # fmt: skip
    assert first["way=dies"]["reason"].startswith("alive: died (checking: performance): oom")
    assert "request_failed" in first["way=fails"]["reason"]
    assert sets_of(matrix) == {("CRASH", ("way=dies",)), ("FAIL", ("way=fails",))}
    assert "way=once: CRASH, not isolated (failed once, and not in a second start" in run.output
    again = next(c for c in matrix["cells"] if c["isolating"] and c["id"] == "way=once")
    assert again["outcome"] == "PASS"
    boots = (tmp_path / "boots.txt").read_text().splitlines()
    assert sum("--enforce-eager" in line for line in boots) == 2
    # As in other levels, a crash must have a bundle, a line, and a class.
    crashes = run.verdict["crashes"]
    assert {c["kind"] for c in crashes} == {"oom"} and len(crashes) == 3
    assert {c["test"].rpartition("::")[2] for c in crashes} == {
        "test_cell[way=dies]", "test_cell[way=once]", "test_smallest_failing_sets",
    }  # fmt: skip
    bundle = run.report / crashes[0]["bundle"]
    assert {"bundle.json", "configuration.json", "server.log"} <= {f.name for f in bundle.iterdir()}


@pytest.mark.slow(why="a run for each fault")
@pytest.mark.parametrize(
    ("fault", "outcome", "values"),
    [
        pytest.param(
            "fallback:flashinfer_cutlass",
            "FALLBACK",
            ("moe=cutlass",),
            id="fallback:flashinfer_cutlass, FALLBACK, moe=cutlass",
        ),
        pytest.param(
            "fallback:flashinfer_cutlass+ngram",
            "FALLBACK",
            ("moe=cutlass", "spec=ngram"),
            id="fallback:flashinfer_cutlass+ngram, FALLBACK",
        ),
        pytest.param(
            "crash:triton+ngram",
            "CRASH",
            ("moe=triton", "spec=ngram"),
            id="crash:triton+ngram, CRASH, moe=triton spec=ngram",
        ),
        pytest.param(
            "refuse:triton+mapped",
            "FAIL",
            ("moe=triton", "load=mapped"),
            id="refuse:triton+mapped, FAIL, moe=triton load=mapped",
        ),
        pytest.param(
            "die:ngram+enforce-eager",
            "CRASH",
            ("graphs=eager", "spec=ngram"),
            id="die:ngram+enforce-eager, CRASH, graphs=eager spec=ngram",
        ),
        pytest.param(
            "corrupt:half", "FAIL", ("window=half",), id="corrupt:half, FAIL, window=half"
        ),
        pytest.param(
            "corrupt-together:flashinfer_cutlass+half",
            "FAIL",
            ("moe=cutlass", "window=half"),
            id="corrupt-together:flashinfer_cutlass+half, FAIL",
        ),
        pytest.param(
            "slow:enforce-eager",
            "SLOWER",
            ("graphs=eager",),
            id="slow:enforce-eager, SLOWER, graphs=eager",
        ),
        pytest.param(
            "slow:flashinfer_cutlass+mapped",
            "SLOWER",
            ("moe=cutlass", "load=mapped"),
            id="slow:flashinfer_cutlass+mapped, SLOWER, moe=cutlass",
        ),
    ],
)
def test_each_fault_alone(run_matrix, fault, outcome, values):
    status, run, matrix = run_matrix("--matrix", "2", faults=fault)
    assert status == 1, run.output
    assert sets_of(matrix) == {(outcome, values)}, run.output
