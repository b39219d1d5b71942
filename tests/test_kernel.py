"""Kernel: the requested kernels ran, and their results are right.

If the kernel path differs from the requested one, the numbers of that configuration are INVALID.
The numerics compare each operation of a kernel provider with the float64 oracle, at gpt-oss's
shapes.
"""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sm121.compilation import flashinfer, libraries, modules, probes
from sm121.compilation.architecture import CodeArchitecture
from sm121.core import interpreter
from sm121.core.unmet import require, require_none
from sm121.core.verdict import NotRun
from sm121.engines import requested
from sm121.evidence import kernel_requirement
from sm121.kernels.cases import BytesCase

pytestmark = [pytest.mark.kernel, pytest.mark.applies_to("cpu", "gpu")]


@pytest.mark.never_waived("the kernel path")
def test_kernel_path_is_the_required_one(paths, server):
    """Attention, MoE and KV layout are as the profile requires, no fallback is used, and the engine
    knows all environment variables. All ranks run the same kernels, and communicate by a transport
    that the profile allows.
    """
    if server.log is None:
        raise NotRun(server.why_no_log)
    wrong = paths.contradictions(server)
    seen = "; ".join(map(str, wrong))
    require(not wrong, "the path of the profile", seen, evidence=server.log)
    if why := paths.unlogged(server):
        raise NotRun(f"attention is not proven: {why}")
    judged = paths.spanned(server)
    if judged is not None and judged.silent:
        raise NotRun("; ".join(judged.silent))


@pytest.mark.never_waived("the kernel path")
def test_kernel_path_of_the_baseline_is_the_required_one(servers, paths, profile):
    """The kernel path of the baseline is as the profile requires."""
    server = servers.last(profile.baseline)
    if server is None:
        raise NotRun("the smoke level starts the baseline, and it was not started")
    wrong = paths.contradictions(server)
    seen = "; ".join(map(str, wrong))
    require(not wrong, "the path of the profile", seen, evidence=server.log)


@pytest.mark.never_waived("the kernel path")
def test_what_was_asked_for_is_what_ran(server, kernel_path):
    """Each value that arguments and variables request is the value that ran. Otherwise all numbers
    are INVALID."""
    if server.configuration is None:
        raise NotRun("what the attached server was started with is not known")
    requested.require_requested_path(server.configuration, kernel_path, server.log)


@pytest.mark.never_waived("the kernel path")
def test_what_was_asked_of_the_baseline_is_what_ran(servers, paths, configurations, profile):
    """Each value that the baseline's arguments and variables request is the value that ran."""
    server = servers.last(profile.baseline)
    if server is None:
        raise NotRun("the smoke level starts the baseline, and it was not started")
    configuration = configurations.managed(profile.baseline)
    requested.require_requested_path(configuration, paths.of(server), server.log)


@pytest.mark.never_waived("the kernel path")
def test_decode_runs_the_kernels_of_its_path(paths, server, kernel_path, decode_profile, profile):
    """During the profiled decode steps, only kernels of the backends in the log run, and quantised
    kernels run for the layers that the configuration quantises.
    """
    required = profile.path_of(server.configuration.name)
    judged = (required, kernel_path, decode_profile, paths.layers)
    wrong = kernel_requirement.kernel_contradictions(*judged)
    require(not wrong, "the path of the profile", "; ".join(wrong), evidence=decode_profile.source)
    if untold := kernel_requirement.undecided_by_kernels(*judged):
        raise NotRun("; ".join(untold))


# Numerics. Each test runs an operation twice, on fresh inputs, into memory poisoned with NaN and
# with a finite value. Inputs must not change. If the provider declares an operation
# deterministic, both results must be equal.

PROPERTY = settings(max_examples=60, deadline=None, derandomize=True, database=None)


def blocks(bytes_per_block: int) -> st.SearchStrategy[tuple[int, int, bytes]]:
    """Return the number of rows, the blocks of 32 in a row, and the bytes of all blocks."""
    sizes = st.tuples(st.integers(0, 5), st.integers(1, 5))
    return sizes.flatmap(
        lambda size: st.tuples(
            st.just(size[0]),
            st.just(size[1]),
            st.binary(
                min_size=size[0] * size[1] * bytes_per_block,
                max_size=size[0] * size[1] * bytes_per_block,
            ),
        )
    )


