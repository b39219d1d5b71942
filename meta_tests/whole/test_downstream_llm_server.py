"""A project that uses only the server of `pytest_llm_server`."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path

import pytest

from meta_tests.fakes.servers import fault_server
from meta_tests.folders import META, ROOT
from meta_tests.releases import needs
from sm121.core.waiting import until
from sm121.engines.process_tree import marked

PROJECT = META / "whole" / "downstream_llm_server"
FAULTS = META / "whole" / "scenarios" / "llm_server_faults.py"
#: A variable that is set in all processes that a run starts.
MARK = "SM121_META_LLM"
SECRET = "hf-T0psecret"
FIRST = "test_our_api.py::test_an_answer_has_the_tokens_that_were_asked_for"
ENGINE = ("-p", "meta_tests.fakes.llm_engine")


@pytest.fixture
def project(tmp_path):
    """Return a copy of the project outside of the suite's checkout."""
    made_by_running = shutil.ignore_patterns("__*", ".*")
    return Path(shutil.copytree(PROJECT, tmp_path / "theirs", ignore=made_by_running))


def command(project: Path, *arguments: str) -> list[str]:
    base = f"--basetemp={project.parent / 'base'}"
    return [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", base, *arguments]


def variables(project: Path) -> dict[str, str]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("PYTEST_", "GITHUB_"))}
    return {**kept, MARK: str(project), "PYTHONPATH": str(ROOT)}


def run(project: Path, *arguments: str, **more: str) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        command(project, *arguments),
        cwd=project, env=variables(project) | more, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert marked(MARK, str(project)) == [], "something is left"
    return done


def outcomes(output: str) -> dict[str, str]:
    """Return the outcome of each test from the output of ``-rA``.

    An error replaces an earlier outcome. The keys are the tests' names."""
    found = re.findall(r"^(PASSED|FAILED|ERROR|SKIPPED) \S*?::(\w+)", output, re.M)
    return {name: outcome for outcome, name in found}


def test_the_entry_point_is_installed():
    points = [each for each in entry_points(group="pytest11") if each.value == "pytest_llm_server"]
    assert [point.name for point in points] == ["pytest_llm_server"]


def test_each_fault_of_a_server_is_reported_at_its_test(project):
    shutil.copy(FAULTS, project / "test_faults.py")
    (project / "pytest.ini").write_text("[pytest]\nllm_model = theirs\n")
    done = run(project, *ENGINE, "-rA", "-l", "--junitxml=junit.xml", "test_faults.py")
    assert done.returncode == 1, done.stdout + done.stderr
    bad = {name: how for name, how in outcomes(done.stdout).items() if how != "PASSED"}
    assert bad == {
        "test_does_not_start": "FAILED",
        "test_hangs_at_its_start": "FAILED",
        "test_dies_in_the_test": "FAILED",
        "test_dies_in_a_block_of_the_test": "FAILED",
        "test_hangs_in_the_test": "FAILED",
        "test_fails_by_itself": "FAILED",
        "test_died_before_the_test": "ERROR",
    }, done.stdout
    text = done.stdout
    assert "the server did not start. Cause: oom: torch.OutOfMemoryError" in text
    # The limit is 1 s, but on a busy machine it is checked later.
    assert re.search(r"Cause: hang: the server was not ready within \d s", text), text
    assert text.count("Cause: killed: python") >= 3
    assert "the server does not answer. Cause: hang: it runs and generates no token" in text
    assert "has ended with status -9, between two tests. Cause: killed: python" in text
    junit = (project / "junit.xml").read_text("utf-8")
    folder = project.parent / "base" / "llm-server"
    logs = "".join(log.read_text("utf-8") for log in folder.glob("*.log"))
    assert re.findall(r"^the key is (\S+)$", text, re.M) == ["[redacted]"]
    assert SECRET not in text + junit + logs
    bundles = {}
    for bundle in sorted((folder / "crashes").iterdir()):
        index = json.loads((bundle / "bundle.json").read_text("utf-8"))
        bundles[bundle.name] = index["test"]
        assert str(bundle) in text and SECRET not in (bundle / "configuration.json").read_text()
        assert "file" in index["parts"]["server.log"]
    assert bundles == {
        "1-oom": "test_faults.py::test_does_not_start",
        "2-hang": "test_faults.py::test_hangs_at_its_start",
        "3-killed": "test_faults.py::test_dies_in_the_test",
        "4-killed": "test_faults.py::test_dies_in_a_block_of_the_test",
        "5-hang": "test_faults.py::test_hangs_in_the_test",
        "6-killed": None,
    }


