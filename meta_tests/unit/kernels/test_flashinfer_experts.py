"""MXFP8 x MXFP4 experts: the provider's own calls on an emulation of the kernels, with the
arguments of each release."""

import ast
import importlib.util
import re
import subprocess
import sys
import zipfile
from contextlib import nullcontext
from pathlib import Path

import pytest
from packaging.version import Version

from meta_tests.fakes.flashinfer_emulation import EmulatedProvider, Emulation
from meta_tests.faults import kernel_mutants, w4a8_mutants
from sm121.core.verdict import NotRun
from sm121.kernels import cases, checks, problems, protocol
from sm121.kernels.flashinfer_releases import api_data, since

pytestmark = pytest.mark.usefixtures("one_thread")

CALLED = {
    "mxfp8_quantize": "flashinfer/quantization/fp8_quantization.py",
    "block_scale_interleave": "flashinfer/quantization/fp4_quantization.py",
    "cutlass_fused_moe": "flashinfer/fused_moe/core.py",
}
#: Lines of the source from which oracle and emulation were written, without spaces. The keys are
#: files.
LINES = {
    "flashinfer/data/csrc/fused_moe/cutlass_backend/cutlass_fused_moe_kernels.cuh": (
        "packed_vec.elts[i].x=static_cast<GemmOutputType>(post_act_val[i*2+0]);",
        "cvt_warp_fp16_to_mxfp8<GemmOutputType,VecSize",
        "returngate_clamped*fn(gate_clamped*alpha)*(linear_clamped+beta);",
        "Tgate_clamped=cutlass::minimum<T>{}(gate,limit);",
        "thread_output=thread_output+row_scale*expert_result;",
    ),
    (
        "flashinfer/data/csrc/nv_internal/tensorrt_llm/kernels/cutlass_kernels/includ"
        "e/moe_kernels.h"
    ): ("usingUnfusedGemmOutputType=BackBoneType;",),
    "flashinfer/data/csrc/nv_internal/tensorrt_llm/kernels/quantization_utils.cuh": (
        "__nv_cvt_float_to_e8m0(SFValue,__NV_SATFINITE,cudaRoundPosInf)",
    ),
}


def case_of(group: str, name: str):
    return next(case for case in cases.GROUPS[group] if case.name == name)


@pytest.mark.parametrize(
    "group",
    [pytest.param(group, marks=[pytest.mark.slow] * (group == "moe_token_counts"))
     for group in kernel_mutants.MOE],
)  # fmt: skip
def test_the_emulation_passes(group):
    for case in kernel_mutants.small(group):
        problem = kernel_mutants.problem(group, case)
        assert checks.check(EmulatedProvider(), problem) == [], f"{group}: {case}"


@pytest.mark.slow("the widths of the real model")
@pytest.mark.parametrize(
    ("group", "name"),
    [
        ("moe_token_counts", "real-tokens-1"),
        ("moe_token_counts", "real-tokens-33"),
        ("moe_block_scales", "real-down"),
        ("moe_block_scales", "real-gate-up"),
    ],
)
def test_the_emulation_passes_at_real_width(group, name):
    assert checks.check(EmulatedProvider(), problems.build(case_of(group, name))) == []


def test_a_tactic_that_adds_by_atomics_passes_and_is_not_held_to_its_bits():
    provider = EmulatedProvider()
    assert "fused_moe" in protocol.declaration(provider).deterministic
    fixed = provider.with_tactic("0,1")
    assert "fused_moe" not in protocol.declaration(fixed).deterministic
    for group, name in (("moe_token_counts", "tokens-129"), ("moe_activation", "no-biases")):
        assert checks.check(fixed, problems.build(case_of(group, name))) == []


