"""The roofline agrees with the published arithmetic, and calls the impossible impossible."""

from types import SimpleNamespace

import pytest
from data_rows import from_data

from sm121.core import errors, profile
from sm121.core.profile import load as load_profile
from sm121.core.profile import shipped as shipped_profiles
from sm121.core.verdict import Invalid, Verdict
from sm121.evidence.kernel_path import KernelPath
from sm121.measure import measurement, roofline
from sm121.performance.box import RunBox
from sm121.performance.recorder import Recorder
from sm121.run.verdict_file import MetricReport
from tools.reference import configurations

GPT_OSS = roofline.read_config("openai/gpt-oss-120b")
GB10 = load_profile("sm121-gpt-oss-120b")
BUILD = "0.14.0+mxfp4"


def test_bytes_per_token_of_gpt_oss_120b():
    """5.003 GB with BF16 attention and head, 2.749 GB all in MXFP4 (computed independently from
    the checkpoint's tensors)."""
    own = roofline.traffic(GPT_OSS, depth=0, formats=roofline.formats(GPT_OSS))
    assert own.total == pytest.approx(5.003e9, rel=1e-3)
    assert own.experts == pytest.approx(1.906e9, rel=1e-3)
    assert own.attention == pytest.approx(1.912e9, rel=1e-3)
    assert own.lm_head == pytest.approx(1.158e9, rel=1e-3)
    least = roofline.traffic(GPT_OSS, depth=0, formats=roofline.SMALLEST)
    assert least.total == pytest.approx(2.749e9, rel=1e-3)


@pytest.mark.parametrize(("depth", "tok_s"), [(0, 54.6), (2048, 53.7), (8192, 51.4), (32768, 43.9)])
def test_ceiling_by_depth_at_the_data_sheets_bandwidth(depth, tok_s):
    own = roofline.traffic(GPT_OSS, depth=depth, formats=roofline.formats(GPT_OSS))
    ceiling = roofline.Ceiling(own, 273.0, tolerance=1.0)
    assert ceiling.tok_s == pytest.approx(tok_s, rel=5e-3)


def test_a_rate_above_the_memory_is_named_with_its_arithmetic():
    own = roofline.traffic(GPT_OSS, depth=0, formats=roofline.formats(GPT_OSS))
    ceiling = roofline.Ceiling(own, 230.0, tolerance=1.15)
    assert ceiling.broken_by(45.0) is None and ceiling.share(45.98) == pytest.approx(1.0, rel=1e-3)
    why = ceiling.broken_by(60.0)
    assert why.startswith("above_roofline: 60 tok/s x 5.002 GB a token")
    assert "= 300.1 GB/s" in why and "230 GB/s" in why and "1.15 tolerated" in why


def test_the_canary_is_computed_from_its_own_config(canary_bf16, canary_mxfp4):
    config = roofline.read_config(str(canary_bf16))
    single = roofline.traffic(config, depth=0, formats=roofline.formats(config, "float32"))
    half = roofline.traffic(config, depth=0, formats=roofline.formats(config))
    assert single.lm_head == 201088 * 256 * 4 and half.lm_head == single.lm_head / 2
    assert single.experts == pytest.approx(4 * 4 * 3 * 128 * 256 * 4, rel=0.01)
    packed = roofline.read_config(str(canary_mxfp4))
    assert roofline.formats(packed).experts == 4.25
    deep = roofline.traffic(config, depth=512, formats=roofline.formats(config))
    assert deep.kv == (2 * 128 + 2 * 512) * 2 * 2 * 64 * 2, "half of the layers see a window"


def test_a_model_that_is_not_known_has_no_ceiling():
    assert roofline.read_config("somebody/something") is None
    with pytest.raises(errors.Sm121Error, match="hidden_size"):
        roofline.traffic({}, depth=0, formats=roofline.formats({}))


