"""Compilation: what a wrong architecture does to FP4 code is caught, with the right reason."""

import io
import itertools
import json
import os
import random
import re
import shutil
import struct
import subprocess
import sys
import time
import tracemalloc
from pathlib import Path

import psutil
import pytest
from data_rows import from_data, text_file
from servers import executable

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
    wanted = arch(architecture)
    flags = {"a": 0x100000, "f": 0x200000, "": 0}[wanted.suffix] | 0x11
    header = bytearray(64)
    struct.pack_into("<HHIQ", header, 0, kind, 0x101, 64, len(payload))
    struct.pack_into("<I", header, 28, wanted.number)
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


@pytest.fixture(scope="session")
def compiler() -> toolchain.Compiler:
    try:
        return toolchain.find_compiler(toolchain.site_packages())
    except NotRun as reason:
        pytest.skip(f"NOT_RUN: {reason}")


@pytest.fixture(scope="session")
def disassembler() -> toolchain.Disassembler:
    try:
        return toolchain.find_disassembler(toolchain.site_packages())
    except NotRun as reason:
        pytest.skip(f"NOT_RUN: {reason}")


@pytest.fixture
def compile_probe(compiler, disassembler, tmp_path):
    def compiled(name: str, architecture: str, **places: Path):
        return probes.compile_probe(
            probes.probe(name), arch(architecture),
            toolchain.Tools(compiler, disassembler, tmp_path), places,
        )  # fmt: skip

    return compiled


# ------------------------------------------------------------------------------------ architectures


@pytest.mark.parametrize("text", ["12.1a", "121a", "sm_121a", "compute_121a"])
def test_spellings_of_an_architecture(text):
    assert arch(text) == CodeArchitecture(121, "a")
    assert arch(text).gencode == "arch=compute_121a,code=sm_121a"


@pytest.mark.parametrize("text", ["", "12.1b", "sm121x", "twelve", "1", "12.1a 12.0f"])
def test_what_is_no_architecture_is_refused(text):
    with pytest.raises(errors.UsageError, match="expected the form"):
        arch(text)


@from_data
def test_which_machine_code_gb10_can_use(text, runs, full):
    assert arch(text).sass_runs_on(GB10) is runs
    assert arch(text).is_full(GB10) is full


@from_data
def test_which_ptx_gb10_can_use(text, runs):
    assert arch(text).ptx_runs_on(GB10) is runs


# ------------------------------------------------------------------------------ plain sm_121 builds


def test_plain_sm121_quantise_is_refused_loudly(compile_probe):
    built = compile_probe("cvt_e2m1x2", "121")
    assert built.outcome is BuildOutcome.REFUSED
    assert "e2m1x2" in built.reason and "sm_121" in built.reason


@pytest.mark.parametrize("name", ["mma_mxf8f6f4", "mma_mxf4"])
def test_plain_sm121_block_scaled_mma_is_refused_loudly(compile_probe, name):
    built = compile_probe(name, "121")
    assert built.outcome is BuildOutcome.REFUSED and "block scale" in built.reason


def test_plain_sm121_cuda_fp4_header_is_silent_software(compile_probe):
    built = compile_probe("cuda_fp4_header", "121")
    assert built.outcome is BuildOutcome.SOFTWARE
    assert "no instruction or kernel like ^F2FP" in built.reason
    assert compile_probe("cuda_fp4_header", "121a").outcome is BuildOutcome.HARDWARE


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
def test_plain_sm121_moe_gemm_compiled_here(compiler, disassembler, tmp_path):
    try:
        installed = flashinfer.find()
    except NotRun as reason:
        pytest.skip(f"NOT_RUN: {reason}")
    (unit,) = installed.units("moe_mxfp8_mxfp4_unit", "12.1a", compiler, tmp_path)
    plain = modules.compile_unit(
        unit, arch("121"), modules.module("moe_mxfp8_mxfp4_unit"),
        toolchain.Tools(compiler, disassembler, tmp_path), tmp_path / "moe.fatbin",
    )  # fmt: skip
    assert plain.outcome is BuildOutcome.TRAP, plain.reason
    assert "1 of 1 kernels only trap" in plain.reason


