"""Compilation: what a wrong architecture does to FP4 code is caught, with the right reason."""

import io
import json
import os
import random
import re
import struct
import sys
import tracemalloc
from pathlib import Path

import pytest
from texts import text_file

from sm121 import cli
from sm121.compilation import (
    child,
    device_code,
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
from sm121.compilation.device_code import Image
from sm121.compilation.libraries import CodeState
from sm121.compilation.sass import UnreadableSass
from sm121.core import errors
from sm121.core.unmet import text
from sm121.core.verdict import NotRun

DATA = Path(__file__).parent / "data"
TRAPPED_MOE = DATA / "moe-mxfp8-mxfp4-plain-sm121"


def arch(text: str) -> CodeArchitecture:
    return CodeArchitecture.parse(text)


def entry(kind: int, architecture: str, payload: bytes = b"code" * 8) -> bytes:
    """One entry of a fat binary, as nvcc 13 lays it out."""
    target = arch(architecture)
    flags = {"a": 0x100000, "f": 0x200000, "": 0}[target.suffix] | 0x11
    header = bytearray(64)
    struct.pack_into("<HHIQ", header, 0, kind, 0x101, 64, len(payload))
    struct.pack_into("<I", header, 28, target.number)
    struct.pack_into("<Q", header, 40, flags)
    return bytes(header) + payload


def fatbin(*entries: bytes) -> bytes:
    body = b"".join(entries)
    return struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(body)) + body


def library(path: Path, *entries: bytes) -> Path:
    """A shared library, as far as the reader looks, with device code in it."""
    host = b"\x7fELF\x02\x01\x01" + bytes(9) + struct.pack("<HH", 3, 62) + bytes(4096)
    path.write_bytes(host + (fatbin(*entries) if entries else b"") + bytes(512))
    return path


SASS, PTX = 2, 1
SMALL_KERNEL = "__global__ void kernel_mha(int* p) { p[0] = 1; }\n"


@pytest.fixture
def tools(compiler, disassembler, tmp_path) -> toolchain.Tools:
    return toolchain.Tools(compiler, disassembler, tmp_path)


# ------------------------------------------------------------------------------------ architectures


@pytest.mark.parametrize("text", ["12.1a", "121a", "sm_121a", "compute_121a"])
def test_spellings_of_an_architecture(text):
    assert arch(text) == CodeArchitecture(121, "a")
    assert arch(text).gencode == "arch=compute_121a,code=sm_121a"


@pytest.mark.parametrize("text", ["", "12.1b", "sm121x", "twelve", "1", "12.1a 12.0f"])
def test_what_is_no_architecture_is_refused(text):
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


# ------------------------------------------------------------------------------ plain sm_121 builds


@pytest.mark.parametrize(
    ("name", "architecture", "outcome", "says"),
    [
        # plain sm_121: refused loudly, or software that nobody is told of
        ("cvt_e2m1x2", "121", "REFUSED", r"e2m1x2(.|\n)*sm_121|sm_121(.|\n)*e2m1x2"),
        ("mma_mxf8f6f4", "121", "REFUSED", "block scale"),
        ("mma_mxf4", "121", "REFUSED", "block scale"),
        ("cuda_fp4_header", "121", "SOFTWARE", r"no instruction or kernel like \^F2FP"),
        ("cuda_fp4_header", "121a", "HARDWARE", None),
        # a source that does not compile is broken, not refused
        ("flashinfer_cutlass_mma", "121a", "BROKEN", r"mma_sm120\.hpp"),
    ],
)
def test_a_probe_has_its_outcome(tools, tmp_path, name, architecture, outcome, says):
    """FlashInfer's headers are not there, which one of the probes includes."""
    (tmp_path / "empty").mkdir()
    folders = {"flashinfer": tmp_path / "empty"}
    built = probes.compile_probe(probes.probe(name), arch(architecture), tools, folders)
    assert built.outcome is BuildOutcome[outcome]
    assert re.search(says or "", built.reason), built.reason


def test_plain_sm121_moe_gemm_is_a_silent_trap():
    """The real SASS of FlashInfer's MXFP8 x MXFP4 kernel, for which nvcc ended with status 0."""
    lines = TRAPPED_MOE.with_suffix(".sass").read_text("utf-8").splitlines()
    (kernel,) = sass.parse(lines, "recorded")
    assert kernel.architecture == arch("sm_121") and kernel.only_traps
    finding = rules.examine(modules.module("moe_mxfp8_mxfp4_unit"), [kernel])
    assert not finding.holds
    assert "1 of 1 kernels only trap" in str(finding) and "QMMA" in str(finding)


