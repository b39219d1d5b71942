"""Fat binaries and libraries with device code, in nvcc 13's format."""

import struct
from pathlib import Path

from meta_tests.folders import DATA
from sm121.compilation.architecture import CodeArchitecture

TRAPPED_MOE = DATA / "moe-mxfp8-mxfp4-plain-sm121"


def arch(text: str) -> CodeArchitecture:
    return CodeArchitecture.parse(text)


def entry(kind: int, architecture: str, payload: bytes = b"code" * 8) -> bytes:
    """Return one entry of a fat binary, in nvcc 13's format."""
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
    """Return a shared library with device code. It has only the parts that the suite reads."""
    host = b"\x7fELF\x02\x01\x01" + bytes(9) + struct.pack("<HH", 3, 62) + bytes(4096)
    path.write_bytes(host + (fatbin(*entries) if entries else b"") + bytes(512))
    return path


SASS = 2
PTX = 1
SMALL_KERNEL = "__global__ void kernel_mha(int* p) { p[0] = 1; }\n"
