"""Which architectures a file holds device code for, read from the file itself, without a tool: what
nvcc embeds in objects and libraries (fat binaries, compressed ones too) and bare cubins. The layout
is observed, not documented by NVIDIA; the meta tests hold it against cuobjdump."""

import mmap
import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from sm121.compilation.architecture import CodeArchitecture
from sm121.core import errors, unmet

FATBIN_MAGIC = b"\x50\xed\x55\xba"
ELF_MAGIC = b"\x7fELF"

_ELF_HEADER_BYTES = 64
_ELF_64 = 2
_NOTHING_ELSE = (".cubin", ".fatbin")
"""Files that are device code or nothing."""

_FATBIN_HEADER = struct.Struct("<IHHQ")
_FATBIN_HEADER_BYTES = 16
_ENTRY_START = struct.Struct("<HHIQ")
_ENTRY_BYTES = 48
_ARCHITECTURE_SPECIFIC = 0x100000
_FAMILY_SPECIFIC = 0x200000
_KINDS: dict[int, Literal["ptx", "sass"]] = {1: "ptx", 2: "sass"}

_EM_CUDA = 190
# ptxas leaves its command line in a note; the ELF flags have the number but not the suffix.
_CUBIN_TARGET = re.compile(rb"(?:-arch|--gpu-name)[ =]+(sm_\d{2,3}[af]?)\b")
_NOTES_BYTES = 1 << 24


class UnreadableCode(errors.Sm121Error):
    """A container of device code is damaged or of a form that is not known."""


@dataclass(frozen=True, order=True)
class Image:
    """One piece of device code: machine code (``sass``) or ``ptx``."""

    kind: Literal["ptx", "sass"]
    architecture: CodeArchitecture

    def __str__(self) -> str:
        number = f"{self.architecture.number}{self.architecture.suffix}"
        return f"sm_{number}" if self.kind == "sass" else f"compute_{number} (PTX)"


def read(path: Path) -> tuple[Image, ...]:
    """The device code in a file, each kind and architecture once; empty when it has none. The file
    is mapped, not loaded: memory does not grow with its size. Raises UnreadableCode: the file, or a
    container of device code in it, is damaged or cut off; OSError: the file cannot be read."""
    images: tuple[Image, ...] = ()
    if path.stat().st_size >= _FATBIN_HEADER_BYTES:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            if data[:4] == ELF_MAGIC:
                _check_whole(data, path)
                (machine,) = struct.unpack_from("<H", data, 18)
                if machine == _EM_CUDA:
                    return (_cubin(data, path),)
            images = tuple(sorted(set(_fatbins(data, path))))
    if not images and path.suffix in _NOTHING_ELSE:
        raise UnreadableCode(f"{path}: expected device code, the file has none")
    return images


def _check_whole(data: mmap.mmap, path: Path) -> None:
    """A library that was cut off may have lost just its device code: "none" would be a guess."""
    if len(data) < _ELF_HEADER_BYTES:
        raise UnreadableCode(f"{path}: an ELF file of {len(data)} bytes is cut off")
    (sections,) = struct.unpack_from("<Q", data, 40)
    size, count = struct.unpack_from("<HH", data, 58)
    if data[4] == _ELF_64 and sections + size * count > len(data):
        raise UnreadableCode(
            unmet.Fact(f"{sections + size * count} bytes", f"{len(data)}; it is cut off", f"{path}")
        )


def _cubin(data: mmap.mmap, path: Path) -> Image:
    match = _CUBIN_TARGET.search(data[:_NOTES_BYTES])
    if match is not None:
        return Image("sass", CodeArchitecture.parse(match[1].decode()))
    (flags,) = struct.unpack_from("<I", data, 48)
    abi = data[8]
    number = (flags >> 8) & 0xFF if abi >= 8 else flags & 0xFF
    if not 20 <= number <= 255:
        raise UnreadableCode(f"{path}: a cubin whose architecture cannot be read ({flags:#x})")
    return Image("sass", CodeArchitecture(number))


def _fatbins(data: mmap.mmap, path: Path) -> Iterator[Image]:
    at = data.find(FATBIN_MAGIC)
    while at >= 0:
        end = at + 4
        if at + _FATBIN_HEADER_BYTES <= len(data):
            _, version, header, size = _FATBIN_HEADER.unpack_from(data, at)
            # The four bytes occur in ordinary code too; a container has this header after them.
            if version == 1 and header == _FATBIN_HEADER_BYTES:
                end = at + header + size
                if end > len(data):
                    raise UnreadableCode(f"{path}: device code at byte {at} is cut off")
                yield from _entries(data, at + header, end, path)
        at = data.find(FATBIN_MAGIC, end)


def _entries(data: mmap.mmap, at: int, end: int, path: Path) -> Iterator[Image]:
    while at + _ENTRY_BYTES <= end:
        kind, _, header, size = _ENTRY_START.unpack_from(data, at)
        (number,) = struct.unpack_from("<I", data, at + 28)
        (flags,) = struct.unpack_from("<Q", data, at + 40)
        if header < _ENTRY_BYTES or at + header + size > end:
            raise UnreadableCode(f"{path}: device code at byte {at} is damaged")
        if kind in _KINDS:  # others hold what a later link step needs, no code that runs
            full = bool(flags & _ARCHITECTURE_SPECIFIC)
            family = bool(flags & _FAMILY_SPECIFIC)
            suffix = "a" if full else "f" if family else ""
            yield Image(_KINDS[kind], CodeArchitecture(number, suffix))
        at += header + size
