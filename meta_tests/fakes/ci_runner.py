"""Run the examples of docs/ci on this machine.

`Scripts` runs an example up to the commands of the suite. `Runner` also runs these commands, on a
simulated GB10. The PATH contains replacements for three programs: a docker that runs the script on
this machine, a git that clones this checkout, and a pip that installs nothing.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import yaml

from meta_tests.fakes.gb10.machine import HERE, ROOT, Behind, Machine
from meta_tests.fakes.loopback import JsonHandler

FILES = {"github": "github-actions.yml", "gitlab": "gitlab-ci.yml"}
EXAMPLES = {name: (ROOT / "docs" / "ci" / file).read_text() for name, file in FILES.items()}
#: GitLab's names for GitHub's events.
_PIPELINES = {
    "pull_request": {"CI_PIPELINE_SOURCE": "merge_request_event"},
    "push": {"CI_PIPELINE_SOURCE": "push", "CI_COMMIT_BRANCH": "main"},
    "schedule": {"CI_PIPELINE_SOURCE": "schedule", "CI_COMMIT_BRANCH": "main"},
}
#: Runs the script of `docker run ... IMAGE -c SCRIPT` on this machine, in the mounted folders.
#: Other commands are printed.
_DOCKER = """
import os, subprocess, sys
if sys.argv[1] != "run":
    print("RUNS docker", *sys.argv[1:])
    sys.exit()
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
for inside in {"/ws", "/history"} & {*mounts}:
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


@dataclass(frozen=True)
class Image:
    """The result of the job that builds an image, and of the job on the Spark that follows."""

    is_started: bool
    status: int
    output: str
    #: Whether the job on the Spark starts.
    is_judged: bool
    #: The image of the job's container, and the packages that the job installs.
    name: str
    install: str