def test_plain_sm121_moe_gemm_is_read_from_its_binary(disassembler):
    report = libraries.judge(TRAPPED_MOE.with_suffix(".fatbin"), disassembler=disassembler)
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
    module, output = modules.module(name), tmp_path / "moe.fatbin"
    plain = modules.compile_unit(unit, arch("121"), module, tools, output)
    assert plain.outcome is BuildOutcome.TRAP, plain.reason
    assert "1 of 1 kernels only trap" in plain.reason


def test_a_guard_that_can_be_passed_is_no_trap():
    kernels = list(sass.parse(text_file("guarded.sass").splitlines(), "made up"))
    assert [kernel.name for kernel in kernels] == ["asserting", "branching"]
    assert not any(kernel.only_traps for kernel in kernels)


# -------------------------------------------------------------------------------- probes as data


def test_an_outcome_that_is_not_the_required_one_is_named(tools):
    outcomes = {"121": BuildOutcome.HARDWARE, "121a": BuildOutcome.REFUSED}
    wrong = probes.probe("cvt_e2m1x2").model_copy(update={"outcomes": outcomes})
    first, second = map(str, probes.contradictions(wrong, tools, {}))
    assert "for sm_121: required: hardware, seen: refused" in first and "e2m1x2" in first
    assert "for sm_121a: required: refused, seen: hardware" in second


def test_every_probe_has_a_source_and_every_source_a_probe():
    folder = Path(__file__).parent.parent / "fixtures" / "compilation" / "sources"
    names = [probe.name for probe in probes.load_probes().probe]
    assert {path.stem for path in folder.glob("*.cu")} == {*names}
    listed = [*probes.names("probes"), *probes.names("headers")]
    assert listed == names and len({*listed, *modules.names()}) == len([*listed, *modules.names()])


@pytest.mark.parametrize("name", modules.names())
def test_the_rule_of_each_module_can_fail(name):
    """Kernels of nothing but an exit, and kernels that trap, are no hardware path."""
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
    """FlashInfer whose modules are one small source, compiled for what it was told."""

    def units(self, module, arch_list, compiler, folder):
        source = folder / "unit.cu"
        source.write_text(SMALL_KERNEL)
        return [flashinfer.Unit(source, ("-O3", f"-gencode=arch=x,code=sm_{arch_list}"))]


@pytest.mark.parametrize(
    ("arch_list", "required", "reason"),
    [
        ("121a", "sm_121a", "no instruction or kernel like ^HMMA"),
        ("120f", "sm_121a", "required: sm_121a, seen: sm_120f"),
        ("121", "sm_121", "sm_121: without the suffix a or f"),
        ("120a", "sm_120a", "sm_120a: does not run on sm_121"),
    ],
)
def test_a_module_is_judged_by_its_device_code(tools, tmp_path, arch_list, required, reason):
    update = {"arch_list": arch_list, "architectures": (required,), "memory_gib": 0.001}
    chosen = modules.module("xqa_decode").model_copy(update=update)
    wrong = modules.contradictions(chosen, OneUnit("python", tmp_path), tools)
    assert reason in text(wrong), wrong


def test_a_module_that_needs_more_memory_than_there_is_is_not_run(tmp_path):
    chosen = modules.module("xqa_decode").model_copy(update={"memory_gib": 1e6})
    compiler = toolchain.Compiler(tmp_path, tmp_path, "13.0")
    disassembler = toolchain.Disassembler(tmp_path, tmp_path, "13.4")
    absent = toolchain.Tools(compiler, disassembler, tmp_path)
    with pytest.raises(NotRun, match=r"compiler: at least 1000000 GiB, seen: .*remedy"):
        modules.contradictions(chosen, OneUnit("python", tmp_path), absent)


def test_architectures_among_arguments_are_replaced():
    words = ["-O3", "-gencode", "arch=compute_90a,code=sm_90a", "-gencode=arch=x,code=y"]
    assert without_architectures([*words, "-arch=sm_90", "-I", "x"]) == ["-O3", "-I", "x"]


# ----------------------------------------------------------------------------- libraries, installed


