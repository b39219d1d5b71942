"""Merges several verdict files into one: those of a run's shards, or of its workers.

docs/verdicts.md contains the rules: the order of verdicts, the order of the states of the machine,
and which of two verdicts on a test counts (`sm121.run.ledger.stands`).
"""

import datetime
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from sm121.core.server import UNRECOGNISED
from sm121.core.unmet import Fact
from sm121.core.verdict import INTERRUPTED, Verdict, worst
from sm121.kernels import serving
from sm121.machine.box import BoxState
from sm121.run import served, trade
from sm121.run.engine_report import EngineReport, ServedKernel
from sm121.run.fingerprint import FingerprintDifference
from sm121.run.ledger import Ledger
from sm121.run.machine_report import BoxReport, MemoryReport
from sm121.run.verdict_file import (
    AGAINST,
    BESIDE,
    AgainstReport,
    MetricReport,
    TestReport,
    VerdictFile,
)

#: The states of the machine, the worst first. UNKNOWN is worse than QUALIFIED.
_BOX_STATES = (BoxState.DEGRADED, BoxState.UNKNOWN, BoxState.QUALIFIED)
#: The maximum time between the starts of two shards of one run, in hours.
_ONE_RUN_H = 24.0


def differences(one: VerdictFile, other: VerdictFile) -> list[FingerprintDifference]:
    """Return the reasons why two runs cannot be parts of the same run.

    Files of earlier versions have no fingerprint. For these files, all values are compared that
    the file contains.

    Args:
        one: A run.
        other: Another run.

    Returns:
        The differences; empty if the runs can be parts of the same run.
    """
    # The version is not known if the run used no server.
    version = one.engine.version or other.engine.version
    # The name is not known if the run did not use an attached server.
    name, other_name = one.engine.name, other.engine.name
    if UNRECOGNISED in (name, other_name):
        name = other_name = UNRECOGNISED
    compared = [
        FingerprintDifference("profile", one.profile, other.profile),
        FingerprintDifference("architecture", one.arch, other.arch),
        FingerprintDifference("engine", name, other_name),
        FingerprintDifference("engine's version", version, other.engine.version or version),
        FingerprintDifference(
            "configuration", one.engine.configuration, other.engine.configuration
        ),
    ]
    if one.fingerprint is not None and other.fingerprint is not None:
        compared += one.fingerprint.differences(other.fingerprint)
    else:
        known_here = "known" if one.fingerprint is not None else "none"
        known_there = "known" if other.fingerprint is not None else "none"
        compared.append(FingerprintDifference("fingerprint", known_here, known_there))
        compared.append(FingerprintDifference("model", one.engine.model, other.engine.model))
        arguments_here = _arguments(one)
        arguments_there = _arguments(other)
        if arguments_here is not None and arguments_there is not None:
            compared.append(
                FingerprintDifference("engine's arguments", arguments_here, arguments_there)
            )
    return [difference for difference in compared if difference.one != difference.other]


def apart(one: VerdictFile, other: VerdictFile) -> list[FingerprintDifference]:
    """Return why two runs cannot be shards of one run: `differences`, or starts too far apart.

    Args:
        one: A shard.
        other: Another shard.
    """
    found = differences(one, other)
    try:
        start_here = datetime.datetime.fromisoformat(one.started)
        start_there = datetime.datetime.fromisoformat(other.started)
        is_one_day = abs(start_here - start_there).total_seconds() / 3600 < _ONE_RUN_H
    except (ValueError, TypeError):  # not a time, or without a time zone
        is_one_day = one.started == other.started
    if not is_one_day:
        found.append(FingerprintDifference("day", one.started, other.started))
    return found


def _arguments(file: VerdictFile) -> str | None:
    """Return the engine's arguments as one line; None if they are not known."""
    arguments = file.environment.get("engine_arguments")
    if arguments is None:
        return None
    return " ".join(map(str, arguments))


def merge(whole: VerdictFile, ledger: Ledger, parts: Mapping[str, VerdictFile]) -> None:
    """Add all results of the parts to the whole, except tests: engines, starts, metrics, crashes.

    Args:
        whole: The verdict file of the whole run. Its tests are not changed.
        ledger: The verdicts of the whole run. Decisions that no test made are added.
        parts: The verdict files of the parts, by their folders in the whole's report directory.
    """
    moved = [_prefixed(part, folder) for folder, part in parts.items()]
    for part in moved:
        _add_part(whole, ledger, part)
    for folder, part in parts.items():
        # A part may have a worse verdict than its tests. A part without executed tests does not
        # change the verdict of the whole.
        if part.verdict not in (_judged_again(part).verdict, Verdict.NOT_RUN):
            ledger.decide(
                TestReport(
                    id=f"{BESIDE}{folder}",
                    level="smoke",
                    verdict=part.verdict,
                    message=part.reason,
                )
            )
    files = [whole, *moved]
    whole.engine = max((file.engine for file in files), key=_rank_of_engine)
    if whole.engine.served:
        whole.engine.served = _judge_served_again(whole)
    whole.box = worst_box(file.box for file in files)
    whole.memory = _worst_memory([file.memory for file in files if file.memory is not None])
    resources: list[dict[str, Any]] = [
        file.environment["resources"] for file in files if file.environment.get("resources")
    ]
    if resources:
        longest = max(resources, key=lambda used: used.get("samples") or 0)
        whole.environment["resources"] = longest