@pytest.mark.slow("it keeps a list true")
@pytest.mark.parametrize("name", w4a8_mutants.MILDER)
def test_roundings_listed_as_undetectable_are_not_detected(name):
    emulation, _ = w4a8_mutants.MILDER[name]
    for group in ("moe_routing", "moe_activation"):
        kill = kernel_mutants.first_kill(EmulatedProvider(emulation()), group)
        assert kill is None, f"it is detected: take it out of MILDER: {kill}"


class On(Emulation):
    """A provider on another GPU."""

    def __init__(self, *capability: int) -> None:
        self.capability = capability


@pytest.mark.parametrize(
    ("capability", "activations", "lacks"),
    [
        pytest.param((10, 0), "mxfp8", None, id="10 0, mxfp8"),
        pytest.param((10, 3), "mxfp8", None, id="10 3, mxfp8"),
        pytest.param((12, 0), "mxfp8", None, id="12 0, mxfp8"),
        pytest.param((12, 1), "mxfp8", None, id="12 1, mxfp8"),
        pytest.param(
            (9, 0),
            "bfloat16",
            r"no flashinfer\.fused_moe\.interleave_moe_weights_for_sm90",
            id="9 0, bfloat16, no",
        ),
        pytest.param(
            (8, 9),
            None,
            "on SM10x and SM12x, this is sm89; vLLM's Marlin",
            id="8 9, on SM10x and SM12x, this is sm89; vLLM's Marlin",
        ),
        pytest.param(
            (11, 0),
            None,
            "on SM10x and SM12x, this is sm110; vLLM's Marlin",
            id="11 0, on SM10x and SM12x, this is sm110; vLLM's Marlin",
        ),
    ],
)
def test_experts_are_what_an_architecture_has(capability, activations, lacks):
    """Experts have MXFP8 activations if the GPU supports them, and BF16 activations on Hopper.

    Missing experts are NOT_RUN."""
    provider = EmulatedProvider(On(*capability))
    assert activations in (None, protocol.declaration(provider).activations)
    problem = problems.build(case_of("moe_token_counts", "tokens-5"))
    with pytest.raises(NotRun, match=lacks) if lacks else nullcontext():
        assert checks.check(provider, problem) == []


def test_an_argument_missing_in_flashinfer_is_not_run():
    """An argument that FlashInfer does not have makes the test NOT_RUN.

    No known release lacks one, but an older one may."""
    problem = problems.build(case_of("moe_token_counts", "tokens-5"))
    old = Emulation()
    older = Emulation()
    old.cutlass_fused_moe = lambda input, input_sf: None  # noqa: A006
    with pytest.raises(NotRun, match=r"no use_mxfp8_act_scaling= of cutlass_fused_moe: 0\.6\.12"):
        checks.check(EmulatedProvider(old), problem)
    older.block_scale_interleave = None
    with pytest.raises(NotRun, match=r"no flashinfer\.block_scale_interleave: 0\.6\.12 or newer"):
        checks.check(EmulatedProvider(older), problem)


# Releases


UNSET = object()


class OfRelease(Emulation):
    """The emulation with the arguments of a given release."""

    def __init__(self, version: str, functions: dict[str, ast.FunctionDef]) -> None:
        self.version = version
        for name, function in functions.items():
            setattr(self, name, behind(function, getattr(self, name)))


def behind(function: ast.FunctionDef, call):
    """Return a function with these arguments that passes their values to `call`."""
    arguments = function.args
    for each in (*arguments.args, *arguments.kwonlyargs):
        each.annotation = None
    unset = ast.Name("_UNSET", ast.Load())
    arguments.defaults = [unset for _ in arguments.defaults]
    arguments.kw_defaults = [d and unset for d in arguments.kw_defaults]
    text = (
        f"def {function.name}({ast.unparse(arguments)}):\n"
        "    given = dict(locals())\n"
        "    return _CALL(**{k: v for k, v in given.items() if v is not _UNSET})\n"
    )
    names = {"_UNSET": UNSET, "_CALL": call}
    exec(text, names)
    return names[function.name]


