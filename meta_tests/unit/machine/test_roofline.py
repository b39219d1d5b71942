"""The roofline agrees with the published arithmetic, and detects impossible rates."""

from types import SimpleNamespace

import pytest

from meta_tests.fakes.run_events import give, stand_in, with_events
from sm121.core import errors, profile
from sm121.core.profile import load as load_profile
from sm121.core.profile import shipped as shipped_profiles
from sm121.core.verdict import Invalid
from sm121.evidence.kernel_path import KernelPath
from sm121.machine import roofline
from sm121.measure import measurement
from sm121.performance.box import RunBox
from sm121.performance.recorder import Recorder
from tools.reference import configurations

GPT_OSS = roofline.read_config("openai/gpt-oss-120b")
GB10 = load_profile("sm121-gpt-oss-120b")
BUILD = "0.14.0+mxfp4"


def test_bytes_per_token_of_gpt_oss_120b():
    """gpt-oss-120b reads 5.003 GB per token with attention and head in BF16, and 2.749 GB with all
    layers in MXFP4.

    Both were computed independently from the checkpoint's tensors."""
    read = roofline.traffic(GPT_OSS, depth=0, formats=roofline.formats(GPT_OSS))
    assert read.total == pytest.approx(5.003e9, rel=1e-3)
    assert read.experts == pytest.approx(1.906e9, rel=1e-3)
    assert read.attention == pytest.approx(1.912e9, rel=1e-3)
    assert read.lm_head == pytest.approx(1.158e9, rel=1e-3)
    least = roofline.traffic(GPT_OSS, depth=0, formats=roofline.SMALLEST)
    assert least.total == pytest.approx(2.749e9, rel=1e-3)


def ceiling(bandwidth: float, tolerance: float, depth: int = 0) -> roofline.Ceiling:
    """Return the highest possible rate of gpt-oss-120b with attention and head in BF16."""
    read = roofline.traffic(GPT_OSS, depth=depth, formats=roofline.formats(GPT_OSS))
    return roofline.Ceiling(read, bandwidth, tolerance=tolerance)


@pytest.mark.parametrize(("depth", "tok_s"), [(0, 54.6), (2048, 53.7), (8192, 51.4), (32768, 43.9)])
def test_ceiling_by_depth_at_the_data_sheets_bandwidth(depth, tok_s):
    assert ceiling(273.0, 1.0, depth).tok_s == pytest.approx(tok_s, rel=5e-3)


def test_a_rate_above_the_memory_is_named_with_its_arithmetic():
    gb10 = ceiling(230.0, 1.15)
    assert gb10.broken_by(45.0) is None and gb10.share(45.98) == pytest.approx(1.0, rel=1e-3)
    why = gb10.broken_by(60.0)
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
    """Return the formats of weights and KV cache that a server with the [kernel_path] of the GB10
    profile uses."""
    path = KernelPath(**shown)
    return roofline.served(GPT_OSS, arguments, GB10.kernel_path, path)


ALL = ("--mxfp4-layers", "moe,qkv,o,lm_head", "--kv-cache-dtype", "fp8")


@pytest.mark.parametrize(
    ("name", "identity", "gb", "deep"),
    [
        ("mxfp4", "0.14.0+mxfp4", 2.83, 3.44),
        ("stock", "0.33.0", 5.17, 6.39),
        ("marlin", "0.33.0", 5.17, 6.39),
        ("cutlass", "0.33.0", 5.09, 6.3),
    ],
)
def test_bytes_of_a_configuration_are_of_its_layers_its_cache_and_its_padding(
    name, identity, gb, deep
):
    gb10 = GB10.judging(name, identity)
    for depth, size in ((0, gb), (32768, deep)):
        cost = roofline.cost(gb10, name, depth, GPT_OSS)
        assert cost is not None and cost.total / 1e9 == pytest.approx(size, abs=0.005)


def test_resolved_formats_override_requested_formats():
    every = quantised(*ALL)
    assert (every.qkv, every.o, every.lm_head, every.kv) == (4.25, 4.25, 4.25, 8)
    assert quantised(*ALL, requantised=["lm_head"]) == every, "a log shows no more of them"
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


@pytest.mark.parametrize(
    ("table", "qkv", "o"),
    [
        ('{"linear":"mxfp8","moe":{"activation":"mxfp8"}}', 8.25, 8.25),
        pytest.param(
            '{"linear":{"weight":"fp8_per_block"},"ignore":["lm_head"]}',
            8,
            8,
            id='{"linear":{"weight":"fp8_per_block"},"ignore":("lm_head"',
        ),
        ('{"linear":"mxfp8","ignore":["re:.*o_proj"]}', 8.25, 16),
        ('{"targets":{"re:.*qkv_proj":"mxfp4"}}', 4.25, 16),
        ('{"moe":{"activation":"mxfp8"}}', 16, 16),
    ],
)
def test_quantization_config_does_not_quantise_lm_head(table, qkv, o):
    read = quantised("--quantization-config", table)
    assert (read.qkv, read.o, read.lm_head, read.experts) == (qkv, o, 16, 4.25)