@pytest.mark.parametrize(
    ("entries", "state", "named"),
    [
        pytest.param(("sass 121a",), "FULL", "sm_121a", id="sass 121a, FULL, sm_121a"),
        pytest.param(
            ("sass 120f", "sass 90a"), "FULL", "sm_120f", id="sass 120f sass 90a, FULL, sm_120f"
        ),
        pytest.param(
            ("sass 120",),
            "PLAIN",
            "sm_120 runs on sm_121, without its FP4",
            id="sass 120, PLAIN, sm_120 runs on sm_121, without its FP4",
        ),
        pytest.param(
            ("sass 90a", "sass 80"),
            "OTHER",
            "seen: sm_80, sm_90a",
            id="sass 90a sass 80, OTHER, seen: sm_80, sm_90a",
        ),
        pytest.param(
            ("sass 120a",), "OTHER", "seen: sm_120a", id="sass 120a, OTHER, seen: sm_120a"
        ),
        pytest.param(
            ("ptx 90a",), "OTHER", "compute_90a (PTX)", id="ptx 90a, OTHER, compute_90a (PTX)"
        ),
        pytest.param(("ptx 90",), "PTX_ONLY", "only PTX", id="ptx 90, PTX_ONLY, only PTX"),
        pytest.param(
            ("sass 90", "ptx 90"),
            "PTX_ONLY",
            "has compute_90 (PTX), sm_90",
            id="sass 90 ptx 90, PTX_ONLY, has compute_90 (PTX), sm_90",
        ),
        pytest.param((), "HOST", "no device code", id="HOST, no device code"),
    ],
)
def test_a_library_is_judged_by_its_architectures(tmp_path, entries, state, named):
    code = [entry(SASS if kind == "sass" else PTX, arch) for kind, arch in map(str.split, entries)]
    report = libraries.judge(library(tmp_path / "lib.so", *code))
    assert report.state is CodeState[state] and named in report.reason


@pytest.mark.parametrize(
    ("images", "words"),
    [
        pytest.param(("sass 121a",), None, id="sass 121a"),
        pytest.param(("sass 121f",), None, id="sass 121f"),
        pytest.param(("sass 120f",), None, id="sass 120f"),
        pytest.param(("sass 121",), "without the suffix", id="sass 121, without the suffix"),
        pytest.param(
            ("sass 120a",), "does not run on sm_121", id="sass 120a, does not run on sm_121"
        ),
        pytest.param(
            ("sass 121a", "ptx 121a"),
            "compute_121a (PTX)",
            id="sass 121a ptx 121a, compute_121a (PTX)",
        ),
        pytest.param((), "no device code", id="no device code"),
    ],
)
def test_what_is_acceptable_in_a_build_for_gb10(images, words):
    made = [Image(k, arch(a)) for k, a in map(str.split, images)]  # type: ignore[arg-type]
    reasons = rules.unacceptable_images(made, GB10)
    assert (not reasons) if words is None else (words in "; ".join(reasons)), reasons


@pytest.mark.slow("two builds, each for five targets")
def test_the_reader_agrees_with_cuobjdump(compiler, disassembler, tmp_path):
    """The layout of fat binaries is observed, not documented: it is compared with the tool."""
    source = tmp_path / "k.cu"
    source.write_text(SMALL_KERNEL)
    codes = [arch(a).gencode for a in ("121a", "120f", "90a", "80")]
    gencodes = [
        w for code in (*codes, "arch=compute_90,code=compute_90") for w in ("-gencode", code)
    ]
    for name, more in (("plain", []), ("compressed", ["-Xfatbin=-compress-all"])):
        out = tmp_path / f"{name}.o"
        ended = child.run([compiler.nvcc, "-c", *gencodes, *more, source, "-o", out], timeout_s=120)
        assert ended.status == 0, ended.output
        printed = child.run(
            [disassembler.cuobjdump, out], timeout_s=60, environment=disassembler.environment
        ).output
        pairs = re.findall(r"Fatbin (elf|ptx) code:\s*=+\s*arch = (\S+)", printed)
        assert len(pairs) == 5, printed
        expected = {Image("sass" if kind == "elf" else "ptx", arch(text)) for kind, text in pairs}
        assert set(device_code.read(out)) == expected


