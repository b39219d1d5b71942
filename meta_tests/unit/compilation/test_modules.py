"""A compilation for the wrong architecture is detected because its FP4 instructions are missing or
emulated, and the message has the right reason."""

import re

import pytest

from meta_tests.fakes.fat_binaries import SMALL_KERNEL, TRAPPED_MOE, arch
from meta_tests.folders import ROOT
from meta_tests.texts import text_file
from sm121.compilation import (
    flashinfer,
    libraries,
    modules,
    probes,
    rules,
    sass,
    toolchain,
)
from sm121.compilation.architecture import GB10, CodeArchitecture
from sm121.compilation.build import BuildOutcome, without_architectures
from sm121.compilation.libraries import CodeState
from sm121.core import errors
from sm121.core.unmet import facts_text
from sm121.core.verdict import NotRun


@pytest.fixture
def tools(compiler, disassembler, tmp_path) -> toolchain.Tools:
    return toolchain.Tools(compiler, disassembler, tmp_path)


# Architectures


@pytest.mark.parametrize("text", ["12.1a", "121a", "sm_121a", "compute_121a"])
def test_spellings_of_an_architecture(text):
    assert arch(text) == CodeArchitecture(121, "a")
    assert arch(text).gencode == "arch=compute_121a,code=sm_121a"


@pytest.mark.parametrize("text", ["", "12.1b", "sm121x", "twelve", "1", "12.1a 12.0f"])
def test_an_invalid_architecture_is_refused(text):
    with pytest.raises(errors.UsageError, match="expected the form"):
        arch(text)


@pytest.mark.parametrize(
    ("text", "runs", "full"),
    [
        ("121a", True, True),
        ("121f", True, True),
        ("120f", True, True),
        ("121", True, False),
        ("120", True, False),
        ("120a", False, False),
        ("100a", False, False),
        ("100f", False, False),
        ("90a", False, False),
        ("80", False, False),
    ],
)
def test_which_machine_code_gb10_can_use(text, runs, full):
    assert arch(text).sass_runs_on(GB10) is runs
    assert arch(text).is_full(GB10) is full


@pytest.mark.parametrize(
    ("text", "runs"),
    [
        ("80", True),
        ("90", True),
        ("121", True),
        ("121a", True),
        ("90a", False),
        ("120a", False),
    ],
)
def test_which_ptx_gb10_can_use(text, runs):
    assert arch(text).ptx_runs_on(GB10) is runs


# Plain sm_121 builds


@pytest.mark.parametrize(
    ("name", "architecture", "outcome", "says"),
    [
        # plain sm_121: the instruction is refused, or emulated without a message
        ("cvt_e2m1x2", "121", "REFUSED", r"e2m1x2(.|\n)*sm_121|sm_121(.|\n)*e2m1x2"),
        ("mma_mxf8f6f4", "121", "REFUSED", "block scale"),
        ("mma_mxf4", "121", "REFUSED", "block scale"),
        ("cuda_fp4_header", "121", "SOFTWARE", r"no instruction or kernel like \^F2FP"),
        ("cuda_fp4_header", "121a", "HARDWARE", None),
        # source code that does not compile is an error, and not a refusal
        ("flashinfer_cutlass_mma", "121a", "BROKEN", r"mma_sm120\.hpp"),
    ],
)
def test_a_probe_has_its_outcome(tools, tmp_path, name, architecture, outcome, says):
    """Each probe has its required outcome.

    FlashInfer's headers, which one of the probes includes, are missing here."""
    (tmp_path / "empty").mkdir()
    folders = {"flashinfer": tmp_path / "empty"}
    built = probes.compile_probe(probes.probe(name), arch(architecture), tools, folders)
    assert built.outcome is BuildOutcome[outcome]
    assert re.search(says or "", built.reason), built.reason


def test_plain_sm121_moe_gemm_is_a_silent_trap():
    """For plain sm_121, nvcc compiled FlashInfer's MXFP8 x MXFP4 kernel to a trap with status 0.

    The test reads its real SASS."""
    lines = TRAPPED_MOE.with_suffix(".sass").read_text("utf-8").splitlines()
    (kernel,) = sass.parse(lines, "recorded")
    assert kernel.architecture == arch("sm_121") and kernel.only_traps
    finding = rules.examine(modules.module("moe_mxfp8_mxfp4_unit"), [kernel])
    assert not finding.holds
    assert "1 of 1 kernels only trap" in str(finding) and "QMMA" in str(finding)


def test_plain_sm121_moe_gemm_is_read_from_its_binary(disassembler):
    report = libraries.check_file(TRAPPED_MOE.with_suffix(".fatbin"), disassembler=disassembler)
    assert report.state is CodeState.PLAIN and report.only_trapping is not None
    assert len(report.only_trapping) == 1 and "1 of 1 kernels only trap" in report.reason


@pytest.mark.slow("about 20 s, 2 GiB and FlashInfer")
def test_plain_sm121_moe_gemm_compiled_here(tools, tmp_path):
    try:
        installed = flashinfer.find()
    except NotRun as reason:
        pytest.skip(str(reason))
    name = "moe_mxfp8_mxfp4_unit"
    (unit,) = installed.units(name, "12.1a", tools.compiler, tmp_path)
    module = modules.module(name)
    output = tmp_path / "moe.fatbin"
    plain = modules.compile_unit(unit, arch("121"), module, tools, output)
    assert plain.outcome is BuildOutcome.TRAP, plain.reason
    assert "1 of 1 kernels only trap" in plain.reason


