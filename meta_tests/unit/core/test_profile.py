"""The required content of profiles, and the message for a mistake."""

import pytest

from meta_tests.fakes.whole_run import waiver_file
from meta_tests.folders import ROOT
from meta_tests.texts import text_file
from sm121.core import digest, profile, profile_fields, waivers
from sm121.core.errors import UsageError
from sm121.run.fingerprint import Fingerprint, profile_label

CPU = profile.shipped()["cpu-tiny-gpt-oss"].read_text("utf-8")


def test_the_first_run_on_a_gb10_is_the_canary_on_its_own_kernels():
    """The first run on a GB10 can be the canary in MXFP4, with the release's own kernels and the
    oracle. No default selects it."""
    tiny = profile.load("sm121-tiny-gpt-oss")
    assert (tiny.arch, tiny.model.id) == ("sm121", "canary:mxfp4")
    assert tiny.configurations[tiny.under_test].arguments == ()
    assert tiny.engine.environment["FLASHINFER_CUDA_ARCH_LIST"] in tiny.engine.needs.arch_list
    readme = (ROOT / "README.md").read_text()
    first = next(line for line in readme.splitlines() if line.startswith("$ pytest"))
    assert first.split("  #")[0].rstrip() == f"$ pytest -m sm121 --profile {tiny.name}"


def test_every_architecture_has_at_most_one_profile_for_an_engine():
    profiles = {name: profile.load(name) for name in profile.shipped()}
    assert [each.name for each in profiles.values()] == [*profiles]
    chosen = [(p.arch, p.engine.name) for p in profiles.values() if p.extends is None]
    assert len(chosen) == len(set(chosen))
    assert profile.for_architecture("sm121") == "sm121-gpt-oss-120b"
    assert profile.for_architecture("cpu", "llama-cpp") == "cpu-tiny-gpt-oss-llama-cpp"
    with pytest.raises(UsageError, match="no profile is shipped for sm80"):
        profile.for_architecture("sm80")


THREE_LINES = """
name = "ours"
extends = "sm121-gpt-oss-120b"
performance.gates = [{ metric = "tg32@d0", unit = "tok/s", minimum=30, source = "users" }]
"""


def written(folder, name="mine", text=THREE_LINES):
    file = folder / f"{name}.toml"
    file.write_text(text)
    return str(file)


def test_a_child_that_measures_less_has_its_parents_plans(tmp_path):
    less = "[performance]\ndepths = [0]\n[performance.measuring]\nconcurrency = [2]\n"
    text = f'extends = "cpu-tiny-gpt-oss"\nname = "mine"\n{less}'
    mine = profile.load(written(tmp_path, text=text))
    assert mine.plan("quick").depths == (0,) and mine.plan("merge").concurrency == (2,)


def test_own_thresholds_are_three_lines(tmp_path):
    parent = profile.load("sm121-gpt-oss-120b")
    whole = profile.load(written(tmp_path))
    judged = whole.judging()
    assert (judged.name, judged.extends) == ("ours", "sm121-gpt-oss-120b")
    gate = judged.gate("tg32@d0")
    assert (gate.minimum, gate.target, gate.source) == (30, None, "users")
    metrics = []
    for p in (judged, parent.judging()):
        metrics.append(sorted(g.metric for g in p.performance.gates))
    assert metrics[0] == metrics[1]
    assert whole.judging("cutlass").gate("tg32@d0") == parent.judging("cutlass").gate("tg32@d0")
    same = {"name", "performance"}
    assert whole.model_dump(exclude=same) == parent.model_dump(exclude=same)


def test_tables_merge_and_lists_and_statements_replace(tmp_path):
    parent = profile.load("sm121-gpt-oss-120b")
    child = profile.load(written(tmp_path, text=text_file("ours.toml")))
    assert child.engine.arguments == ("--max-model-len", "4096")
    assert (child.engine.stalled_after_s, child.engine.name) == (99, parent.engine.name)
    assert child.engine.environment == {**parent.engine.environment, "MAX_JOBS": "2"}
    assert [*child.configurations] == [*parent.configurations, "eager"]
    assert (child.stress.answer_tokens.value, child.stress.answer_tokens.source) == (8, "ours")
    assert child.stress.mixed_requests == parent.stress.mixed_requests
    assert [*child.correctness.agreement] == ["auto", "bfloat16"]
    assert child.matrix is None and child.box is not None and child.box.sm_clock_mhz is None
    assert child.box.bandwidth_gb_s == parent.box.bandwidth_gb_s