def _add_part(whole: VerdictFile, ledger: Ledger, part: VerdictFile) -> None:
    """Add the metrics, starts, crashes, remarks, and the decisions of a part that no test made."""
    for name, metric in part.metrics.items():
        earlier = whole.metrics.get(name)
        if earlier is None or worst([earlier.verdict, metric.verdict]) is not earlier.verdict:
            whole.metrics[name] = metric
    whole.starts += part.starts
    whole.crashes += part.crashes
    whole.changes += [change for change in part.changes if change not in whole.changes]
    whole.unproven += [line for line in part.unproven if line not in whole.unproven]
    whole.remarks += [line for line in part.remarks if line not in whole.remarks]
    for test in part.tests:
        if test.has_no_test:
            ledger.decide(test)


def _rank_of_engine(engine: EngineReport) -> tuple[bool, bool, bool]:
    """Return the rank of an engine's report.

    The best report has a proven kernel path. The next best one has a recognised engine, and the
    third best one has a server.
    """
    is_recognised = engine.name != UNRECOGNISED
    return bool(engine.path.evidence), is_recognised, engine.base_url is not None


def _judge_served_again(whole: VerdictFile) -> list[ServedKernel]:
    """Return the served kernels, and whether a test of any part compared them with the oracle."""
    backends = {kernel.component: kernel.backend for kernel in whole.engine.served}
    backends["attention_decode"] = None
    for kernel in whole.engine.served:
        if kernel.attention_decode:
            backends["attention_decode"] = kernel.attention_decode
            break
    path = served.with_expected(whole.engine.path, serving.path_of(backends))
    return served.list_tested_kernels(whole, path)


def _worst_memory(memories: Sequence[MemoryReport]) -> MemoryReport | None:
    """Return the report with the worst verdict; among equal ones, the one with the most samples."""
    gravest = worst(memory.verdict for memory in memories)
    of_it = [memory for memory in memories if memory.verdict is gravest]
    return max(of_it, key=lambda memory: memory.samples, default=None)


def merge_shards(
    parts: Mapping[str, VerdictFile], beside: Sequence[TestReport] = ()
) -> VerdictFile:
    """Merge shards, or the parts of a run's workers, into the whole run.

    Args:
        parts: The verdict files of the shards by their folders; at least one.
        beside: Further decisions that are in no part.

    Returns:
        The verdict file of the whole run. Its verdict is never better than that of a part. If a
        shard is missing, its tests and the whole run are NOT_RUN.
    """
    files = list(parts.values())
    shards = [file.shard for file in files if file.shard is not None]
    planned = shards[0]
    present = {shard.index for shard in shards}
    missing = []
    for index in range(1, planned.of + 1):
        if index not in present:
            missing.append(f"{index}/{planned.of}")
    names = ", ".join(missing)
    why_undecided = f"its shard is missing ({names})" if missing else "no shard had it"
    first = files[0]
    whole = VerdictFile(
        finished=not missing and all(file.finished for file in files),
        arch=first.arch,
        profile=first.profile,
        question=first.question,
        started=first.started,
        duration_s=max(file.duration_s for file in files),
        engine=first.engine,
        environment=_environments(files),
        fingerprint=first.fingerprint,
        tests=[
            TestReport(
                id=test.id,
                level=test.level,
                verdict=Verdict.NOT_RUN,
                message=why_undecided,
            )
            for test in planned.tests
        ],
    )
    ledger = Ledger(whole)
    done = set()
    for file in files:
        for test in file.tests:
            if not test.has_no_test:
                ledger.decide(test)
                done.add(test.id)
    merge(whole, ledger, parts)
    for decision in beside:
        ledger.decide(decision)
    whole.against = _against((file.against for file in files), whole.metrics)
    _require_anything_in_common(whole, ledger)
    whole.judge()
    absent = [test.id for test in planned.tests if test.id not in done]
    _conclude(whole, files, names, absent)
    return whole


def _conclude(
    whole: VerdictFile, files: Sequence[VerdictFile], missing: str, absent: Sequence[str]
) -> None:
    """Set the reason of the whole run, and its verdict if shards or tests are missing.

    ``missing``: the names of the missing shards. ``absent``: the tests that were in no shard.
    """
    if missing:
        whole.settle(worst([whole.verdict, Verdict.NOT_RUN]))
        whole.reason = f"shards that are missing: {missing}"
    elif absent:
        whole.finished = False
        whole.settle(worst([whole.verdict, Verdict.NOT_RUN]))
        whole.reason = f"no shard had {len(absent)} of the run's tests ({absent[0]})"
    elif not whole.finished:
        whole.reason = next(file.reason for file in files if not file.finished)
    elif whole.verdict is Verdict.NOT_RUN and len({file.reason for file in files}) == 1:
        whole.reason = files[0].reason
    else:
        whole.reason = whole.why()


