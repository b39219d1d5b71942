"""The device code of an installed library is read without a GPU, and is never guessed."""

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

from meta_tests.fakes.fat_binaries import (
    PTX,
    SASS,
    SMALL_KERNEL,
    TRAPPED_MOE,
    arch,
    entry,
    fatbin,
    library,
)
from sm121 import cli
from sm121.compilation import (
    child,
    device_code,
    libraries,
    rules,
    sass,
)
from sm121.compilation.architecture import GB10
from sm121.compilation.device_code import Image
from sm121.compilation.libraries import CodeState
from sm121.compilation.sass import UnreadableSass
from sm121.core.unmet import facts_text


@pytest.mark.parametrize(
    ("entries", "state", "named"),
    [
        pytest.param(("sass 121a",), "FULL", "sm_121a", id="sm_121a"),
        pytest.param(("sass 120f", "sass 90a"), "FULL", "sm_120f", id="sm_120f beside sm_90a"),
        pytest.param(
            ("sass 120",),
            "PLAIN",
            "sm_120 runs on sm_121, without its FP4",
            id="sm_120, without its FP4",
        ),
        pytest.param(
            ("sass 90a", "sass 80"),
            "OTHER",
            "got sm_80, sm_90a",
            id="sm_90a and sm_80",
        ),
        pytest.param(("sass 120a",), "OTHER", "got sm_120a", id="sm_120a"),
        pytest.param(("ptx 90a",), "OTHER", "compute_90a (PTX)", id="PTX of 90a"),
        pytest.param(("ptx 90",), "PTX_ONLY", "only PTX", id="PTX of 90"),
        pytest.param(
            ("sass 90", "ptx 90"),
            "PTX_ONLY",
            "has compute_90 (PTX), sm_90",
            id="PTX of 90 beside sm_90",
        ),
        pytest.param((), "HOST", "no device code", id="no device code"),
    ],
)
def test_a_library_is_judged_by_its_architectures(tmp_path, entries, state, named):
    code = []
    for kind, name in map(str.split, entries):
        code.append(entry(SASS if kind == "sass" else PTX, name))
    report = libraries.check_file(library(tmp_path / "lib.so", *code))
    assert report.state is CodeState[state] and named in report.reason


@pytest.mark.parametrize(
    ("images", "words"),
    [
        pytest.param(("sass 121a",), None, id="sm_121a"),
        pytest.param(("sass 121f",), None, id="sm_121f"),
        pytest.param(("sass 120f",), None, id="sm_120f"),
        pytest.param(("sass 121",), "without the suffix", id="sm_121, without the suffix"),
        pytest.param(("sass 120a",), "does not run on sm_121", id="sm_120a"),
        pytest.param(
            ("sass 121a", "ptx 121a"),
            "compute_121a (PTX)",
            id="PTX beside sm_121a",
        ),
        pytest.param((), "no device code", id="no device code"),
    ],
)
def test_which_device_code_is_accepted_in_a_build_for_gb10(images, words):
    made = [Image(k, arch(a)) for k, a in map(str.split, images)]  # type: ignore[arg-type]
    reasons = rules.unacceptable_images(made, GB10)
    assert (not reasons) if words is None else (words in "; ".join(reasons)), reasons


@pytest.mark.slow("two builds, each for five targets")
def test_the_reader_agrees_with_cuobjdump(compiler, disassembler, tmp_path):
    """The reader agrees with cuobjdump.

    The format of fat binaries is not documented, so this is the reference."""
    source = tmp_path / "k.cu"
    source.write_text(SMALL_KERNEL)
    codes = [arch(a).gencode for a in ("121a", "120f", "90a", "80")]
    gencodes = []
    for code in (*codes, "arch=compute_90,code=compute_90"):
        gencodes += ["-gencode", code]
    for name, more in (("plain", []), ("compressed", ["-Xfatbin=-compress-all"])):
        out = tmp_path / f"{name}.o"
        ended = child.run([compiler.nvcc, "-c", *gencodes, *more, source, "-o", out], timeout_s=120)
        assert ended.status == 0, ended.output
        printed = child.run(
            [disassembler.cuobjdump, out], timeout_s=60, environment=disassembler.environment
        ).output
        pairs = re.findall(r"Fatbin (elf|ptx) code:\s*=+\s*arch = (\S+)", printed)
        assert len(pairs) == 5, printed
        expected = set()
        for kind, text in pairs:
            expected.add(Image("sass" if kind == "elf" else "ptx", arch(text)))
        assert set(device_code.read_device_code(out)) == expected


