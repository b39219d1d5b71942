"""Healthy and sick GB10s, and what the suite must say of each."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gb10.machine import BUILD, DEVICE, RATES, STATE

RELEASES = ("0.24.0", "0.28.0", "0.32.0", "0.33.0")
START = ("tests/test_smoke.py", "tests/test_kernel.py")
SPEED = ("tests/test_performance.py",)
CUTLASS = ("--configuration", "cutlass")
TAGGED = "0.14.0rc1.dev375+g8409484b4"


@dataclass(frozen=True)
class Case:
    """One of them.

    Attributes:
        arguments: of pytest, beside the plan ``quick``.
        verdict: of the run, as a regular expression.
        says: what must be in what is said, as regular expressions.
        changes: fields of `gb10.machine.Machine`.
        sample: in ``make test`` as well; the others are left to ``make catalogues``.
    """

    name: str
    arguments: tuple[str, ...]
    verdict: str
    says: tuple[str, ...] = ()
    release: str = "0.33.0"
    changes: dict[str, Any] = field(default_factory=dict)
    sample: bool = False


#: The project's own question is asked by default: a release cannot hold its gates.
HEALTHY = [
    Case(
        f"{release} {configuration}",
        ("--configuration", configuration),
        "PASS",
        says=(rf"asked: is it as fast as configuration {configuration} has been",),
        release=release,
    )
    for release in RELEASES
    for configuration in ("stock", "cutlass")
]

#: The effort's build as checkouts and images call it, and one of a commit that nobody knows.
HEALTHY += [
    Case("the build", (), "PASS", release=BUILD, changes={"version": TAGGED}),
    Case(
        "the build's image, cold, behind docker compose", (), "PASS", release=BUILD,
        changes={"version": "0.1.dev12770+g045293d82.d20260810",
                 "settings": {"cold": True, "prefix": "vllm-mxfp4  | "}},
    ),
    Case(
        "the build of an unknown commit, with Ray", (), "PASS", release=BUILD,
        changes={"version": "0.1.dev12999+gfeedfac",
                 "settings": {"worker": "(RayWorkerWrapper pid=4711) "}},
    ),
]  # fmt: skip

#: What the images of others leave in the environment (their Dockerfiles).
HEALTHY += [
    Case(
        "vLLM's image", START, "PASS", sample=True,
        changes={"environment": {
            "VLLM_USAGE_SOURCE": "production-docker-image", "VLLM_IMAGE_TAG": "v0.33.0-aarch64",
            "VLLM_BUILD_COMMIT": "0123abc", "HF_HUB_OFFLINE": "1",
        }},
    ),
    Case(
        "NGC's image", START, "PASS", release="0.24.0",
        changes={"environment": {
            "VLLM_VERSION": "0.24.0+nv26.07", "VLLM_FLASH_ATTN_SRC_DIR": "/opt/flash-attention",
        }},
    ),
    Case(
        "eugr's image, a build of a commit", START, "PASS",
        changes={
            "version": "0.1.dev16581+g0123abc.d20261101",
            "environment": {
                "VLLM_REF": "main", "VLLM_REPO": "https://github.com/vllm-project/vllm",
                "VLLM_BASE_DIR": "/workspace/vllm", "MAX_JOBS": "16",
                "TORCH_CUDA_ARCH_LIST": "12.1a", "FLASHINFER_CUDA_ARCH_LIST": "12.1a",
            },
        },
    ),
]  # fmt: skip

_FLASHINFER = ("--engine-arg=--attention-backend", "--engine-arg=FLASHINFER")
_EAGLE = (
    "--engine-arg=--speculative-config",
    '--engine-arg={"method": "eagle3", "model": "nvidia/gpt-oss-120b-Eagle3-v3", '
    '"num_speculative_tokens": 2}',
)

SICK = [
    Case(
        "stuck clock", SPEED, "INCONCLUSIVE", ("DEGRADED", r"200 GB/s.*70\.2", "799"),
        changes={"device": DEVICE | {"bandwidth_gb_s": 70.2, "bandwidth_best_gb_s": 71.0,
                            "matrix_tflop_s": 36.5, "sm_clock_mhz": 799, "power_w": 19.5}},
    ),
    Case(
        "cap at 100 W", SPEED, "INCONCLUSIVE", ("DEGRADED", "a power cap", r"70 TFLOP/s.*60"),
        changes={"device": DEVICE | {"matrix_tflop_s": 60.0, "sm_clock_mhz": 1890, "power_w": 100.0,
                            "power_capped": 1.0}},
    ),
    Case(
        "cold caches", START, "INCONCLUSIVE", ("cold", "batch_prefill_attention_sink"),
        changes={"warm": (), "profile": Path(__file__).with_name("impatient.toml"),
                 "settings": {"compiles": {
                     "batch_prefill_attention_sink_bf16_swa_True_fa2": 14.0}}},
    ),
    Case(
        "JIT out of memory", (*START, *CUTLASS), "FAIL", ("a compiler was killed", "MAX_JOBS"),
        changes={"settings": {"faults": ["jit-out-of-memory"]}},
    ),
    Case(
        "FLASHINFER refused", (*START, *_FLASHINFER), "FAIL",
        ("attention sinks not supported", "TRITON_ATTN"), release="0.24.0", sample=True,
    ),
    Case(
        "fallback to Marlin", (*START, *CUTLASS), "FAIL",
        ("required FLASHINFER_CUTLASS_MXFP4_MXFP8|flashinfer_cutlass", "MARLIN"),
        changes={"settings": {"faults": ["fallback-to-marlin"]}},
        sample=True,
    ),
    Case(
        "silent fallback to Marlin", (*START, *CUTLASS), "FAIL", ("MARLIN",),
        changes={"settings": {"faults": ["silent-marlin"]}},
    ),
    Case(
        "47 tok/s", (*SPEED, *CUTLASS), "FAIL", ("tg32@d0", "52"),
        changes={"rates": RATES | {"FLASHINFER_CUTLASS_MXFP4_MXFP8": [[2048, 47.0, 5300.0],
                                                              [34816, 27.5, 1500.0]]}},
    ),
    Case(
        "drift", SPEED, "INCONCLUSIVE|FAIL|INVALID", ("tg32@d0",),
        changes={"settings": {"drift": 0.88}},
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
        changes={"state": STATE | {"process": 1}},
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
        "a disk that fills", START, "FAIL", ("a disk is full", "HF_HOME"),
        changes={"settings": {"faults": ["disk-full"]}},
    ),
    Case(
        "a drafter that is missing", (*START, *_EAGLE), "FAIL",
        ("gpt-oss-120b-Eagle3-v3", "the model cannot be found|offline"),
        changes={"settings": {"faults": ["no-drafter"]}},
    ),
]  # fmt: skip