@pytest.mark.kernel_cases("mxfp4_dequantisation")
def test_mxfp4_decodes_exactly(kernels, case):
    """Each byte with each scale decodes to the exact value. With scale 0xFF, the block is NaN."""
    require_none(kernels.faults(case))


@PROPERTY
@given(blocks(17))
def test_mxfp4_decodes_any_bytes_exactly(kernels, drawn):
    """Random bytes in random shapes decode to the exact values."""
    rows, count, data = drawn
    case = BytesCase("bytes", codec="mxfp4-decode", rows=rows, blocks=count, data=data)
    require_none(kernels.faults(case))


@pytest.mark.kernel_cases("mxfp4_quantisation")
def test_mxfp4_encodes_by_its_rule(kernels, case):
    """All scales follow the declared rule, or any single rule if none is declared. Each element is
    rounded to the nearest value."""
    require_none(kernels.faults(case))


@pytest.mark.kernel_cases("mxfp8_quantisation")
def test_mxfp8_encodes_by_its_rule(kernels, case):
    """MXFP8 is encoded by the rules that apply to MXFP4, but with elements in E4M3."""
    require_none(kernels.faults(case))


@pytest.mark.parametrize("codec", ["mxfp4", "mxfp8"])
@PROPERTY
@given(blocks(64))
def test_any_finite_values_are_encoded_by_the_rule(kernels, codec, drawn):
    """Random bfloat16 values are encoded by the rule, also subnormal values beside very large
    ones."""
    rows, count, data = drawn
    case = BytesCase("values", codec=codec, rows=rows, blocks=count, data=data)
    require_none(kernels.faults(case))


@pytest.mark.kernel_cases("routing")
def test_routing_takes_top_k_then_softmax(kernels, case):
    """Routing takes the k largest of 128 logits, then the softmax over them. Ties may be broken
    either way."""
    require_none(kernels.faults(case))


@pytest.mark.kernel_cases("moe_token_counts")
def test_moe_at_every_token_count(kernels, case):
    """The MoE is right for 0 to 16 tokens, and around the tile edges 32, 128 and 320."""
    require_none(kernels.faults(case))


@pytest.mark.kernel_cases("moe_routing")
def test_moe_under_every_routing(kernels, case):
    """The MoE is right if all tokens go to one expert. The weights of unused experts are NaN and
    must not be read."""
    require_none(kernels.faults(case))


@pytest.mark.kernel_cases("moe_block_scales")
def test_moe_reads_every_block_scale(kernels, case):
    """The MoE reads each block scale. Each token uses one block of 32 of one expert, so that a sum
    cannot hide a wrong scale."""
    require_none(kernels.faults(case))


@pytest.mark.kernel_cases("moe_activation")
def test_moe_activation_is_the_clamped_swiglu(kernels, case):
    """The activation is the clamped SwiGLU beyond its limit and near zero, with and without biases,
    and on strided inputs."""
    require_none(kernels.faults(case))


@pytest.mark.kernel_cases("moe_ranges")
def test_moe_in_the_ranges_of_its_format(kernels, case):
    """If all scales are one, activations beyond E4M3's range saturate. Subnormal activations, and
    sums whose terms nearly cancel, keep their precision. SwiGLU's alpha is 1.702, unrounded."""
    require_none(kernels.faults(case))


@pytest.mark.kernel_cases("mxfp4_linear")
def test_mxfp4_linear(kernels, case):
    """Dense layers with MXFP4 weights (qkv, o, lm_head) are right for 1, 2, 16 and 128 tokens."""
    require_none(kernels.faults(case))


@pytest.mark.kernel_cases("prefill")
def test_prefill_attention(kernels, case):
    """Prefill of ragged batches is right with and without the sliding window of 128 tokens, also
    with an empty sequence.
    """
    require_none(kernels.faults(case))


@pytest.mark.kernel_cases("prefill_sinks")
def test_prefill_attention_sinks(kernels, case):
    """Prefill is right without sinks, with sinks that take nearly all of the attention weight, with
    sinks that take nearly none, and with all of these in one batch."""
    require_none(kernels.faults(case))


