"""verdict.json of a run whose suite was killed names the crash bundle of its server."""

import json
import subprocess
import sys

import pytest

from meta_tests.fakes.run_events import new_file
from sm121.core import waiting
from sm121.evidence import crash_bundle
from sm121.run import suite_killed, verdict_file


def bundle_in(report, **changes):
    """Write the description of a bundle, and return its folder."""
    bundle = report / crash_bundle.FOLDER / "1-suite_killed"
    bundle.mkdir(parents=True)
    content = {
        "class": "suite_killed",
        "summary": "pytest ended",
        "owner": "the suite",
        "what": "the suite died",
        "test": None,
        "at": "",
        "exit_status": None,
        "exits": [],
        "engine_debug": False,
        "rerun": "",
        "parts": {},
    }
    (bundle / crash_bundle.INDEX).write_text(json.dumps(content | changes))
    return bundle


def test_the_crash_is_added_by_the_model(tmp_path):
    path = tmp_path / verdict_file.NAME
    verdict_file.write(new_file(started="2026-11-30T10:00:00+00:00"), path)
    bundle = bundle_in(tmp_path, summary="pytest\x1b ended")
    assert suite_killed.main([str(tmp_path), str(bundle)]) == 0
    file = verdict_file.read(path)
    (crash,) = file.crashes
    assert crash.bundle == "crashes/1-suite_killed" and crash.happened == "the suite died"
    assert (crash.kind, crash.summary) == ("suite_killed", "pytest\\x1b ended")
    assert file.reason == "the run has not finished: pytest\\x1b ended"
    assert file.started == "2026-11-30T10:00:00+00:00" and not file.finished


@pytest.mark.parametrize("content", ["{}", "no JSON"])
def test_a_damaged_verdict_is_one_line(tmp_path, content, capsys):
    path = tmp_path / verdict_file.NAME
    path.write_text(content)
    assert suite_killed.main([str(tmp_path), str(bundle_in(tmp_path))]) == 1
    assert path.read_text() == content
    assert capsys.readouterr().err.startswith(f"{path}: cannot be changed: ")


def test_a_folder_without_a_verdict_stays_as_it_is(tmp_path):
    assert suite_killed.main([str(tmp_path), str(bundle_in(tmp_path))]) == 0
    assert not (tmp_path / verdict_file.NAME).exists()


def test_the_supervisor_of_a_killed_suite_adds_its_crash(tmp_path):
    path = tmp_path / verdict_file.NAME
    verdict_file.write(new_file(), path)
    log = tmp_path / "server-x.log"
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    code = "import time; print('ready', flush=True); time.sleep(600)"
    words = ["--status", tmp_path / "server-x.status.json", "--scratch", scratch, "--grace", "2"]
    server = [sys.executable, "-c", code]
    with log.open("w") as output:
        supervisor = subprocess.Popen(
            [sys.executable, "-m", "sm121.engines.supervisor", *words, "--", *server],
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=output,
        )
    assert waiting.until(lambda: "ready" in log.read_text(), 60.0)
    supervisor.stdin.close()  # the same happens when pytest is killed
    supervisor.wait(60)
    file = verdict_file.read(path)
    assert [crash.kind for crash in file.crashes] == ["suite_killed"], log.read_text()
    assert file.reason.startswith("the run has not finished: pytest ended without stopping")
    assert (tmp_path / file.crashes[0].bundle / crash_bundle.INDEX).is_file()
