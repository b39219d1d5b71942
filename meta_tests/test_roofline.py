"""The roofline agrees with the published arithmetic, and calls the impossible impossible."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from sm121.core.errors import Sm121Error
from sm121.core.profile import load as load_profile
from sm121.measure import roofline
from sm121.measure.measurement import Measurement
from sm121.performance.box import RunBox
from sm121.performance.recorder import Recorder

GPT_OSS = roofline.read_config("openai/gpt-oss-120b")


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
    with pytest.raises(Sm121Error, match="hidden_size"):
        roofline.traffic({}, depth=0, formats=roofline.formats({}))


def gate_that_fails(bandwidth: float, rate: float, configuration: str = "cutlass") -> str:
    """What is said at the gate of 52 tok/s, on a GB10 of that bandwidth."""
    own = load_profile("sm121-gpt-oss-120b").judging(configuration)
    path = SimpleNamespace(speculative="none")
    harness = SimpleNamespace(
        profile=own,
        configurations={},
        attached=None,
        file=SimpleNamespace(
            metrics={},
            unproven=[],
            box=SimpleNamespace(state="QUALIFIED", reason=""),
            engine=SimpleNamespace(path=path, model="openai/gpt-oss-120b"),
        ),
        save=lambda: None,
        remark=lambda *_said, **_how: None,
    )
    device = SimpleNamespace(device="cuda:0", bandwidth_best_gb_s=bandwidth)
    box = RunBox(harness, before=SimpleNamespace(device=device))
    samples = [rate + 0.01 * (at % 3) for at in range(20)]
    measured = Measurement(
        name="tg32@d0", unit="tok/s", samples=samples, higher_is_better=True, clock="token_ids"
    )
    with pytest.raises(AssertionError) as failed:
        Recorder(harness, box=box).record(measured)
    return str(failed.value)


def test_the_gate_says_why_it_cannot_be_reached():
    """218 to 235 GB/s allow 43.6 to 47.0 tok/s with dense layers in BF16: 52 were asked for, and
    nothing was said."""
    said = gate_that_fails(235.0, 44.0)
    assert "52 tok/s cannot be reached with these bytes: a token reads 5.00" in said
    assert "235 GB/s were measured, so that 47.0 tok/s are the most" in said
    assert "fewer bits, or speculation" in said
    assert "43.6 tok/s are the most" in gate_that_fails(218.0, 40.0)


def test_a_gate_within_reach_blames_nothing_else():
    assert "cannot be reached" not in gate_that_fails(273.0, 44.0)
    assert "cannot be reached" not in gate_that_fails(218.0, 25.0, "stock")
