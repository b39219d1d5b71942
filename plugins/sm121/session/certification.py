"""``--certify``: what a certificate requires beyond a plain run."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path

from sm121.core import architecture, data_file, digest, profile_fields
from sm121.core.profile import Profile
from sm121.core.verdict import Severity, Verdict, worst
from sm121.run.verdict_file import VerdictFile

#: The architectures whose certificate requires a test. The outer keys are levels, the inner keys
#: are test ids without parameters.
Inventory = Mapping[str, Mapping[str, tuple[str, ...]]]


class _InventoryFile(data_file.DataTable):
    smoke: dict[str, tuple[str, ...]]
    kernel: dict[str, tuple[str, ...]]
    correctness: dict[str, tuple[str, ...]]
    stress: dict[str, tuple[str, ...]]
    performance: dict[str, tuple[str, ...]]
    regression: dict[str, tuple[str, ...]]
    matrix: dict[str, tuple[str, ...]]
    files: dict[str, str]


def _file() -> _InventoryFile:
    return data_file.load("inventory.toml", _InventoryFile)


def inventory() -> Inventory:
    """Return the tests of the suite, except those that run only with an option."""
    tests: Inventory = _file().model_dump(exclude={"files"})
    return tests


def digests(root: Path) -> dict[str, str]:
    """Return the digest of each test file in a folder, by its path.

    Args:
        root: The folder. It has the layout of a checkout.
    """
    by_path = {}
    for file in sorted([root / "conftest.py", *(root / "tests").rglob("*.py")]):
        if file.is_file():
            by_path[file.relative_to(root).as_posix()] = digest.of_files(root, [file])
    return by_path


def foreign_tests(root: Path) -> list[str]:
    """Return the test files that differ from those of the suite.

    Args:
        root: A folder with the layout of a checkout, but not under git.

    Returns:
        Their paths in the folder, sorted. The paths of missing files are included.
    """
    shipped = dict(_file().files)
    present = digests(root)
    # Not needed if installed, because `sm121 run` loads the plugin.
    if "conftest.py" not in present:
        shipped.pop("conftest.py", None)
    return sorted(name for name in {*shipped, *present} if shipped.get(name) != present.get(name))


def certify(
    file: VerdictFile,
    profile: Profile,
    tests: Inventory,
    *,
    deselected: Sequence[str],
    inapplicable: Collection[str],
) -> None:
    """Compare a finished run with what a certificate of the profile requires, and set its verdict.

    Args:
        file: The run. Its verdict, its reason and ``certified`` are set.
        profile: The profile of the run.
        tests: The tests that ship with the suite.
        deselected: Ids of tests that -m, -k or --deselect removed.
        inapplicable: Ids of tests that no certificate needs.
    """
    gaps = [
        *_gaps_of_levels(file, profile.certify.levels, inapplicable),
        *_gaps_of_inventory(file, profile, tests),
        *_gaps_of_answers(file, profile),
        *_gaps_of_gates(file, profile),
        *_gaps_of_proof(file, profile),
    ]
    if file.crashes:
        gap = f"{len(file.crashes)} crashes, the first: {file.crashes[0].summary}"
        gaps.append((Verdict.FAIL, gap))
    if deselected:
        gap = f"{len(deselected)} tests were deselected ({deselected[0]})"
        gaps.append((Verdict.NOT_RUN, gap))
    if gaps:
        verdicts = [file.verdict]
        texts = []
        for verdict, text in gaps:
            verdicts.append(verdict)
            texts.append(text)
        file.settle(worst(verdicts))
        file.reason = f"not certified: {'; '.join(texts)}"
    file.certified = file.verdict is Verdict.PASS
    if file.certified:
        file.no_oracle = profile.correctness.cannot.get("oracle")
    if file.certified and file.certificate_covers is not None:
        waived = [test.id for test in file.tests if test.waived]
        names = f" ({', '.join(waived)})" if waived else ""
        file.reason += f"; {file.certificate}{names}: {file.certificate_covers}"


#: The reason why some waivers prevent a certificate; messages add the tests that they name.
NEVER_WAIVED = "no certificate waives a gate or a blocker"
SOAK = "tests/test_stress.py::test_soak"
_GOLDEN = "tests/test_correctness.py::test_answers_agree_with_the_golden_file"
_Gaps = Iterator[tuple[Verdict, str]]


def _gaps_of_levels(
    file: VerdictFile, levels: Sequence[profile_fields.Level], inapplicable: Collection[str]
) -> _Gaps:
    for level in levels:
        tests = [test for test in file.tests if test.level == level]
        if not tests:
            yield Verdict.NOT_RUN, f"no test of level {level} was selected"
        skipped = [test.id for test in tests if test.skipped and test.id not in inapplicable]
        if skipped:
            yield Verdict.NOT_RUN, f"{len(skipped)} tests of {level} were skipped ({skipped[0]})"


def _gaps_of_inventory(file: VerdictFile, profile: Profile, tests: Inventory) -> _Gaps:
    targets = {profile.arch}
    if profile.arch != architecture.CPU:
        targets.add("gpu")
    present = {test.id.partition("[")[0] for test in file.tests}
    for level in profile.certify.levels:
        missing = []
        for name, applies_to in tests.get(level, {}).items():
            if name not in present and not targets.isdisjoint(applies_to):
                missing.append(name)
        if missing and any(test.level == level for test in file.tests):
            yield Verdict.NOT_RUN, f"{len(missing)} tests of {level} are missing ({missing[0]})"


def _gaps_of_answers(file: VerdictFile, profile: Profile) -> _Gaps:
    passed = {test.id for test in file.tests if test.verdict is Verdict.PASS}
    certify = profile.certify
    why = profile.correctness.cannot.get("oracle")
    if why is not None and "correctness" in certify.levels and _GOLDEN not in passed:
        gap = "the answers were not compared with a golden file (--golden PATH), and there is "
        yield Verdict.NOT_RUN, f"{gap}no oracle: {why}"
    if certify.soak_s and SOAK not in passed:
        yield Verdict.NOT_RUN, f"no soak passed (--soak {certify.soak_s:g}s)"
    if "kernel" not in certify.levels:
        return
    for each in file.engine.served:
        if each.judged is False:
            kernel = f"{each.operation} of {each.component} {each.backend or 'not shown'}"
            yield Verdict.NOT_RUN, f"{kernel} was not judged: {each.why}"


def doubt_of_answers(
    file: VerdictFile, profile: Profile, tests: Inventory, deselected: Collection[str]
) -> str | None:
    """Return why the answers that a run recorded cannot be trusted.

    They can be trusted if the run finished, if its levels smoke, kernel and correctness did not
    fail, if it ran all checks of correctness, and if no failure of these was excused.

    Args:
        file: The run.
        profile: The profile of the run.
        tests: The tests that ship with the suite.
        deselected: Ids of tests that -m, -k or --deselect removed.

    Returns:
        The first reason; None for answers that can be trusted.
    """
    if not file.finished:
        return "the run that recorded it has not finished"
    for name in ("smoke", "kernel", "correctness"):
        level = file.levels.get(name)
        if level is not None and level.verdict not in (Verdict.PASS, Verdict.NOT_RUN):
            return f"level {name} of the run that recorded it is {level.verdict}"
    waived = [test.id for test in file.tests if test.waived and test.level == "correctness"]
    if waived:
        return f"in the run that recorded it a waiver tolerated {waived[0]}"
    left_out = [name for name in deselected if "test_correctness.py" in name]
    required = profile.certify.model_copy(update={"levels": ("correctness",)})
    of_correctness = profile.model_copy(update={"certify": required})
    for _, gap in _gaps_of_inventory(file, of_correctness, tests):
        left_out.append(gap)
    if left_out:
        return f"the run that recorded it left out checks of correctness ({left_out[0]})"
    return None


def _gaps_of_gates(file: VerdictFile, profile: Profile) -> _Gaps:
    for gate in profile.performance.gates:
        metric = file.metrics.get(gate.metric)
        if metric is None or metric.value is None:
            yield Verdict.NOT_RUN, f"gate {gate.metric} has no number"
        elif (metric.minimum, metric.at_most) != (gate.minimum, gate.at_most):
            yield Verdict.INVALID, f"{gate.metric} was compared with another gate"
        elif metric.verdict not in (Verdict.PASS, Verdict.FAIL):
            yield metric.verdict, f"gate {gate.metric} is {metric.verdict}"
    gates = {name for name, metric in file.metrics.items() if metric.gated}
    waived = []
    for test in file.tests:
        is_needed = test.severity is Severity.BLOCKER or not gates.isdisjoint(test.metrics)
        if test.waived and is_needed:
            waived.append(test.id)
    if waived:
        yield Verdict.FAIL, f"{NEVER_WAIVED}: {', '.join(waived)}"


def _gaps_of_proof(file: VerdictFile, profile: Profile) -> _Gaps:
    required = profile.certify
    path = file.engine.path
    not_shown = profile.path_of(profile.under_test).not_shown
    parts = [name for name in required.path if name not in not_shown]
    unproven = [name for name in parts if getattr(path, name) is None]
    if unproven:
        yield Verdict.INVALID, f"kernel path not proven: {', '.join(unproven)}"
    if path.differences:
        yield Verdict.INVALID, f"a requested path did not run: {path.differences[0]}"
    if file.unproven:
        yield Verdict.INVALID, f"unproven: {'; '.join(file.unproven)}"
    if required.box == "QUALIFIED" and file.box.state != "QUALIFIED":
        state = f"the machine is {file.box.state}, expected QUALIFIED ({file.box.reason})"
        yield Verdict.INCONCLUSIVE, state