@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param(("--quantization", "fp8"), id="--quantization fp8"),
        pytest.param(("--mxfp4-layers", "moe,router"), id="--mxfp4-layers moe,router"),
        pytest.param(
            ("--quantization-config", "fp8_per_tensor"), id="--quantization-config fp8_per_tensor"
        ),
        pytest.param(
            ("--quantization-config", '{"linear":"a_new_one"}'),
            id='--quantization-config {"linear":"a_new_one"}',
        ),
        pytest.param(
            ("--quantization-config", '{"moe":{"weight":"nvfp4"}}'),
            id='--quantization-config {"moe":{"weight":"nvfp4"}}',
        ),
        pytest.param(
            ("--quantization-config", '{"linear":"mxfp8","ignore":["re:*"]}'),
            id="--quantization-config",
        ),
        pytest.param(("--kv-cache-dtype", "a_new_one"), id="--kv-cache-dtype a_new_one"),
        pytest.param(
            ("--speculative-config", '{"method":"ngram"}'),
            id='--speculative-config {"method":"ngram"}',
        ),
    ],
)
def test_formats_that_are_not_known_are_none_and_no_guess(arguments):
    assert quantised(*arguments) is None


def test_a_layer_that_is_shown_and_not_asked_for_is_not_guessed():
    lm_head = {"requantised": ["lm_head"]}
    assert quantised(**lm_head) is quantised(**lm_head, requantised_is_whole=True) is None
    promised = GB10.kernel_path.model_copy(update={"requantised": ("qkv",)})
    assert roofline.served(GPT_OSS, (), promised, KernelPath()) is None
    experts = roofline.served(GPT_OSS, ("--mxfp4-layers", "moe"), promised, KernelPath())
    assert experts.qkv == 16, "what was asked for beside it counts"


def measured(
    rate, *, bandwidth=235.0, named=None, identity="0.33.0", metric="tg32@d0", managed=True,
    model="openai/gpt-oss-120b", **other
):  # fmt: skip
    """Return a rate on a GB10 with this bandwidth: its metric, the gate's decision, and the
    remarks.

    `other` is the server's kernel path, and `more` contains further arguments of the server."""
    of = GB10.judging(named, identity)
    remarks = []
    started = {of.under_test: SimpleNamespace(arguments=other.pop("more", ()))}
    path = KernelPath(speculative="none", **other)
    engine = SimpleNamespace(path=path, model=model)
    box = SimpleNamespace(state="QUALIFIED", reason="")
    run = stand_in(profile=of, attached=None, replaced=None)
    give(
        run,
        by_name=started if managed else {},
        file=SimpleNamespace(metrics={}, unproven=[], box=box, engine=engine),
        remark=lambda line, **_how: remarks.append(line),
    )
    run_box = RunBox(with_events(run))
    if bandwidth is not None:
        run_box.bounds.device = SimpleNamespace(device="cuda:0", bandwidth_best_gb_s=bandwidth)
    samples = [rate + 0.01 * (n % 3) for n in range(20)]
    text = ""
    fields = {"unit": "tok/s", "higher_is_better": True, "clock": "token_ids"}
    try:
        sampled = measurement.Measurement(name=metric, samples=samples, **fields)
        Recorder(run, box=run_box).record(sampled)
    except (AssertionError, Invalid) as failed:
        text = str(failed)
    return run.record.file.metrics[metric], text, remarks


