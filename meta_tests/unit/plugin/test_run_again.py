"""The command after ``run again:`` can be pasted, and repeats the failed checks of the run."""

import shlex
from types import SimpleNamespace

import pytest

from meta_tests.fakes.run_events import stand_in
from sm121.core import redaction
from sm121.core.verdict import Verdict
from sm121.plugin import run_again
from sm121.run import details
from sm121.run.verdict_file import ChangeReport, EngineReport, TestReport, VerdictFile

VERDICTS = "meta_tests/whole/scenarios/verdicts.py"
COMMAND = ["python", "-m", "pytest"]
#: A plan quick with two checks that fail, because the server gives no right answers, and a check
#: that passes.
PROFILE = """
schema_version = 1
name = "failing"
description = "two failures in plan quick"
extends = "sm121-gpt-oss-120b"
plans.quick.tests.smoke = ["test_health"]
plans.quick.tests.kernel = []
plans.quick.tests.performance = []
plans.quick.tests.correctness = ["test_known_answers", "test_a_stop_string_ends_the_text"]
"""


def words_of(run) -> list[str]:
    """Return the arguments of the command in the second to last line of a failing run."""
    (line,) = [each for each in run.output.splitlines() if each.startswith("run again: ")]
    return shlex.split(line.removeprefix("run again: "))


def failed_in(run) -> set[str]:
    return {test["id"] for test in run.verdict["tests"] if test["verdict"] in ("FAIL", "INVALID")}


def test_two_failures_of_an_attached_server_are_both_named(run_pytest, fault_server):
    options = fault_server().options
    tests = [f"{VERDICTS}::{name}" for name in ("test_fail", "test_parametrised[7]")]
    _, run = run_pytest(
        "--arch=cpu", *options, "-m", "cpu", VERDICTS, "-k", "fail or parametrised or pass", "-q"
    )
    redacted = []
    for word in options:
        if word != options[-1]:
            redacted.append(word)
        else:
            redacted.append("[redacted]")
    assert words_of(run) == [
        *COMMAND, *tests, f"--benchmark-storage={run.report.parent / 'benchmarks'}",
        "-p", "no:cacheprovider", "--arch=cpu", *redacted, "-m", "cpu",
    ]  # fmt: skip


def test_the_command_runs_the_failed_checks_of_its_plan_again(run_pytest, timed_server, tmp_path):
    profile = tmp_path / "failing.toml"
    log = tmp_path / "a log"
    profile.write_text(PROFILE)
    log.write_text("it says nothing\n")
    url = timed_server("--rate", "300").base_url
    _, run = run_pytest(
        "-m", "sm121", f"--profile={profile}", "--base-url", url, f"--server-log={log}"
    )
    failed = failed_in(run)
    assert len(failed) == 2, run.output
    command = words_of(run)
    assert command[:5] == [*COMMAND, *sorted(failed, reverse=command[3] == max(failed))]
    assert command.count("sm121") == 1 and command[-2:] == ["--plan", "quick"]
    assert f"--profile={profile}" in command and f"--server-log={log}" in command
    _, again = run_pytest(*command[3:])
    executed = {test["id"] for test in again.verdict["tests"] if test["verdict"] != "NOT_RUN"}
    assert (failed_in(again), executed) == (failed, failed), again.output
    assert set(words_of(again)) == set(command)


@pytest.mark.slow("a run more")
def test_a_plan_that_was_given_is_there_once(run_pytest, timed_server, tmp_path):
    profile = tmp_path / "failing.toml"
    profile.write_text(PROFILE)
    url = timed_server("--rate", "300").base_url
    _, run = run_pytest(
        "--plan=quick", "-m", "gpu", "-m", "sm121", f"--profile={profile}", "--base-url", url
    )
    command = words_of(run)
    assert [word for word in command if word.startswith("--plan")] == ["--plan=quick"]
    markers = [command[at + 1] for at, word in enumerate(command) if word == "-m" and at > 1]
    assert markers == ["sm121"], "the one in force"


def started(folder, *arguments: str, paths: tuple[str, ...] = ()):
    """Return the part of pytest's configuration from which the command is made."""
    return SimpleNamespace(
        invocation_params=SimpleNamespace(args=arguments, dir=folder),
        option=SimpleNamespace(file_or_dir=list(paths)),
        inipath=None,
        rootpath=folder,
    )


def ended(name: str, level: str = "correctness", verdict: Verdict = Verdict.FAIL) -> TestReport:
    return TestReport(id=name, level=level, verdict=verdict, message="it broke")


def session(*tests: TestReport, plan: str = "full", changes=()):
    file = VerdictFile(
        arch="cpu",
        profile="p",
        started="2026-01-12T09:14:03+00:00",
        engine=EngineReport(name="vllm", model="m", managed=True),
        tests=[*tests],
        changes=[*changes],
        verdict=Verdict.FAIL,
    )
    run = stand_in(redact=lambda text: text, file=file)
    return SimpleNamespace(run=run, settings=SimpleNamespace(plan=plan))


