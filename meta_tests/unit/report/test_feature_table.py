"""FEATURE_MATRIX.md of `sm121 testlog`: the values of its columns."""

import json

import pytest

from meta_tests.fakes import report_runs
from sm121.cli import main


@pytest.mark.parametrize(
    ("changes", "row"),
    [
        pytest.param(
            {"moe": "FLASHINFER_CUTLASS_MXFP4_MXFP8", "speculative": "eagle3"},
            "| FLASHINFER\\_CUTLASS\\_MXFP4\\_MXFP8 | mxfp8 | - | eagle3 | on |",
            id="mxfp8",
        ),
        pytest.param(
            {"moe": "MARLIN", "dtype": "bfloat16", "cuda_graphs": False},
            "| MARLIN | bfloat16 | - | none | off |",
            id="bfloat16",
        ),
        pytest.param({"moe": "A_NEW_FP8_KERNEL"}, "KERNEL | - | - | none | on |", id="unknown"),
    ],
)
def test_the_feature_matrix_has_the_activations_that_the_path_shows(changes, row, tmp_path):
    """The feature matrix shows the activations that the kernel path contains.

    Before, the column was empty unless the profile's matrix had an axis for them."""
    run = report_runs.write("pass", tmp_path / "run")
    verdict = json.loads((run / "verdict.json").read_text())
    verdict["engine"]["identity"] = "0.33.0"
    verdict["engine"]["path"] |= changes
    (run / "verdict.json").write_text(json.dumps(verdict))
    matrix = json.loads((run / "matrix" / "matrix.json").read_text())
    cell = matrix["cells"][0]
    cell["values"] = {}
    path = verdict["engine"]["path"]
    cell["path"] = {name: path[name] for name in ("moe", "dtype", "cuda_graphs", "speculative")}
    cell["path"]["oracle"] = "kv=fp8"  # the result of another check
    (run / "matrix" / "matrix.json").write_text(json.dumps(matrix))
    assert main(["testlog", str(run), "--output", str(tmp_path)]) == 0
    features = (tmp_path / "FEATURE_MATRIX.md").read_text()
    assert features.count(row) == 2, "the configuration and a cell of the matrix"