XFAIL = """
import pytest
from pytest_llm_server import ServerFailed

@pytest.fixture
def mortal(llm_server_factory):
    with llm_server_factory("mortal", ["--fault", "obeys"]) as server:
        yield server

def die(server):
    with server.http(timeout_s=1.0) as http:
        http.post("/v1/completions", json={"prompt": "die"}).raise_for_status()

@pytest.mark.xfail(reason="another bug")
def test_dies_beside_another_bug(mortal):
    die(mortal)

@pytest.mark.xfail(raises=ServerFailed, reason="a known crash")
def test_dies_as_it_is_known_to(mortal):
    die(mortal)

@pytest.mark.xfail(reason="another bug")
def test_has_another_bug(mortal):
    assert mortal.api_key == "theirs"
"""


@pytest.mark.slow("another way to the same verdict")
def test_a_server_that_dies_under_xfail_is_red(project):
    (project / "test_xfail.py").write_text(XFAIL)
    done = run(project, *ENGINE, "-rA", "--runxfail", "test_xfail.py::test_has_another_bug")
    said = re.findall(r"^E +AssertionError: assert (.*) == 'theirs'", done.stdout, re.M)
    # If the variable CI is set, the summary also has the whole message.
    assert set(said) == {"'[redacted]...[redacted]'"}, done.stdout
    done = run(project, *ENGINE, "-rA", "test_xfail.py")
    assert done.returncode == 1 and "1 failed, 2 xfailed" in done.stdout, done.stdout
    assert outcomes(done.stdout) == {"test_dies_beside_another_bug": "FAILED"}
    assert "Cause: killed: python" in done.stdout


