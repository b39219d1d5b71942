"""The NCCL library that a process has mapped is identified by its digest."""

import hashlib
import mmap

import psutil

from sm121.evidence import mapped


def test_nccl_that_was_replaced_since_has_no_digest(tmp_path):
    """If NCCL was replaced after the start, there is no digest, because the file of the old library
    cannot be read."""
    library = tmp_path / "libnccl.so.2"
    library.write_bytes(b"NCCL 2.28.9")
    with library.open("rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ):
        (row,) = mapped.nccl([psutil.Process()])
        assert row.path == str(library)
        assert row.sha256 == hashlib.sha256(b"NCCL 2.28.9").hexdigest()
        library.unlink()
        assert mapped.nccl([psutil.Process()]) == [row.model_copy(update={"sha256": None})]
        library.write_bytes(b"NCCL 2.29.1")
        assert mapped.nccl([psutil.Process()]) == [row.model_copy(update={"sha256": None})]
    assert mapped.nccl([psutil.Process()]) == []


def test_a_node_without_a_digest_is_not_compared():
    def of(sha256: str | None) -> list[mapped.MappedLibrary]:
        return [mapped.MappedLibrary(path="/usr/lib/libnccl.so.2", sha256=sha256)]

    assert mapped.different({"node 0": of(None), "node 1": of("a"), "node 2": of("a")}) == []
    (line,) = mapped.different({"node 0": of("a"), "node 1": of(None), "node 2": of("b")})
    assert line.startswith("libnccl of node 2: expected sha256 a as node 0, got b.")