@pytest.mark.parametrize(
    ("rate", "options", "read", "verdict", "says", "remark"),
    [
        pytest.param(
            33.6,
            None,
            (5174595072, 45.41, 0.7401),
            "FAIL",
            (
                (
                    "it reads 5.17 GB a token: at most 45.4 tok/s on this machine (235 GB/s); "
                    "configuration mxfp4 (--mxfp4-layers moe,qkv,o,lm_head --kv-cache-dtype "
                    "fp8) reads 2.83)"
                ),
            ),
            None,
            id="out of reach",
        ),
        pytest.param(
            33.6,
            {"bandwidth": 218.0},
            (5174595072, 42.13, 0.7978),
            "FAIL",
            ("at most 42.1 tok/s",),
            None,
            id="of a slower machine",
        ),
        pytest.param(
            33.6,
            {"bandwidth": None},
            (5174595072, None, None),
            "FAIL",
            ("at most 45.4 tok/s on the fastest healthy machine",),
            None,
            id="of a machine that is not known",
        ),
        pytest.param(
            20,
            {"bandwidth": 100.0},
            (5174595072, 19.33, 1.0354),
            "FAIL",
            ("; it needs fewer bits, or speculation",),
            None,
            id="of none that reaches it",
        ),
        pytest.param(
            33.6,
            {"managed": False},
            (None, None, None),
            "FAIL",
            None,
            None,
            id="attached without its log",
        ),
        pytest.param(
            33.6,
            {"managed": False, "moe": "MARLIN"},
            (5174595072, 45.41, 0.7401),
            "FAIL",
            ("it reads 5.17 GB a token",),
            None,
            id="attached with its log",
        ),
        # If the gate can be reached, the message does not say that the memory bandwidth is the
        # reason.
        pytest.param(
            44.0,
            {"bandwidth": 273.0},
            (5174595072, 52.76, 0.8342),
            "FAIL",
            None,
            None,
            id="a faster memory",
        ),
        pytest.param(
            25.0,
            {"bandwidth": 218.0, "named": "stock"},
            (5174595072, 42.13, 0.5937),
            "FAIL",
            None,
            None,
            id="a lower gate",
        ),
        pytest.param(
            27.0,
            {"identity": "0.14.0+mxfp4"},
            (2834060544, 82.92, 0.3257),
            "FAIL",
            None,
            None,
            id="a build that reads less",
        ),
        # The share of a rate is computed from the bound for the rate's configuration and depth.
        pytest.param(
            59.4,
            {"identity": "0.14.0+mxfp4"},
            (2834060544, 82.92, 0.7165),
            "PASS",
            None,
            None,
            id="a fast one",
        ),
        pytest.param(
            45.0,
            {"identity": "0.14.0+mxfp4", "metric": "tg32@d32768"},
            (3440399616, 68.31, 0.6589),
            "PASS",
            None,
            None,
            id="a deep one",
        ),
        pytest.param(
            4664.0, {"metric": "pp2048@d0"}, (None, None, None), "PASS", None, None, id="of prefill"
        ),
        # A server may read fewer bytes than requested, or an unknown number. A rate above the
        # highest bound is INVALID.
        pytest.param(
            59.4,
            None,
            (5174595072, 45.41, 1.3082),
            "PASS",
            None,
            "more than the bytes of this configuration allow",
            id="above its bound",
        ),
        pytest.param(
            59.4,
            {"identity": "0.14.0+mxfp4", "requantised": [], "kv_cache_dtype": "bfloat16"},
            (5088075264, 46.19, 1.2863),
            "PASS",
            None,
            "more than the bytes of this configuration allow",
            id="asked for, and not what ran",
        ),
        pytest.param(
            59.4,
            {"more": ["--mxfp4-layers", "moe,router"]},
            (None, None, None),
            "PASS",
            None,
            None,
            id="layers that are not known",
        ),
        pytest.param(
            115.0,
            {"identity": "0.14.0+mxfp4"},
            (2834060544, 82.92, 1.387),
            "INVALID",
            ("above_roofline",),
            None,
            id="above any",
        ),
        pytest.param(
            115.0,
            {"more": ["--quantization", "fp8"]},
            (None, None, None),
            "INVALID",
            ("above_roofline",),
            None,
            id="above any, of an unknown format",
        ),
    ],
)
def test_a_rate_is_held_against_the_bound_of_what_it_reads(
    rate, options, read, verdict, says, remark
):
    """A rate is compared with the bound for the bytes that the server reads.

    Before, 52 tok/s were required of machines that allow 42 to 45, without a message. `read`
    contains the bytes per token, the bound in tok/s, and the share of the bound; `says` is the
    reason why no gate can be reached."""
    metric, text, remarks = measured(rate, **options or {})
    assert [metric.bytes_per_token, metric.bound, metric.roofline] == [*read]
    assert metric.verdict == verdict and bool(text) == (verdict != "PASS")
    if verdict == "FAIL":
        assert (metric.out_of_reach is None) == (not says) == ("it reads" not in text)
        assert metric.out_of_reach is None or f"; it reads {metric.out_of_reach})" in text
    assert all(part in text for part in says or ()), text
    assert [remark in line for line in remarks] == [True] * bool(remark)


@pytest.mark.parametrize(
    ("rate", "named", "second"),
    [
        pytest.param(33.55, None, (30.2, "PASS"), id="a healthy release"),
        pytest.param(25.0, None, (30.2, "FAIL"), id="a release that got slower"),
        pytest.param(25.0, "stock", None, id="a release asked for by name: one gate"),
        pytest.param(53.0, None, None, id="a build that passes: one answer"),
    ],
)
def test_a_release_below_the_gate_is_also_compared_with_releases(rate, named, second):
    bandwidth = 235.0 if rate < 50 else 400.0
    metric, _, _ = measured(rate, named=named, bandwidth=bandwidth)
    own = metric.configuration_gate
    assert (own and (own.minimum, own.verdict.value)) == second
    assert own is None or own.configuration == "stock"