def test_a_trap_behind_a_condition_is_no_trapping_kernel():
    kernels = list(sass.parse(text_file("guarded.sass").splitlines(), "made up"))
    assert [kernel.name for kernel in kernels] == ["asserting", "branching"]
    for kernel in kernels:
        assert not kernel.only_traps


# Probes as data


def test_an_outcome_that_is_not_the_required_one_is_named(tools):
    outcomes = {"121": BuildOutcome.HARDWARE, "121a": BuildOutcome.REFUSED}
    wrong = probes.probe("cvt_e2m1x2").model_copy(update={"outcomes": outcomes})
    first, second = map(str, probes.contradictions(wrong, tools, {}))
    assert "for sm_121: expected hardware, got refused" in first and "e2m1x2" in first
    assert "for sm_121a: expected refused, got hardware" in second


def test_every_probe_has_a_source_and_every_source_a_probe():
    folder = ROOT / "fixtures" / "compilation" / "sources"
    names = [probe.name for probe in probes.load_probes().probe]
    assert {path.stem for path in folder.glob("*.cu")} == {*names}
    listed = [*probes.names("probes"), *probes.names("headers")]
    assert listed == names and len({*listed, *modules.names()}) == len([*listed, *modules.names()])


@pytest.mark.parametrize("name", modules.names())
def test_the_rule_of_each_module_can_fail(name):
    """Kernels that only exit, and kernels that only trap, do not satisfy the rule of a module."""
    chosen = modules.module(name)
    idle = "code for sm_121a\nFunction : idle\n   /*0000*/   EXIT ;\n"
    finding = rules.examine(chosen, sass.parse(idle.splitlines(), "made up"))
    assert set(chosen.must_see) <= set(finding.missing)
    assert str(rules.examine(chosen, [])) == "no kernel" and not rules.examine(chosen, []).holds


def test_two_files_are_judged_as_one():
    rule = rules.SassRule(must_see=("QMMA", "UTMALDG"))
    head = "code for sm_121a\nFunction : k\n  /*0000*/  "
    one = rules.examine(rule, sass.parse(f"{head}QMMA.SF R0 ;".splitlines(), "one"))
    two = rules.examine(rule, sass.parse(f"{head}UTMALDG.2D R0 ;".splitlines(), "two"))
    assert not one.holds and not two.holds and one.joined(two).holds


class OneUnit(flashinfer.FlashInfer):
    """A FlashInfer whose modules have one small source, compiled for the requested
    architectures."""

    def units(self, module, arch_list, compiler, folder):
        source = folder / "unit.cu"
        source.write_text(SMALL_KERNEL)
        return [flashinfer.Unit(source, ("-O3", f"-gencode=arch=x,code=sm_{arch_list}"))]


@pytest.mark.parametrize(
    ("arch_list", "required", "reason"),
    [
        ("121a", "sm_121a", "no instruction or kernel like ^HMMA"),
        ("120f", "sm_121a", "expected sm_121a, got sm_120f"),
        ("121", "sm_121", "sm_121: without the suffix a or f"),
        ("120a", "sm_120a", "sm_120a: does not run on sm_121"),
    ],
)
def test_a_module_is_judged_by_its_device_code(tools, tmp_path, arch_list, required, reason):
    update = {"arch_list": arch_list, "architectures": (required,), "memory_gib": 0.001}
    chosen = modules.module("xqa_decode").model_copy(update=update)
    wrong = modules.contradictions(chosen, OneUnit("python", tmp_path), tools)
    assert reason in facts_text(wrong), wrong


def test_a_module_that_needs_more_memory_than_there_is_is_not_run(tmp_path):
    chosen = modules.module("xqa_decode").model_copy(update={"memory_gib": 1e6})
    compiler = toolchain.Compiler(tmp_path, tmp_path, "13.0")
    disassembler = toolchain.Disassembler(tmp_path, tmp_path, "13.4")
    absent = toolchain.Tools(compiler, disassembler, tmp_path)
    with pytest.raises(NotRun, match=r"compiler: at least 1000000 GiB, got .*remedy"):
        modules.contradictions(chosen, OneUnit("python", tmp_path), absent)


def test_architectures_among_arguments_are_replaced():
    words = ["-O3", "-gencode", "arch=compute_90a,code=sm_90a", "-gencode=arch=x,code=y"]
    assert without_architectures([*words, "-arch=sm_90", "-I", "x"]) == ["-O3", "-I", "x"]


# Slow tests


def test_left_out_slow_tests_are_reported(run_pytest):
    selection = ("tests/test_kernel.py", "--collect-only", "-q", "-k", "compiles or module")
    status, run = run_pytest(*selection)
    count = len(modules.names())
    assert status == 0 and f"{count} slow tests are left out; --slow runs them" in run.output
    assert "test_flashinfer_module" not in run.output
    _, run = run_pytest(*selection, "--slow")
    assert run.output.count("test_flashinfer_module[") == count
