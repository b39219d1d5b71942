"""``sm121``: a wrong request is one line and status 4, whoever finds it."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import sm121.fixtures
from data_rows import from_data

from sm121 import cli
from sm121.cli.arguments import OF_A_CHECKOUT


@from_data
def test_a_wrong_request_is_one_line(arguments, line, capsys):
    assert cli.main(arguments) == 4
    printed = capsys.readouterr()
    assert printed.out == "" and printed.err.count("\n") == 1 and line in printed.err


def test_help_is_no_wrong_request(capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(["merge", "--help"])
    assert ended.value.code == 0 and "DIR" in capsys.readouterr().out


def test_help_has_the_commands_in_groups(capsys):
    with pytest.raises(SystemExit):
        cli.main(["--help"])
    judge, look, gate, more, authors = capsys.readouterr().out.split("\n\n")[2:7]
    assert "  run " in judge and "  history " in look and "  trust " in gate and "  warm " in more
    assert all(f"  {name} " in authors for name in OF_A_CHECKOUT)


def test_help_of_a_run_is_the_suites_own(capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(["run", "--help"])
    text = capsys.readouterr().out
    assert not ended.value.code and "--base-url" in text and "--collect-only" not in text


def test_an_installed_copy_says_that_a_tool_needs_a_checkout(tmp_path):
    installed = tmp_path / "lib" / "site-packages" / "sm121"
    shutil.copytree(Path(sm121.__file__).parent, installed)
    data = Path(sm121.fixtures.__file__).parent
    shutil.copytree(data, installed / "fixtures", dirs_exist_ok=True)

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, "PYTHONPATH": str(installed.parent)}
        command = [sys.executable, "-m", "sm121", *words]
        return subprocess.run(
            command, env=environment, capture_output=True, text=True, cwd=tmp_path
        )

    done = run("canary-train", "weights.safetensors", "--steps", "1")
    assert done.returncode == 4
    assert done.stderr == "sm121 canary-train: needs a checkout of the suite, see tools/ there\n"
    helped = run("--help").stdout
    assert "  history " in helped and "ablation" not in helped