FAILURES = []
for level in "ab":
    for at in range(3):
        FAILURES.append(ended(f"tests/test_{level}.py::test_{at}"))


@pytest.mark.parametrize(
    ("tests", "arguments", "command"),
    [
        pytest.param(FAILURES[:2], (), "tests/test_a.py::test_0 tests/test_a.py::test_1", id="two"),
        pytest.param(
            FAILURES, ("-k", "test_0 or test_1"),
            "tests/test_a.py tests/test_b.py -k 'test_0 or test_1'", id="more-than-five",
        ),
        pytest.param(
            [FAILURES[0], ended("tests/test_c.py::test_d", verdict=Verdict.INCONCLUSIVE)],
            (), "tests/test_a.py::test_0", id="a-failure-before-what-is-not-decided",
        ),
        pytest.param(
            [FAILURES[0], ended("tests/test_c.py::test_d", verdict=Verdict.INVALID)],
            (), "tests/test_a.py::test_0 tests/test_c.py::test_d", id="an-invalid-one-beside",
        ),
        pytest.param([ended("x.py::test_a", verdict=Verdict.PASS)], (), None, id="none"),
        pytest.param(
            [ended("tests/test_regression.py::test_worse", "regression")],
            ("--benchmark-compare", "--report-dir=r"), "--benchmark-compare --report-dir=r",
            id="a-comparison-measures-nothing-itself",
        ),
        pytest.param(
            [FAILURES[0], ended("--against::path moe", "kernel")], ("-m", "sm121"), "-m sm121",
            id="the-decision-of-an-option-is-no-test",
        ),
    ],
)  # fmt: skip
def test_the_command_asks_the_failed_checks(tmp_path, tests, arguments, command):
    line = run_again.of_failed(started(tmp_path, *arguments), session(*tests))
    assert line == (f"python -m pytest {command}" if command else None)


def test_a_comparison_of_two_configurations_is_run_alone(tmp_path):
    name = "tests/test_regression.py::test_b_is_not_slower_than_a"
    change = ChangeReport(
        metric="tg32@d0", unit="tok/s", here=1, before=2, worse=0.5, allowed=0.05, beside="A",
        verdict=Verdict.FAIL,
    )  # fmt: skip
    of_ab = session(ended(name, "regression"), changes=[change])
    line = run_again.of_failed(started(tmp_path, "--ab", "", "--flag"), of_ab)
    assert line == f"python -m pytest {name} --ab '' --flag"


def test_more_failed_tests_than_fit_that_were_named_are_named_as_before(tmp_path):
    names = tuple(test.id for test in FAILURES)
    line = run_again.of_failed(started(tmp_path, *names, paths=names), session(*FAILURES))
    assert line == f"python -m pytest {' '.join(names)}"


def test_a_file_of_a_smaller_plan_has_the_plan(tmp_path):
    line = run_again.of_failed(started(tmp_path), session(*FAILURES, plan="merge"))
    assert line == "python -m pytest tests/test_a.py tests/test_b.py --plan merge"


def test_it_has_what_was_given(fault_server, run_pytest, tmp_path):
    """The command contains the given values, after = and after a space, even with spaces in them.

    Options that select other tests are left out."""
    log = tmp_path / "a log"
    test = f"{VERDICTS}::test_fail"
    log.write_text("it says nothing\n")
    options = (["--server-log", str(log)], ["--rounds=9"], ["-m", "cpu"])
    words = []
    for option in options:
        words.extend(option)
    _, run = run_pytest(
        *("--arch=cpu", *fault_server().options, "-k", "fail or pass", "-q", "--engine=openai"),
        *words,
        *("--tb=short", test),
    )
    (failure,) = details.read_details(run.report).failures
    words = shlex.split(failure.reproduce or "")
    assert words[:4] == ["python", "-m", "pytest", test]
    for option in options:
        at = words.index(option[0], 3)
        assert words[at : at + len(option)] == option, words
    assert "-k" not in words and "-q" not in words


@pytest.mark.parametrize("b", ["-nkvo", "-n 128", "-q", "--dist layer"])
def test_it_has_the_arguments_of_an_engine(b, tmp_path):
    """The command contains the arguments of an engine, even if they look like options of pytest
    that are left out."""
    given = ("--ab", "", b, "-n", "2", "--numprocesses", "2", "--lf", "-q", "tests")
    assert run_again.repeated(started(tmp_path, *given, paths=("tests",))) == ["--ab", "", b]


def test_no_quote_hides_a_secret_in_a_command(tmp_path):
    key = "it's-a-Secret-7"
    of_key = SimpleNamespace(run=stand_in(redact=lambda text: redaction.redact(text, {key})))
    words = ["--api-key", key, f"--engine-env=A={key}"]
    line = run_again.line(of_key, started(tmp_path), words)
    assert "Secret-7" not in line
    assert shlex.split(line)[3:] == ["--api-key", "[redacted]", "--engine-env=A=[redacted]"]