def quantised(*arguments: str, **shown: object) -> roofline.Formats | None:
    """What a server of the GB10 profile's [kernel_path] reads."""
    path = KernelPath(**shown)
    return roofline.served(GPT_OSS, arguments, GB10.kernel_path, path)


ALL = ("--mxfp4-layers", "moe,qkv,o,lm_head", "--kv-cache-dtype", "fp8")


@from_data
def test_bytes_of_a_configuration_are_of_its_layers_its_cache_and_its_padding(
    name, identity, gb, deep
):
    own = GB10.judging(name, identity)
    for depth, size in ((0, gb), (32768, deep)):
        cost = roofline.cost(own, name, depth, GPT_OSS)
        assert cost is not None and cost.total / 1e9 == pytest.approx(size, abs=0.005)


def test_what_resolved_counts_before_what_was_asked():
    asked = quantised(*ALL)
    assert (asked.qkv, asked.o, asked.lm_head, asked.kv) == (4.25, 4.25, 4.25, 8)
    assert quantised(*ALL, requantised=["lm_head"]) == asked, "a log shows no more of them"
    names = {"requantised": ["qkv", "o"], "requantised_is_whole": True}
    proven = quantised(*ALL, **names, moe="FLASHINFER_CUTLASS_MXFP4_MXFP8")
    assert (proven.qkv, proven.o, proven.lm_head) == (4.25, 4.25, 16), "kernels prove all of them"
    read = roofline.traffic(GPT_OSS, depth=0, formats=proven)
    assert read.total / 1e9 == pytest.approx(3.685, abs=0.005)
    without = quantised(*ALL, requantised=[], kv_cache_dtype="bfloat16")
    assert (without.qkv, without.lm_head, without.kv) == (16, 16, 16)
    assert quantised("--mxfp4-layers", "moe,qkv,o").lm_head == 16
    assert quantised("--moe-backend", "marlin").padded_to == (256, 128)
    assert quantised("--moe-backend", "marlin", moe="TRITON").padded_to == (1, 1)


@from_data
def test_upstreams_way_leaves_the_head(table, qkv, o):
    read = quantised("--quantization-config", table)
    assert (read.qkv, read.o, read.lm_head, read.experts) == (qkv, o, 16, 4.25)


@from_data
def test_formats_that_are_not_known_are_none_and_no_guess(arguments):
    assert quantised(*arguments) is None


def test_a_layer_that_is_shown_and_not_asked_for_is_not_guessed():
    assert quantised(requantised=["lm_head"]) is None
    assert quantised(requantised=["lm_head"], requantised_is_whole=True) is None
    promised = GB10.kernel_path.model_copy(update={"requantised": ("qkv",)})
    assert roofline.served(GPT_OSS, (), promised, KernelPath()) is None
    asked = roofline.served(GPT_OSS, ("--mxfp4-layers", "moe"), promised, KernelPath())
    assert asked.qkv == 16, "what was asked for beside it counts"


def measured(
    rate: float,
    *,
    bandwidth: float | None = 235.0,
    named: str | None = None,
    identity: str = "0.33.0",
    metric: str = "tg32@d0",
    more: tuple[str, ...] = (),
    managed: bool = True,
    **shown: object,
) -> tuple[MetricReport, str, list[str]]:
    """A rate on a GB10 of that bandwidth: its metric, what the gate said, and the remarks."""
    own = GB10.judging(named, identity)
    remarks: list[str] = []
    configuration = SimpleNamespace(arguments=more)
    path = KernelPath(speculative="none", **shown)
    harness = SimpleNamespace(
        profile=own,
        configurations={own.under_test: configuration} if managed else {},
        attached=None,
        replaced=None,
        file=SimpleNamespace(
            metrics={},
            unproven=[],
            box=SimpleNamespace(state="QUALIFIED", reason=""),
            engine=SimpleNamespace(path=path, model="openai/gpt-oss-120b"),
        ),
        save=lambda: None,
        remark=lambda text, **_how: remarks.append(text),
    )
    box = RunBox(harness)
    if bandwidth is not None:
        device = SimpleNamespace(device="cuda:0", bandwidth_best_gb_s=bandwidth)
        box.before = SimpleNamespace(device=device)
    samples = [rate + 0.01 * (at % 3) for at in range(20)]
    sampled = measurement.Measurement(
        name=metric, unit="tok/s", samples=samples, higher_is_better=True, clock="token_ids"
    )
    said = ""
    try:
        Recorder(harness, box=box).record(sampled)
    except (AssertionError, Invalid) as failed:
        said = str(failed)
    return harness.file.metrics[metric], said, remarks


