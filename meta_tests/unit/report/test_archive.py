"""The archive of a run, which users attach to an issue."""

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
    """A failed run with its server's log, a trace, and an earlier run."""
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


def test_an_archive_contains_the_run_from_any_folder(failed, tmp_path, monkeypatch):
    """The archive of a run is the same, from whatever folder the command is started.

    In the report directory, the archive does not contain itself. The run may also be given by its
    verdict.json.
    """
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


NOTHING = {"verdict": "NOT_RUN", "reason": "sm121 was requested, but this machine is cpu"}


def put(folder: Path, started: str, **fields) -> Path:
    """Write a run with the given time into a report directory.

    If the ``verdict`` is NOT_RUN, nothing ran in it."""
    folder.mkdir(parents=True, exist_ok=True)
    run = json.loads((report_runs.write("fail", folder) / "verdict.json").read_text())
    if fields:
        run |= {"tests": [], "crashes": [], **fields}
    (folder / "verdict.json").write_text(json.dumps({**run, "started": started}))
    return folder


def bundled(report: Path, tmp_path: Path) -> dict:
    """Return the verdict.json in the archive of a report directory."""
    output = tmp_path / "run.tar.gz"
    assert main(["bundle", str(report), "--output", str(output)]) == 0
    with tarfile.open(output) as archived:
        (name,) = [name for name in archived.getnames() if name.endswith("/verdict.json")]
        return json.load(archived.extractfile(name))


def test_an_archive_is_of_the_newest_run_that_has_answers(tmp_path, capsys):
    report = tmp_path / "report"
    put(report / "earlier" / "1", "2026-11-27T10:00:00+00:00")
    put(report / "earlier" / "2", "2026-11-28T10:00:00+00:00")
    put(report / "earlier" / "3", "2026-11-29T09:00:00+00:00", **NOTHING)
    put(report, "2026-11-29T10:00:00+00:00", **NOTHING)
    assert bundled(report, tmp_path)["started"].startswith("2026-11-28")
    printed = capsys.readouterr().out
    assert "the newest run is NOT_RUN, and no check was executed in it" in printed
    assert f"FAIL of 2026-11-28T10:00:00, in {report}/earlier/2" in printed
    newest = f"sm121 bundle {report}/verdict.json"
    assert newest in printed
    assert bundled(report / "verdict.json", tmp_path)["verdict"] == "NOT_RUN"
    assert newest not in capsys.readouterr().out


def test_after_a_refused_certificate_the_run_before_is_bundled(tmp_path, capsys):
    """After a refused certificate, the command archives the run before it.

    That run's report was moved away, and the certificate has no report."""
    report = tmp_path / "report"
    put(report / "earlier" / "1", "2026-11-28T10:00:00+00:00")
    assert bundled(report, tmp_path)["verdict"] == "FAIL"
    assert "the newest run was refused, and has no report" in capsys.readouterr().out


def test_a_run_with_answers_is_bundled_without_a_note(tmp_path, capsys):
    report = tmp_path / "report"
    put(report / "earlier" / "1", "2026-11-28T10:00:00+00:00")
    put(report / "not-run", "2026-11-29T11:00:00+00:00", **NOTHING)
    put(report, "2026-11-29T10:00:00+00:00")
    assert bundled(report, tmp_path)["started"].startswith("2026-11-29T10")
    assert "newest" not in capsys.readouterr().out


def test_without_answers_anywhere_the_newest_run_is_bundled(tmp_path, capsys):
    report = put(tmp_path / "report", "2026-11-29T10:00:00+00:00", **NOTHING)
    assert bundled(report, tmp_path)["verdict"] == "NOT_RUN"
    assert "newest" not in capsys.readouterr().out
