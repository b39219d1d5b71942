"""Healthy and sick GB10s, and what the suite must say of each."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

RELEASES = ("0.24.0", "0.28.0", "0.32.0", "0.33.0")
START = ("tests/test_smoke.py", "tests/test_kernel.py")
SPEED = ("tests/test_performance.py",)
CUTLASS = ("--configuration", "cutlass")


@dataclass(frozen=True)
class Case:
    """One of them. ``changes`` are fields of `machine.Machine`."""

    name: str
    arguments: tuple[str, ...]
    verdict: str
    #: What must be in what is said, as regular expressions.
    says: tuple[str, ...] = ()
    release: str = "0.33.0"
    changes: dict[str, Any] = field(default_factory=dict)
    slow: str | None = None


HEALTHY = [
    Case(
        f"{release} {configuration}",
        ("--configuration", configuration),
        "PASS",
        release=release,
        slow=None if (release, configuration) == ("0.33.0", "stock") else "three minutes",
    )
    for release in RELEASES
    for configuration in ("stock", "cutlass")
]

_FLASHINFER = ("--engine-arg=--attention-backend", "--engine-arg=FLASHINFER")
_EAGLE = (
    "--engine-arg=--speculative-config",
    '--engine-arg={"method": "eagle3", "model": "nvidia/gpt-oss-120b-Eagle3-v3", '
    '"num_speculative_tokens": 2}',
)

SICK = [
    Case(
        "stuck clock", SPEED, "INCONCLUSIVE", ("DEGRADED", "70 GB/s", "power"),
        changes={"device": {"bandwidth_gb_s": 70.2, "bandwidth_best_gb_s": 71.0,
                            "matrix_tflop_s": 36.5, "sm_clock_mhz": 799, "power_w": 19.5}},
    ),
    Case(
        "cap at 100 W", SPEED, "INCONCLUSIVE", ("DEGRADED", "60 TFLOP/s"),
        changes={"device": {"matrix_tflop_s": 60.0, "sm_clock_mhz": 1890, "power_w": 100.0,
                            "power_capped": 1.0}},
    ),
    Case(
        "cold caches", START, "NOT_RUN", ("cold",),
        changes={"warm": (), "settings": {"compiles": {
            "batch_prefill_attention_sink_bf16_swa_True_fa2": 12.0}}},
    ),
    Case(
        "JIT out of memory", (*START, *CUTLASS), "FAIL", ("a compiler was killed", "MAX_JOBS"),
        changes={"settings": {"faults": ["jit-out-of-memory"]}},
    ),
    Case(
        "FLASHINFER refused", (*START, *_FLASHINFER), "FAIL",
        ("attention sinks not supported", "TRITON_ATTN"), release="0.24.0",
    ),
    Case(
        "fallback to Marlin", (*START, *CUTLASS), "FAIL",
        ("required FLASHINFER_CUTLASS_MXFP4_MXFP8|flashinfer_cutlass", "MARLIN"),
        changes={"settings": {"faults": ["fallback-to-marlin"]}},
    ),
    Case(
        "silent fallback to Marlin", (*START, *CUTLASS), "FAIL", ("MARLIN",),
        changes={"settings": {"faults": ["silent-marlin"]}},
    ),
    Case(
        "47 tok/s", (*SPEED, *CUTLASS), "FAIL", ("tg32@d0", "52"),
        changes={"rates": {"FLASHINFER_CUTLASS_MXFP4_MXFP8": [[0, 47.0, 4900.0],
                                                              [32768, 27.5, 1500.0]]}},
        slow="two minutes",
    ),
    Case(
        "drift", SPEED, "INCONCLUSIVE|FAIL|INVALID", ("tg32@d0",),
        changes={"settings": {"drift": 0.88}}, slow="two minutes",
    ),
    Case(
        "a foreign variable", START, "FAIL", ("VLLM_FANCY_MOE",),
        changes={"environment": {"VLLM_FANCY_MOE": "1"}},
    ),
    Case(
        "a wrong layout", (*START, *CUTLASS), "FAIL", ("kv_layout", "LBNHC"),
        changes={"settings": {"faults": ["wrong-layout"]}},
    ),
    Case(
        "an old FlashInfer", (*START, *CUTLASS), "FAIL", ("0.6.7", "FlashInfer|flashinfer"),
        changes={"flashinfer": "0.6.7"},
    ),
    Case(
        "a neighbour on the GPU", SPEED, "INCONCLUSIVE", ("GPU", "process"),
        changes={"state": {"process": 1}},
    ),
    Case(
        "an Xid", SPEED, "FAIL", ("Xid 13",),
        changes={
            "settings": {"dies_after_s": 4.0},
            "kernel_log": "NVRM: Xid (PCI:000f:01:00): 13, pid=4711, name=VLLM::EngineCor, "
            "Graphics SM Warp Exception on (GPC 0, TPC 2, SM 0): Illegal Instruction Encoding\n",
        },
    ),
    Case(
        "a disk that fills", START, "FAIL", ("No space left|disk",),
        changes={"settings": {"faults": ["disk-full"]}},
    ),
    Case(
        "a drafter that is missing", (*START, *_EAGLE), "FAIL",
        ("gpt-oss-120b-Eagle3-v3", "the model cannot be found|offline"),
        changes={"settings": {"faults": ["no-drafter"]}},
    ),
]  # fmt: skip