@pytest.mark.parametrize("architecture", ["121a", "121f", "120f", "90a", "121"])
def test_a_bare_cubin_is_read(compiler, tmp_path, architecture):
    source, cubin = tmp_path / "k.cu", tmp_path / "k.cubin"
    source.write_text(SMALL_KERNEL)
    made = child.run(
        [compiler.nvcc, "-cubin", "-gencode", arch(architecture).gencode, source, "-o", cubin],
        timeout_s=60,
    )
    assert made.status == 0, made.output
    assert device_code.read(cubin) == (Image("sass", arch(architecture)),)


NOISE, MAGIC = random.Random(5).randbytes, device_code.FATBIN_MAGIC
WHOLE = fatbin(entry(SASS, "121a"))
INTERPRETER = Path(sys.executable).resolve().read_bytes()
#: In a library; what it is called, where it is not free of device code.
CONTENTS = {
    "empty": (b"", "HOST"),
    "a header": (b"\x7fELF", "HOST"),
    "a script": (b"#!/bin/sh\n", "HOST"),
    "noise": (NOISE(100_000), "HOST"),
    "a magic in noise": (NOISE(1000) + MAGIC + NOISE(1000), "HOST"),
    "a magic": (MAGIC, "HOST"),
    "magics": (b"x" * 100 + MAGIC * 5, "HOST"),
    "whole": (INTERPRETER, "HOST"),
    # What was cut off may be just its device code.
    **{f"cut at {at}": (INTERPRETER[:at], "UNREADABLE") for at in (20, 1000, -1)},
    "device code, cut": (WHOLE[:-8], "UNREADABLE"),
    # an entry that is longer than its container
    "device code, too long": (WHOLE[:24] + struct.pack("<Q", 1 << 40) + WHOLE[32:], "UNREADABLE"),
}


@pytest.mark.parametrize("content", CONTENTS)
def test_only_a_whole_library_is_called_free_of_device_code(tmp_path, content):
    data, state = CONTENTS[content]
    (tmp_path / "lib.so").write_bytes(data)
    report = libraries.judge(tmp_path / "lib.so")
    assert report.state is CodeState[state]
    assert state == "HOST" or str(tmp_path / "lib.so") in report.reason


@pytest.mark.parametrize("content", [b"", b"text", bytes(1000)])
@pytest.mark.parametrize("name", ["kernel.cubin", "kernel.fatbin"])
def test_file_that_can_only_be_device_code_is_not_called_free_of_it(tmp_path, name, content):
    (tmp_path / name).write_bytes(content)
    assert libraries.judge(tmp_path / name).state is CodeState.UNREADABLE


def test_bit_flips_never_break_the_reader(tmp_path):
    noise = random.Random(7)
    whole = fatbin(entry(SASS, "121a"), entry(PTX, "90"), entry(SASS, "80"))
    path = tmp_path / "lib.so"
    for _ in range(300):
        damaged = bytearray(whole)
        for _ in range(noise.randint(1, 12)):
            damaged[noise.randrange(len(damaged))] = noise.randrange(256)
        path.write_bytes(bytes(damaged[: noise.randint(0, len(damaged))]))
        assert isinstance(libraries.judge(path).state, CodeState)


def test_garbage_is_not_disassembled_silently(disassembler, tmp_path):
    path = tmp_path / "garbage.cubin"
    path.write_bytes(random.Random(3).randbytes(4096))
    with pytest.raises(UnreadableSass, match=re.escape(str(path))):
        list(sass.disassemble(path, disassembler))
    assert list(sass.parse(["\x00\xff", "/*zz*/", "*" * 9999], "garbage")) == []
    with pytest.raises(UnreadableSass, match="before any architecture"):
        list(sass.parse(["Function : f"], "garbage"))


