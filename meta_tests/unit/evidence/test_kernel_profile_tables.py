"""Tables of a real GB10 show the shares, truncated names, layers quantised beyond the checkpoint,
and the variant of the experts."""

import re
from pathlib import Path

import pytest

from meta_tests.unit.evidence.kernel_tables import (
    ALL,
    ATTENTION,
    CUTLASS,
    DENSE,
    DENSE_MARLIN,
    FLASH,
    GATED,
    GB10,
    KERNELS,
    MARLIN,
    NAMES,
    QUANTISE,
    REAL,
    TABLES,
    TABLES_OF_GB10,
    WRITE,
    as_printed,
    gpu,
    judged,
    real,
)
from sm121.evidence.kernel_names import part_of
from sm121.evidence.kernel_path import KernelPath
from sm121.evidence.kernel_profile import KernelProfile, Launches, build_profile
from sm121.evidence.kernel_proof import moe_variant, requantised, with_kernels
from sm121.evidence.profile_files import read_profile


@pytest.mark.parametrize(
    ("name", "shares"),
    [
        pytest.param(
            "unfused",
            {"moe": 0.71, "dense": 0.166, "attention": 0.074, "quantise": 0.005},
            id="unfused, moe 0.71 dense 0.166 attention 0.074 quantise",
        ),
        pytest.param(
            "fused",
            {"moe": 0.909, "dense": 0.053, "attention": 0.023, "quantise": 0.002},
            id="fused, moe 0.909 dense 0.053 attention 0.023 quantise",
        ),
    ],
)
def test_real_tables_have_their_shares(name, shares):
    profiled = real(name)
    for part, share in shares.items():
        assert profiled.parts[part].share == pytest.approx(share, abs=0.003), part
    other = {row.name for row in profiled.kernels if row.part == "other"}
    for row in profiled.kernels:
        if "triton_" in row.name:
            assert row.name in other
    assert not any("compute" in name for name in other)


@pytest.mark.parametrize("prefix", ["", "vllm-1  | "])
@pytest.mark.parametrize("name", TABLES)
def test_printed_table_of_a_log_is_the_same_table(tmp_path, name, prefix):
    log = tmp_path / "server_profiled.log"
    log.write_text(as_printed(TABLES_OF_GB10 / f"{name}_0804_kernels.csv", prefix) + "\n")
    printed = read_profile(log)
    table = real(name)
    calls = [(k.name, k.calls) for k in printed.kernels]
    expected = [(k.name, k.calls) for k in table.kernels]
    assert calls == expected and printed.parts == table.parts
    grouped = [calls for kernel, calls in expected if "GroupProblemShape" in kernel]
    assert name != "unfused" or grouped == [216, 4536], "rows of one cut name stay rows"


WHOLE = []
for names in NAMES.values():
    WHOLE.extend(names)


@pytest.mark.parametrize("name", [*WHOLE, FLASH, DENSE_MARLIN, WRITE, GATED])
def test_cut_name_is_never_of_another_part(name):
    for at in range(60, min(len(name), 120)):
        for end in ("…", "..."):
            assert part_of(name[:at] + end) in (part_of(name), "other"), name[:at]


@pytest.mark.parametrize("table", TABLES)
def test_cut_rows_of_real_tables_are_never_of_another_part(table):
    for row in real(table).kernels:
        for at in range(60, 99):
            assert part_of(row.name.rstrip("…")[:at] + "…") in (row.part, "other")


@pytest.mark.parametrize("name", TABLES)
def test_cut_names_are_untold_and_contradict_nothing(name):
    wrong, untold = judged(REAL, real(name), layers=36)
    assert wrong == []
    assert any(
        re.search(r"Sm120Array.*undecided because \d+ kernel names are truncated", line)
        for line in untold
    )
    path = KernelPath(moe="MARLIN", attention="TRITON_ATTN")
    wrong, _ = judged(path, real(name))
    assert len(wrong) == (3 if name == "fused" else 2), "what the names still tell contradicts"


def decoded(marlin: dict[str, int], steps: int | None = 16, layers: int = 36) -> KernelProfile:
    times = layers * (steps or 16)
    rows = {CUTLASS: 2 * times, QUANTISE: times, ATTENTION: times, WRITE: times, DENSE: times}
    rows |= {KERNELS.get(name, name): calls * (steps or 16) for name, calls in marlin.items()}
    launches = [Launches(name, calls, calls * 1e-5) for name, calls in rows.items()]
    return build_profile("gpu", Path("t.json"), steps, launches)