def test_a_guard_that_can_be_passed_is_no_trap(compile_probe, disassembler):
    guarded = text_file("guarded.sass")
    kernels = list(sass.parse(guarded.splitlines(), "made up"))
    assert [kernel.name for kernel in kernels] == ["asserting", "branching"]
    assert not any(kernel.only_traps for kernel in kernels)


# -------------------------------------------------------------------------------- probes as data


def test_an_outcome_that_is_not_the_required_one_is_named(compiler, disassembler, tmp_path):
    wrong = probes.probe("cvt_e2m1x2").model_copy(
        update={"outcomes": {"121": BuildOutcome.HARDWARE, "121a": BuildOutcome.REFUSED}}
    )
    found = probes.contradictions(wrong, toolchain.Tools(compiler, disassembler, tmp_path), {})
    assert len(found) == 2
    first, second = map(str, found)
    assert "for sm_121: required: hardware, seen: refused" in first and "e2m1x2" in first
    assert "for sm_121a: required: refused, seen: hardware" in second


def test_a_source_that_does_not_compile_is_broken_not_refused(compile_probe, tmp_path):
    (tmp_path / "empty").mkdir()
    built = compile_probe("flashinfer_cutlass_mma", "121a", flashinfer=tmp_path / "empty")
    assert built.outcome is BuildOutcome.BROKEN and "mma_sm120.hpp" in built.reason


def test_every_probe_has_a_source_and_every_source_a_probe():
    folder = Path(__file__).parent.parent / "fixtures" / "compilation" / "sources"
    known = {probe.name for probe in probes.load_probes().probe}
    assert {path.stem for path in folder.glob("*.cu")} == known


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
        source.write_text("__global__ void kernel_mha(int* p) { p[0] = 1; }\n")
        return [flashinfer.Unit(source, ("-O3", f"-gencode=arch=x,code=sm_{arch_list}"))]


@from_data
def test_a_module_is_judged_by_its_device_code(
    compiler, disassembler, tmp_path, arch_list, required, said
):
    chosen = modules.module("xqa_decode").model_copy(
        update={"arch_list": arch_list, "architectures": (required,), "memory_gib": 0.001}
    )
    wrong = modules.contradictions(
        chosen, OneUnit("python", tmp_path), toolchain.Tools(compiler, disassembler, tmp_path)
    )
    assert said in text(wrong), wrong


def test_a_module_that_needs_more_memory_than_there_is_is_not_run(tmp_path):
    chosen = modules.module("xqa_decode").model_copy(update={"memory_gib": 1e6})
    nothing = toolchain.Compiler(tmp_path, tmp_path, "13.0")
    with pytest.raises(NotRun, match=r"compiler: at least 1000000 GiB, seen: .*remedy"):
        modules.contradictions(
            chosen,
            OneUnit("python", tmp_path),
            toolchain.Tools(nothing, toolchain.Disassembler(tmp_path, tmp_path, "13.4"), tmp_path),
        )


def test_architectures_among_arguments_are_replaced():
    given = ["-O3", "-gencode", "arch=compute_90a,code=sm_90a", "-gencode=arch=x,code=y"]
    assert without_architectures([*given, "-arch=sm_90", "-I", "x"]) == ["-O3", "-I", "x"]


# ----------------------------------------------------------------------------- libraries, installed


@from_data
def test_a_library_is_judged_by_its_architectures(tmp_path, entries, state, named):
    code = [entry(SASS if kind == "sass" else PTX, arch) for kind, arch in map(str.split, entries)]
    report = libraries.judge(library(tmp_path / "lib.so", *code))
    assert report.state is CodeState[state] and named in report.reason


@from_data
def test_what_is_acceptable_in_a_build_for_gb10(images, words):
    made = [Image(k, arch(a)) for k, a in map(str.split, images)]  # type: ignore[arg-type]
    found = rules.unacceptable_images(made, GB10)
    assert (not found) if words is None else (words in "; ".join(found)), found