def test_a_profile_is_its_merged_values(tmp_path):
    """Profiles with the same merged values are equal.

    A profile that extends another one equals a profile that states all values itself. A profile may
    also extend the first of them."""
    parent = written(tmp_path, "parent")
    child = profile.load(
        written(tmp_path, "child", 'name = "ours"\nextends = "parent.toml"\nmodel.id = "x"\n'
                                   'model.served_name = "x"\nmodel.source = "ours"\n')
    )  # fmt: skip
    gate = child.judging().gate("tg32@d0")
    assert child.model.id == "x" and gate is not None and gate.minimum == 30
    extended = profile.load(parent)
    whole = profile.load("sm121-gpt-oss-120b")
    same = whole.model_copy(update={"name": "ours", "performance": extended.performance})
    assert digest.of_value(extended.model_dump(mode="json")) == digest.of_value(
        same.model_dump(mode="json")
    )
    fingerprint = Fingerprint(profile="12ab", profile_shipped=False, extends=extended.extends)
    assert "extends sm121-gpt-oss-120b" in profile_label("ours", fingerprint)


def test_under_test_of_a_profile_decides_the_tested_configuration(tmp_path):
    text = 'name = "mine"\nextends = "sm121-gpt-oss-120b"\n'
    stock = profile.load(written(tmp_path, "stock", f'{text}under_test = "stock"\n'))
    assert stock.judging(identity="0.14.0+mxfp4").under_test == "stock"
    other = profile.load(written(tmp_path, "other", f"{text}engine.stop_within_s = 61\n"))
    assert other.judging(identity="0.14.0+mxfp4").under_test == "mxfp4"


@pytest.mark.parametrize(
    ("text", "more", "change", "expected"),
    [
        pytest.param(
            'name = "ours"\nextends = "sm122"',
            None,
            None,
            "mine.toml: key extends: .*sm122: expected a file or one of cpu-tiny",
            id='name = "ours" extends = "sm122", mine.toml: key',
        ),
        pytest.param(
            'name = "ours"\nextends = 3',
            None,
            None,
            "key extends: expected the name or path of a profile, got 3",
            id='name = "ours" extends = 3, key extends: expected the',
        ),
        pytest.param(
            'extends = "sm121-gpt-oss-120b"',
            None,
            None,
            "key name: required key is missing",
            id='extends = "sm121-gpt-oss-120b", key name: required key',
        ),
        pytest.param(
            'name = "ours"\nextends = "mine.toml"',
            None,
            None,
            "expected no cycle, got .*mine.toml -> .*mine",
            id='name = "ours" extends = "mine.toml", expected no',
        ),
        pytest.param(
            None,
            "[engine]\nstaled_after_s = 1",
            None,
            "key engine.staled_after_s: unknown key",
            id="(engine) staled_after_s = 1, key engine.staled_after_s",
        ),
        pytest.param(
            None,
            None,
            ("30", '"x"'),
            "mine.toml: key performance.gates.tg32@d0.minimum: ",
            id='30 "x", mine.toml: key',
        ),
        pytest.param(
            None,
            None,
            (', source = "users"', ""),
            "tg32@d0.source: required key is miss",
            id=', source = "users", tg32@d0.source: required key is miss',
        ),
        pytest.param(
            None,
            "engine.ready_within_s = { value = 9 }",
            None,
            "ready_within_s.source: required",
            id="engine.ready_within_s = { value = 9 }",
        ),
        pytest.param(
            None,
            'without = ["matrx"]',
            None,
            "key without: expected keys of the parent, got 'mat",
            id='without = ("matrx"), key without: expected keys of the',
        ),
        pytest.param(
            None,
            'without = ["under_test"]',
            None,
            "key under_test: required key is missing",
            id='without = ("under_test"), key under_test: required key',
        ),
        pytest.param(
            'without = ["matrix"]\n[CPU]',
            None,
            None,
            "key extends: expected the name or path of a profile, got None",
            id='without = ("matrix") (CPU), key extends: expected the',
        ),
        pytest.param(
            'name = "ours"\nextends = "cpu-tiny-gpt-oss"\nperformance = 3',
            None,
            None,
            "key performance: Input should be",
            id="performance = 3",
        ),
        pytest.param(
            'name = "ours"\nextends = "cpu-tiny-gpt-oss"\nperformance.measuring = 3',
            None,
            None,
            r"key performance\.measuring: Input should be",
            id="performance.measuring = 3",
        ),
        pytest.param(
            'name = "ours"\nextends = "cpu-tiny-gpt-oss"\nperformance.depths = 5',
            None,
            None,
            r"key performance\.depths: Input should be",
            id="performance.depths = 5",
        ),
    ],
)
def test_a_mistake_in_extending_names_file_and_key(tmp_path, text, more, change, expected):
    """A mistake in an extending profile gives the file and the key.

    `more` is added to `THREE_LINES`, `change` is replaced in them."""
    text = (text or THREE_LINES).replace("[CPU]", CPU).replace(*change or ("", "")) + (more or "")
    with pytest.raises(UsageError, match=expected) as caught:
        profile.load(written(tmp_path, text=text))
    assert "mine.toml: key" in str(caught.value) and "\n" not in str(caught.value)


