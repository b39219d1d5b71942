"""A profile may leave axes out of its matrix, with a reason."""

from types import SimpleNamespace

import pytest

from sm121.core import profile
from sm121.core.errors import UsageError
from sm121.matrix import covering, feature_matrix, plan
from sm121.plugin import matrix, terminal
from sm121.plugin.stash import SETTINGS
from sm121.session.options import GivenTarget
from sm121.session.settings import Settings

pytestmark = pytest.mark.usefixtures("a_cpu_without_fp8")


def starts_of(name: str, axes_file: str | None, strength: str = "1") -> list[str]:
    """Return the values of the axis graphs in the cells of a profile, on vLLM 0.32."""
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
    """An engine without axes has no cells unless the user requests them.

    Before, `--arch sm121 --engine sglang` was refused because of a value of --matrix that the user
    had not given."""
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


@pytest.mark.parametrize("strength", ["9", "99"])
def test_no_cells_are_computed_on_a_machine_that_examines_none(monkeypatch, strength):
    """No cells are computed on a machine that examines none.

    Before, `pytest -m sm121 --plan full --matrix=9` without a GPU printed nothing for 20 s."""
    monkeypatch.delattr(covering, "build")
    chosen = profile.load("sm121-gpt-oss-120b")
    settings = Settings(target=GivenTarget(profile=chosen))
    config = SimpleNamespace(
        stash={SETTINGS: settings, terminal.NOTHING_RUNS: True},
        getoption={"--matrix": strength, "--matrix-axes": None}.get,
    )
    if strength == "9":
        matrix.refuse_wrong_options(config)
    else:
        with pytest.raises(UsageError, match="--matrix 99: expected at most 9"):
            matrix.refuse_wrong_options(config)