def test_a_large_library_is_read_in_bounded_memory(tmp_path):
    path = tmp_path / "large.so"
    with path.open("wb") as file:
        file.truncate(512 << 20)
        file.seek(0, os.SEEK_END)
        file.write(fatbin(entry(SASS, "121a")))
    tracemalloc.start()
    try:
        assert libraries.judge(path).state is CodeState.FULL
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_report_of_places_is_json_and_each_file_is_in_it_once(tmp_path):
    site = tmp_path / "site" / "vllm"
    site.mkdir(parents=True)
    library(site / "_C.abi3.so", entry(SASS, "90a"))
    library(site / "libcudart.so.13")
    (site / "again.so").symlink_to(site / "_C.abi3.so")
    (site / "gone.so").symlink_to(site / "nothing.so")
    (site / "README.so.txt").mkdir()
    cached = tmp_path / "cache" / "121a" / "cached_ops" / "xqa"
    cached.mkdir(parents=True)
    library(cached / "xqa.so", entry(SASS, "121a"))
    (cached / "mha.cuda.o").write_bytes(fatbin(entry(PTX, "121")))
    stream = io.StringIO()
    counts = libraries.write_report([site, tmp_path / "cache", cached / "xqa.so"], stream)
    report = json.loads(stream.getvalue())
    states = {Path(item["path"]).name: item["state"] for item in report["libraries"]}
    assert states == {
        "_C.abi3.so": "other_architecture",
        "libcudart.so.13": "no_device_code",
        "xqa.so": "full",
        "mha.cuda.o": "ptx_only",
    }
    assert report["summary"]["other_architecture"] == 1 == counts[CodeState.OTHER]
    assert report["gpu"] == "sm_121"


def test_command_judges_what_it_is_given(tmp_path, capsys):
    path = library(tmp_path / "lib.so", entry(SASS, "90a"))
    assert cli.main(["path", "--libraries", str(path)]) == 0
    (report,) = json.loads(capsys.readouterr().out)["libraries"]
    assert report["path"] == str(path) and report["sass"] == ["sm_90a"]
    assert cli.main(["path", "--libraries", str(path), "--gpu", "9.0"]) == 0
    assert json.loads(capsys.readouterr().out)["libraries"][0]["state"] == "full"


def test_command_reads_instructions_when_asked(disassembler, capsys):
    path = TRAPPED_MOE.with_suffix(".fatbin")
    assert cli.main(["path", "--sass", "--libraries", str(path)]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["libraries"][0]["only_trapping"] == 1
    assert report["summary"]["only_trapping_kernels"] == 1


def test_command_without_a_place_looks_at_the_engine(tmp_path):
    """The caches that the environment names, and the packages of the interpreter."""
    pytest.importorskip("torch")
    cache = tmp_path / ".cache" / "flashinfer" / "0.7" / "121a" / "cached_ops" / "m"
    cache.mkdir(parents=True)
    library(cache / "m.so", entry(SASS, "121a"))
    folders = libraries.engine_places(sys.executable, {"HOME": str(tmp_path)})
    assert tmp_path / ".cache" / "flashinfer" in folders
    assert any(folder.name == "torch" for folder in folders)


@pytest.mark.parametrize(
    ("core", "experts", "reason"),
    [
        ("120f", "120", None),
        pytest.param(
            "90a",
            "120f",
            r"_C\.abi3\.so .*required: machine code that runs on sm_121, seen: sm_90a",
            id="90a, 120f, _C.abi3.so .*required: machine code that",
        ),
        ("120f", None, r"_moe_C\.abi3\.so .*seen: no device code"),
        ("120f", "absent", r"required: vllm/_moe_C\*\.so .*seen: none"),
    ],
)
def test_an_engine_without_code_for_gb10_is_named(tmp_path, core, experts, reason):
    library(tmp_path / "_C.abi3.so", entry(SASS, core))
    library(tmp_path / "_vllm_fa3_C.abi3.so", entry(SASS, "90a"))  # is for other GPUs, rightly
    if experts != "absent":
        code = [entry(SASS, experts)] if experts else []
        library(tmp_path / "_moe_C.abi3.so", *code)
    facts = libraries.without_code("vllm", {"vllm": str(tmp_path / "__init__.py")}, GB10)
    assert len(facts) == bool(reason) and re.search(reason or "", text(facts)), facts


def test_an_engine_that_is_not_installed_has_no_code(tmp_path):
    assert len(libraries.without_code("vllm", {"vllm": None}, GB10)) == 2


# ------------------------------------------------------------------------------------- slow tests


def test_slow_tests_are_left_out_with_a_word(run_pytest):
    selection = ("tests/test_kernel.py", "--collect-only", "-q", "-k", "compiles or module")
    status, run = run_pytest(*selection)
    count = len(modules.names())
    assert status == 0 and f"{count} slow tests are left out; --slow runs them" in run.output
    assert "test_flashinfer_module" not in run.output
    _, run = run_pytest(*selection, "--slow")
    assert run.output.count("test_flashinfer_module[") == count
