"""What is handed on of a run: one archive for an issue."""

import hashlib
import json
import tarfile
from pathlib import Path

import pytest

from meta_tests.fakes import report_runs
from sm121.cli import main
from sm121.report import archive

SECRET = "hf_" + "a1B2c3D4" * 4


@pytest.fixture
def failed(tmp_path):
    """A run that failed, with the log of its server, a trace, and a run before it."""
    directory = report_runs.write("fail", tmp_path / "report")
    (directory / "server-under-test.log").write_text(f"loading\nHF_TOKEN={SECRET}\nready\n")
    (directory / "earlier" / "1").mkdir(parents=True)
    (directory / "earlier" / "1" / "verdict.json").write_text("{}")
    (directory / ".lock").touch()
    return directory


def test_an_archive_has_the_whole_run_without_secrets(failed, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(archive, "LARGEST", 2 << 20)
    with (failed / "decode.pt.trace.json").open("wb") as trace:
        trace.truncate(3 << 20)
    output = tmp_path / "run.tar.gz"
    assert main(["bundle", str(failed), "--output", str(output)]) == 0
    assert "left out: decode.pt.trace.json (3 MiB)" in capsys.readouterr().out
    with tarfile.open(output) as archived:
        entries = {entry.name.partition("/")[2]: entry for entry in archived.getmembers()}
        read = {name: archived.extractfile(entry).read() for name, entry in entries.items()}
    assert {"verdict.json", "server-under-test.log", archive.SUMS} <= set(read)
    assert not [name for name in read if name.startswith((".", "earlier"))]
    assert SECRET.encode() not in b"".join(read.values())
    assert json.loads(read["verdict.json"]) == json.loads((failed / "verdict.json").read_text())
    sums = dict(reversed(line.split("  ")) for line in read[archive.SUMS].decode().splitlines())
    hashes = {name: hashlib.sha256(data).hexdigest() for name, data in read.items()}
    assert sums == {name: hashed for name, hashed in hashes.items() if name != archive.SUMS}
    assert {(entry.uid, entry.uname) for entry in entries.values()} == {(0, "")}


def test_an_archive_is_of_the_run_wherever_it_is_asked_for(failed, tmp_path, monkeypatch):
    """In the report directory it is no part of itself; by its verdict.json it is the same run."""
    monkeypatch.chdir(failed)
    for _ in range(2):
        written, _ = archive.write(Path())
        with tarfile.open(written) as archived:
            names = {name.partition("/")[2] for name in archived.getnames()}
        assert {"verdict.json", "details.json"} <= names and written.name not in names
    other, _ = archive.write(failed / "verdict.json", tmp_path / "other.tar.gz")
    written.unlink()
    with tarfile.open(other) as archived:
        assert {name.partition("/")[2] for name in archived.getnames()} >= names