class Scripts:
    """A CI machine with a folder for each job.

    It only prints the suite's commands; they always pass.

    `texts` are examples that replace those of docs/ci."""

    def __init__(self, folder: Path, **texts: str) -> None:
        self.folder = folder
        self.history = folder / "home" / "sm121-history"
        self.jobs = 0
        self.history.mkdir(parents=True)
        self.texts = EXAMPLES | texts
        self.suite = folder / "suite"
        (self.suite / "tests").mkdir(parents=True)
        (folder / "tmp").mkdir()
        for name in ("conftest.py", "pytest.ini"):
            (self.suite / name).symlink_to(ROOT / name)
        # The levels of which tests were collected.
        for level in ("smoke", "performance", "regression"):
            name = f"tests/test_{level}.py"
            (self.suite / name).symlink_to(ROOT / name)
        self._program("docker", _DOCKER)
        self._program("git", _GIT)
        for name in ("pip", "chown"):
            self._program(name, "")
        for name in ("pytest", "sm121", "python3"):
            self._program(name, f"import sys\nprint('RUNS {name}', *sys.argv[1:])")

    def _program(self, name: str, text: str) -> None:
        program = self.folder / "bin" / name
        program.parent.mkdir(exist_ok=True)
        program.write_text(f"#!{sys.executable}\n{text}\n")
        program.chmod(0o755)

    def surroundings(self) -> dict[str, str]:
        return dict(os.environ)

    def shell(self, script: str, variables: dict[str, str], folder: Path) -> tuple[int, str]:
        variables = {"INSTALL": "true", **variables}
        git = shutil.which("git")
        around = self.surroundings()
        assert git is not None
        environment = {
            **around, "HOME": str(self.folder / "home"), "REAL_GIT": git,
            "SUITE_HERE": str(self.suite), "TMPDIR": str(self.folder / "tmp"), **variables,
            "PATH": f"{self.folder / 'bin'}{os.pathsep}{around['PATH']}",
        }  # fmt: skip
        done = subprocess.run(
            ["bash", "-e", "-o", "pipefail", "-c", script], cwd=folder, env=environment, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=600, check=False,
        )  # fmt: skip
        return done.returncode, done.stdout

    def run(self, example: str, event: str) -> tuple[int, str, str]:
        """Run the job on the Spark for an event, and return its status, its output, and its
        summary. GitLab has no summary."""
        self.jobs += 1
        folder = self.folder / f"job-{self.jobs}"
        (folder / "change").mkdir(parents=True)
        loaded = yaml.safe_load(self.texts[example])
        if example == "gitlab":
            return *self._gitlab(loaded, event, folder), ""
        steps = loaded["jobs"]["spark"]["steps"]
        (step,) = [step for step in steps if "docker run" in step.get("run", "")]
        (folder / "suite").symlink_to(self.suite)
        summary = folder / "summary.md"
        summary.touch()
        variables = {name: expression(text, event) for name, text in step["env"].items()}
        variables |= {"INSTALL": "true", "GITHUB_STEP_SUMMARY": str(summary)}
        status, output = self.shell(step["run"], variables, folder)
        return status, output, summary.read_text("utf-8")

    def action(self, arguments: str, **inputs: str) -> tuple[int, str, str]:
        """Run action.yml; return its status, its printed output, and its outputs.

        Args:
            arguments: The arguments of `sm121 run`.
            inputs: Further inputs.
        """
        step = yaml.safe_load((ROOT / "action.yml").read_text("utf-8"))["runs"]["steps"][0]
        outputs = self.folder / "outputs"
        outputs.write_text("")
        (self.folder / "summary.md").write_text("")
        variables = {"SUITE": str(ROOT), "ARGUMENTS": arguments, "PYTHON": "python3"}
        variables |= {"AGAINST": "", "STORAGE": ""} | {k.upper(): v for k, v in inputs.items()}
        variables |= {
            "GITHUB_OUTPUT": str(outputs),
            "GITHUB_STEP_SUMMARY": str(self.folder / "summary.md"),
        }
        status, output = self.shell(step["run"], variables, self.suite)
        return status, output, outputs.read_text("utf-8")

    @property
    def summary(self) -> str:
        """The job summary of the action's last run."""
        return (self.folder / "summary.md").read_text("utf-8")

    def image(self, example: str, build: str) -> Image:
        """Run the job that builds an image, with the given value of the variable BUILD.

        Return what the job on the Spark gets from it."""
        loaded = yaml.safe_load(self.texts[example])
        return (self._image_of_gitlab if example == "gitlab" else self._image_of_github)(
            loaded, build
        )

    def _image_of_github(self, loaded: dict, build: str) -> Image:
        job = loaded["jobs"]["image"]
        values = {"vars.BUILD": build}
        status = 0
        output = ""
        name = ""
        is_started = expression("${{ " + job["if"] + " }}", "pull_request", values=values) == "True"
        if is_started:
            (step,) = [step for step in job["steps"] if step.get("id") == "build"]
            outputs = self.folder / "outputs"
            outputs.write_text("")
            variables = {
                key: expression(text, "pull_request", ref="1a2b", values=values)
                for key, text in step["env"].items()
            }
            variables["GITHUB_OUTPUT"] = str(outputs)
            status, output = self.shell(step["run"], variables, self.folder)
            name = outputs.read_text().strip().removeprefix("name=")
        (judge,) = [
            step for step in loaded["jobs"]["spark"]["steps"] if "docker run" in step.get("run", "")
        ]
        values["needs.image.outputs.name"] = name
        values["needs.image.result"] = (
            ("failure" if status else "success") if is_started else "skipped"
        )
        condition = loaded["jobs"]["spark"]["if"].replace("!cancelled()", "True")
        return Image(
            is_started=is_started, status=status, output=output,
            is_judged=expression(condition, "pull_request", values=values) == "True",
            name=expression(judge["env"]["IMAGE"], "pull_request", values=values),
            install=expression(judge["env"]["INSTALL"], "pull_request", values=values),
        )  # fmt: skip

    def _image_of_gitlab(self, loaded: dict, build: str) -> Image:
        variables = {**loaded["variables"], "BUILD": build, "CI_COMMIT_SHA": "1a2b"}
        (chosen, always) = loaded["workflow"]["rules"]
        assert chosen["if"] == "$BUILD" and always == {"when": "always"}
        if build:
            variables |= chosen["variables"]
        variables = _named(_named(variables))  # a variable may contain another one
        job = loaded["image"]
        status = 0
        output = ""
        assert job["rules"] == [{"if": "$BUILD"}]
        if build:
            folder = self.folder / "image"
            folder.mkdir()
            status, output = self.shell("\n".join(job["script"]), variables, folder)
        needs_it = {"job": "image", "optional": True} in loaded["spark"]["needs"]
        assert loaded["spark"]["image"]["name"] == "$IMAGE"
        return Image(
            is_started=bool(build), status=status, output=output, is_judged=needs_it and not status,
            name=variables["IMAGE"], install=variables["INSTALL"],
        )  # fmt: skip

    def _gitlab(self, loaded: dict, event: str, folder: Path) -> tuple[int, str]:
        """Run a job of GitLab.

        The stored runs are in the folder that a comment in config.toml tells the user to mount."""
        pipeline = _PIPELINES[event] | {"CI_DEFAULT_BRANCH": "main"}
        rules = {name: _rule(loaded[name]["rules"], pipeline) for name in ("spark", "certificate")}
        ((name, rule),) = [(name, rule) for name, rule in rules.items() if rule is not None]
        job = loaded["spark"] | loaded[name]
        script = "\n".join([*job["before_script"], *job["script"]])
        if ":/history" in self.texts["gitlab"]:
            script = re.sub(r"(?<=[ =])/history", str(self.history), script)
        return self.shell(script, {"SUITE": "the suite"} | rule.get("variables", {}), folder)


