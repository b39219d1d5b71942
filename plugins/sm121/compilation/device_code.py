"""Find the architectures for which a file contains device code, without NVIDIA's tools.

The file is an object file or a library with nvcc's fat binaries, which may be compressed, or a bare
cubin. NVIDIA does not document the layout; it was found by inspection, and the meta-tests compare
the results with those of cuobjdump.
"""

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

#: Properties of the ELF header of 64-bit files: its size, the value of the class, and the offsets
#: of its fields.
_ELF_HEADER_BYTES = 64
_ELF_64 = 2
_ELF_CLASS_AT = 4
_ELF_ABI_AT = 8
_ELF_MACHINE_AT = 18
_ELF_SECTIONS_AT = 40
_ELF_FLAGS_AT = 48
_ELF_SECTION_SIZE_AT = 58
#: The ELF machine of a cubin.
_EM_CUDA = 190
#: From this ABI version on, a cubin has its architecture in the second byte of the flags.
_ABI_SECOND_BYTE = 8
#: The architecture in the command line of ptxas, which a cubin contains in a note. Unlike the ELF
#: flags, it has the suffix.
_CUBIN_TARGET = re.compile(rb"(?:-arch|--gpu-name)[ =]+(sm_\d{2,3}[af]?)\b")
#: The number of bytes of a cubin that are searched for that note.
_NOTES_BYTES = 1 << 24
#: The suffixes of files that contain only device code.
_NOTHING_ELSE = (".cubin", ".fatbin")

#: The header of a fat binary: magic, version, size of the header, size of the entries.
_FATBIN_HEADER = struct.Struct("<IHHQ")
_FATBIN_HEADER_BYTES = 16
#: The start of an entry: kind, version, size of the header, size of the code.
_ENTRY_START = struct.Struct("<HHIQ")
_ENTRY_BYTES = 48
_ENTRY_NUMBER_AT = 28
_ENTRY_FLAGS_AT = 40
#: The flag of an entry for the suffix a.
_ARCHITECTURE_SPECIFIC = 0x100000
#: The flag of an entry for the suffix f.
_FAMILY_SPECIFIC = 0x200000
#: The kinds of entries with code. Other kinds contain data for a later link step.
_KINDS: dict[int, Literal["ptx", "sass"]] = {1: "ptx", 2: "sass"}


class UnreadableCode(errors.Sm121Error):
    """A container of device code is damaged, or has an unknown layout."""


@dataclass(frozen=True, order=True)
class Image:
    """One piece of device code: machine code (``sass``) or ``ptx``."""

    kind: Literal["ptx", "sass"]
    architecture: CodeArchitecture

    def __str__(self) -> str:
        number = f"{self.architecture.number}{self.architecture.suffix}"
        return f"sm_{number}" if self.kind == "sass" else f"compute_{number} (PTX)"


def read_device_code(path: Path) -> tuple[Image, ...]:
    """Return the device code in a file.

    The file is mapped into memory, so that memory use does not grow with its size.

    Args:
        path: The file.

    Returns:
        Each kind and architecture once, sorted; empty if there is no device code.

    Raises:
        UnreadableCode: The file, or a container of device code in it, is damaged or truncated.
        OSError: The file cannot be read.
    """
    images: tuple[Image, ...] = ()
    if path.stat().st_size >= _FATBIN_HEADER_BYTES:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            if data[:4] == ELF_MAGIC:
                _check_whole(data, path)
                (machine,) = struct.unpack_from("<H", data, _ELF_MACHINE_AT)
                if machine == _EM_CUDA:
                    return (_cubin(data, path),)
            images = tuple(sorted(set(_fatbins(data, path))))
    if not images and path.suffix in _NOTHING_ELSE:
        raise UnreadableCode(f"{path}: expected device code, the file has none")
    return images


def _check_whole(data: mmap.mmap, path: Path) -> None:
    """Check that an ELF file is not truncated, because device code may be at its end."""
    if len(data) < _ELF_HEADER_BYTES:
        raise UnreadableCode(f"{path}: an ELF file of {len(data)} bytes is truncated")
    (sections,) = struct.unpack_from("<Q", data, _ELF_SECTIONS_AT)
    size, count = struct.unpack_from("<HH", data, _ELF_SECTION_SIZE_AT)
    least = sections + size * count
    if data[_ELF_CLASS_AT] == _ELF_64 and least > len(data):
        raise UnreadableCode(
            unmet.Fact(f"{least} bytes", (f"{len(data)}; it is truncated"), f"{path}")
        )


def _cubin(data: mmap.mmap, path: Path) -> Image:
    """Return the machine code of a bare cubin."""
    match = _CUBIN_TARGET.search(data[:_NOTES_BYTES])
    if match is not None:
        return Image("sass", CodeArchitecture.parse(match[1].decode()))
    (flags,) = struct.unpack_from("<I", data, _ELF_FLAGS_AT)
    shift = 8 if data[_ELF_ABI_AT] >= _ABI_SECOND_BYTE else 0
    number = (flags >> shift) & 0xFF
    if not 20 <= number <= 255:
        raise UnreadableCode(f"{path}: a cubin whose architecture cannot be read ({flags:#x})")
    return Image("sass", CodeArchitecture(number))


def _fatbins(data: mmap.mmap, path: Path) -> Iterator[Image]:
    """Yield the device code of all fat binaries in a file."""
    at = data.find(FATBIN_MAGIC)
    while at >= 0:
        end = at + 4
        if at + _FATBIN_HEADER_BYTES <= len(data):
            _, version, header, size = _FATBIN_HEADER.unpack_from(data, at)
            # The four bytes of the magic number also occur in ordinary code, but only a container
            # has this header.
            if version == 1 and header == _FATBIN_HEADER_BYTES:
                end = at + header + size
                if end > len(data):
                    raise UnreadableCode(f"{path}: device code at byte {at} is truncated")
                yield from _entries(data, at + header, end, path)
        at = data.find(FATBIN_MAGIC, end)


def _entries(data: mmap.mmap, at: int, end: int, path: Path) -> Iterator[Image]:
    """Yield the device code of one fat binary, whose entries are between two offsets."""
    while at + _ENTRY_BYTES <= end:
        kind, _, header, size = _ENTRY_START.unpack_from(data, at)
        (number,) = struct.unpack_from("<I", data, at + _ENTRY_NUMBER_AT)
        (flags,) = struct.unpack_from("<Q", data, at + _ENTRY_FLAGS_AT)
        if header < _ENTRY_BYTES or at + header + size > end:
            raise UnreadableCode(f"{path}: device code at byte {at} is damaged")
        if kind in _KINDS:
            yield Image(_KINDS[kind], CodeArchitecture(number, _suffix_of(flags)))
        at += header + size


def _suffix_of(flags: int) -> str:
    if flags & _ARCHITECTURE_SPECIFIC:
        return "a"
    if flags & _FAMILY_SPECIFIC:
        return "f"
    return ""
