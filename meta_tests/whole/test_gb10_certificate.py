"""Each test that a certificate of the GB10 profile requires can run on a healthy GB10, or has a
reason why it does not apply.

``WAYS`` says, for each fixture or marker of a test, on which servers the test can run."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import operator

import pytest

from meta_tests.folders import ROOT
from sm121.core import profile
from sm121.kernels import protocol, registry, serving
from sm121.run import served
from sm121.session import certification

#: As for the MXFP4 build, because no release fulfils a certificate's requirements.
GB10 = profile.load("sm121-gpt-oss-120b").judging(None, "0.14.0+mxfp4")
#: The operation of the provider that each test of the kernel level needs.
OPERATIONS = {
    "test_mxfp4_decodes_exactly": "mxfp4_dequantize",
    "test_mxfp4_decodes_any_bytes_exactly": "mxfp4_dequantize",
    "test_mxfp4_encodes_by_its_rule": "mxfp4_quantize",
    "test_mxfp8_encodes_by_its_rule": "mxfp8_quantize",
    "test_any_finite_values_are_encoded_by_the_rule": "mxfp8_quantize",
    "test_routing_takes_top_k_then_softmax": "route",
    "test_moe_at_every_token_count": "fused_moe",
    "test_moe_under_every_routing": "fused_moe",
    "test_moe_reads_every_block_scale": "fused_moe",
    "test_moe_activation_is_the_clamped_swiglu": "fused_moe",
    "test_prefill_attention": "prefill_attention",
    "test_prefill_attention_sinks": "prefill_attention",
    "test_decode_attention": "decode_attention",
    "test_decode_attention_sinks": "decode_attention",
    "test_cuda_graph_replay_equals_eager": "fused_moe",
    "test_kernel_speed": "lm_head",
}


#: For each fixture that tests use, how the test can run on a GB10, the part of the profile that
#: it needs, and the reason why it cannot run without this part.
WAYS = {
    "reference": ("the oracle, in BF16",),
    "continuations": (
        "answers within correctness.agreement",
        "correctness.agreement",
        "no correctness.agreement for auto",
    ),
    "measured_history": ("a stored run (--benchmark-autosave)",),
    "matrix": ("the profile's matrix", "matrix", "no [matrix]"),
    "box": ("the box", "box", "no [box]"),
    "compilation": ("nvcc and cuobjdump",),
    "decode_profile": ("the engine's profiler", "engine.profiler", "engine.profiler is off"),
}


def _of_level(level: str) -> dict[str, object]:
    file = ROOT / "tests" / f"test_{level}.py"
    spec = importlib.util.spec_from_file_location(f"level_{level}", file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return {name: value for name, value in vars(module).items() if name.startswith("test_")}


def _judged(judging: profile.Profile, operation: str) -> tuple[str, str | None]:
    """Return which provider tests the kernel of an operation, and the reason if none can test
    it."""
    path = served.expected(judging.path_of(judging.under_test), None)
    (choice,) = serving.choices(judging.engine.name, judging.arch, path, operation)
    if choice.nothing is not None:
        return f"does not apply: {choice.nothing}", None
    if choice.provider is None:
        return operation, choice.why
    row = registry._PROVIDERS[choice.provider]
    provider = getattr(importlib.import_module(f"sm121.kernels.{row.module}"), row.maker)
    if why := protocol.declaration(provider).absent.get(operation):
        return f"does not apply: {why}", None
    has_it = hasattr(provider, operation)
    return f"provider {choice.provider}: {operation}", None if has_it else f"it has no {operation}"


def way(judging: profile.Profile, name: str, test: object) -> tuple[str, str | None]:
    """Return how a test can run, and the reason if it can never run; None without a reason."""
    test = inspect.unwrap(test)
    marks = {mark.name: mark.args for mark in getattr(test, "pytestmark", [])}
    if (ability := marks.get("ability")) and (why := judging.correctness.cannot.get(ability[0])):
        return f"does not apply: {why}", None
    if (operation := OPERATIONS.get(name)) is not None:
        return _judged(judging, operation)
    if name == "test_answers_are_as_long_as_they_should_be":
        band = judging.correctness.mean_answer_tokens
        return "the profile's band", None if band else "no correctness.mean_answer_tokens"
    handle = getattr(test, "hypothesis", None)
    uses = inspect.signature(handle.inner_test if handle else test).parameters
    for fixture in uses:
        if fixture in WAYS:
            how, *needs = WAYS[fixture]
            if not needs:
                return how, None
            field, why = needs
            value = operator.attrgetter(field)(judging)
            is_there = "auto" in value if isinstance(value, dict) else value and value != "off"
            return how, None if is_there else why
    return "the server", None


def ways(judging: profile.Profile) -> dict[str, tuple[str, str | None]]:
    by_test = {}
    for level in judging.certify.levels:
        tests = _of_level(level)
        for test in certification.inventory()[level]:
            name = test.partition("::")[2]
            by_test[test] = way(judging, name, tests[name])
    return by_test


def test_no_test_is_a_gap_for_ever():
    """Each test that a GB10 certificate requires can run, or has a reason why it does not apply.

    Earlier, seven tests could never run: four that compare with the oracle, one that checks the
    length of answers, and two that check the bytes of MXFP4 weights."""
    by_test = ways(GB10)
    gaps = {test: why for test, (_, why) in by_test.items() if why is not None}
    assert not gaps, gaps
    apart = [test for test, (how, _) in by_test.items() if how.startswith("does not apply")]
    parts = ("test_correctness", "_decodes_", "_encodes_by", "test_any_finite_values")
    assert all(any(part in test for part in parts) for test in apart), apart
    of_kernels = [test for test in apart if "test_kernel" in test]
    assert len(of_kernels) == 2, "MXFP4 weights are decoded inside the kernels"


@pytest.mark.parametrize("ability", ["answer_length"])
def test_a_test_that_cannot_run_without_a_reason_is_a_gap(ability):
    """A test that cannot run is a gap if it has no reason."""
    reasons = {k: v for k, v in GB10.correctness.cannot.items() if k != ability}
    correctness = GB10.correctness.model_copy(update={"cannot": reasons})
    by_test = ways(GB10.model_copy(update={"correctness": correctness}))
    assert [why for _, why in by_test.values() if why is not None]


def test_each_gate_is_of_a_metric_that_is_measured():
    depths = {f"@d{depth}" for depth in GB10.performance.depths}
    for name in GB10.configurations:
        for gate in GB10.judging(name).performance.gates:
            at = gate.metric.partition("@")[2]
            assert not at or f"@{at}" in depths, gate.metric
