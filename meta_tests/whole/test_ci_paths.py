"""The CI examples (docs/ci) are executed.

The paths are a good and a faulty pull request, two pull requests that wait for the same machine, a
push to main, the nightly run, and the first run without a trusted one."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from meta_tests.fakes.ci_runner import EXAMPLES, Answers, Runner, Scripts, expression
from meta_tests.fakes.gb10.machine import ROOT, Behind
from meta_tests.fakes.loopback import serving
from sm121.evidence import git_source
from sm121.plugin import certificate

#: For each event, words that the suite's command must have, and words that it must not have.
_WORDS = {
    "pull_request": (("--plan merge",), ("--benchmark-autosave", "--certify")),
    "push": (("--plan merge", "--benchmark-autosave"), ("--certify",)),
    "schedule": (("--certify", "--soak 30m", "--benchmark-autosave"), ("--plan", "--against")),
}
_TRUST = r"sm121 trust \S+ --benchmark-storage=\S*history"


def _wrong_words(scripts: Scripts, example: str) -> Iterator[str]:
    """Yield each wrong argument of the suite's command in a CI example.

    The script of each event runs up to this command, with and without a trusted run.
    """
    for trusted in (False, True):
        (scripts.history / "trusted").mkdir() if trusted else None
        for event, (required, excluded) in _WORDS.items():
            status, output, summary = scripts.run(example, event)
            assert status == 0, output
            pytest_line, *others = re.findall(r"^RUNS (.*)$", output, re.M)
            words = f"{pytest_line} "
            yield from (f"{event}: no {word}" for word in required if f" {word} " not in words)
            wrong = [re.search(rf" ({word}( [^-]\S*)?) ", words) for word in excluded]
            yield from (f"{event}: {match[1]}" for match in wrong if match)
            if f"--benchmark-storage={scripts.history} " not in words:
                yield f"{event}: no history is mounted"
            if (" --against trusted " in words) != (trusted and event != "schedule"):
                yield f"{event}: compared with a trusted run, there is one: {trusted}"
            if [line.split()[1] for line in others] != ["trust"] * (event == "push"):
                yield f"{event}: then {others}"
            says = re.search(_TRUST, summary or re.sub(r"(?m)^RUNS .*$", "", output))
            if bool(says) == (trusted or event == "schedule"):
                yield f"{event}: {'says' if says else 'does not say what'} to type"


def _is_built_beside_a_run(loaded: dict, example: str) -> bool:
    """Return whether the job that builds an image may run on the Spark while another job
    measures."""
    if example == "gitlab":
        return loaded["image"]["resource_group"] != "spark"
    return loaded["jobs"]["image"]["concurrency"]["group"] != "spark"


def _lost(events: list[tuple[str, str]], text: str, example: str) -> Iterator[str]:
    """Yield the jobs that the CI system cancels if several events arrive at once.

    `events` contains each event with its ref.
    """
    loaded = yaml.safe_load(text)
    if _is_built_beside_a_run(loaded, example):
        yield "an image is built beside a run"
    if example == "gitlab":
        job = loaded["spark"]
        is_one = "$" not in job.get("resource_group", "$CI_NONE")
        cancels = job.get("interruptible", False)
        queues = True
    else:
        rules = loaded["jobs"]["spark"]["concurrency"]
        is_one = len({expression(rules["group"], *event) for event in events}) == 1
        values = [expression(rules["cancel-in-progress"], *event) for event in events]
        cancels = "True" in values
        queues = rules["queue"] == "max"
    problems = {"two run at once": not is_one, "a running one is cancelled": cancels}
    yield from (line for line, holds in problems.items() if holds)
    if not queues:
        yield "pending runs are lost"


def _complaints(folder: Path, example: str, text: str) -> Iterator[str]:
    if example == "github":
        (step,) = [s for s in yaml.safe_load(text)["jobs"]["spark"]["steps"] if "env" in s]
        modes = {event: expression(step["env"]["WRITES"], event) for event in _WORDS}
        if modes != {"pull_request": "ro", "push": "rw", "schedule": "rw"}:
            yield "what is not merged writes the history"
    events = [("pull_request", "refs/pull/7/merge"), ("pull_request", "refs/pull/8/merge")]
    events += [("push", "refs/heads/main"), ("schedule", "refs/heads/main")]
    yield from _lost(events, text, example)
    yield from _wrong_words(Scripts(folder, **{example: text}), example)


@pytest.mark.parametrize("example", EXAMPLES)
def test_the_examples_ask_on_each_path_for_what_it_needs(example, tmp_path):
    assert [*_complaints(tmp_path / "ci", example, EXAMPLES[example])] == []


_SICK = [
    pytest.param(
        "github",
        "      queue: max\n",
        "      queue: single\n",
        "pending runs are lost",
        id="a second run that waits is lost",
    ),
    pytest.param(
        "github",
        "cancel-in-progress: false",
        "cancel-in-progress: true",
        "a running one is cancelled",
        id="a running job is cancelled",
    ),
    pytest.param(
        "github",
        "cancel-in-progress: false",
        "cancel-in-progress: ${{ github.event_name == 'pull_request' }}",
        "a running one is cancelled",
        id="a running pull request is cancelled",
    ),
    pytest.param(
        "github",
        "group: spark",
        "group: spark-${{ github.ref }}",
        "two run at once",
        id="a group for each branch",
    ),
    pytest.param(
        "gitlab",
        "resource_group: spark",
        "resource_group: $CI_COMMIT_REF_SLUG",
        "two run at once",
        id="a resource group for each branch",
    ),
    pytest.param(
        "gitlab", "resource_group: spark", "retry: 0", "two run at once", id="no resource group"
    ),
    pytest.param(
        "gitlab",
        "resource_group: spark",
        "resource_group: spark\n  interruptible: true",
        "a running one is cancelled",
        id="an interruptible job",
    ),
    pytest.param(
        "github",
        "--certify --soak 30m",
        "--plan quick",
        "schedule: --plan quick",
        id="a night without a certificate",
        marks=pytest.mark.slow,
    ),
    pytest.param(
        "gitlab",
        "--certify --soak 30m",
        "--plan merge",
        "schedule: --plan merge",
        id="a night without a certificate (GitLab)",
    ),
    pytest.param(
        "github",
        "github.event_name != 'schedule' && '--against",
        "'any' && '--against",
        "schedule: --against trusted",
        id="a night compared with what is trusted",
    ),
    pytest.param(
        "gitlab",
        "30m --benchmark-autosave",
        "30m",
        "schedule: no --benchmark-autosave",
        id="a night that is not stored",
    ),
    pytest.param(
        "github",
        '-v "$HOME/sm121-history:/history:$WRITES" \\',
        "\\",
        "push: no history is mounted",
        id="no history",
    ),
    pytest.param(
        "gitlab",
        "/srv/sm121-history:/history",
        "/srv/sm121-history:/runs",
        "push: no history is mounted",
        id="no history (GitLab)",
        marks=pytest.mark.slow,
    ),
    pytest.param(
        "github",
        "'ro' || 'rw'",
        "'rw' || 'ro'",
        "what is not merged writes the history",
        id="a pull request writes the history",
    ),
    pytest.param(
        "github",
        "!= 'pull_request' && '--benchmark",
        "!= 'issue' && '--benchmark",
        "pull_request: --benchmark-autosave",
        id="a pull request is stored",
    ),
    pytest.param(
        "gitlab",
        'test -n "$AGAINST" ||',
        "true ||",
        "push: does not say what to type",
        id="silence about what to trust",
        marks=pytest.mark.slow,
    ),
]


@pytest.mark.parametrize(("example", "before", "after", "complaint"), _SICK)
def test_a_sick_example_is_noticed(example, before, after, complaint, tmp_path):
    """This module detects a CI example into which a fault was written.

    The fault is written into the last job that contains the text `before`: the job on the Spark.
    """
    head, found, tail = EXAMPLES[example].rpartition(before)
    assert found
    assert complaint in _complaints(tmp_path / "ci", example, f"{head}{after}{tail}")


@pytest.mark.parametrize("example", EXAMPLES)
@pytest.mark.parametrize(
    ("build", "words"),
    [
        pytest.param(
            "vllm",
            "-f [a-z/]*docker/Dockerfile --target vllm-openai "
            "--build-arg torch_cuda_arch_list=12.1a",
            id="a change of vLLM's kernels",
        ),
        pytest.param(
            "flashinfer",
            "-f suite/docker/Dockerfile.flashinfer --build-arg IMAGE=vllm/vllm-openai:latest",
            id="a change of FlashInfer's kernels",
        ),
    ],
)
def test_an_image_of_a_change_of_kernels_is_built_and_judged(example, build, words, tmp_path):
    made = Scripts(tmp_path / "ci").image(example, build)
    assert made.is_started and made.status == 0, made.output
    built, pruned = re.findall(r"^RUNS docker (.*)$", made.output, re.M)
    assert re.match("build --label sm121-change -t sm121-change:1a2b " + words, built), built
    assert re.search(r" (change|\.)$", built), "the context is the change"
    assert pruned.startswith("image prune --all --force --filter label=sm121-change ")
    assert (made.is_judged, made.name) == (True, "sm121-change:1a2b")
    assert made.install == "true", "the image has the change"


@pytest.mark.parametrize("example", EXAMPLES)
def test_without_a_build_the_change_is_installed_over_an_image(example, tmp_path):
    made = Scripts(tmp_path / "ci").image(example, "")
    assert not made.is_started and made.is_judged
    assert made.name == "vllm/vllm-openai:latest"
    assert made.install.startswith("VLLM_USE_PRECOMPILED=1 pip install -q ")


@pytest.mark.parametrize("example", EXAMPLES)
def test_a_build_that_fails_judges_nothing(example, tmp_path):
    made = Scripts(tmp_path / "ci").image(example, "vlm")
    assert made.is_started and made.status == 1 and not made.is_judged
    assert "expected vllm or flashinfer, got vlm" in made.output


@pytest.mark.parametrize(
    ("inputs", "options"),
    [
        pytest.param({}, "", id="a run by itself"),
        pytest.param({"storage": "/history"}, " --benchmark-storage=/history", id="a storage"),
        pytest.param({"against": "run-1"}, " --against=run-1", id="against a folder"),
        pytest.param(
            {"against": "trusted", "storage": "STORAGE"},
            " --benchmark-storage=STORAGE --against=trusted",
            id="against what is trusted",
        ),
        pytest.param(
            {"against": "trusted", "storage": "file://STORAGE"},
            " --benchmark-storage=file://STORAGE --against=trusted",
            id="a storage by its address",
        ),
        pytest.param(
            {"against": "trusted", "storage": "STORAGE/new"},
            " --benchmark-storage=STORAGE/new",
            id="before anything is trusted",
        ),
        pytest.param({"against": "trusted"}, "", id="the default storage before the first run"),
    ],
)
def test_the_action_passes_on_its_inputs(inputs, options, tmp_path):
    scripts = Scripts(tmp_path / "ci")
    (scripts.history / "trusted").mkdir()
    (scripts.history / "new").mkdir()
    history = str(scripts.history)
    inputs = {name: value.replace("STORAGE", history) for name, value in inputs.items()}
    status, output, outputs = scripts.action("-m sm121 --plan quick", **inputs)
    assert status == 0, output
    options = options.replace("STORAGE", history)
    expected = (
        f"RUNS python3 -m sm121 run -m sm121 --plan quick --report-dir=conformance-report{options}"
    )
    assert expected in output.splitlines()
    assert outputs == "report=conformance-report\n"
    is_first = "against" in inputs and "--against" not in options
    assert ("Nothing is trusted yet" in scripts.summary) == is_first
    assert "no verdict, exit status 0" in scripts.summary, "nothing was judged by the stand-in"


def test_the_action_compares_with_no_storage_that_is_misspelt(tmp_path):
    """The action takes only an empty storage folder for a first run, and refuses a misspelt
    folder."""
    scripts = Scripts(tmp_path / "ci")
    (scripts.history / "trusted").mkdir()
    misspelt = f"{scripts.history}y"
    status, output, _ = scripts.action("-m sm121", against="trusted", storage=misspelt)
    assert status == 4 and "RUNS python3 -m sm121 run" not in output, output
    expected = f"storage {misspelt}: expected the folder of the stored runs, got no folder"
    assert expected in output and expected in scripts.summary


def test_the_action_links_the_report():
    loaded = yaml.safe_load((ROOT / "action.yml").read_text("utf-8"))
    run, upload, link = loaded["runs"]["steps"]
    assert loaded["inputs"]["arguments"]["default"] == "-m sm121 --plan quick"
    named = {name.upper() for name in loaded["inputs"] if name != "artifact"}
    assert named == {*run["env"]} - {"SUITE"}, "each input reaches the run"
    assert upload["if"].startswith("always() && ") and "upload-artifact" in upload["uses"]
    assert link["env"]["URL"] == loaded["outputs"]["report-url"]["value"]
    assert "$GITHUB_STEP_SUMMARY" in link["run"]


@pytest.fixture
def runner(canary_bf16: Path, tmp_path: Path) -> Iterator[Runner]:
    with serving(Answers) as url:
        yield Runner(tmp_path / "ci", Behind(url, "no key"))


def _trusted(runner: Runner) -> int:
    return len([*runner.history.glob("trusted/[0-9]*")])


def _stored(runner: Runner) -> int:
    return len([*runner.history.glob("*/*.json")])


def _ended(runner: Runner, example: str, event: str, *statuses: int) -> str:
    """Run a job that must end with one of these statuses. Return its output and its summary."""
    status, output, summary = runner.run(example, event)
    assert status in statuses, output
    return f"{output}\n{summary}"


def _first_push_is_trusted_by_hand(runner: Runner) -> None:
    """Run the first push, whose build is too slow, while no run is trusted.

    The job prints the command with which a user trusts its run.
    """
    runner.box.settings = {"faster": 8.0}
    text = _ended(runner, "github", "push", 1)
    assert "startup_s" in text and (_trusted(runner), _stored(runner)) == (0, 1)
    command = re.search(_TRUST, text)
    assert command is not None and command[0] in text.partition("# SM121")[0]
    status, output = runner.shell(command[0], {}, runner.suite)
    assert status == 0 and "known failure from now on" in output and _trusted(runner) == 1, output


def _better_push_is_stored_and_trusted(runner: Runner) -> None:
    runner.box.settings = {"faster": 70.0}
    text = _ended(runner, "gitlab", "push", 0)
    assert re.search(r"^PASS( \(.*\))?: not worse than the run of ", text, re.M), text
    assert (_trusted(runner), _stored(runner)) == (2, 2) and "Nothing is trusted" not in text


def _good_change_passes(runner: Runner, example: str) -> None:
    runner.box.settings = {"faster": 70.0}
    text = _ended(runner, example, "pull_request", 0)
    assert "not worse than the run of " in text and "Nothing is trusted" not in text


def _sick_change_fails(runner: Runner, example: str) -> None:
    runner.box.settings = {"faster": 70.0, "faults": ["silent-triton"]}
    text = _ended(runner, example, "pull_request", 1)
    assert "MARLIN" in text and "TRITON" in text and runner.verdict["verdict"] == "FAIL"
    if example == "github":
        summary = text[text.index("# SM121 conformance: FAIL") :]
        assert "Compared with the run of " in summary
        assert len(summary.splitlines()) < 60, "a screen or two"


@pytest.mark.timeout(600)
def test_a_first_push_and_a_good_change(runner):
    """The first push to one CI example fails, and a good change in the other example passes.

    This is a sample of the next test. The good change is compared with a trusted run.
    """
    _first_push_is_trusted_by_hand(runner)
    _good_change_passes(runner, "gitlab")
    assert (_trusted(runner), _stored(runner)) == (1, 1), "no change is stored"


@pytest.mark.slow("nine jobs; a sample of two is above")
@pytest.mark.timeout(1200)
def test_the_paths_of_both_examples(runner, monkeypatch):
    """Both CI examples give the right result on every path, with one history of runs.

    The paths are executed in the order in which a fork would use them."""
    _first_push_is_trusted_by_hand(runner)
    _better_push_is_stored_and_trusted(runner)
    for example in EXAMPLES:  # a good and a bad change; neither run is stored
        _good_change_passes(runner, example)
        _sick_change_fails(runner, example)
    assert (_trusted(runner), _stored(runner)) == (2, 2)
    runner.box.settings = {"faster": 70.0}
    _ended(runner, "github", "push", 0)
    assert (_trusted(runner), _stored(runner)) == (3, 3)

    # The nightly runs are stored, but not trusted. The second nightly run is compared with the
    # first one.
    if git_source.changed_files(ROOT, certificate._data().judges):
        assert "differs from the commit" in _ended(runner, "github", "schedule", 4)
        return
    monkeypatch.setattr(Answers, "wait_s", 1.0)
    text = _ended(runner, "github", "schedule", 5)
    reason = runner.verdict["reason"]
    assert reason.startswith("not certified: ") and "3 of regression skipped" in reason, reason
    monkeypatch.setattr(Answers, "wait_s", 0.2)
    # The memory in this run depends on other processes of the machine, so the test only requires a
    # comparison.
    text = _ended(runner, "gitlab", "schedule", 1, 5)
    reason = runner.verdict["reason"]
    compared = [t["verdict"] for t in runner.verdict["tests"] if t["level"] == "regression"]
    assert len(compared) == 3 and "NOT_RUN" not in compared, text
    assert "of regression skipped" not in reason, "it has what only a second night has"
    assert not runner.verdict["certified"] and "of performance skipped" in reason
    assert (_trusted(runner), _stored(runner)) == (3, 5)