@pytest.mark.slow("two builds, each for five targets")
def test_the_reader_agrees_with_cuobjdump(compiler, disassembler, tmp_path):
    """The layout of fat binaries is observed, not documented: it is compared with the tool."""
    source = tmp_path / "k.cu"
    source.write_text("__global__ void k(int* p) { p[0] = 1; }\n")
    wanted = ["121a", "120f", "90a", "80"]
    gencodes = [word for a in wanted for word in ("-gencode", arch(a).gencode)]
    for name, more in (("plain", []), ("compressed", ["-Xfatbin=-compress-all"])):
        made = tmp_path / f"{name}.o"
        ptx = ["-gencode", "arch=compute_90,code=compute_90"]
        ended = child.run(
            [compiler.nvcc, "-c", *gencodes, *ptx, *more, source, "-o", made], timeout_s=120
        )
        assert ended.status == 0, ended.output
        told = child.run(
            [disassembler.cuobjdump, made], timeout_s=60, environment=disassembler.environment
        ).output
        pairs = re.findall(r"Fatbin (elf|ptx) code:\s*=+\s*arch = (\S+)", told)
        assert len(pairs) == 5, told
        expected = {Image("sass" if kind == "elf" else "ptx", arch(text)) for kind, text in pairs}
        assert set(device_code.read(made)) == expected


@pytest.mark.parametrize("architecture", ["121a", "121f", "120f", "90a", "121"])
def test_a_bare_cubin_is_read(compiler, tmp_path, architecture):
    source, cubin = tmp_path / "k.cu", tmp_path / "k.cubin"
    source.write_text("__global__ void k(int* p) { p[0] = 1; }\n")
    made = child.run(
        [compiler.nvcc, "-cubin", "-gencode", arch(architecture).gencode, source, "-o", cubin],
        timeout_s=60,
    )
    assert made.status == 0, made.output
    assert device_code.read(cubin) == (Image("sass", arch(architecture)),)


def test_garbage_is_no_device_code(tmp_path):
    noise = random.Random(5)
    for number, content in enumerate(
        (
            b"",
            b"\x7fELF",
            b"#!/bin/sh\n",
            noise.randbytes(100_000),
            noise.randbytes(1000) + device_code.FATBIN_MAGIC + noise.randbytes(1000),
            device_code.FATBIN_MAGIC,
            b"x" * 100 + device_code.FATBIN_MAGIC * 5,
        )
    ):
        path = tmp_path / f"{number}.so"
        path.write_bytes(content)
        assert libraries.judge(path).state is CodeState.HOST, content[:20]


def test_library_that_was_cut_off_is_not_called_free_of_device_code(tmp_path):
    """Its device code may be just what is missing."""
    whole = Path(sys.executable).resolve().read_bytes()
    for size in (20, 1000, len(whole) - 1):
        path = tmp_path / "cut.so"
        path.write_bytes(whole[:size])
        assert libraries.judge(path).state is CodeState.UNREADABLE, size
    path.write_bytes(whole)
    assert libraries.judge(path).state is CodeState.HOST


@pytest.mark.parametrize("content", [b"", b"text", bytes(1000)])
@pytest.mark.parametrize("name", ["kernel.cubin", "kernel.fatbin"])
def test_file_that_can_only_be_device_code_is_not_called_free_of_it(tmp_path, name, content):
    (tmp_path / name).write_bytes(content)
    assert libraries.judge(tmp_path / name).state is CodeState.UNREADABLE


def test_damaged_device_code_is_not_called_absent(tmp_path):
    whole = fatbin(entry(SASS, "121a"))
    longer = bytearray(whole)
    struct.pack_into("<Q", longer, 16 + 8, 1 << 40)  # an entry that is longer than its container
    for number, content in enumerate((whole[:-8], bytes(longer))):
        path = tmp_path / f"{number}.so"
        path.write_bytes(content)
        report = libraries.judge(path)
        assert report.state is CodeState.UNREADABLE and str(path) in report.reason


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
    (seen,) = json.loads(capsys.readouterr().out)["libraries"]
    assert seen["path"] == str(path) and seen["sass"] == ["sm_90a"]
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
    places = libraries.engine_places(sys.executable, {"HOME": str(tmp_path)})
    assert tmp_path / ".cache" / "flashinfer" in places
    assert any(place.name == "torch" for place in places)


