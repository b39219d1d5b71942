"""Starts for the tests of preflight checks, and the machine on which they happen."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from sm121.compilation.jit import FlashInferModules
from sm121.core.engine_settings import Needs
from sm121.engines.preflight import Preflight, PreflightFinding, load_preflight

GOOD_ARGUMENTS = ["--model", "m", "--attention-backend", "TRITON_ATTN", "--moe-backend", "marlin"]

GOOD_ENVIRONMENT = {"VLLM_KV_CACHE_LAYOUT": "HND", "VLLM_LOGGING_LEVEL": "DEBUG"}

MXFP8 = ["--quantization-config", '{"moe":{"activation":"mxfp8"}}']


def found(
    arguments=GOOD_ARGUMENTS, environment=GOOD_ENVIRONMENT, *, flashinfer=None, beside=(), **options
):
    fields = {"arch": "sm121", "needs": Needs(), "directory": Path(), **options}
    if flashinfer is not None:
        fields["modules"] = FlashInferModules(flashinfer, fields["directory"], beside=dict(beside))
    start = Preflight(fields.pop("arch"), arguments, environment, **fields)
    return start.findings()


def checks(findings: list[PreflightFinding]) -> set[str]:
    return {finding.check for finding in findings}


def build(base: Path, arch: str, module: str, version: str = "0.7.2") -> None:
    folder = base / ".cache" / "flashinfer" / version / arch / "cached_ops" / module
    folder.mkdir(parents=True)
    if "attention_sink" in module:
        generated = folder.parents[1] / "generated" / module
        generated.mkdir(parents=True)
        (generated / "batch_prefill_config.inc").write_text("using DTypeKV = nv_bfloat16;\n")
    (folder / f"{module}.so").touch()


JIT = Needs(jit_modules=("experts", "attention_sink_window"), weights_gib=65)

CUTLASS = ["--moe-backend", "flashinfer_cutlass", *MXFP8, "--attention-backend=FLASHINFER"]

#: The available memory of a Spark in GiB. It has room for 65 GiB of weights, a reserve of 4 GiB,
#: and four compile jobs of 9.3 GiB each.
SPARK = 112


def tools(base: Path) -> Path:
    folder = base / "cuda" / "bin"
    if not folder.is_dir():
        folder.mkdir(parents=True)
        for name in ("nvcc", "ninja"):
            (folder / name).touch(0o755)
    return folder


def jit(
    base: Path, arguments: list[str] = CUTLASS, modules=None, cold_ready_within_s=None, **more: str
) -> dict[tuple[str, str], PreflightFinding]:
    environment = {"FLASHINFER_WORKSPACE_BASE": str(base), "PATH": str(tools(base)), **more}
    limits = {} if cold_ready_within_s is None else {"cold_ready_within_s": cold_ready_within_s}
    start = Preflight(
        "sm121", arguments, environment, needs=JIT, directory=base, modules=modules, **limits
    )
    rules = {rule.id for rule in load_preflight().rule}
    return {(f.check, f.severity): f for f in start.findings() if f.check not in rules}


def available(monkeypatch: pytest.MonkeyPatch, gib: float) -> None:
    memory = SimpleNamespace(available=gib * 2**30)
    monkeypatch.setattr("psutil.virtual_memory", lambda: memory)
    monkeypatch.setattr("os.cpu_count", lambda: 20)
    monkeypatch.setattr("sm121.engines.preflight._DEFAULT_NVCC", "/nowhere/nvcc")
