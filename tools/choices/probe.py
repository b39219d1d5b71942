"""Run inside a release of vLLM, and report which arguments it accepts and which kernels it chooses
on a GB10.

This script runs in its own process with the release first on ``sys.path``. It reads one JSON object
from standard input, and writes one line of JSON for each case. It replaces the machine (NVML,
``torch.cuda``, the network) and the compiled code (the ``.so`` files of the wheel); all decisions
are made by the release's own code.
"""

import functools
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import io
import json
import logging
import os
import sys
import tempfile
import traceback
import types
from contextlib import redirect_stderr
from typing import Any

import torch
import torch._dynamo
import torch._inductor.utils  # returns for which architectures the real torch was built
from torch.overrides import TorchFunctionMode

#: The properties of a GB10; docs/tables/choices.md has the sources.
CAPABILITY = (12, 1)
NAME = "NVIDIA GB10"
MEMORY = int(119.6 * 2**30)
CUDA = "13.0"
MULTIPROCESSORS = 48
UUID = "GPU-00000000-0000-0000-0000-000000000000"


#: The functions of the compiled extensions, with their results in a wheel built for 12.0 and CUDA
#: 13.
OPERATORS = (
    ("_C", "cutlass_scaled_mm_supports_fp8", True),
    ("_C", "cutlass_scaled_mm_supports_block_fp8", True),
    ("_C", "cutlass_scaled_mm_supports_fp4", True),
    ("_C", "cutlass_group_gemm_supported", False),
    ("_C", "mxfp4_experts_quant_supported", True),
    ("_moe_C", "moe_permute_unpermute_supported", True),
)


#: These modules are imported before the cases fork, to save time.
AHEAD = (
    "v1.attention.backends.flashinfer",
    "v1.attention.backends.triton_attn",
    "v1.attention.backends.flash_attn",
    "v1.attention.backends.flex_attention",
    "model_executor.layers.fused_moe.oracle.mxfp4",
    "model_executor.layers.fused_moe.experts.marlin_moe",
    "model_executor.layers.fused_moe.experts.flashinfer_cutlass_moe",
    "model_executor.layers.fused_moe.experts.gpt_oss_triton_kernels_moe",
    "model_executor.layers.fused_moe.experts.trtllm_mxfp4_moe",
    "model_executor.layers.fused_moe.experts.cutlass_moe",
    "model_executor.model_loader.utils",
)


