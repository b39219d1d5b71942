"""Axes that a profile leaves out of its matrix, with a reason."""

import pytest

from sm121.core import profile
from sm121.core.errors import UsageError
from sm121.matrix import covering, feature_matrix, plan

pytestmark = pytest.mark.usefixtures("a_cpu_without_fp8")


def starts_of(name: str, axes_file: str | None, strength: str = "1") -> list[str]:
    """Return the values of graphs in the cells of a profile, on vLLM 0.32."""
    chosen = profile.load(name)
    space = plan.space_of(chosen, axes_file, "vllm", "0.32.0")
    cells = plan.make_plan(chosen, space, strength=strength).cells
    return [cell.cell.get("graphs", "eager") for cell in cells]


@pytest.mark.parametrize("strength", ["1", "2"])
def test_the_cpu_profile_compiles_in_no_cell(strength):
    assert {*starts_of("cpu-tiny-gpt-oss", None, strength)} == {"eager"}


def test_axes_that_are_named_are_all_tried():
    assert starts_of("cpu-tiny-gpt-oss", "cpu").count("compiled") == 1


def test_a_matrix_names_what_the_profile_leaves_out_and_why():
    chosen = profile.load("cpu-tiny-gpt-oss")
    space = plan.space_of(chosen, None, "vllm", "0.32.0")
    array = covering.build(space, 1)
    file = feature_matrix.build(space, array, [], [], profile=chosen.name)
    assert file.absent["graphs=compiled"].startswith("left out: a compiled start takes minutes")
    again, _ = feature_matrix.merged([file, file])
    assert again.axes == space.axes, "shards of it make the same matrix"


@pytest.mark.parametrize("name", sorted(profile.shipped()))
def test_only_a_profile_of_a_cpu_leaves_out_an_axis(name):
    chosen = profile.load(name)
    if chosen.arch != "cpu" and chosen.matrix is not None:
        assert not chosen.matrix.left_out


def test_an_engine_without_axes_has_no_cells_unless_somebody_asks():
    """`--arch sm121 --engine sglang` was refused because of a strength that nobody had given."""
    chosen = profile.load("cpu-tiny-gpt-oss")
    space = plan.space_of(chosen, None, "sglang")
    assert not space.axes
    assert plan.make_plan(chosen, space).cells == ()
    with pytest.raises(UsageError, match="--matrix 1: expected at most 0"):
        plan.make_plan(chosen, space, strength="1")


def test_an_unknown_axis_cannot_be_left_out():
    chosen = profile.load("cpu-tiny-gpt-oss")
    settings = chosen.matrix.model_copy(update={"left_out": {"graph": "a typing error"}})
    with pytest.raises(UsageError, match=r"left_out: expected axes of cpu \(.*\), got graph$"):
        plan.space_of(chosen.model_copy(update={"matrix": settings}))