class Runner(Scripts):
    """CI jobs with the suite, on a simulated GB10."""

    def __init__(self, folder: Path, behind: Behind) -> None:
        super().__init__(folder)
        self.box = Machine(folder / "gb10", "0.33.0", behind, profile=HERE / "paths.toml")
        self.box.build()
        suite = [f"--profile={self.box.profile}", f"--engine-python={self.box.python}"]
        options = ["-p", "no:cacheprovider"]
        typed = [sys.executable, "-m", "pytest", *options, *suite]
        certified = [str(folder / "gb10" / "suite" / "bin" / "python"), "-m", "pytest", *suite]
        self._program(
            "pytest",
            "import os, sys\n"
            "is_night = '--certify' in sys.argv\n"
            # PYTHONPATH contains the simulated GB10, which a certified run sets up by itself.
            "if is_night: del os.environ['PYTHONPATH']\n"
            f"start = {certified!r} if is_night else {typed!r}\n"
            "os.execv(start[0], start + sys.argv[1:])",
        )
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

    def surroundings(self) -> dict[str, str]:
        self.box.write()
        return self.box.surroundings()

    @property
    def verdict(self) -> dict:
        return json.loads((self.suite / "conformance-report" / "verdict.json").read_text("utf-8"))


class Answers(JsonHandler):
    """The server behind the simulated GB10.

    It sends the two answers that the smoke level requests, and the text of a stream after `wait_s`
    seconds."""

    wait_s = 0.2

    def do_GET(self) -> None:
        models = {"object": "list", "data": [{"id": "gpt-oss-120b", "object": "model"}]}
        self.say(models if self.path == "/v1/models" else "")

    def do_POST(self) -> None:
        request = self.asked()
        is_chat = "messages" in request
        choice = {"index": 0, "logprobs": None}
        if is_chat:
            message = {"role": "assistant", "content": "Paris"}
            choice |= {"finish_reason": "stop", "message": message, "delta": message}
        else:
            choice |= {"finish_reason": "length", "text": " Paris"}
        usage = {"prompt_tokens": 5, "completion_tokens": 1, "total_tokens": 6}
        answer = {"id": "1", "object": "text_completion", "created": 0, "model": "gpt-oss-120b"}
        answer |= {"choices": [choice], "usage": usage}
        if request.get("stream"):
            time.sleep(self.wait_s)
            self.say(f"data: {json.dumps(answer)}\n\ndata: [DONE]\n\n", kind="text/event-stream")
        else:
            self.say(answer)


def _named(variables: Mapping[str, str]) -> dict[str, str]:
    """Replace the names of GitLab's variables in values by the variables' values."""

    def value(match: re.Match[str]) -> str:
        return str(variables.get(match[1], match[0]))

    return {name: re.sub(r"\$(\w+)", value, str(text)) for name, text in variables.items()}


def _rule(rules: list[dict], pipeline: dict[str, str]) -> dict | None:
    """Return the rule that starts a job of GitLab; None if the job does not start."""
    for rule in rules:
        name, value = rule["if"].split(" == ")
        if pipeline.get(name[1:]) == (pipeline[value[1:]] if value[0] == "$" else value.strip('"')):
            return None if rule.get("when") == "never" else rule
    return None


def expression(
    text: str, event: str, ref: str = "main", values: Mapping[str, str] | None = None
) -> str:
    """Evaluate a text with `${{ ... }}` as GitHub does.

    Args:
        text: A value of the workflow.
        event: The name of the event.
        ref: The value of all other fields of `github`.
        values: The values of `vars` and `needs`, by their full names; all others are empty.
    """
    known = values or {}

    def value(match: re.Match[str]) -> str:
        python = match[1].replace("github.event_name", repr(event)).replace("&&", "and")
        python = re.sub(r"github\.\w+", repr(ref), python).replace("||", "or")
        named = r"(?:vars|needs)[\w.]+"
        return str(eval(re.sub(named, lambda name: repr(known.get(name[0], "")), python)))

    return re.sub(r"\$\{\{ (.*?) \}\}", value, str(text))


def _starts(words: list[str]) -> str:
    """Write a program that starts another program with the given arguments."""
    return f"import os, sys\nos.execv({words[0]!r}, {words!r} + sys.argv[1:])"