def test_a_model_without_experts_has_no_kernel_of_them(tmp_path):
    """For a model without experts, reports do not list the experts' kernel as unproven."""
    text = (
        'name = "ours"\nextends = "sm121-gpt-oss-120b"\n'
        'model = { id = "m", served_name = "m", dense = true, source = "meta test" }'
    )
    with pytest.raises(UsageError, match=r"model\.dense: expected .*, got configurations\.\w+"):
        profile.load(written(tmp_path, text=text))


@pytest.mark.parametrize(
    "lines",
    [
        pytest.param("chats = []", id="neither chats nor a reason"),
        pytest.param('cannot.chats = "no chat template"', id="chats and a reason"),
    ],
)
def test_a_profile_has_chats_or_the_reason_for_none(tmp_path, lines):
    text = f'extends = "cpu-tiny-gpt-oss"\nname = "mine"\n[correctness]\n{lines}\n'
    with pytest.raises(UsageError, match=r"mine\.toml: key correctness.*chats"):
        profile.load(written(tmp_path, text=text))


def test_a_mistake_of_a_parent_names_the_parent(tmp_path):
    written(tmp_path, "parent", CPU.replace("stalled_after_s", "staled_after_s"))
    with pytest.raises(UsageError, match=r"parent.toml: key engine.staled_after_s: unknown key"):
        profile.load(written(tmp_path, text='name = "ours"\nextends = "parent.toml"'))


def test_a_gate_has_one_direction_and_ordered_grades_and_is_given_once(tmp_path):
    once = THREE_LINES[THREE_LINES.index("[{") + 1 : THREE_LINES.rindex("]")]
    with pytest.raises(UsageError, match=r"performance.gates.*tg32@d0"):
        profile.load(written(tmp_path, text=THREE_LINES.replace(once, f"{once}, {once}")))
    good = {"metric": "tg32@d0", "unit": "tok/s", "source": "meta test"}
    profile_fields.Gate(**good, minimum=52, target=58, stretch=61)
    for bad in ({}, {"minimum": 1, "at_most": 2}, {"minimum": 58, "target": 52}):
        with pytest.raises(ValueError, match="expected"):
            profile_fields.Gate(**good, **bad)


