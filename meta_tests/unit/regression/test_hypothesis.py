"""Each kind of criterion of a feature's hypothesis is checked."""

import ast
import re
from importlib.resources import files
from pathlib import Path

import pytest

from meta_tests.fakes.ab_visits import answer, visits
from meta_tests.folders import ROOT
from sm121.core import errors
from sm121.core.verdict import Verdict
from sm121.regression import hypothesis
from sm121.regression.ab import Visit
from sm121.run.verdict_file import TestReport


@pytest.mark.parametrize(
    ("factor", "criterion", "verdict"),
    [
        pytest.param(
            1.2,
            {"metric": "tg32@d0", "change_at_least": 0.1},
            "PASS",
            id="20 % faster, 10 promised",
        ),
        pytest.param(
            1.0,
            {"metric": "tg32@d0", "change_at_least": 0.1},
            "FAIL",
            id="as fast, 10 % promised",
        ),
        pytest.param(
            1.1,
            {"metric": "tg32@d0", "change_at_least": 0.1},
            "INCONCLUSIVE",
            id="10 % faster, 10 promised",
        ),
        pytest.param(
            1.0,
            {"metric": "ttft_p50", "change_at_most": 0.03},
            "PASS",
            id="as late, 3 % allowed",
        ),
        pytest.param(
            0.9,
            {"metric": "ttft_p50", "change_at_most": 0.03},
            "FAIL",
            id="11 % later, 3 allowed",
        ),
        pytest.param(
            1.0,
            {"metric": "memory_gib", "difference_at_most": 2.0},
            "PASS",
            id="as much memory",
        ),
        pytest.param(
            0.9,
            {"metric": "memory_gib", "difference_at_most": 2.0},
            "FAIL",
            id="9 GiB more, 2 allowed",
        ),
        pytest.param(
            1.0,
            {"metric": "ttft_p50", "value_at_most": 1000.0},
            "PASS",
            id="early enough",
        ),
        pytest.param(
            0.4,
            {"metric": "ttft_p50", "value_at_most": 1000.0},
            "FAIL",
            id="too late",
        ),
        pytest.param(
            1.0,
            {"metric": "pp2048@d0", "value_at_least": 4500.0},
            "NOT_RUN",
            id="a metric that was not measured",
        ),
        pytest.param(1.0, {"no_crash": True}, "PASS", id="no crash"),
        pytest.param(1.0, {"moe": "CUTLASS"}, "PASS", id="the promised kernels"),
        pytest.param(1.0, {"moe_not": "MARLIN"}, "PASS", id="not the excluded kernels"),
        pytest.param(1.0, {"moe": "MARLIN"}, "FAIL", id="other kernels than promised"),
    ],
)
def test_each_kind_of_criterion(factor, criterion, verdict):
    assert answer(visits(factor, boot=0.001, pairs=4, seed=2), **criterion).verdict == verdict


def test_a_crash_and_a_level_that_failed_are_seen():
    crashed = [*visits(1.2, seed=1), Visit("B", failure="the engine ended with -9")]
    result = answer(crashed, no_crash=True)
    assert result.verdict is Verdict.FAIL and "-9" in result.note
    runs = visits(1.0, seed=1)
    assert answer(runs, {"correctness": Verdict.FAIL}, level="correctness").verdict is Verdict.FAIL
    assert answer(runs, level="correctness").verdict is Verdict.NOT_RUN


@pytest.mark.parametrize(
    ("verdicts", "expected"),
    [
        pytest.param(["PASS"], "PASS", id="passed"),
        pytest.param(["PASS", "NOT_RUN"], "NOT_RUN", id="one case did not run"),
        pytest.param(["NOT_RUN"], "NOT_RUN", id="did not run"),
        pytest.param(["FAIL"], "FAIL", id="failed"),
        pytest.param([], "NOT_RUN", id="not selected"),
    ],
)
def test_a_test_must_pass_in_the_same_run(verdicts, expected):
    reports = [
        TestReport(id=f"tests/test_kernel.py::test_x[{n}]", level="kernel", verdict=verdict)
        for n, verdict in enumerate(verdicts)
    ]
    other = TestReport(id="tests/test_kernel.py::test_xy", level="kernel", verdict=Verdict.PASS)
    result = answer(visits(1.0, seed=1), tests=[*reports, other], test="test_x")
    assert result.verdict == expected


def test_the_gate_behind_p1_needs_the_profiled_kernels():
    """The gate of phase p1 needs the profiled kernels, because a log may name CUTLASS while
    Marlin's kernels run."""
    gate = hypothesis.gate_behind("P1")
    assert gate is not None
    (name,) = [criterion.test for criterion in gate.criteria if criterion.test]
    level = ast.parse((ROOT / "tests" / "test_kernel.py").read_text())
    assert name in [node.name for node in level.body if isinstance(node, ast.FunctionDef)]


SHIPPED = Path(str(files("sm121.fixtures") / "hypotheses"))
PHASES = ("P1", "P2", "P3", "P4", "P5", "P6")