@from_data
def test_an_engine_without_code_for_gb10_is_named(tmp_path, core, experts, said):
    library(tmp_path / "_C.abi3.so", entry(SASS, core))
    library(tmp_path / "_vllm_fa3_C.abi3.so", entry(SASS, "90a"))  # is for other GPUs, rightly
    if experts != "absent":
        code = [entry(SASS, experts)] if experts else []
        library(tmp_path / "_moe_C.abi3.so", *code)
    found = libraries.without_code("vllm", {"vllm": str(tmp_path / "__init__.py")}, GB10)
    assert (not found) if said is None else (len(found) == 1 and re.search(said, text(found))), (
        found
    )


def test_an_engine_that_is_not_installed_has_no_code(tmp_path):
    assert len(libraries.without_code("vllm", {"vllm": None}, GB10)) == 2


# ------------------------------------------------------------------------------------- toolchains


def test_without_nvcc_it_is_not_run_and_says_how_to_get_it(monkeypatch, tmp_path):
    monkeypatch.setattr(toolchain, "_SYSTEM", tmp_path)
    monkeypatch.setattr(os, "environ", {"PATH": str(tmp_path)})
    with pytest.raises(NotRun, match=r"required: nvcc.*seen: none.*pip install.*nvidia-cuda-nvcc"):
        toolchain.find_compiler([tmp_path])
    with pytest.raises(NotRun, match=r"required: cuobjdump.*pip install.*nvidia-cuda-nvdisasm"):
        toolchain.find_disassembler([tmp_path])


@from_data
def test_an_nvcc_that_is_of_no_use_is_not_run(tmp_path, monkeypatch, script, said):
    executable(tmp_path / "nvcc", script)
    monkeypatch.setattr(os, "environ", {"PATH": f"{tmp_path}:/usr/bin:/bin"})
    with pytest.raises(NotRun, match=said):
        toolchain.find_compiler([])


def test_a_wrapper_on_path_does_not_hide_the_toolkit(compiler, tmp_path, monkeypatch):
    executable(tmp_path / "nvcc", f'exec {compiler.nvcc} "$@"')
    monkeypatch.setattr(os, "environ", {"PATH": f"{tmp_path}:/usr/bin:/bin"})
    found = toolchain.find_compiler([])
    assert found.nvcc == tmp_path / "nvcc" and found.root == compiler.root
    assert (found.root / "include").is_dir()


def test_pip_wheels_alone_suffice(monkeypatch, tmp_path):
    """No CUDA_HOME, nothing on PATH, no toolkit under /usr/local: nvcc and reader from pip."""
    packages = toolchain.site_packages()
    for tool, wheels in (("nvcc", toolchain.WHEELS), ("cuobjdump", toolchain.READER_WHEELS)):
        if not any(list(folder.glob(f"nvidia/cu*/bin/{tool}")) for folder in packages):
            pytest.skip(f"NOT_RUN: no {tool} of pip here: pip install --no-deps {wheels}")
    monkeypatch.setattr(toolchain, "_SYSTEM", tmp_path)
    monkeypatch.setattr(os, "environ", {"PATH": "/usr/bin:/bin"})
    if shutil.which("nvcc") is not None:
        pytest.skip("NOT_RUN: a system nvcc is in /usr/bin and cannot be hidden")
    compiler = toolchain.find_compiler(packages)
    disassembler = toolchain.find_disassembler(packages)
    assert "site-packages/nvidia/" in str(compiler.nvcc)
    assert "site-packages/nvidia/" in str(disassembler.cuobjdump)
    for name in probes.names("probes"):
        chosen = probes.probe(name)
        outcomes = {text: chosen.outcomes[text] for text in ("121a", "121")}
        found = probes.contradictions(
            chosen.model_copy(update={"outcomes": outcomes}),
            toolchain.Tools(compiler, disassembler, tmp_path),
            {},
        )
        assert not found, found


