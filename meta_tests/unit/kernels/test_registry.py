"""The option `--kernel-provider`: which kernels are tested, and the message if they cannot be
tested."""

import abc
import ast
import functools
import importlib.util
import itertools
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from meta_tests.fakes.installed import dist_info
from meta_tests.fakes.servers import executable
from meta_tests.folders import ROOT
from sm121.core.verdict import NotRun
from sm121.kernels import builds, cases, checks, problems, protocol, registry, vllm_cuda
from sm121.kernels.flashinfer_provider import FlashInferProvider
from sm121.kernels.flashinfer_releases import since
from sm121.kernels.torch_provider import TorchProvider
from sm121.oracles import attention

pytestmark = pytest.mark.timeout(300)

HERE = {"PYTHONPATH": str(ROOT)}
NUMERICS = ("tests/test_kernel.py", "-k", "routing_takes", "--arch", "cpu")


def judged(run) -> list[dict]:
    return [t for t in run.verdict["tests"] if "routing_takes" in t["id"]]


def not_run(run_pytest, provider: str, *more: str, **options) -> str:
    """Return the reason why a provider is not tested."""
    status, run = run_pytest(*NUMERICS, "--kernel-provider", provider, *more, **options)
    assert status == 5, run.output
    assert {test["verdict"] for test in judged(run)} == {"NOT_RUN"}
    return judged(run)[0]["message"]


def test_a_provider_of_ones_own_is_judged(run_pytest):
    provider = ("--kernel-provider", "meta_tests.fakes.kernel_providers:wrong")
    status, run = run_pytest(*NUMERICS, *provider, environment=HERE)
    assert status == 1, run.output
    failed = [t for t in judged(run) if t["verdict"] == "FAIL"]
    assert failed and "expected max of the error at most" in failed[0]["message"]


@pytest.mark.slow("a run more")
def test_an_operation_that_a_provider_lacks_is_not_run(run_pytest):
    message = not_run(run_pytest, "meta_tests.fakes.kernel_providers:empty", environment=HERE)
    assert "provider object has no route" in message


@pytest.mark.parametrize(
    ("base", "step", "part"),
    [
        pytest.param(TorchProvider, "visible", "attention_class", id="torch, attention"),
        pytest.param(TorchProvider, "e4m3", "codecs_class", id="torch, codecs"),
        pytest.param(FlashInferProvider, "quantised", "experts_class", id="flashinfer, experts"),
    ],
)
def test_a_provider_that_replaces_a_step_of_a_part_is_refused(base, step, part):
    """A provider that replaces a step of a part is refused.

    No operation would call its method, so that its kernel would not be tested."""
    with pytest.raises(TypeError, match=rf"Ours\.{step}: .* set {part} of Ours to that class"):
        type("Ours", (base,), {step: lambda self: None})
    type("Ours", (base,), {"route": lambda self: None})


@pytest.mark.parametrize("is_first", [True, False])
def test_a_provider_with_a_step_of_a_mixin_is_refused(is_first):
    mixin = type("Steps", (), {"visible": lambda self: None})
    bases = (mixin, TorchProvider) if is_first else (TorchProvider, mixin)
    with pytest.raises(TypeError, match=r"Ours\.visible: .* set attention_class of Ours"):
        type("Ours", bases, {})


def test_a_mixin_may_have_a_step_that_the_part_has_of_it():
    mixin = type("Steps", (), {"visible": lambda self: None})
    attention = type("Attention", (mixin, TorchProvider.attention_class), {})
    type("Ours", (mixin, TorchProvider), {"attention_class": attention})


@pytest.mark.parametrize(
    ("step", "own"),
    [
        pytest.param(classmethod(lambda cls: None), {}, id="a class method"),
        pytest.param(staticmethod(lambda: None), {}, id="a static method"),
        pytest.param(lambda self: None, {"visible": lambda self: None}, id="replaced in the part"),
    ],
)
def test_a_provider_and_its_part_may_share_a_mixin(step, own):
    mixin = type("Steps", (), {"visible": step})
    attention = type("Attention", (mixin, TorchProvider.attention_class), own)
    type("Ours", (mixin, TorchProvider), {"attention_class": attention})


def test_a_mixin_may_be_an_abstract_class():
    """A part and a mixin with different abstract base classes share only names of Python."""
    mixin = abc.ABCMeta("Mixin", (abc.ABC,), {"help": lambda self: None})
    attention = abc.ABCMeta("Attention", (TorchProvider.attention_class, abc.ABC), {})
    abc.ABCMeta("Ours", (mixin, TorchProvider), {"attention_class": attention})
    abc.ABCMeta("Plain", (mixin, TorchProvider), {})
    steps = abc.ABCMeta("Steps", (abc.ABC,), {"visible": lambda self: None})
    with pytest.raises(TypeError, match=r"Plain\.visible: "):
        abc.ABCMeta("Plain", (steps, TorchProvider), {})