def test_the_phases_and_the_example_are_valid():
    for phase in PHASES:
        gate = hypothesis.gate_behind(phase)
        assert gate is not None and gate.description and gate.criteria
    assert len(hypothesis.load(SHIPPED / "example.toml").criteria) == 4


@pytest.mark.parametrize(
    ("name", "phase", "promise"),
    [
        ("cutlass", "P1", "tg32@d0 changes by at least +10 %"),
        ("runner-caching", "P2", "ttft_p50 is at most 500"),
        ("runner-caching", "P2", "startup_s is at most 60"),
        ("mxfp8", "P3", "tg32@d0 changes by at least +5 %"),
        ("tiles", "P4", "tg32@d0 changes by at least +5 %"),
        ("speculation", "P5", "tg32@d0 changes by at least +50 %"),
        ("sinks", "P6", "no start crashes"),
    ],
)
def test_each_feature_of_the_plan_has_its_file(name, phase, promise):
    """Each feature of the plan's table "Features to Port" has its file."""
    shipped = hypothesis.load(SHIPPED / f"{name}.toml")
    assert shipped.phase == phase
    assert promise in [str(criterion) for criterion in shipped.criteria]


@pytest.mark.parametrize("file", sorted(SHIPPED.glob("*.toml")), ids=lambda file: file.stem)
def test_an_a_b_measures_each_metric_of_a_shipped_file(file):
    """An A/B comparison measures each metric of the shipped files, at the first depth, which is 0
    in each shipped profile."""
    if file.stem == "phases":
        criteria = []
        for phase in PHASES:
            criteria.extend(hypothesis.gate_behind(phase).criteria)
    else:
        criteria = hypothesis.load(file).criteria
    metrics = [each.metric for each in criteria if each.metric is not None]
    for name in metrics:
        assert "@" not in name or name.endswith("@d0")


def test_no_list_of_the_review_may_be_empty(tmp_path):
    text = (SHIPPED / "tiles.toml").read_text("utf-8")
    for name in ("assumptions", "inefficiencies", "alternatives", "upstream_todos", "experiments"):
        file = tmp_path / f"{name}.toml"
        file.write_text(re.sub(rf"(?s){name} = \[.*?\n\]", f"{name} = []", text))
        words = rf"key review.{name}: expected at least 1 entry, got 0$"
        with pytest.raises(errors.UsageError, match=words):
            hypothesis.load(file)


@pytest.mark.parametrize(
    "text",
    [
        "   ",
        "TODO",
        "N/A",
        "---",
        "...",
        "T.B.D.",
        "unknown yet",
        "same as before",
        "Lorem ipsum dolor",
        "to be filled",
        "pending review of the team",
        "will be written later",
        "FIXME tomorrow please",
        "not applicable here",
        "none, because of that",
    ],
)
def test_a_line_of_the_review_is_a_sentence(text, tmp_path):
    """A line of the review must be a sentence.

    Before, placeholders were refused by a list of words, which never contained all of them."""
    tiles = (SHIPPED / "tiles.toml").read_text("utf-8")
    for name in ("assumptions", "inefficiencies", "alternatives", "upstream_todos", "experiments"):
        file = tmp_path / f"{name}.toml"
        file.write_text(re.sub(rf"(?s){name} = \[.*?\n\]", f"{name} = ['{text}']", tiles))
        words = rf"review.{name}.*expected a sentence of at least 6 words, got '.*'. If there is"
        with pytest.raises(errors.UsageError, match=words):
            hypothesis.load(file)


@pytest.mark.parametrize(
    "text",
    [
        "none, because FlashInfer already has it",
        "not applicable: the build has no other kernel",
        "n/a, since the server waits for its clock",
        "TODO in vLLM: fuse the norm and the quantisation",
        "unknown tactics of the autotuner are not tried",
    ],
)
def test_a_line_of_the_review_may_give_the_reason_for_no_content(text, tmp_path):
    tiles = (SHIPPED / "tiles.toml").read_text("utf-8")
    file = tmp_path / "mine.toml"
    file.write_text(re.sub(r"(?s)alternatives = \[.*?\n\]", f"alternatives = ['{text}']", tiles))
    assert hypothesis.load(file).review.alternatives == (text,)


def test_a_hypothesis_is_a_sentence(tmp_path):
    tiles = (SHIPPED / "tiles.toml").read_text("utf-8")
    file = tmp_path / "mine.toml"
    file.write_text(
        re.sub(r"(?m)^hypothesis = .*$", "hypothesis = 'not yet determined, sorry'", tiles)
    )
    with pytest.raises(errors.UsageError, match="hypothesis: expected a sentence of at least 6"):
        hypothesis.load(file)


@pytest.mark.parametrize(
    ("key", "message"),
    [("feature", "feature: expected a name"), ("hypothesis", "hypothesis: expected a sentence")],
)
def test_spaces_are_no_hypothesis(key, message, tmp_path):
    tiles = (SHIPPED / "tiles.toml").read_text("utf-8")
    file = tmp_path / "mine.toml"
    file.write_text(re.sub(rf"(?m)^{key} = .*$", f"{key} = '{' ' * 30}'", tiles))
    with pytest.raises(errors.UsageError, match=message):
        hypothesis.load(file)