@pytest.mark.parametrize("architecture", ["121a", "121f", "120f", "90a", "121"])
def test_a_bare_cubin_is_read(compiler, tmp_path, architecture):
    source = tmp_path / "k.cu"
    cubin = tmp_path / "k.cubin"
    source.write_text(SMALL_KERNEL)
    made = child.run(
        [compiler.nvcc, "-cubin", "-gencode", arch(architecture).gencode, source, "-o", cubin],
        timeout_s=60,
    )
    assert made.status == 0, made.output
    assert device_code.read_device_code(cubin) == (Image("sass", arch(architecture)),)


NOISE = random.Random(5).randbytes
MAGIC = device_code.FATBIN_MAGIC
WHOLE = fatbin(entry(SASS, "121a"))
INTERPRETER = Path(sys.executable).resolve().read_bytes()
#: The contents of a library, and the expected class of the library.
CONTENTS = {
    "empty": (b"", "HOST"),
    "a header": (b"\x7fELF", "HOST"),
    "a script": (b"#!/bin/sh\n", "HOST"),
    "noise": (NOISE(100_000), "HOST"),
    "a magic in noise": (NOISE(1000) + MAGIC + NOISE(1000), "HOST"),
    "a magic": (MAGIC, "HOST"),
    "magics": (b"x" * 100 + MAGIC * 5, "HOST"),
    "whole": (INTERPRETER, "HOST"),
    # The missing part of a truncated file may be the device code.
    **{f"cut at {at}": (INTERPRETER[:at], "UNREADABLE") for at in (20, 1000, -1)},
    "device code, cut": (WHOLE[:-8], "UNREADABLE"),
    # the entry is longer than its container
    "device code, too long": (WHOLE[:24] + struct.pack("<Q", 1 << 40) + WHOLE[32:], "UNREADABLE"),
}


@pytest.mark.parametrize("content", CONTENTS)
def test_only_a_whole_library_is_called_free_of_device_code(tmp_path, content):
    data, state = CONTENTS[content]
    (tmp_path / "lib.so").write_bytes(data)
    report = libraries.check_file(tmp_path / "lib.so")
    assert report.state is CodeState[state]
    assert state == "HOST" or str(tmp_path / "lib.so") in report.reason


@pytest.mark.parametrize("content", [b"", b"text", bytes(1000)], ids=["empty", "text", "zeros"])
@pytest.mark.parametrize("name", ["kernel.cubin", "kernel.fatbin"])
def test_file_that_can_only_be_device_code_is_not_called_free_of_it(tmp_path, name, content):
    (tmp_path / name).write_bytes(content)
    assert libraries.check_file(tmp_path / name).state is CodeState.UNREADABLE


def test_bit_flips_never_break_the_reader(tmp_path):
    noise = random.Random(7)
    whole = fatbin(entry(SASS, "121a"), entry(PTX, "90"), entry(SASS, "80"))
    path = tmp_path / "lib.so"
    for _ in range(300):
        damaged = bytearray(whole)
        for _ in range(noise.randint(1, 12)):
            damaged[noise.randrange(len(damaged))] = noise.randrange(256)
        path.write_bytes(bytes(damaged[: noise.randint(0, len(damaged))]))
        assert isinstance(libraries.check_file(path).state, CodeState)


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
        assert libraries.check_file(path).state is CodeState.FULL
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
    """Without a path, the command reads the caches that the environment names, and the packages of
    the interpreter."""
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
            r"_C\.abi3\.so .*expected machine code that runs on sm_121, got sm_90a",
            id="a core for Hopper",
        ),
        ("120f", None, r"_moe_C\.abi3\.so .*got no device code"),
        ("120f", "absent", r"expected vllm/_moe_C\*\.so .*got none"),
    ],
)
def test_an_engine_without_code_for_gb10_is_named(tmp_path, core, experts, reason):
    library(tmp_path / "_C.abi3.so", entry(SASS, core))
    # This library is meant for other GPUs.
    library(tmp_path / "_vllm_fa3_C.abi3.so", entry(SASS, "90a"))
    if experts != "absent":
        code = [entry(SASS, experts)] if experts else []
        library(tmp_path / "_moe_C.abi3.so", *code)
    facts = libraries.without_code("vllm", {"vllm": str(tmp_path / "__init__.py")}, GB10)
    assert len(facts) == bool(reason) and re.search(reason or "", facts_text(facts)), facts


def test_an_engine_that_is_not_installed_has_no_code(tmp_path):
    assert len(libraries.without_code("vllm", {"vllm": None}, GB10)) == 2
