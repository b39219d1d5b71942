"""Runs the examples of docs/ci here, on a GB10 that is not there. On its PATH are a docker that
runs the script here, a git that clones this checkout, a pip that installs nothing."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import yaml
from gb10.machine import HERE, ROOT, Behind, Machine

EXAMPLES = ROOT / "docs" / "ci"
#: Runs the script of `docker run ... IMAGE -c SCRIPT` here, where its mounts lie.
_DOCKER = """
import os, subprocess, sys
given, mounts, environment, place = sys.argv[2:], {}, dict(os.environ), "."
for option, value in zip(given, given[1:]):
    if option == "-v":
        outside, inside, *_ = value.split(":")
        mounts[inside] = outside
    elif option == "-e":
        name, equals, text = value.partition("=")
        environment.update({name: text} if equals else {})
    elif option == "-w":
        place = value
def here(text):
    for inside in sorted(mounts, key=len, reverse=True):
        text = text.replace(inside, mounts[inside]) if text.startswith(inside) else text
    return text
script = given[-1]
for inside in ("/ws", "/history"):
    for before in " =":
        script = script.replace(before + inside, before + mounts[inside])
own = {name: here(value) for name, value in environment.items()}
sys.exit(subprocess.run(["bash", "-c", script], cwd=here(place), env=own).returncode)
"""
_GIT = """
import os, sys
if sys.argv[1] == "clone":
    os.symlink(os.environ["SUITE_HERE"], sys.argv[-1])
elif sys.argv[1] != "config":
    os.execv(os.environ["REAL_GIT"], ["git", *sys.argv[1:]])
"""


class Runner:
    """A machine of somebody's CI: a GB10, and a folder for each job."""

    def __init__(self, folder: Path, behind: Behind) -> None:
        self.box = Machine(folder / "gb10", "0.33.0", behind, profile=HERE / "merge.toml")
        self.box.build()
        self.folder, self.history, self.jobs = folder, folder / "home" / "sm121-history", 0
        self.history.mkdir(parents=True)
        self.suite = folder / "suite"
        self.suite.mkdir()
        for name in ("tests", "conftest.py", "pytest.ini"):
            (self.suite / name).symlink_to(ROOT / name)
        suite = [f"--profile={self.box.profile}", f"--engine-python={self.box.python}"]
        suite = ["-p", "no:cacheprovider", "--share-machine", *suite]
        typed = [sys.executable, "-m", "pytest", *suite]
        self._program("docker", _DOCKER)
        self._program("git", _GIT)
        self._program("pip", "")
        self._program("chown", "")
        self._program("pytest", _starts(typed))
        self._program("sm121", _starts([sys.executable, "-m", "sm121"]))
        run = [*typed, "-c", str(ROOT / "pytest.ini")]
        self._program(
            "python3",
            "import os, sys\n"
            "words = sys.argv[1:]\n"
            "is_suite = words[:3] == ['-m', 'sm121', 'run']\n"
            f"start = {run!r} if is_suite else [{sys.executable!r}]\n"
            "if words[:2] != ['-m', 'pip']:\n"
            "    os.execv(start[0], start + words[3 * is_suite :])",
        )

    def _program(self, name: str, text: str) -> None:
        program = self.folder / "bin" / name
        program.parent.mkdir(exist_ok=True)
        program.write_text(f"#!{sys.executable}\n{text}\n")
        program.chmod(0o755)

    def shell(self, script: str, variables: dict[str, str], place: Path) -> tuple[int, str]:
        self.box.write()
        found = self.box.surroundings()
        git = shutil.which("git")
        assert git is not None
        environment = {
            **found, "HOME": str(self.folder / "home"), "REAL_GIT": git,
            "SUITE_HERE": str(self.suite), **variables,
            "PATH": f"{self.folder / 'bin'}{os.pathsep}{found['PATH']}",
        }  # fmt: skip
        done = subprocess.run(
            ["bash", "-e", "-o", "pipefail", "-c", script], cwd=place, env=environment, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=600, check=False,
        )  # fmt: skip
        return done.returncode, done.stdout

    def github(self, event: str) -> tuple[int, str, str]:
        """The job of the Spark on an event: its status, its output, and the summary of the job."""
        loaded = yaml.safe_load((EXAMPLES / "github-actions.yml").read_text("utf-8"))
        (step,) = [
            step for step in loaded["jobs"]["spark"]["steps"] if "docker run" in step.get("run", "")
        ]
        self.jobs += 1
        place = self.folder / f"job-{self.jobs}"
        (place / "change").mkdir(parents=True)
        (place / "suite").symlink_to(self.suite)
        summary = place / "summary.md"
        summary.touch()
        variables = {name: _expression(text, event) for name, text in step["env"].items()}
        variables |= {"INSTALL": "true", "GITHUB_STEP_SUMMARY": str(summary)}
        status, output = self.shell(step["run"], variables, place)
        return status, output, summary.read_text("utf-8")

    def action(self, arguments: str) -> tuple[int, str, str]:
        """action.yml with such arguments: its status, its output, and what it puts out."""
        (step,) = yaml.safe_load((ROOT / "action.yml").read_text("utf-8"))["runs"]["steps"]
        outputs = self.folder / "outputs"
        variables = {"SUITE": str(ROOT), "ARGUMENTS": arguments, "PYTHON": "python3"}
        variables["GITHUB_OUTPUT"] = str(outputs)
        status, output = self.shell(step["run"], variables, self.suite)
        return status, output, outputs.read_text("utf-8")

    def gitlab(self, *, default_branch: bool) -> tuple[int, str]:
        """The same of GitLab, which has the history where its runner mounts it."""
        loaded = yaml.safe_load((EXAMPLES / "gitlab-ci.yml").read_text("utf-8"))
        job = loaded["spark"]
        merged = [rule for rule in job["rules"] if "CI_DEFAULT_BRANCH" in rule["if"]]
        script = "\n".join([*job["before_script"], *job["script"]])
        self.jobs += 1
        place = self.folder / f"job-{self.jobs}"
        place.mkdir()
        variables = {"INSTALL": "true", "SUITE": "the suite"}
        variables |= merged[0]["variables"] if default_branch else {}
        return self.shell(script.replace("/history", str(self.history)), variables, place)

    @property
    def verdict(self) -> dict:
        return json.loads((self.suite / "conformance-report" / "verdict.json").read_text("utf-8"))


def _expression(text: str, event: str) -> str:
    """What GitHub makes of `${{ ... }}`: a variable that nobody set, or a choice by the event."""
    match = re.fullmatch(r"\$\{\{ (.*) \}\}", text)
    assert match is not None, text
    own = match[1].replace("github.event_name", repr(event)).replace("&&", "and")
    own = re.sub(r"vars\.\w+", "''", own.replace("||", "or"))
    return str(eval(own))


def _starts(words: list[str]) -> str:
    """A program that is another one with such words."""
    return f"import os, sys\nos.execv({words[0]!r}, {words!r} + sys.argv[1:])"
