"""Healthy and sick GB10s, and what the suite must say of each."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gb10.machine import BUILD, DEVICE, RATES, STATE

RELEASES = ("0.24.0", "0.28.0", "0.32.0", "0.33.0")
START = ("tests/test_smoke.py", "tests/test_kernel.py")
SPEED = ("tests/test_performance.py",)
CUTLASS = ("--configuration", "cutlass")
RATE_GATES = r"tests/test_performance\.py::test_(decode|prefill)_rate\[d\d+-?\w*\]"
TAGGED = "0.14.0rc1.dev375+g8409484b4"


@dataclass(frozen=True)
class Case:
    """One of them. `arguments`: of pytest, beside the plan ``quick``; `served`: arguments of a
    server that its owner started, and that the suite is attached to; `tail`: what was in the file
    of its log before; `verdict`: of the run, as a regular expression; `says`: what must be in what
    is said, as regular expressions; `alone`: what the tests that fail are called, as a regular
    expression on all of them; `changes`: fields of `gb10.machine.Machine`; `sample`: in ``make
    test`` as well, since its server refuses to start, and no vLLM has to answer."""

    name: str
    arguments: tuple[str, ...]
    verdict: str
    says: tuple[str, ...] = ()
    release: str = "0.33.0"
    changes: dict[str, Any] = field(default_factory=dict)
    sample: bool = False
    served: tuple[str, ...] | None = None
    tail: str = ""
    alone: str | None = None


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
        "the build of an unknown commit, with Ray", START, "PASS", release=BUILD,
        changes={"version": "0.1.dev12999+gfeedfac",
                 "settings": {"worker": "(RayWorkerWrapper pid=4711) "}},
    ),
]  # fmt: skip

#: What the images of others leave in the environment (their Dockerfiles).
HEALTHY += [
    Case(
        "vLLM's image", START, "PASS",
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
                     "batch_prefill_attention_sink_bf16_swa_True_fa2": 28.0}}},
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
    ),
    Case(
        "silent fallback to Marlin", (*START, *CUTLASS), "FAIL", ("MARLIN",),
        changes={"settings": {"faults": ["silent-marlin"]}},
    ),
    Case(
        "24 tok/s", (*SPEED, *CUTLASS), "FAIL", ("tg32@d0", "26.1"),
        changes={"rates": RATES | {"FLASHINFER_CUTLASS_MXFP4_MXFP8": [[2048, 24.0, 4663.7],
                                                              [34816, 20.0, 1398.8]]}},
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

#: Each release, asked for 52: the gates of the rates fail, and nothing else.
SICK += [
    Case(f"{release}, asked for 52", (), "FAIL", (r"tg32@d0 >= 52 tok/s; seen: 3",),
         release=release, alone=RATE_GATES)
    for release in RELEASES
]  # fmt: skip

#: How the effort's build is started (its start.sh), with the profile's context.
_NO_MEMORY = (
    "NVRM: nvCheckOkFailedNoLog: Check failed: Out of memory [NV_ERR_NO_MEMORY] (0x00000051) "
    "returned from _memdescAllocInternal(pMemDesc) @ mem_desc.c:1359\n"
)
_OWN = (
    "--quantization", "mxfp4", "--mxfp4-backend", "CUTLASS",
    "--mxfp4-layers", "moe,qkv,o,lm_head", "--attention-backend", "FLASHINFER",
    "--kv-cache-dtype", "fp8", "--max-num-seqs", "2", "--max-model-len", "131072",
    "--max-num-batched-tokens", "8192", "--enable-prefix-caching",
)  # fmt: skip
_CUTLAS = tuple("CUTLAS" if word == "CUTLASS" else word for word in _OWN)
_ANOTHER = "".join(
    f"(APIServer pid=47328) INFO 02-09 07:{at // 60:02}:{at % 60:02} [loggers.py:257] Engine 000: "
    "Avg prompt throughput: 0.0 tokens/s, Avg generation throughput: 26.8 tokens/s, Running: 1 "
    "reqs, Waiting: 0 reqs, GPU KV cache usage: 0.2%, Prefix cache hit rate: 2.4%\n"
    for at in range(3600)
)


def _build(name: str, arguments: tuple[str, ...], verdict: str, says: tuple[str, ...],
           served: tuple[str, ...] | None = None, tail: str = "", sample: bool = False,
           kernel_log: str = "", **settings: Any) -> Case:  # fmt: skip
    changes = {"version": TAGGED, "settings": settings, "kernel_log": kernel_log}
    return Case(name, arguments, verdict, says, BUILD, changes, sample, served, tail)


SICK += [
    _build("fused, FlashInfer 6c7a32f", (*START, *SPEED), "FAIL",
           ("moe_variant: required unfused, seen fused",), cold=True, faults=["fused"]),
    _build("fused, FlashInfer 6c7a32f, warm", SPEED, "FAIL",
           (r"tg32@d0 >= 52 tok/s; seen: 2[67]\b", r"pp2048@d0 >= 4500 tok/s; seen: 1[01]"),
           faults=["fused"]),
    _build("fused, FlashInfer 8117a7b, warm", SPEED, "FAIL",
           (r"pp2048@d0 >= 4500 tok/s; seen: 4[123]",), faults=["fused-before"]),
    _build("--mxfp4-backend CUTLAS", (*START, "--engine-arg=--mxfp4-backend=CUTLAS"), "FAIL",
           ("no such --mxfp4-backend", "CUTLASS, MARLIN or TRITON"), sample=True),
    _build("another started it with CUTLAS", START, "FAIL", ("Unknown backend", "Using auto"),
           served=_CUTLAS, faults=["misspelt"]),
    _build("lm_head in BF16", (*START, *SPEED), "FAIL",
           ("must see .*lm_head quantized", "tg32@d0: kernel_path: .*lm_head"),
           faults=["lm-head-in-bf16"]),
    _build("Marlin's experts", (*START, "--engine-arg=--mxfp4-backend=MARLIN"), "FAIL",
           ("moe: required FLASHINFER_CUTLASS_MXFP4_MXFP8, seen MARLIN",)),
    _build("KV cache in BF16", START, "FAIL",
           ("kv_cache_dtype=auto",), faults=["kv-in-bf16"]),
    _build("--enforce-eager", (*START, "--engine-arg=--enforce-eager"), "FAIL",
           ("cuda_graphs: required True, seen False",)),
    _build("two clients at once", SPEED, "INVALID", ("other_clients: ",),
           faults=["another-on-it"], tenant_rate=30.0),
    # It is healthy: only its log proves nothing, and that is said.
    _build("another run's tail behind its log", START, "PASS",
           ("not proven: kernel path: .*not proven to be this server's",),
           served=_OWN, tail=_ANOTHER),
    _build("an illegal access in a graph", SPEED, "FAIL",
           ("an illegal memory access was encountered",), dies_after_s=20.0, death="graph-replay"),
    _build("NV_ERR_NO_MEMORY, and it dies", SPEED, "FAIL",
           ("oom: the NVIDIA driver found no memory",),
           kernel_log=_NO_MEMORY, dies_after_s=6.0, death="silent"),
    _build("NV_ERR_NO_MEMORY, and it lives", START, "FAIL",
           ("oom: the NVIDIA driver found no memory",), kernel_log=_NO_MEMORY),
]  # fmt: skip