def nothing_compared(trusted: str, executed: int) -> TestReport:
    """Return the decision on a whole run that has nothing in common with the trusted run.

    Args:
        trusted: The name of the trusted run.
        executed: The number of tests that the whole run executed.
    """
    note = "Trust a run with the same checks, or select checks of that run"
    fact = Fact(f"a check that ran in {trusted} too", f"none of {executed}", evidence=note)
    identity = f"{AGAINST}nothing was compared"
    return TestReport.of(identity, "regression", fact, verdict=Verdict.INCONCLUSIVE)


def _require_anything_in_common(whole: VerdictFile, ledger: Ledger) -> None:
    """Add a decision if no part has a test or a metric of the trusted run."""
    against = whole.against
    if whole.finished and against is not None and against.nothing_in_common:
        executed = sum(test.executed for test in whole.tests)
        ledger.decide(nothing_compared(against.run, executed))


def _against(
    parts: Iterable[AgainstReport | None], metrics: Mapping[str, MetricReport]
) -> AgainstReport | None:
    """Merge the comparisons of all parts with the trusted run; None if no part was compared.

    ``metrics`` are the metrics of the whole run. They are judged together, because the rates may be
    from one part and the accuracy costs from another.
    """
    reports = [report for report in parts if report is not None]
    if not reports:
        return None
    whole = AgainstReport(run=reports[0].run, engine=reports[0].engine)
    for name, field in AgainstReport.model_fields.items():
        if field.annotation == list[str]:
            lines: dict[str, None] = {}
            for report in reports:
                lines.update(dict.fromkeys(getattr(report, name)))
            setattr(whole, name, list(lines))
    whole.not_asked = sorted(set.intersection(*(set(report.not_asked) for report in reports)))
    for report in reports:
        whole.measured.update(report.measured)
        whole.rates_not_judged = whole.rates_not_judged or report.rates_not_judged
    whole.trade = trade.trade(trade.values(whole.measured), trade.values(metrics))
    whole.nothing_in_common = all(report.nothing_in_common for report in reports)
    is_no_worse = all(report.no_worse for report in reports)
    whole.no_worse = is_no_worse and not whole.nothing_in_common
    return whole


def _judged_again(file: VerdictFile) -> VerdictFile:
    """Return a copy of a file with the verdict that follows from its tests."""
    # A shallow copy is sufficient, because the tests are not changed.
    judged = file.model_copy(update={"levels": {}})
    judged.judge()
    return judged


def contradiction(file: VerdictFile) -> str | None:
    """Return how a file contradicts its own tests. Such a file was edited after the run.

    Args:
        file: The file.

    Returns:
        The contradiction; None if the file is consistent.
    """
    judged = _judged_again(file)
    if worst([file.verdict, judged.verdict]) is not file.verdict:
        return f"its verdict is {file.verdict}, but its tests result in {judged.verdict}"
    is_interrupted = not file.finished and file.exit_status == INTERRUPTED
    if file.exit_status != file.verdict.exit_status and not is_interrupted:
        return f"its verdict is {file.verdict}, its exit status {file.exit_status}"
    for name in {*file.levels, *judged.levels}:
        if judged.levels.get(name) != file.levels.get(name):
            return f"its counts of level {name} do not match its tests"
    return None


def _prefixed(part: VerdictFile, prefix: str) -> VerdictFile:
    """Return a copy of a part whose paths are relative to the report directory of the whole."""
    moved = part.model_copy(deep=True)
    for start in moved.starts:
        start.log = f"{prefix}/{start.log}"
    for crash in moved.crashes:
        if crash.bundle:
            crash.bundle = f"{prefix}/{crash.bundle}"
    if moved.memory is not None:
        moved.memory.file = f"{prefix}/{moved.memory.file}"
    return moved


def worst_box(boxes: Iterable[BoxReport]) -> BoxReport:
    """Return the state of the machine for the whole run: the worst state that a part measured.

    Args:
        boxes: The states in the parts; at least one. A state that only a later version of the
            suite knows counts as UNKNOWN.
    """
    candidates = list(boxes)
    were_read = [box for box in candidates if box.looked_at]
    return min(were_read or candidates, key=_rank_of_box)


def _rank_of_box(box: BoxReport) -> int:
    """Return the index of a machine's state in `_BOX_STATES`."""
    if box.state not in _BOX_STATES:
        return _BOX_STATES.index(BoxState.UNKNOWN)
    return _BOX_STATES.index(BoxState(box.state))


def _environments(files: Sequence[VerdictFile]) -> dict[str, object]:
    """Return the environment of the first file, and how the other shards differ from it."""
    first = files[0].environment
    others = {}
    for file in files[1:]:
        if file.shard is None:
            continue
        different = {}
        for name in {**first, **file.environment}:
            value = file.environment.get(name)
            if value != first.get(name):
                different[name] = value
        if different:
            others[str(file.shard.index)] = different
    if not others:
        return dict(first)
    return {**first, "other_shards": others}