def test_the_numbers_of_the_original_documents():
    """The profile has the thresholds of the original documents: the MXFP4 v2 benchmark plan, its
    project context, and its testing guide."""
    sm121 = profile.load("sm121-gpt-oss-120b").judging(None, "0.14.0+mxfp4")
    gates = {gate.metric: gate for gate in sm121.performance.gates}
    numbers = {
        "tg32@d0": {"minimum": 52, "target": 58, "stretch": 61},
        "tg32@d4096": {"minimum": 47},
        "tg32@d8192": {"minimum": 41},
        "tg32@d16384": {"minimum": 34},
        "tg32@d32768": {"minimum": 26},
        "pp2048@d0": {"minimum": 4500},
        "ttft_p99": {"at_most": 1000},
    }
    for metric, limits in numbers.items():
        assert {name: getattr(gates[metric], name) for name in limits} == limits, metric
    assert {name for name in gates if name.startswith("tg32")} <= numbers.keys()
    assert sm121.engine.ready_within_s.value == 300
    stress = sm121.stress
    assert stress.sequential_requests.value == 100
    assert stress.concurrent_requests.value == 10
    assert (stress.load_requests.value, stress.load_concurrency.value) == (200, 8)
    assert (stress.memory_growth_fraction.value, stress.memory_growth_gb.value) == (0.10, 5.0)
    assert sm121.engine.needs.arch_list == ("12.1a", "12.1f")
    assert sm121.under_test == "mxfp4" and "HND" in sm121.path_of("mxfp4").kv_layout


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        pytest.param(
            "[[waver]]\ntest = 'x'",
            "key waver: unknown key; expected one of waiver",
            id="((waver)) test = 'x', key waver: unknown key; expected",
        ),
        pytest.param(
            "[[waiver]]\ntest = 'tests/x::t'",
            "key waiver.tests/x::t.reason: required key is missing",
            id="((waiver)) test = 'tests/x:t', key",
        ),
        pytest.param(
            ("[[waiver]]\ntest='tests/x::t'\nreason='known'\nissue='later'\nexpires=2030-01-01"),
            "key waiver.tests/x::t.issue",
            id="((waiver)) test='tests/x:t' reason='known'",
        ),
    ],
)
def test_a_wrong_waiver_file_is_named_the_same_way(tmp_path, text, expected):
    file = tmp_path / "waivers.toml"
    file.write_text(text)
    with pytest.raises(UsageError) as caught:
        waivers.load(file)
    assert str(file) in str(caught.value) and expected in str(caught.value), caught.value


@pytest.mark.parametrize(
    ("test", "days", "expected"),
    [
        ("tests/test_stress.py::*", 1, "without wildcards"),
        ("tests/test_stress.py::test_soa?", 1, "without wildcards"),
        ("*", 1, "without wildcards"),
        ("tests/test_stress.py", 1, "expected the id of one test"),
        ("tests/test_stress.py::test_soak", 91, "expected a day within 90 days"),
        ("tests/test_stress.py::test_soak", 3650, "expected a day within 90 days"),
    ],
)
def test_a_waiver_is_narrow_and_ends(tmp_path, test, days, expected):
    with pytest.raises(UsageError, match=expected):
        waivers.load(waiver_file(tmp_path, test, days=days))


def test_certified_levels_of_the_shipped_profiles():
    """The GB10 profile certifies all levels.

    The other shipped profiles certify the levels that their machines allow."""
    certified = {name: profile.load(name).certify for name in profile.shipped()}
    assert certified["sm121-gpt-oss-120b"].levels == profile_fields.LEVELS
    assert certified["sm121-gpt-oss-120b"].box == "QUALIFIED"
    server = ("smoke", "kernel", "correctness", "stress")
    assert certified["sm90-tiny-gpt-oss"].levels == server
    assert certified["cpu-tiny-gpt-oss"].levels == (*server, "performance")
    assert certified["cpu-tiny-gpt-oss-llama-cpp"].levels == ("smoke", "correctness", "performance")


def test_a_question_of_ones_own_has_no_rates_of_the_projects():
    """A configuration with gates of its own does not also have the project's gates on rates.

    `cutlass` has gates at one depth only: 47 tok/s at 4,096 tokens were required of a build that
    reaches 29 at depth 0."""
    for name in ("stock", "cutlass"):
        judged = profile.load("sm121-gpt-oss-120b").judging(name, "0.33.0")
        own = judged.configurations[name].gates
        assert judged.performance.gates[: len(own)] == own, name
        rates = [gate for gate in judged.performance.gates if gate.minimum is not None]
        assert {*rates} <= {*own}, name
        assert judged.gate("tpot_p50") in own, "20 ms are the project's question"
        assert judged.gate("ttft_p99") and judged.gate("startup_s"), "times are asked of all"
    mxfp4 = profile.load("sm121-gpt-oss-120b").judging(None, "0.33.0")
    assert mxfp4.gate("tg32@d4096").minimum == 47
