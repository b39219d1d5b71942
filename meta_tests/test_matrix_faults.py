"""Planted faults: each comes out with the right outcome and down to the right values."""

from __future__ import annotations

import pytest


def sets_of(matrix: dict) -> set[tuple[str, tuple[str, ...]]]:
    return {
        (one["outcome"], tuple(f"{a}={v}" for a, v in one["values"].items()))
        for one in matrix["failing_sets"]
        if one["confirmed"]
    }


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


def test_all_faults_at_once_are_told_apart(run_matrix):
    faults = "fallback:triton crash:flashinfer_cutlass+enforce-eager corrupt:ngram+half slow:mapped"
    status, run, matrix = run_matrix("--matrix", "2", faults=faults)
    assert status == 1, run.output
    assert sets_of(matrix) == {
        ("FALLBACK", ("moe=triton",)),
        ("CRASH", ("moe=cutlass", "graphs=eager")),
        ("FAIL", ("spec=ngram", "window=half")),
        ("SLOWER", ("load=mapped",)),
    }, run.output
    crashed = next(cell for cell in matrix["cells"] if cell["outcome"] == "CRASH")
    assert crashed["kind"] == "oom"
    bundle = run.report / crashed["bundle"]
    assert {item.name for item in bundle.iterdir()} == {"server.log", "cell.json", "cause.json"}
    assert "each alone passes" in run.output
    assert matrix["pairs"]["moe=cutlass + graphs=eager"] == "broken"


@pytest.mark.slow(why="a run for each fault")
@pytest.mark.parametrize(
    ("fault", "outcome", "values"),
    [
        ("fallback:flashinfer_cutlass", "FALLBACK", ("moe=cutlass",)),
        ("fallback:flashinfer_cutlass+ngram", "FALLBACK", ("moe=cutlass", "spec=ngram")),
        ("crash:triton+ngram", "CRASH", ("moe=triton", "spec=ngram")),
        ("refuse:triton+mapped", "FAIL", ("moe=triton", "load=mapped")),
        ("die:ngram+enforce-eager", "CRASH", ("graphs=eager", "spec=ngram")),
        ("corrupt:half", "FAIL", ("window=half",)),
        ("corrupt-together:flashinfer_cutlass+half", "FAIL", ("moe=cutlass", "window=half")),
        ("slow:enforce-eager", "SLOWER", ("graphs=eager",)),
        ("slow:flashinfer_cutlass+mapped", "SLOWER", ("moe=cutlass", "load=mapped")),
    ],
)
def test_each_fault_alone(run_matrix, fault, outcome, values):
    status, run, matrix = run_matrix("--matrix", "2", faults=fault)
    assert status == 1, run.output
    assert sets_of(matrix) == {(outcome, values)}, run.output
