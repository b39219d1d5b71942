"""Item 13: a certificate with a favourable selection of options, tests, gates and waivers."""

import itertools
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from unittest import mock

from meta_tests.fakes.servers import git
from meta_tests.fakes.whole_run import gated, judge, waive, waiver_file, whole
from meta_tests.folders import ROOT
from meta_tests.two_steps import in_two_steps
from sm121.core import errors, waivers
from sm121.evidence import git_source
from sm121.run import verdict_file
from sm121.run.verdict_file import (
    VerdictFile,
)
from sm121.session import certification

from . import Case, Kit, Outcome

_NUMBERS = itertools.count()


def _nothing(_changed: object) -> None: ...


@in_two_steps
def _certified(
    _kit: Kit, change: Callable[..., object] = _nothing, *tests: str, **options: str
) -> Outcome:
    gates = gated("tg32@d0")
    file = whole(gates)
    change(file, *tests, **options)
    judge(file)
    certification.certify(file, gates, certification.inventory(), deselected=[], inapplicable=set())
    return Outcome(file.verdict.value, file.reason, certified=bool(file.certified))


def _waive_most(file: VerdictFile) -> None:
    waive(file, *(test.id for number, test in enumerate(file.tests) if number % 10))


def _waive_a_slow_gate(file: VerdictFile) -> None:
    file.metrics["tg32@d0"].value = 20.0
    file.metrics["tg32@d0"].verdict = verdict_file.Verdict.FAIL
    waive(file, "test_decode_rate", severity="courtesy")
    for test in file.tests:
        test.metrics = ["tg32@d0"] if test.waived else []


def _without_numbers(file: VerdictFile) -> None:
    file.metrics.clear()


def _without_a_test(file: VerdictFile) -> None:
    file.tests = [test for test in file.tests if "test_known_answers" not in test.id]


def _failed_and_waived(file: VerdictFile) -> None:
    """Let the gate fail only because of lost requests, and waive this failure."""
    file.metrics["tg32@d0"].value = None
    file.metrics["tg32@d0"].verdict = file.tests[-1].verdict = verdict_file.Verdict.FAIL
    file.tests[-1].waived = True


_TEST = "tests/test_smoke.py"


def _copy(kit: Kit) -> Path:
    """Copy the suite's tests into a folder."""
    folder = kit.tmp_path / f"copy-{next(_NUMBERS)}"
    shutil.copytree(ROOT / "tests", folder / "tests", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "conftest.py", folder)
    return folder


@in_two_steps
def _checkout(kit: Kit, change: Callable[..., None] = _nothing, *options: str) -> Outcome:
    """Create a checkout, and change it."""
    folder = _copy(kit)
    git(folder, "init", "-q")
    git(folder, "add", ".")
    git(folder, "commit", "-qm", "the tests")
    with mock.patch.dict(os.environ):
        change(folder, *options)
        changed = git_source.changed_files(folder, ["tests", "conftest.py"])
    if changed is None:
        return Outcome("FAIL", "git does not answer")
    return Outcome("FAIL" if changed else "PASS", f"changed: {', '.join(changed)}")


def _change(folder: Path, *flags: str) -> None:
    """Change a test, and mark its file as unchanged for git."""
    for flag in flags:
        git(folder, "update-index", flag, _TEST)
    file = folder / _TEST
    file.write_text(file.read_text().replace("    assert ", "    assert True or "))


def _change_elsewhere(folder: Path) -> None:
    _change(folder)
    os.environ["GIT_DIR"] = str(folder / "nowhere")


def _add(folder: Path, ignored: str = "") -> None:
    if ignored:
        (folder / ".git" / "info" / "exclude").write_text(f"{ignored}\n")
    (folder / "tests" / "test_aaa.py").write_text("import sm121\n")


@in_two_steps
def _tarball(kit: Kit, change: Callable[[Path], None] = _nothing) -> Outcome:
    """Create the tests without a git commit that identifies them."""
    folder = _copy(kit)
    change(folder)
    foreign = certification.foreign_tests(folder)
    return Outcome("FAIL" if foreign else "PASS", f"changed: {', '.join(foreign)}")


@in_two_steps
def _excused(kit: Kit, chosen: str) -> Outcome:
    status, ran = kit.run_pytest(
        "--arch", "cpu", "-k", chosen, "meta_tests/whole/scenarios/excused.py"
    )
    return Outcome(ran.verdict["verdict"], ran.verdict["reason"], status)


@in_two_steps
def _waived(kit: Kit, test: str, days: int) -> Outcome:
    try:
        waivers.load(waiver_file(kit.tmp_path, test, days=days))
    except errors.UsageError as error:
        return Outcome("refused", str(error))
    return Outcome("PASS", "accepted")


@in_two_steps
def _no_level(kit: Kit, scenario: str) -> Outcome:
    status, ran = kit.run_pytest("--arch", "cpu", "-k", "test_pass", scenario)
    verdict = ran.verdict if (ran.report / "verdict.json").is_file() else {}
    reason = verdict.get("reason", ran.output[-300:])
    return Outcome(verdict.get("verdict", "none"), reason, min(status, 5))