def test_an_nvcc_that_makes_another_architecture_is_caught(disassembler, tmp_path):
    """A wrapper that adds PTX, or ignores -gencode, is not believed."""
    liar = executable(
        tmp_path / "nvcc", f'while [ "$1" != -o ]; do shift; done; cp "{TRAPPED_MOE}.fatbin" "$2"'
    )
    with pytest.raises(errors.Sm121Error, match=r"required of nvcc: sm_121a; seen: sm_121$"):
        probes.compile_probe(
            probes.probe("cvt_e2m1x2"), arch("121a"),
            toolchain.Tools(toolchain.Compiler(liar, tmp_path, "0"), disassembler, tmp_path), {},
        )  # fmt: skip


def test_a_compiler_that_hangs_is_ended_with_its_children(tmp_path):
    marker = tmp_path / "pid"
    script = executable(tmp_path / "slow", f"sleep 300 & echo $! > {marker}; wait")
    started = time.monotonic()
    with pytest.raises(child.TookTooLong, match="slow: required: done in 1 s"):
        child.run([script], timeout_s=1)
    assert time.monotonic() - started < 10
    pid = int(marker.read_text())
    for _ in range(50):
        if not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
            break
        time.sleep(0.1)
    else:
        pytest.fail(f"child {pid} of the compiler is still there")


def test_output_of_a_compiler_is_bounded(tmp_path):
    script = executable(tmp_path / "loud", "yes 'error: something' | head -c 5000000; exit 7")
    ended = child.run([script], timeout_s=60)
    assert ended.status == 7 and len(ended.output) == child.OUTPUT_LIMIT


# -------------------------------------------------------------------------------------- FlashInfer


class Answering(flashinfer.FlashInfer):
    """FlashInfer with answers of its own."""

    answers: dict = {}  # noqa: RUF012

    def targets(self, arch_lists, compiler):
        return {**{e.arch_list: list(e.compiled_for) or e.error for e in entries()}, **self.answers}


def entries():
    return flashinfer.load_resolutions()


@from_data
def test_a_flashinfer_that_resolves_gb10_wrongly_is_caught(tmp_path, answer, said):
    fake = Answering("python", tmp_path)
    object.__setattr__(fake, "answers", answer)
    found = flashinfer.contradictions(fake, toolchain.Compiler(tmp_path, tmp_path, "13.0"))
    if said is None:
        assert not found
    else:
        assert len(found) == 1 and re.search(said, text(found)), found


def test_without_flashinfer_it_is_not_run_and_says_how_to_get_it(tmp_path):
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "v"], check=True)
    with pytest.raises(NotRun, match=r"required: flashinfer-python.*pip install --no-deps"):
        flashinfer.find(str(tmp_path / "v" / "bin" / "python"))


def test_a_flashinfer_that_does_not_import_is_not_run(tmp_path):
    broken = flashinfer.FlashInfer(
        str(executable(tmp_path / "python", "echo ImportError: no torch >&2; exit 1")), tmp_path
    )
    with pytest.raises(NotRun, match="seen: ImportError: no torch"):
        broken.targets(["12.1"], toolchain.Compiler(tmp_path, tmp_path, "13.0"))


# ------------------------------------------------------------------------------------- slow tests


def test_slow_tests_are_left_out_with_a_word(run_pytest):
    selection = ("tests/test_kernel.py", "--collect-only", "-q", "-k", "compiles or module")
    status, run = run_pytest(*selection)
    count = len(modules.names())
    assert status == 0 and f"{count} slow tests are left out; --slow runs them" in run.output
    assert "test_flashinfer_module" not in run.output
    _, run = run_pytest(*selection, "--slow")
    assert run.output.count("test_flashinfer_module[") == count


def test_names_of_tests_are_those_of_the_data():
    listed = [*probes.names("probes"), *probes.names("headers")]
    assert listed == [probe.name for probe in probes.load_probes().probe]
    assert len(set(itertools.chain(listed, modules.names()))) == len(listed) + len(modules.names())