@pytest.mark.kernel_cases("prefill_fp8")
def test_prefill_attention_of_an_fp8_cache(kernels, case):
    """Prefill writes keys and values as saturated E4M3 with scale one, and is right with window and
    sinks."""
    require_none(kernels.faults(case))


@pytest.mark.kernel_cases("decode_fp8")
def test_decode_attention_of_an_fp8_cache(kernels, case):
    """Decode is right with the FP8 cache that prefill has written."""
    require_none(kernels.faults(case))


@pytest.mark.kernel_cases("decode")
def test_decode_attention(kernels, case):
    """Decode is right for lengths at the edges of pages and of the window. Values after the last
    token are ignored."""
    require_none(kernels.faults(case))


@pytest.mark.kernel_cases("decode_sinks")
def test_decode_attention_sinks(kernels, case):
    """Decode is right without sinks, and with the kinds of sinks that the prefill tests use."""
    require_none(kernels.faults(case))


@pytest.mark.applies_to("gpu")
@pytest.mark.kernel_cases("graph_replay")
def test_cuda_graph_replay_equals_eager(kernels, case):
    """A replayed CUDA graph uses its current inputs, not those of the capture, and writes the whole
    output."""
    require_none(kernels.faults_of_replay(case))


@pytest.mark.applies_to("gpu")
@pytest.mark.slow("FlashInfer has some hundreds of tactics, ten seconds each")
@pytest.mark.timeout(7200)
@pytest.mark.kernel_cases("tactics")
def test_every_autotune_tactic(kernels, case):
    """Each tactic of the autotuner gives right results. The test runs each tactic in its own
    process, so that it can name the tactic that crashes or hangs."""
    require_none(kernels.faults_of_tactics(case))


# ------------------------------------------------------------------------------------- Benchmarks
# pytest-benchmark's --benchmark-save and --benchmark-compare work. A time is INVALID if the result
# was wrong, or if the call was faster than the memory allows.


@pytest.mark.kernel_benchmarks
def test_kernel_speed(kernels, case, time_kernel):
    """Measure the time of a kernel with a cold cache, in microseconds, and the share of the
    measured memory bandwidth that it reaches."""
    time_kernel(kernels, case)


# ------------------------------------------------------------------------------------ Compilation
# These tests compile for GB10, on any machine with nvcc. They read the machine instructions,
# because nvcc's exit status is 0 even if it replaced an instruction by software or by a trap.


def test_flashinfer_compiles_for_gb10(compilation):
    """FLASHINFER_CUDA_ARCH_LIST resolves to architectures with FP4 instructions."""
    installed = compilation.flashinfer
    compiler = compilation.tools.compiler
    require_none(flashinfer.contradictions(installed, compiler))


@pytest.mark.parametrize("probe", probes.names("probes"))
def test_fp4_instruction(compilation, probe):
    """Code for 120a, 121a, 120f and 121f contains FP4 instructions. For plain 120 and 121, the
    compiler reports an error, or the code emulates FP4."""
    require_none(compilation.wrong_outcomes(probe))


@pytest.mark.parametrize("probe", probes.names("headers"))
def test_flashinfer_header(compilation, probe):
    """FlashInfer's conversion and multiplication of FP4 compile to hardware instructions."""
    require_none(compilation.wrong_outcomes(probe))


@pytest.mark.slow("FlashInfer's modules take up to minutes each to compile")
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("module", modules.names())
def test_flashinfer_module(compilation, module):
    """The machine code of gpt-oss's attention, quantisation and MoE has the required instructions,
    and no trap."""
    chosen = modules.module(module)
    require_none(modules.contradictions(chosen, compilation.flashinfer, compilation.tools))


@pytest.mark.applies_to("gpu")
def test_engine_has_code_for_this_gpu(conformance, configurations, profile):
    """The engine's libraries contain machine code for this GPU."""
    configuration = configurations.managed(profile.under_test)
    imported = interpreter.imports(
        conformance.engine_interpreter,
        libraries.PACKAGES,
        configurations.environment(configuration),
    )
    gpu = CodeArchitecture.parse(profile.arch).number
    require_none(libraries.without_code(configuration.engine, imported.origins, gpu))