def test_nothing_is_left_when_pytest_is_killed(project):
    (project / "test_waits.py").write_text(
        "import time\n\ndef test_it(llm_server):\n    print('serves', flush=True)\n"
        "    time.sleep(100)\n"
    )
    words = command(project, *ENGINE, "--llm-model=theirs", "-s", "test_waits.py")
    with subprocess.Popen(
        words, cwd=project, env=variables(project), stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if "serves" in line:
                break
        assert len(marked(MARK, str(project))) >= 3, "pytest, the supervisor, the server"
        process.send_signal(signal.SIGKILL)
    assert until(lambda: not marked(MARK, str(project)), 30.0), marked(MARK, str(project))


def test_a_running_server_is_used_and_its_death_reported(project):
    (project / "test_theirs.py").write_text(
        "import os\n\ndef test_it_dies(llm_client, llm_server):\n"
        "    os.kill(int(os.environ['META_PID']), 9)\n"
        "    llm_client.completions.create(model=llm_server.model, prompt='Hello')\n"
        "def test_after(llm_server):\n    pass\n"
    )
    with fault_server(key="th3ir-key") as running:
        more = {"OPENAI_API_KEY": running.key, "META_PID": str(running.process.pid)}
        done = run(project, "--base-url", running.base_url, "-rA", "-l", **more)
    assert done.returncode == 1, done.stdout + done.stderr
    assert outcomes(done.stdout) == {
        "test_an_answer_has_the_tokens_that_were_asked_for": "PASSED",
        "test_it_dies": "FAILED",
        "test_after": "ERROR",
    }, done.stdout
    assert f"needs a server of its own; the run uses {running.base_url}" in done.stdout
    assert "ServerFailed: the attached server ended" in done.stdout
    assert "the attached server ended in an earlier test and does not answer" in done.stdout
    assert running.key not in done.stdout


def test_a_running_server_that_is_not_there_is_one_line_and_no_test_runs(project):
    done = run(project, "--base-url", "http://127.0.0.1:9")
    assert done.returncode == 4, done.stdout + done.stderr
    (line,) = done.stderr.strip().splitlines()
    expected = "ERROR: --base-url http://127.0.0.1:9: expected an OpenAI-compatible server, got no"
    assert line.startswith(expected), line


THEIRS = """
def pytest_addoption(parser):
    parser.addoption("--base-url", default="http://their.page")
"""


def test_a_project_that_does_not_use_it_notices_nothing(project):
    """Without the plugin, a project may use the same option name, and imports nothing of the
    suite."""
    (project / "conftest.py").write_text(THEIRS)
    (project / "test_page.py").write_text(
        "import sys\n\ndef test_it(pytestconfig):\n"
        "    assert pytestconfig.getoption('--base-url') == 'http://their.page'\n"
        "    assert {name for name in sys.modules if name.startswith('sm121')} <= "
        "{'sm121', 'sm121.entry_point'}\n"
    )
    done = run(project, "--strict-markers", "--strict-config", "-W", "error", "test_page.py")
    assert done.returncode == 0, done.stdout + done.stderr


@needs("pytest", "9", "two options of one name are a traceback")
def test_an_option_of_theirs_with_a_name_of_the_plugin_is_one_line(project):
    (project / "conftest.py").write_text(THEIRS.replace("--base-url", "--llm-model"))
    done = run(project)
    (line,) = done.stderr.strip().splitlines()
    expected = "ERROR: conftest.py: expected an option of another name than --llm-model, which"
    assert done.returncode == 4 and line.startswith(expected), line


@needs("pytest", "9", "two options of one name are a traceback")
@pytest.mark.parametrize("named_by", ["-p", "conftest.py"])
def test_an_option_of_another_plugin_is_one_line(project, named_by):
    (project / "theirs.py").write_text(THEIRS.replace("--base-url", "--llm-model"))
    words = ["-p", "theirs"]
    if named_by == "conftest.py":
        (project / "conftest.py").write_text("pytest_plugins = ['theirs']\n")
        words = []
    done = run(project, *words, PYTHONPATH=str(project))
    (line,) = done.stderr.strip().splitlines()
    assert done.returncode == 4 and line.startswith("ERROR: "), line
    assert "expected an option of another name than --llm-model" in line
    assert "-p no:pytest_llm_server" in line


@pytest.mark.slow("as of pytest_gpu_arch")
def test_an_option_of_theirs_in_a_folder_below_is_one_line(project):
    (project / "below").mkdir()
    (project / "below" / "conftest.py").write_text(THEIRS.replace("--base-url", "--llm-model"))
    (project / "below" / "test_it.py").write_text("def test_it(): pass\n")
    done = run(project)
    assert done.returncode == 2 and "Traceback" not in done.stdout, done.stdout
    line = "below/conftest.py: expected an option of another name than --llm-model, which the"
    assert f"\n{line}" in done.stdout and "argparsing.py" not in done.stdout, done.stdout


@pytest.mark.slow("as of the suite")
def test_a_password_in_the_address_is_one_line(project):
    done = run(project, f"--base-url=http://me:{SECRET}@127.0.0.1:9")
    (line,) = done.stderr.strip().splitlines()
    assert done.returncode == 4 and SECRET not in done.stdout + done.stderr
    assert line.endswith("Give the key in the variable OPENAI_API_KEY"), line


@pytest.mark.slow("refused as an option in a folder below is")
def test_a_quote_that_does_not_end_names_its_setting(project):
    (project / "pytest.ini").write_text("[pytest]\nllm_model = m\nllm_args = --x 'y\n")
    done = run(project)
    (line,) = done.stderr.strip().splitlines()
    assert line == "ERROR: llm_args in pytest.ini: No closing quotation"


@pytest.mark.slow("a whole run of the suite")
def test_beside_the_suite_both_have_the_same_running_server(project):
    (project / "pytest.ini").write_text("[pytest]\nsm121 = true\n")
    (project / "test_levels.py").write_text(
        "import pytest\n\n"
        "@pytest.mark.smoke\n@pytest.mark.applies_to('cpu')\n"
        "def test_both(server, llm_server):\n"
        "    assert server.endpoint.base_url == llm_server.url\n"
        "    assert server.endpoint.api_key == llm_server.api_key\n"
    )
    with fault_server() as running:
        attached = [*running.options, "--served-model-name", "canary", "--arch", "cpu"]
        done = run(project, *attached, "test_levels.py", FIRST)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "PASS" in done.stdout and "2 passed" in done.stdout, done.stdout


def test_the_page_begins_with_the_project():
    text = (ROOT / "docs" / "pytest-llm-server.md").read_text("utf-8")
    mark = r"<!-- run: meta_tests/whole/test_downstream_llm_server.*?```python\n(.*?)```"
    (block,) = re.findall(mark, text, re.S)
    code = (PROJECT / "test_our_api.py").read_text("utf-8")
    for part in block.strip().split("\n\n\n"):
        assert part in code, part