def test_the_gate_says_why_it_cannot_be_reached_and_what_could_reach_it():
    """218 to 235 GB/s allow 42 to 45 tok/s with dense layers in BF16: 52 were asked for, and
    nothing was said."""
    metric, said, _ = measured(33.6)
    assert f"; it reads {metric.out_of_reach})" in said
    assert "it reads 5.17 GB a token: at most 45.4 tok/s on this machine (235 GB/s)" in said
    assert "configuration mxfp4 (--mxfp4-layers moe,qkv,o,lm_head " in said
    assert said.endswith("--kv-cache-dtype fp8) reads 2.83)")
    assert "at most 42.1 tok/s" in measured(33.6, bandwidth=218.0)[1]
    assert "at most 45.4 tok/s on the fastest healthy" in measured(33.6, bandwidth=None)[1]
    assert "; it needs fewer bits, or speculation" in measured(20, bandwidth=100.0)[1]


def test_what_an_attached_server_reads_is_not_known_without_its_log():
    silent, said, _ = measured(33.6, managed=False)
    assert (silent.bytes_per_token, silent.roofline, silent.out_of_reach) == (None, None, None)
    assert said and "it reads" not in said
    shown, said, _ = measured(33.6, managed=False, moe="MARLIN")
    assert shown.bytes_per_token is not None and "it reads 5.17 GB a token" in said


def test_a_bound_is_said_where_no_configuration_is_known():
    own, gate = GB10.judging(None, "0.33.0"), GB10.gate("tg32@d0")
    read = roofline.cost(own, "stock", 0, GPT_OSS)
    each = {n: c.model_copy(update={"arguments": ("--quantization", "x")})
            for n, c in {**own.lacking, **own.configurations}.items()}  # fmt: skip
    none = own.model_copy(update={"configurations": each, "lacking": {}})
    said = roofline.out_of_reach(none, gate, read, GPT_OSS, 235.0)
    assert said is not None and said.endswith("; it needs fewer bits, or speculation")


def test_a_gate_within_reach_blames_nothing_else():
    for metric, said, _ in (
        measured(44.0, bandwidth=273.0),
        measured(25.0, bandwidth=218.0, named="stock"),
        measured(27.0, identity=BUILD),
    ):
        assert said and metric.out_of_reach is None and "It reads" not in said


def test_a_decode_rate_has_its_share_of_its_own_configurations_bound():
    stock, _, remarks = measured(33.6)
    assert (stock.bytes_per_token, stock.bound) == (5174595072, 45.41)
    assert stock.roofline == pytest.approx(0.74, abs=0.001) and not remarks
    fast, said, remarks = measured(59.4, identity=BUILD)
    assert fast.roofline == pytest.approx(0.716, abs=0.001) and not said and not remarks
    deep, _, _ = measured(45.0, identity=BUILD, metric="tg32@d32768")
    assert deep.bound == pytest.approx(68.3, abs=0.1)
    elsewhere, _, _ = measured(33.6, bandwidth=None)
    assert (elsewhere.roofline, elsewhere.bound) == (None, None)
    assert elsewhere.bytes_per_token == stock.bytes_per_token
    assert measured(4664.0, metric="pp2048@d0")[0].bytes_per_token is None