class _Compiled(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Import empty modules in place of the wheel's compiled extensions."""

    def __init__(self, names: list[str]) -> None:
        self.names = set(names)
        self.used: list[str] = []

    def find_spec(self, name: str, *_: Any) -> Any:
        if name not in self.names:
            return None
        return importlib.machinery.ModuleSpec(name, self)

    def create_module(self, _: Any) -> Any:
        return None

    def exec_module(self, module: types.ModuleType) -> None:
        self.used.append(module.__name__)


def _stand_in_torch() -> None:
    """Replace ``torch.cuda`` by functions that answer as on a GB10, and never initialise CUDA."""
    properties = types.SimpleNamespace(
        name=NAME,
        major=CAPABILITY[0],
        minor=CAPABILITY[1],
        total_memory=MEMORY,
        multi_processor_count=MULTIPROCESSORS,
        is_integrated=1,
        is_multi_gpu_board=0,
        warp_size=32,
        shared_memory_per_block_optin=101376,
        shared_memory_per_multiprocessor=102400,
        max_threads_per_multi_processor=1536,
        regs_per_multiprocessor=65536,
        L2_cache_size=25165824,
        uuid=UUID,
        gcnArchName="",
    )
    cuda = torch.cuda
    torch.version.cuda = CUDA
    torch._C._cuda_getCurrentRawStream = lambda _: 0
    answers = {
        "is_available": True,
        "_is_compiled": True,
        "device_count": 1,
        "_device_count_nvml": 1,
        "current_device": 0,
        "is_initialized": False,
        "get_device_capability": CAPABILITY,
        "get_device_name": NAME,
        "get_device_properties": properties,
        "_lazy_init": None,
        "mem_get_info": (MEMORY, MEMORY),
        "is_bf16_supported": True,
        "set_device": None,
        "get_arch_list": ["sm_80", "sm_90", "sm_100", "sm_120", "compute_120"],
        "is_current_stream_capturing": False,
        "empty_cache": None,
        "synchronize": None,
        "current_stream": types.SimpleNamespace(cuda_stream=0),
    }
    for name, answer in answers.items():
        setattr(cuda, name, lambda *_, answer=answer, **__: answer)
    cuda.Stream = type("Stream", (), {})  # 0.14 creates one when it creates its experts
    accelerator = torch.accelerator
    accelerator.is_available = lambda: True
    accelerator.device_count = lambda: 1
    accelerator.current_device_index = lambda: 0
    accelerator.set_device_index = lambda *_: None
    accelerator.current_accelerator = lambda *_, **__: torch.device("cuda")


def _stand_in_operators() -> None:
    """Replace the functions that report what vLLM's compiled extensions support."""
    for space, name, answer in OPERATORS:
        setattr(getattr(torch.ops, space), name, lambda *_, answer=answer: answer)


class _InFront(importlib.machinery.PathFinder):
    """An import hook that loads all modules of the release's packages from the release's folder,
    and never from another release.
    """

    packages: list[str] = []  # noqa: RUF012 - one process, one release
    front: list[str] = []  # noqa: RUF012

    @classmethod
    def find_spec(cls, fullname: str, path: Any = None, target: Any = None) -> Any:
        own = cls.front if fullname in cls.packages else path
        return importlib.machinery.PathFinder.find_spec(fullname, own, target)


class _Nvml(importlib.abc.MetaPathFinder):
    """The release's bindings of NVML, which answer as on a GB10: the GPU has no memory of its own
    ([N/A]).
    """

    def find_spec(self, name: str, path: Any = None, *_: Any) -> Any:
        if name != "vllm.third_party.pynvml":
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        if spec is not None and spec.loader is not None:
            load = spec.loader.exec_module

            def exec_module(module: types.ModuleType) -> None:
                load(module)
                self.answer(module)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec

    @staticmethod
    def answer(nvml: Any) -> None:
        def unsupported(*_: Any) -> Any:
            raise nvml.NVMLError(nvml.NVML_ERROR_NOT_SUPPORTED)

        answers = {
            "nvmlInit": None,
            "nvmlShutdown": None,
            "nvmlDeviceGetCount": 1,
            "nvmlDeviceGetHandleByIndex": "GB10",
            "nvmlDeviceGetHandleByUUID": "GB10",
            "nvmlDeviceGetIndex": 0,
            "nvmlDeviceGetCudaComputeCapability": CAPABILITY,
            "nvmlDeviceGetName": NAME,
            "nvmlDeviceGetUUID": UUID,
        }
        for name, answer in answers.items():
            setattr(nvml, name, lambda *_, answer=answer, **__: answer)
        for name in ("MemoryInfo", "NumaNodeId", "CpuAffinity"):
            setattr(nvml, f"nvmlDeviceGet{name}", unsupported)


def _stand_in_network(online: bool) -> None:
    """Replace the access to NVIDIA's store of kernels.

    `online` says whether the store answers or the network is down.
    """
    import requests

    def get(*_: Any, **__: Any) -> Any:
        if not online:
            raise requests.exceptions.ConnectionError("no network")
        return types.SimpleNamespace(status_code=200, ok=True, text="")

    requests.get = get


#: The log lines of the release, in order.
LINES: list[dict[str, str]] = []


def _listen() -> None:
    """Record every log line of the release, whichever log handlers the release installs."""

    def handle(_: logging.Logger, record: logging.LogRecord) -> None:
        line = {"level": record.levelname, "file": record.filename, "text": record.getMessage()}
        if record.levelno >= logging.INFO and record.name.startswith("vllm") and line not in LINES:
            LINES.append(line)

    logging.Logger.handle = handle  # type: ignore[method-assign, assignment]


def _step(result: dict[str, Any], name: str, function: Any) -> Any:
    """Run one step; record a refusal with the release's message and the place in its code."""
    said = io.StringIO()
    try:
        with redirect_stderr(said):
            return function()
    except SystemExit:
        text = said.getvalue().strip().splitlines()
        result["refused"] = {"by": name, "words": text[-1] if text else "", "at": "argparse"}
    except Exception as error:  # noqa: BLE001 - any exception may be a refusal; it is stored
        frames = traceback.extract_tb(error.__traceback__)
        own = [f for f in frames if "/vllm/" in f.filename] or list(frames)
        at = f"{own[-1].filename.rsplit('/vllm/', 1)[-1]}:{own[-1].lineno}"
        result["refused"] = {
            "by": name,
            "words": f"{type(error).__name__}: {error}",
            "at": at,
            "trace": traceback.format_exc(),
        }
    return None


def _cli_args() -> Any:
    for module in ("common", "launchers", "openai"):  # vLLM since 0.33, since 0.29, and before
        try:
            return importlib.import_module(f"vllm.entrypoints.{module}.cli_args")
        except ModuleNotFoundError:
            continue
    raise SystemExit("this vLLM has its arguments in none of the places known")


@functools.cache
def _parser() -> Any:
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    return _cli_args().make_arg_parser(FlexibleArgumentParser())


def _parse(arguments: list[str]) -> Any:
    """Run the release's own parser, and its check of arguments that contradict each other."""
    parsed = _parser().parse_args(arguments)
    _cli_args().validate_parsed_serve_args(parsed)
    return parsed


def _configure(parsed: Any) -> Any:
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.usage.usage_lib import UsageContext

    return AsyncEngineArgs.from_cli_args(parsed).create_engine_config(
        usage_context=UsageContext.OPENAI_API_SERVER
    )


class _OnMeta(TorchFunctionMode):  # type: ignore[misc]
    """Create tensors for the GPU on the meta device, without content."""

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if "cuda" in str(kwargs.get("device", "")):
            kwargs["device"] = "meta"
        return function(*args, **kwargs)


def _build(config: Any) -> Any:
    """Build the release's own model without weights: each layer chooses its kernel when it is
    created."""
    from vllm.config import CompilationMode, set_current_vllm_config
    from vllm.distributed import init_distributed_environment, initialize_model_parallel
    from vllm.model_executor.model_loader.utils import initialize_model

    config.compilation_config.mode = CompilationMode.NONE  # compiled functions are not called
    with set_current_vllm_config(config):
        store = tempfile.mkstemp()[1] + ".store"
        init_distributed_environment(1, 0, f"file://{store}", 0, "gloo")
        initialize_model_parallel(1, 1)
        torch.set_default_dtype(torch.bfloat16)
        with torch.device("meta"), _OnMeta():
            model = initialize_model(config)
        from vllm.model_executor.model_loader import base_loader

        getattr(base_loader, "log_online_quantization", lambda _: None)(config)
        return model


def _chosen(model: Any) -> dict[str, Any]:
    """Return the names of the attention backends and of the experts of all layers."""
    attention: set[str] = set()
    experts: set[str] = set()
    cache: set[Any] = set()
    for module in model.modules():
        backend = getattr(module, "attn_backend", None)
        if backend is not None and hasattr(backend, "get_name"):
            attention.add(backend.get_name())
        kind = getattr(getattr(module, "quant_method", None), "mxfp4_backend", None)
        if kind is not None:
            value = getattr(kind, "value", kind)  # a number in 0.14
            experts.add(value if isinstance(value, str) else kind.name)
        cache |= {getattr(module, "kv_cache_dtype", None)} - {None, "auto"}
    return {
        "attention": sorted(attention),
        "experts": sorted(experts),
        "linear": _quantised(model),
        "kv_cache_dtype": sorted(cache),
    }


def _quantised(model: Any) -> list[str]:
    """Return the dense layers that are quantised beyond the checkpoint, each with its kernel."""
    from vllm.model_executor.layers.linear import LinearBase

    found: set[str] = set()
    for name, module in model.named_modules():
        method = getattr(module, "quant_method", None)
        kind = type(method).__name__
        if name.endswith("lm_head") or isinstance(module, LinearBase):
            own = []
            for v in vars(method).values():
                if "Kernel" in type(v).__name__:
                    own.append(type(v).__name__)
            if not kind.startswith("Unquantized"):
                found.add(" ".join([name.rsplit(".", 1)[-1], *(own or [kind])]))
    return sorted(found)


def _layout(config: Any, model: Any, asked: str | None) -> str:
    """Return the layout of the KV cache, computed by the release's own function."""
    from vllm.config import set_current_vllm_config
    from vllm.v1.attention.backends import utils

    os.environ.pop("VLLM_KV_CACHE_LAYOUT", None)
    if asked is not None:
        os.environ["VLLM_KV_CACHE_LAYOUT"] = asked
    backends = set()
    for m in model.modules():
        if hasattr(getattr(m, "attn_backend", None), "get_name"):
            backends.add(m.attn_backend)
    with set_current_vllm_config(config):
        if hasattr(utils, "resolve_kv_cache_layout"):  # 0.29 and later
            config.cache_config.kv_cache_layout = None
            names = []
            for item in utils.get_supported_kv_cache_layouts(backends):
                names.append(item.name)
            return str(utils.resolve_kv_cache_layout(config, [names]).name)
        utils.get_kv_cache_layout.cache_clear()
        return str(utils.get_kv_cache_layout())


def _forget() -> None:
    """Clear caches that were filled in another environment, while modules were imported."""
    for name, module in list(sys.modules.items()):
        if name.startswith("vllm") and not name.startswith("vllm.engine"):
            for value in list(vars(module).values()):
                if isinstance(value, functools._lru_cache_wrapper):
                    value.cache_clear()


def _run(case: dict[str, Any]) -> dict[str, Any]:
    """Parse the arguments, configure, build the model and resolve the layouts, until the release
    refuses a step.
    """
    result: dict[str, Any] = {}
    os.environ.update(case["environment"])
    _stand_in_network(case["online"])
    _forget()
    _listen()
    arguments = [*case["arguments"], *case["model"]]
    parsed = _step(result, "parser", lambda: _parse(arguments))
    if parsed is not None and case["parse_only"]:
        return {}
    config = parsed and _step(result, "configuration", lambda: _configure(parsed))
    model = config and _step(result, "model", lambda: _build(config))
    if model is not None:
        result |= _chosen(model)
        own = os.environ.get("VLLM_KV_CACHE_LAYOUT")
        result["layout"] = _step(result, "layout", lambda: _layout(config, model, own))
        result["lines"] = list(LINES)
        for asked in case["layouts"]:
            answer: dict[str, Any] = {}
            name = _step(answer, "layout", lambda asked=asked: _layout(config, model, asked))
            result.setdefault("layouts", {})[asked] = name or answer["refused"]["words"]
    result.setdefault("lines", list(LINES))
    return result


def main() -> None:
    job = json.load(sys.stdin)
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    compiled = _Compiled(job["compiled"])
    _InFront.packages = job["packages"]
    _InFront.front = job["path"]
    finders = []
    for f in sys.meta_path:
        finders.append(_InFront if f is importlib.machinery.PathFinder else f)
    sys.meta_path[:] = [compiled, _Nvml(), *finders]
    sys.path[:0] = job["path"]
    _stand_in_torch()
    _stand_in_operators()
    _stand_in_network(False)
    import vllm.engine.arg_utils  # noqa: F401
    from vllm.model_executor.models.gpt_oss import GptOssForCausalLM
    from vllm.model_executor.models.registry import ModelRegistry

    # Without this, the release examines the model in a separate process, in which nothing is
    # replaced.
    ModelRegistry.register_model("GptOssForCausalLM", GptOssForCausalLM)
    _parser()
    for module in AHEAD:
        try:
            importlib.import_module(f"vllm.{module}")
        except ImportError as error:
            sys.stderr.write(f"{module}: {error}\n")
    for case in job["cases"]:
        reading, writing = os.pipe()
        child = os.fork()
        if not child:
            try:
                answer = _run(case)
            except BaseException:  # noqa: BLE001 - the parent reports it
                answer = {"failed": traceback.format_exc()}
            answer |= {"name": case["name"], "stubbed": compiled.used}
            with os.fdopen(writing, "w") as stream:
                json.dump(answer, stream)
            os._exit(0)
        os.close(writing)
        with os.fdopen(reading) as stream:
            text = stream.read()
        os.waitpid(child, 0)
        print(text, file=out, flush=True)


if __name__ == "__main__":
    main()
