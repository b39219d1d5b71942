"""The paths of the CI examples (docs/ci), executed: a pull request that is good, one that is sick,
two that wait, a push to main, the night, the first run without trust."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from ci_runner import EXAMPLES, Scripts, expression
from data_rows import from_data

#: What the command of the suite has on each event, and has not.
_WORDS = {
    "pull_request": (("--plan merge",), ("--benchmark-autosave", "--certify")),
    "push": (("--plan merge", "--benchmark-autosave"), ("--certify",)),
    "schedule": (("--certify", "--soak 30m", "--benchmark-autosave"), ("--plan", "--against")),
}
_TRUST = r"sm121 trust \S+ --benchmark-storage=\S*history"


def _wrong_words(scripts: Scripts, example: str) -> Iterator[str]:
    """Runs each event's script up to the suite, before a run is trusted and then."""
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


def _lost(events: list[tuple[str, str]], text: str, example: str) -> Iterator[str]:
    """What becomes of jobs of the Spark that come at the same time. `events`: each with its ref."""
    loaded = yaml.safe_load(text)
    if example == "gitlab":
        job = loaded["spark"]
        is_one = "$" not in job.get("resource_group", "$CI_NONE")
        cancels, queues = job.get("interruptible", False), True
    else:
        rules = loaded["jobs"]["spark"]["concurrency"]
        is_one = len({expression(rules["group"], *event) for event in events}) == 1
        values = [expression(rules["cancel-in-progress"], *event) for event in events]
        cancels, queues = "True" in values, rules["queue"] == "max"
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


@from_data
def test_a_sick_example_is_noticed(example, before, after, says, tmp_path):
    assert EXAMPLES[example].count(before) == 1
    text = EXAMPLES[example].replace(before, after)
    assert says in _complaints(tmp_path / "ci", example, text)