def functions_of(site: Path) -> dict[str, ast.FunctionDef]:
    trees = {name: ast.parse((site / file).read_text("utf-8")) for name, file in CALLED.items()}
    functions = {}
    for name, tree in trees.items():
        defined = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
        functions[name] = next(node for node in defined if node.name == name)
    return functions


def arguments_anywhere(site: Path) -> dict[str, set[str]]:
    """Return the arguments of every function or method with one of these names."""
    names = {name for name, _ in since()}
    arguments: dict[str, set[str]] = {}
    for file in (site / "flashinfer").rglob("*.py"):
        text = file.read_text("utf-8")
        if not any(f"def {name}(" in text for name in names):
            continue
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef) and node.name in names:
                every = (*node.args.args, *node.args.kwonlyargs)
                arguments.setdefault(node.name, set()).update(each.arg for each in every)
    return arguments


def judge_release(site: Path, version: str) -> None:
    """Run the provider's own code with the arguments of a release.

    Return its rows and its sources.
    """
    emulation = OfRelease(version, functions_of(site))
    provider = EmulatedProvider(emulation)
    for group, name in (("moe_token_counts", "tokens-33"), ("moe_activation", "no-biases")):
        assert checks.check(provider, problems.build(case_of(group, name))) == []
    tactic = provider.with_tactic("0,0")
    problem = problems.build(case_of("moe_token_counts", "tokens-5"))
    if Version(version).release >= Version(since()["cutlass_fused_moe", "profile_ids"]).release:
        assert checks.check(tactic, problem) == []
    else:
        with pytest.raises(NotRun, match=rf"{re.escape(version)} has no profile_ids= of cutlass"):
            checks.check(tactic, problem)
    has = arguments_anywhere(site)
    for (name, argument), first in since().items():
        if " " not in name:
            is_in = name in has and (argument is None or argument in has[name])
            expected = Version(version).release >= Version(first).release
            assert is_in == expected, f"{version}: {name} {argument}, by the data since {first}"
    main = (site / "flashinfer/__init__.py").read_text("utf-8")
    experts = (site / "flashinfer/fused_moe/__init__.py").read_text("utf-8")
    for module, name in ((main, "mxfp8_quantize"), (main, "block_scale_interleave"),
                         (experts, "cutlass_fused_moe")):  # fmt: skip
        assert re.search(rf"\b{name}\b", module), f"{version} does not export {name}"
    for file, lines in LINES.items():
        text = re.sub(r"\s", "", (site / file).read_text("utf-8"))
        missing = [line for line in lines if line not in text]
        assert not missing, f"{version}: {file} has another definition: no {missing}"
    modules = (site / "flashinfer/fused_moe/core.py").read_text("utf-8")
    chosen = modules[modules.index("def get_cutlass_fused_moe_module") :][:1500]
    assert {"100", "103", "120", "121"} <= set(re.findall(r'"(\d{2,3})"', chosen)), version


@pytest.mark.slow("it reads all of FlashInfer")
def test_the_installed_release_takes_the_providers_calls():
    folder = Path(importlib.util.find_spec("flashinfer").origin).parent
    installed = next(folder.parent.glob("flashinfer_python-*.dist-info")).name
    judge_release(folder.parent, installed.removesuffix(".dist-info").split("-", 1)[1])


@pytest.mark.slow("gets the wheel of each release")
@pytest.mark.parametrize("release", api_data().releases)
def test_each_release_accepts_the_providers_calls_or_names_what_is_missing(release, tmp_path):
    wheel = f"flashinfer-python=={release}"
    get = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(tmp_path), wheel]
    subprocess.run(get, check=True)
    with zipfile.ZipFile(next(tmp_path.glob("*.whl"))) as archive:
        names = (name for name in archive.namelist() if not name.startswith("flashinfer/data/"))
        sources = [name for name in names if name.endswith(".py")]
        archive.extractall(tmp_path / "site", {*sources, *LINES} & {*archive.namelist()})
    judge_release(tmp_path / "site", release)