CASES = [
    Case(
        item="13 A certificate by a choice of options",
        name="a test of the suite is not there",
        fault=_certified(_without_a_test),
        clean=_certified(),
        expected="test_known_answers",
    ),
    Case(
        item="13 A certificate by a choice of options",
        name="a gate without a number that is waived",
        fault=_certified(_failed_and_waived),
        clean=_certified(),
        expected="has no number",
    ),
    Case(
        item="13 A certificate by a choice of options",
        name="a test that was changed",
        fault=_checkout(_change),
        clean=_checkout(),
        expected=_TEST,
    ),
    Case(
        item="13 A certificate by a choice of options",
        name="changed, and git told to take it for unchanged",
        fault=_checkout(_change, "--assume-unchanged"),
        clean=_checkout(),
        expected=_TEST,
    ),
    Case(
        item="13 A certificate by a choice of options",
        name="changed, and git told not to look",
        fault=_checkout(_change, "--skip-worktree"),
        clean=_checkout(),
        expected=_TEST,
    ),
    Case(
        item="13 A certificate by a choice of options",
        name="changed, and git sent elsewhere by a variable",
        fault=_checkout(_change_elsewhere),
        clean=_checkout(),
        expected=_TEST,
    ),
    Case(
        item="13 A certificate by a choice of options",
        name="a test module that no commit has",
        fault=_checkout(_add),
        clean=_checkout(),
        expected="tests/test_aaa.py",
    ),
    Case(
        item="13 A certificate by a choice of options",
        name="one that git was told to ignore",
        fault=_checkout(_add, "test_aaa.py"),
        clean=_checkout(),
        expected="tests/test_aaa.py",
    ),
    Case(
        item="13 A certificate by a choice of options",
        name="a test that was changed, without a commit",
        fault=_tarball(_change),
        clean=_tarball(),
        expected=_TEST,
    ),
    Case(
        item="13 A certificate by a choice of options",
        name="a test module more, without a commit",
        fault=_tarball(_add),
        clean=_tarball(),
        expected="tests/test_aaa.py",
    ),
    Case(
        item="13 A certificate by a choice of options",
        name="a failure under an xfail mark",
        fault=_excused("that_holds or that_fails"),
        clean=_excused("that_holds or after_all"),
        expected="an xfail mark or a plugin cannot excuse",
    ),
    Case(
        item="13 A certificate by a choice of options",
        name="an error under an xfail mark",
        fault=_excused("that_holds or nothing_known"),
        clean=_excused("that_holds or after_all"),
        expected="an xfail mark or a plugin cannot excuse",
        slow=True,
    ),
    Case(
        item="13 A certificate by a choice of options",
        name="a waiver for a whole level",
        fault=_waived("tests/test_stress.py::*", 1),
        clean=_waived("tests/test_stress.py::test_soak", 90),
        expected="without wildcards",
    ),
    Case(
        item="13 A certificate by a choice of options",
        name="a waiver for ten years",
        fault=_waived("tests/test_stress.py::test_soak", 3650),
        clean=_waived("tests/test_stress.py::test_soak", 90),
        expected="within 90 days",
    ),
    Case(
        item="13 A certificate by a choice of options",
        name="a gate without a number",
        fault=_certified(_without_numbers),
        clean=_certified(),
        expected="has no number",
    ),
    Case(
        item="13 A certificate by a choice of options",
        name="a waiver for each test",
        fault=_certified(waive, ""),
        clean=_certified(waive, "test_token_counts_are_exact", severity="contract"),
        expected="no certificate waives a gate or a blocker",
    ),
    Case(
        item="13 A certificate by a choice of options",
        name="a waiver for 135 of 150 tests",
        fault=_certified(_waive_most),
        clean=_certified(waive, "test_token_counts_are_exact", severity="contract"),
        expected="no certificate waives a gate or a blocker",
    ),
    Case(
        item="13 A certificate by a choice of options",
        name="a waived gate, at 20 tok/s",
        fault=_certified(_waive_a_slow_gate),
        clean=_certified(waive, "test_token_counts_are_exact", severity="contract"),
        expected="no certificate waives a gate or a blocker",
    ),
    Case(
        item="13 A certificate by a choice of options",
        name="a waived blocker of correctness",
        fault=_certified(waive, "test_known_answers"),
        clean=_certified(waive, "test_token_counts_are_exact", severity="contract"),
        expected="no certificate waives a gate or a blocker",
    ),
    Case(
        item="13 A certificate by a choice of options",
        name="no level is there, and an architecture was asked for",
        fault=_no_level("meta_tests/whole/scenarios/foreign.py"),
        clean=_no_level("meta_tests/whole/scenarios/verdicts.py::test_pass"),
        expected="no test of a level was collected",
        slow=True,
    ),
]