@pytest.mark.parametrize("model", ["openai/gpt-oss-120b", "default", "canary"])
def test_no_name_of_an_attached_model_raises_the_bound(model):
    """The name of an attached model does not raise the bound.

    A small model with an uninformative name is too fast for the profile's model."""
    metric, text, _ = measured(300.0, managed=False, model=model)
    assert metric.verdict == "INVALID" and "above_roofline" in text
    metric, text, _ = measured(45.0, managed=False, model=model)
    assert "above_roofline" not in text


def test_a_gate_above_the_bound_is_reported_without_a_better_configuration():
    gb10 = GB10.judging(None, "0.33.0")
    gate = GB10.gate("tg32@d0")
    read = roofline.cost(gb10, "stock", 0, GPT_OSS)
    each = {n: c.model_copy(update={"arguments": ("--quantization", "x")})
            for n, c in {**gb10.lacking, **gb10.configurations}.items()}  # fmt: skip
    none = gb10.model_copy(update={"configurations": each, "lacking": {}})
    text = roofline.out_of_reach(none, gate, read, GPT_OSS, 235.0)
    assert text is not None and text.endswith("; it needs fewer bits, or speculation")


def unreachable(target: profile.Profile) -> list[str]:
    """Return those gates of configurations, selected by name, that no healthy machine can reach."""
    config = roofline.read_config(target.model.id)
    lines = []
    for name, each in configurations.judged(target) if config is not None else ():
        for gate in each.performance.gates:
            depth = roofline.depth_of(gate.metric)
            cost = roofline.cost(each, name, depth, config) if depth is not None else None
            if (why := roofline.out_of_reach(each, gate, cost, config, None)) is not None:
                required = roofline.required_rate(gate)
                lines.append(f"{name}, {gate.metric}: {required:g} tok/s. It reads {why}")
    return lines


@pytest.mark.parametrize("name", shipped_profiles())
def test_no_gate_of_a_named_configuration_is_above_its_bound(name):
    assert unreachable(load_profile(name)) == []


@pytest.mark.parametrize(("minimum", "faults"), [(52.0, 1), (46.5, 1), (46.0, 0)])
def test_a_gate_that_no_healthy_machine_can_reach_is_found(minimum, faults):
    row = GB10.configurations["cutlass"]
    gates = (row.gates[0].model_copy(update={"minimum": minimum}), *row.gates[1:])
    planted = row.model_copy(update={"gates": gates})
    gb10 = GB10.model_copy(update={"configurations": {**GB10.configurations, "cutlass": planted}})
    lines = unreachable(gb10)
    assert len(lines) == faults
    for line in lines:
        assert line.startswith(f"cutlass, tg32@d0: {minimum:g} tok/s")


def test_each_gate_is_below_the_bound_of_the_mxfp4_build():
    build = GB10.judging(None, BUILD)
    for gate in build.performance.gates:
        if (depth := roofline.depth_of(gate.metric)) is not None:
            cost = roofline.cost(build, build.under_test, depth, GPT_OSS)
            least = roofline.Ceiling(cost, build.box.healthy_gb_s.low, 1.0).tok_s
            farthest = gate.stretch or gate.target
            required = farthest or roofline.required_rate(gate)
            assert required < least, gate.metric


def test_a_time_per_token_is_held_against_the_same_bound():
    gate = next(gate for gate in GB10.performance.gates if gate.metric == "tpot_p50")
    assert roofline.depth_of("tpot_p50") == 0 and roofline.depth_of("itl_p50") is None
    assert roofline.required_rate(gate) == pytest.approx(50)
    stock = GB10.judging("stock", "0.33.0")
    read = roofline.cost(stock, "stock", 0, GPT_OSS)
    why = roofline.out_of_reach(GB10, gate, read, GPT_OSS, None)
    assert why is not None and "at most 45.4 tok/s" in why


def test_two_machines_read_half_each_and_wait_for_the_link():
    one = profile.load("sm121-gpt-oss-120b").judging(None, "0.14.0+mxfp4")
    two = profile.load("sm121x2-gpt-oss-120b").judging(None, "0.14.0+mxfp4")
    of_one, of_two = (roofline.cost(each, "mxfp4", 0, GPT_OSS) for each in (one, two))
    assert of_two.total - of_two.router == pytest.approx((of_one.total - of_one.router) / 2)
    assert of_two.router == of_one.router  # each node has the router
    assert of_two.link_s == pytest.approx(37 * (2e-6 + 2 * 2880 / 25e9))
    bounds = [roofline.Ceiling(each, 235.0, 1.0).tok_s for each in (of_one, of_two)]
    assert bounds[1] == pytest.approx(1 / (of_two.total / 235e9 + of_two.link_s))
    assert 75.96 < bounds[1] < 2 * bounds[0]  # this is the best published rate
