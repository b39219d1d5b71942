"""The file of the matrix: named cells that are not in the plan."""

from meta_tests.unit.matrix.test_axes import with_axes
from sm121.matrix import covering, feature_matrix

NAMED = """
[named.ruled-out]
values = { dtype = "bfloat16", kv = "fp8" }
source = "mine"
"""


def test_a_named_cell_of_values_that_do_not_work_together_is_incompatible():
    space = with_axes(NAMED)
    file = feature_matrix.build(space, covering.build(space, 1), [], [], profile="p")
    assert file.left_out_incompatible == ["ruled-out"]
    assert file.left_out["ruled-out"].startswith("INCOMPATIBLE: with AMX")
    assert "| ruled-out | INCOMPATIBLE | " in feature_matrix.markdown(space, file)


def test_a_named_cell_with_a_value_that_the_engine_lacks_is_not_here():
    space = with_axes(NAMED)
    array = covering.Array(1, (), {}, {"elsewhere": "dtype=x: not applicable: no such value"})
    file = feature_matrix.build(space, array, [], [], profile="p")
    assert file.left_out_incompatible == []
    assert "| elsewhere | not here | " in feature_matrix.markdown(space, file)