def test_a_rate_above_its_configurations_bound_is_said_and_one_above_any_is_invalid():
    metric, said, remarks = measured(59.4)
    assert metric.verdict is Verdict.PASS and metric.roofline > 1 and not said
    assert len(remarks) == 1 and "more than the bytes of this configuration allow" in remarks[0]
    metric, said, _ = measured(115.0, identity=BUILD)
    assert metric.verdict is Verdict.INVALID and "above_roofline" in said


def test_a_share_is_null_where_nothing_says_what_is_read():
    metric, _, remarks = measured(59.4, more=("--mxfp4-layers", "moe,router"))
    assert (metric.roofline, metric.bound, metric.bytes_per_token) == (None, None, None)
    assert metric.verdict is Verdict.PASS and not remarks
    shown, _, _ = measured(59.4, identity=BUILD, requantised=[], kv_cache_dtype="bfloat16")
    assert shown.roofline > 1, "asked for, and not what ran"
    assert measured(115.0, more=("--quantization", "fp8"))[0].verdict is Verdict.INVALID


def unreachable(own: profile.Profile) -> list[str]:
    """Gates of configurations that are asked by name, above what any healthy machine allows."""
    config, found = roofline.read_config(own.model.id), []
    for name, each in configurations.judged(own) if config is not None else ():
        for gate in each.performance.gates:
            depth = roofline.depth_of(gate.metric)
            cost = roofline.cost(each, name, depth, config) if depth is not None else None
            if (why := roofline.out_of_reach(each, gate, cost, config, None)) is not None:
                found.append(f"{name}, {gate.metric}: {gate.minimum:g} tok/s. It reads {why}")
    return found


@pytest.mark.parametrize("name", shipped_profiles())
def test_no_gate_of_a_named_configuration_is_above_its_bound(name):
    assert unreachable(load_profile(name)) == []


@pytest.mark.parametrize(("minimum", "faults"), [(52.0, 1), (46.5, 1), (46.0, 0)])
def test_a_gate_that_no_healthy_machine_can_reach_is_found(minimum, faults):
    known = GB10.configurations["cutlass"]
    gates = (known.gates[0].model_copy(update={"minimum": minimum}), *known.gates[1:])
    planted = known.model_copy(update={"gates": gates})
    own = GB10.model_copy(update={"configurations": {**GB10.configurations, "cutlass": planted}})
    found = unreachable(own)
    assert len(found) == faults
    assert all(line.startswith(f"cutlass, tg32@d0: {minimum:g} tok/s") for line in found)


def test_a_target_of_the_projects_is_within_the_bound_of_what_reaches_it():
    own = GB10.judging(None, BUILD)
    for gate in own.performance.gates:
        if (depth := roofline.depth_of(gate.metric)) is not None:
            cost = roofline.cost(own, own.under_test, depth, GPT_OSS)
            least = roofline.Ceiling(cost, own.box.healthy_gb_s.low, 1.0).tok_s
            assert (gate.stretch or gate.target) < least, gate.metric


def test_two_machines_read_half_each_and_wait_for_the_link():
    one = profile.load("sm121-gpt-oss-120b").judging(None, "0.14.0+mxfp4")
    two = profile.load("sm121x2-gpt-oss-120b").judging(None, "0.14.0+mxfp4")
    of_one, of_two = (roofline.cost(own, "mxfp4", 0, GPT_OSS) for own in (one, two))
    assert of_two.total - of_two.router == pytest.approx((of_one.total - of_one.router) / 2)
    assert of_two.router == of_one.router  # it is on both
    assert of_two.link_s == pytest.approx(37 * (2e-6 + 2 * 2880 / 25e9))
    bounds = [roofline.Ceiling(each, 235.0, 1.0).tok_s for each in (of_one, of_two)]
    assert bounds[1] == pytest.approx(1 / (of_two.total / 235e9 + of_two.link_s))
    assert 75.96 < bounds[1] < 2 * bounds[0]  # the best that was published