@pytest.mark.parametrize(
    ("calls", "proven"),
    [
        pytest.param(
            {"DENSE_MARLIN": 73}, ("qkv", "o", "lm_head"), id="DENSE_MARLIN 73, qkv o lm_head"
        ),
        pytest.param(
            {
                "DENSE_MARLIN": 37,
                (
                    "void marlin::Marlin<(long)1125899906909960, (long)562949953487106>(int4 "
                    "const*)2"
                ): 36,
            },
            ("qkv", "o", "lm_head"),
            id="DENSE_MARLIN 37 void",
        ),
        pytest.param(
            {"DENSE_MARLIN": 72, "BF16": 1}, ("qkv", "o"), id="DENSE_MARLIN 72 BF16 1, qkv o"
        ),
        pytest.param(
            {"DENSE_MARLIN": 1, "BF16": 72}, ("lm_head",), id="DENSE_MARLIN 1 BF16 72, lm_head"
        ),
        pytest.param({"BF16": 73}, (), id="BF16 73"),
        pytest.param({"DENSE_MARLIN": 36, "BF16": 37}, None, id="DENSE_MARLIN 36 BF16 37"),
        pytest.param({"DENSE_MARLIN": 37, "BF16": 36}, None, id="DENSE_MARLIN 37 BF16 36"),
        pytest.param({"DENSE_MARLIN": 71}, None, id="DENSE_MARLIN 71"),
        pytest.param(
            {"void cutlass_scaled_mm_fp8<...>": 73}, None, id="void cutlass_scaled_mm_fp8<...> 73"
        ),
        pytest.param(
            {"BF16": 36, "void cutlass_scaled_mm_fp8<...>": 37},
            None,
            id="BF16 36 void cutlass_scaled_mm_fp8<...> 37",
        ),
        pytest.param({}, None, id="nothing"),
    ],
)
def test_calls_a_token_prove_the_layers(calls, proven):
    proven = None if proven is None else [*proven]
    assert requantised(decoded(calls), 36) == proven
    assert requantised(decoded({n: c * 24 // 36 for n, c in calls.items()}, layers=24), 36) is None
    unmarked = decoded(calls, steps=None)
    if proven not in (None, []):
        assert requantised(unmarked, 36) is None, "prefill may be in it"
    assert requantised(unmarked.model_copy(update={"decoding": True}), 36) == proven


def test_prefill_among_marked_steps_proves_nothing():
    profiled = decoded({DENSE_MARLIN: 73})
    assert requantised(profiled.model_copy(update={"steps": 8}), 36) is None


@pytest.mark.parametrize("name", TABLES)
def test_real_tables_prove_the_layers(name):
    path = with_kernels(KernelPath(requantised=["lm_head"]), real(name), 36)
    assert path.requantised == ALL
    assert "calls of dense Marlin in 66 passes of 36 layers" in path.evidence["requantised"]
    assert path.also == {}
    assert with_kernels(KernelPath(), real(name), None).requantised is None
    wrong = with_kernels(KernelPath(requantised=["router"]), real(name), 36)
    assert wrong.also == {"requantised": ["router"]}


# `dropped` contains the numbers of calls of the dense Marlin kernels that are removed.
@pytest.mark.parametrize(
    ("dropped", "proven"),
    [
        # only the rows of prefill
        pytest.param((2298, 2232), None, id="2298 2232"),
        # qkv or o, but the table does not show which of them
        pytest.param((2232,), None, id="2232"),
        # the whole table
        pytest.param((), ("qkv", "o", "lm_head"), id="qkv o lm_head"),
    ],
)
def test_real_table_with_fewer_layers_quantised(dropped, proven):
    fused = real("fused")
    rows = [k for k in fused.kernels if not ("marlin::" in k.name and k.calls in dropped)]
    layers = requantised(fused.model_copy(update={"kernels": rows}), 36)
    assert layers == (proven and [*proven])


def test_real_table_without_lm_head():
    unfused = real("unfused")
    rows = []
    for k in unfused.kernels:
        if k.calls == 2298:
            rows.append(k.model_copy(update={"calls": 2232}))
        else:
            rows.append(k)
    assert requantised(unfused.model_copy(update={"kernels": rows}), 36) == ["qkv", "o"]
    for number, row in enumerate(rows):  # a long time belongs to prefill
        if row.calls == 2232 and row.part == "attention":
            rows[number] = row.model_copy(update={"seconds": 100.0})
    assert requantised(unfused.model_copy(update={"kernels": rows}), 36) is None


def test_variant_is_named_by_whole_names_and_helpers():
    assert moe_variant(gpu(MARLIN, ATTENTION)) is None
    assert moe_variant(real("fused")) == "fused"
    assert moe_variant(real("unfused")) is None, "Gated may be in what was cut"
    for logged, other, ran in (("unfused", GATED, "fused"), ("fused", ATTENTION, "unfused")):
        profiled = gpu(CUTLASS, other)
        assert moe_variant(profiled) == ran
        path = with_kernels(KernelPath(moe_variant=logged), profiled, 36)
        assert (path.moe_variant, path.also) == (ran, {"moe_variant": [logged]})
        assert with_kernels(KernelPath(moe_variant=ran), profiled, 36).also == {}


MXFP4 = GB10.model_copy(update={"requantised": tuple(ALL), "moe_variant": ("unfused",)})


@pytest.mark.parametrize(
    ("calls", "wrong", "untold"),
    [
        pytest.param({"DENSE_MARLIN": 73}, "", "", id="DENSE_MARLIN 73"),
        pytest.param(
            {"DENSE_MARLIN": 72, "BF16": 1},
            "requantised: expected qkv, o, lm_head, got .*1152 calls",
            "",
            id="DENSE_MARLIN 72 BF16 1, requantised: required qkv, o",
        ),
        pytest.param(
            {"BF16": 73},
            "requantised: .*0 calls of dense Marlin in 16 passes.*no layer",
            "",
            id="BF16 73, requantised: .*0 calls of dense Marlin in 16",
        ),
        pytest.param(
            {"DENSE_MARLIN": 36, "BF16": 37},
            "",
            "requantised: .*do not show",
            id="DENSE_MARLIN 36 BF16 37, requantised: .*do not show",
        ),
        pytest.param(
            {"DENSE_MARLIN": 73, "GATED": 36},
            "moe_variant: expected unfused, got .*BlockScaledGated",
            "",
            id="DENSE_MARLIN 73 GATED 36, moe_variant: required",
        ),
    ],
)
def test_configuration_is_held_to_layers_and_variant(calls, wrong, untold):
    judgement = judged(REAL, decoded(calls), MXFP4, 36)
    for lines, expected in zip(judgement, (wrong, untold), strict=True):
        assert bool(lines) is bool(expected), lines
        assert all(re.search(expected, line) for line in lines), lines