def test_cases_and_plugin_are_there_without_torch():
    code = (
        "import sys\n"
        "sys.modules['torch'] = None\n"
        "import sm121.kernels.cases, sm121.kernels.registry, sm121.plugin.kernels, sm121.cli\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.fixture
def another_build(tmp_path):
    """An interpreter that imports another build of vLLM, as in a user's environment."""
    package = tmp_path / "site" / "vllm"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("__version__ = '0.33.0'\n")
    dist_info(package.parent, "vllm", "0.33.0")
    script = f'PYTHONPATH={package.parent}:$PYTHONPATH exec {sys.executable} "$@"'
    return executable(tmp_path / "python", script)


def test_it_is_known_of_each_provider_whose_kernels_it_calls():
    """Each provider states the packages whose kernels it calls.

    Otherwise, it would run with the suite's packages and not with the engine's."""
    of_nobody = {name for name in registry.NAMES if not registry.packages(name)}
    assert of_nobody == {"torch", "torch-cuda"}


def test_the_suites_own_interpreter_has_the_engines_build(tmp_path):
    names = registry.packages("vllm") + registry.packages("flashinfer")
    assert set(names) == {"vllm", "flashinfer", "torch"}
    # A link to this interpreter has the same packages, so the provider exists there, too.
    link = executable(tmp_path / "python", f'exec {sys.executable} "$@"')
    for python in (sys.executable, str(link)):
        assert builds.differences(names, python, dict(os.environ)) is None


def test_another_build_of_the_engine_is_seen(another_build):
    text = builds.differences(("vllm", "torch"), str(another_build), dict(os.environ))
    assert f"the engine uses vllm 0.33.0 at {another_build.parent / 'site' / 'vllm'}" in text
    assert "torch" not in text, "that is the same"
    environment = {**os.environ, "PYTHONPATH": str(another_build.parent / "site")}
    assert "0.33.0" in str(builds.differences(("vllm",), sys.executable, environment))


def test_an_engine_without_the_package_and_one_that_does_not_answer(tmp_path):
    bare = executable(tmp_path / "bare", f'exec {sys.executable} -I -S "$@"')
    for python, reason in ((bare, "uses no vllm"), (tmp_path / "none", "cannot be started")):
        assert reason in builds.differences(("vllm",), str(python), dict(os.environ))
    assert builds.differences((), str(tmp_path / "none"), {}) is None, "nothing of an engine"


@pytest.mark.slow("a run of all numerics; test_benchmarks.py has such a child")
def test_the_kernels_are_judged_in_the_engines_interpreter(run_pytest, tmp_path):
    """The kernels are judged in the engine's interpreter.

    Before, they were NOT_RUN if the engine's build was not that of pytest's environment."""
    log = tmp_path / "seen"
    notes = f'case "$2" in *"kernels import judge"*) echo "$0" >> {log};; esac'
    python = executable(tmp_path / "python", f'{notes}\nexec {sys.executable} "$@"')
    status, run = run_pytest(*NUMERICS, f"--engine-python={python}", timeout_s=240.0)
    assert status == 0, run.output
    assert {t["verdict"] for t in judged(run)} == {"PASS"}
    assert log.read_text("utf-8").split() == [str(python)], "one process for all of them"
    (route,) = [k for k in run.verdict["engine"]["served"] if k["operation"] == "route"]
    assert (route["judged"], route["provider"]) == (True, "vllm-cpu-float32")
    assert route["cases"] == len(judged(run))


@pytest.mark.slow("a run more")
def test_an_engine_without_the_kernels_is_named(run_pytest, another_build):
    message = not_run(run_pytest, "vllm-cpu", f"--engine-python={another_build}")
    assert "provider vllm-cpu needs vLLM for the CPU" in message
    assert f"{another_build.parent}" in message, "where that interpreter's vLLM lies"


@pytest.mark.slow("a run more; the build of an engine is compared in this process above")
def test_another_build_than_the_engines_is_not_judged_by_a_provider_of_ones_own(
    run_pytest, tmp_path, another_build
):
    (tmp_path / "mine.py").write_text(
        "import importlib.util, sys\n"
        "found = importlib.util.find_spec('vllm')\n"
        # Acts as if it was imported.
        "sys.modules['vllm'] = importlib.util.module_from_spec(found)\n"
        "from sm121.kernels.torch_provider import TorchProvider\n"
        "provider = TorchProvider()\n"
    )
    environment = {"PYTHONPATH": f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    python = f"--engine-python={another_build}"
    message = not_run(run_pytest, "mine:provider", python, environment=environment)
    assert "vllm 0.33.0" in message
    assert "that build was not judged" in message
    assert "pip install sm121-conformance" in message


@pytest.mark.slow("a run of all numerics")
def test_the_unknown_build_of_an_attached_server_is_a_remark(run_pytest, fault_server):
    attached = ("--kernel-provider", "vllm-cpu", *fault_server("none").options)
    _, run = run_pytest(*NUMERICS, *attached, timeout_s=240.0)
    assert {t["verdict"] for t in judged(run)} == {"PASS"}, run.output
    remarks = "\n".join(run.verdict["remarks"])
    assert "it is not known whether the attached server uses that build" in remarks


class OldFlashInfer:
    """The FlashInfer API of a release, without kernels.

    The arguments are those of the published wheels."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, version: str, capability=(12, 1)) -> None:
        import torch

        new = tuple(int(part) for part in version.split(".")[:3]) >= (0, 6, 16)
        main = ModuleType("flashinfer")
        decode = ModuleType("flashinfer.decode")
        main.__version__ = version

        class SfLayout:
            layout_linear = 2

        def before(a, backend="cuda", enable_pdl=None):
            raise AssertionError("not called")

        def mxfp4_quantize(a, backend="cuda", enable_pdl=None, sfLayout=0):  # noqa: N803
            raise TypeError("expected a tensor on a GPU")

        def xqa(query, kv_cache, workspace, table, lens, longest, bmm1_scale=1.0, bmm2_scale=1.0,
                window_left=-1, out=None, sinks=None, kv_layout="NHD"):  # fmt: skip
            raise RuntimeError("an illegal instruction")

        main.SfLayout = SfLayout
        quantise = mxfp4_quantize if new else before
        main.mxfp4_quantize = functools.wraps(quantise)(lambda *a, **k: quantise(*a, **k))
        decode.xqa_batch_decode_with_kv_cache = xqa
        for module in (main, decode):
            monkeypatch.setitem(sys.modules, module.__name__, module)
        monkeypatch.setitem(sys.modules, "flashinfer.fused_moe", ModuleType("flashinfer.fused_moe"))
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
        self.provider = FlashInferProvider()
        self.provider.device = "cpu"
        self.x = torch.zeros(2, 64, dtype=torch.bfloat16)

    def decode(self):
        import torch

        q = torch.zeros(1, 8, 64)
        cache = torch.zeros(1, 2, 1, 16, 64)
        table = torch.zeros(1, 1, dtype=torch.int32)
        lens = torch.ones(1, dtype=torch.int32)
        keywords = {"sinks": torch.zeros(8), "window": None, "scale": 1.0}
        return self.provider.decode_attention(q, cache, table, lens, **keywords)


def test_a_feature_missing_in_an_older_flashinfer_is_not_run(monkeypatch):
    """A feature that an older FlashInfer lacks is NOT_RUN, and the reason names the release.

    0.6.15 has no `sfLayout=`. Its XQA has no sinks on SM12x, where the sink wrapper decodes
    instead."""
    old = OldFlashInfer(monkeypatch, "0.6.15.post1")
    with pytest.raises(NotRun, match=r"0\.6\.15\.post1 has no sfLayout= .*0\.6\.16 or newer"):
        old.provider.mxfp4_quantize(old.x)
    with pytest.raises(NotRun, match=r"no flashinfer\.BatchAttentionWithAttentionSinkWrapper"):
        old.decode()
    older = OldFlashInfer(monkeypatch, "0.6.8", (9, 0))
    problem = experts()
    with pytest.raises(NotRun, match=r"no flashinfer\.fused_moe\.interleave_moe_weights.*0\.6\.12"):
        older.provider.fused_moe(**problem)
    with pytest.raises(RuntimeError, match="illegal instruction"):
        older.decode()  # sinks exist on sm90


def test_a_kernel_that_raises_is_a_failure(monkeypatch):
    """A kernel that raises is a failure.

    This includes a TypeError, because the release has the called function."""
    new = OldFlashInfer(monkeypatch, "0.6.16")
    with pytest.raises(TypeError, match="expected a tensor on a GPU"):
        new.provider.mxfp4_quantize(new.x)
    with pytest.raises(RuntimeError, match="illegal instruction"):
        new.decode()


def test_every_argument_of_the_installed_flashinfer_is_there():
    """Every argument name that the provider passes exists in the real, installed FlashInfer."""
    folder = Path(importlib.util.find_spec("flashinfer").origin).parent
    texts = [file.read_text("utf-8") for file in folder.rglob("*.py")]
    defining = []
    for text in texts:
        if any(f"def {name}(" in text for name, _ in since()):
            defining.append(text)
    arguments: dict[str, set[str]] = {}
    nodes = []
    for text in defining:
        nodes += ast.walk(ast.parse(text))
    for node in nodes:
        if isinstance(node, ast.FunctionDef):
            names = {arg.arg for arg in (*node.args.args, *node.args.kwonlyargs)}
            arguments[node.name] = arguments.get(node.name, set()) | names
    for name, argument in since():
        if " " not in name:
            assert argument is None or argument in arguments[name], (name, argument)
            assert name in arguments


def experts():
    import torch

    def packed(rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        return tuple(torch.zeros(2, rows, columns, dtype=torch.uint8) for columns in (32, 2))

    return {
        "x": torch.zeros(1, 64, dtype=torch.bfloat16), "weights": torch.ones(1, 1),
        "ids": torch.zeros(1, 1, dtype=torch.int32), "w1": packed(128), "w1_bias": None,
        "w2": packed(64), "w2_bias": None, "alpha": 1.7, "limit": 7.0,
    }  # fmt: skip


def flash_attention(fault: str, q, k, v, out, *, window_size, s_aux, **planned):
    import torch

    assert planned["causal"] and planned["fa_version"] == 3
    assert s_aux is None or s_aux.dtype == torch.bfloat16
    sinks = None if fault == "sinks" or s_aux is None else s_aux.double()
    window = None if fault == "window" or window_size[0] < 0 else window_size[0] + 1
    spans = itertools.pairwise(planned["cu_seqlens_q"].tolist())
    for table, length, (start, end) in zip(
        planned["block_table"].long(), planned["seqused_k"].tolist(), spans, strict=True
    ):
        length += fault == "length"
        pages = table.roll(1) if fault == "pages" else table
        keys, values = (part[pages].flatten(0, 1)[:length].double() for part in (k, v))
        visible = attention.visible_keys(torch.arange(length)[start - end :], len(keys), window)
        out[start:end] = attention.attend(
            *(q[start:end].double(), keys, values, visible),
            sinks=sinks, scale=planned["softmax_scale"],
        )  # fmt: skip


@pytest.mark.parametrize("fault", ["", "sinks", "window", "pages", "length"])
def test_flash_attention_is_called_as_vllm_calls_it(monkeypatch, fault):
    call = functools.partial(flash_attention, fault)
    module = SimpleNamespace(
        current_platform=SimpleNamespace(is_cuda=lambda: True),
        flash_attn_supports_sinks=lambda: True,
        get_flash_attn_version=lambda: 3,
        flash_attn_varlen_func=call,
    )
    monkeypatch.setattr(checks, "RUNS", {})  # in this test, faults occur in each run
    monkeypatch.setattr(vllm_cuda, "_module", lambda _name: module)
    monkeypatch.setattr(vllm_cuda.VllmFlashAttentionProvider, "device", "cpu")
    provider = registry.load("vllm-flash-attn")
    names = {"sinks-none", "sinks-mixed", "window-page-64", "window-0"}
    noticed = set()
    for group in ("prefill", "prefill_sinks", "decode", "decode_sinks"):
        for case in cases.GROUPS[group]:
            if case.name in names and checks.check(provider, problems.build(case)):
                noticed.add(case.operation)
    assert noticed == ({"prefill_attention", "decode_attention"} if fault else set())
    module.flash_attn_supports_sinks = lambda: False
    with pytest.raises(NotRun, match="FlashAttention 3 has no sinks here"):
        registry.load("vllm-flash-attn")


def test_undefined_results_of_an_operator_are_returned():
    import torch

    from sm121.kernels import poison

    right = torch.ones(2)
    call = functools.partial(lambda *_: (right, None))
    call.overloadpacket = None
    result = poison.Poisoned(poison.NAN).__torch_dispatch__(call, ())
    assert result[0] is right and isinstance(result[1], torch.Tensor)


@pytest.mark.parametrize("provider", [FlashInferProvider, vllm_cuda.VllmProvider])
def test_attention_is_as_deterministic_with_an_fp8_cache(provider):
    """Attention must be as deterministic with an FP8 cache as with BF16, because the same kernel
    computes both."""
    for with_fp8, plain in protocol.PLAIN.items():
        assert (with_fp8 in provider.deterministic) == (plain in provider.deterministic)
