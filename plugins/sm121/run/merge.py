"""Merges several verdict files into one: those of a run's shards, or of its workers.
docs/verdicts.md states the rules: how verdicts rank, how states of the box rank, and which of two
decisions on a test stands (`sm121.run.record.stands`)."""

import datetime
import math
from collections.abc import Iterable, Mapping, Sequence

from sm121.core.verdict import Verdict, worst
from sm121.kernels import serving
from sm121.measure.box import BoxState
from sm121.run import served
from sm121.run.fingerprint import Difference
from sm121.run.record import Ledger
from sm121.run.verdict_file import (
    BESIDE,
    AgainstReport,
    BoxReport,
    TestReport,
    VerdictFile,
)

#: Worst first. UNKNOWN is worse than QUALIFIED.
_BOX_STATES = (BoxState.DEGRADED, BoxState.UNKNOWN, BoxState.QUALIFIED)
_ONE_RUN_H = 24.0


def differences(one: VerdictFile, other: VerdictFile) -> list[Difference]:
    """Why two runs are not parts of the same one; empty where they can be. Files of earlier
    versions have no fingerprint: of them less is known, and all of it is compared."""
    compared = [
        Difference("profile", one.profile, other.profile),
        Difference("architecture", one.arch, other.arch),
        Difference("engine", one.engine.name, other.engine.name),
        # Without a server nobody knows it.
        Difference(
            "engine's version",
            one.engine.version or other.engine.version,
            other.engine.version or one.engine.version,
        ),
        Difference("configuration", one.engine.configuration, other.engine.configuration),
    ]
    if one.fingerprint is not None and other.fingerprint is not None:
        compared += one.fingerprint.differences(other.fingerprint)
    else:
        compared += [
            Difference(
                "fingerprint", *("known" if each.fingerprint else "none" for each in (one, other))
            ),
            Difference("model", one.engine.model, other.engine.model),
        ]
        if None not in (arguments := (_arguments(one), _arguments(other))):
            compared.append(Difference("engine's arguments", *arguments))
    return [difference for difference in compared if difference.one != difference.other]


def apart(one: VerdictFile, other: VerdictFile) -> list[Difference]:
    """The same of two shards, which are also of one day."""
    others = differences(one, other)
    try:
        begun = [datetime.datetime.fromisoformat(file.started) for file in (one, other)]
        hours = abs(begun[0] - begun[1]).total_seconds() / 3600
    except (ValueError, TypeError):  # not a time, or one without its zone
        hours = 0.0 if one.started == other.started else math.inf
    day = Difference("day", one.started, other.started)
    return others if hours < _ONE_RUN_H else [*others, day]


def _arguments(file: VerdictFile) -> str | None:
    arguments = file.environment.get("engine_arguments")
    return None if arguments is None else " ".join(map(str, arguments))


def merge(whole: VerdictFile, ledger: Ledger, parts: Mapping[str, VerdictFile]) -> None:
    """Add to the whole what only its parts, by their folders in its report directory, know: their
    engines, starts, metrics, crashes, and entries beside the tests. Its tests stay as they are."""
    moved = [_prefixed(part, folder) for folder, part in parts.items()]
    for part in moved:
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
            if test.is_beside:
                ledger.decide(test)
    for folder, part in parts.items():
        # A part is worse than its tests; one that executed nothing takes nothing away.
        if part.verdict not in (_judged_again(part).verdict, Verdict.NOT_RUN):
            name, why = f"{BESIDE}{folder}", part.reason
            ledger.decide(TestReport(id=name, level="smoke", verdict=part.verdict, message=why))
    files = [whole, *moved]
    # The first with a proven kernel path, else the first that served.
    whole.engine = max(
        (file.engine for file in files),
        key=lambda engine: (bool(engine.path.evidence), engine.base_url is not None),
    )
    if whole.engine.served:
        backends = {each.component: each.backend for each in whole.engine.served}
        decoding = (each.attention_decode for each in whole.engine.served)
        backends["attention_decode"] = next(filter(None, decoding), None)
        path = served.with_expected(whole.engine.path, serving.path_of(backends))
        whole.engine.served = served.judge(whole, path)
    whole.box = worst_box(file.box for file in files)
    memories = [file.memory for file in files if file.memory is not None]
    gravest = worst(memory.verdict for memory in memories)
    gravest_ones = (memory for memory in memories if memory.verdict is gravest)
    whole.memory = max(gravest_ones, key=lambda memory: memory.samples, default=None)
    used = [file.environment.get("resources") or {} for file in files]
    if longest := max(used, key=lambda resources: resources.get("samples") or 0):
        whole.environment["resources"] = longest


def merge_shards(
    parts: Mapping[str, VerdictFile], beside: Sequence[TestReport] = ()
) -> VerdictFile:
    """Join shards, or the workers of a run, to the whole run.

    Args:
        parts: The shards by their folders. Tests of a missing one are NOT_RUN, and so is then the
            run. The whole is never better than any of them.
        beside: Decisions that no part has.

    Returns:
        The verdict file of the whole run.
    """
    files = list(parts.values())
    shards = [file.shard for file in files if file.shard is not None]
    planned = shards[0]
    present = {shard.index for shard in shards}
    missing = [f"{n}/{planned.of}" for n in range(1, planned.of + 1) if n not in present]
    names = ", ".join(missing)
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
                message=f"its shard is missing ({names})" if missing else "no shard had it",
            )
            for test in planned.tests
        ],
    )
    ledger = Ledger(whole)
    done = set()
    for file in files:
        for test in file.tests:
            if not test.is_beside:
                ledger.decide(test)
                done.add(test.id)
    merge(whole, ledger, parts)
    for decision in beside:
        ledger.decide(decision)
    whole.against = _against(file.against for file in files)
    whole.judge()
    nobodys = [test.id for test in planned.tests if test.id not in done]
    _conclude(whole, files, names, nobodys)
    return whole


def _conclude(
    whole: VerdictFile, files: Sequence[VerdictFile], missing: str, nobodys: Sequence[str]
) -> None:
    """Set the reason of a judged whole, and its verdict where parts or tests are missing."""
    if missing:
        whole.settle(worst([whole.verdict, Verdict.NOT_RUN]))
        whole.reason = f"shards that are missing: {missing}"
    elif nobodys:
        whole.finished = False
        whole.settle(worst([whole.verdict, Verdict.NOT_RUN]))
        whole.reason = f"no shard had {len(nobodys)} of the run's tests ({nobodys[0]})"
    elif not whole.finished:
        whole.reason = next(file.reason for file in files if not file.finished)
    elif whole.verdict is Verdict.NOT_RUN and len({file.reason for file in files}) == 1:
        whole.reason = files[0].reason
    else:
        whole.reason = whole.why()


def _against(parts: Iterable[AgainstReport | None]) -> AgainstReport | None:
    reports = [report for report in parts if report is not None]
    if not reports:
        return None
    whole = AgainstReport(run=reports[0].run, engine=reports[0].engine)
    for name, field in AgainstReport.model_fields.items():
        if field.annotation == list[str]:
            lines = [line for report in reports for line in getattr(report, name)]
            setattr(whole, name, [*dict.fromkeys(lines)])
    whole.not_asked = sorted(set.intersection(*(set(report.not_asked) for report in reports)))
    whole.measured = {name: metric for each in reports for name, metric in each.measured.items()}
    whole.no_worse = all(report.no_worse for report in reports)
    return whole


def _judged_again(file: VerdictFile) -> VerdictFile:
    judged = file.model_copy(update={"levels": {}})  # the tests are read, not changed
    judged.judge()
    return judged


def contradiction(file: VerdictFile) -> str | None:
    """What in a file contradicts its own tests: it was changed after it was written; or None."""
    judged = _judged_again(file)
    if worst([file.verdict, judged.verdict]) is not file.verdict:
        return f"its verdict is {file.verdict}, its tests make {judged.verdict}"
    if file.exit_status != file.verdict.exit_status:
        return f"its verdict is {file.verdict}, its exit status {file.exit_status}"
    for name in {*file.levels, *judged.levels}:
        if judged.levels.get(name) != file.levels.get(name):
            return f"its tests of level {name} are not those that it counts"
    return None


def _prefixed(part: VerdictFile, prefix: str) -> VerdictFile:
    """A copy whose paths are of the whole's report directory, with the part's ``prefix``."""
    moved = part.model_copy(deep=True)
    for start in moved.starts:
        start.log = f"{prefix}/{start.log}"
    for crash in moved.crashes:
        crash.bundle = f"{prefix}/{crash.bundle}" if crash.bundle else None
    if moved.memory is not None:
        moved.memory.file = f"{prefix}/{moved.memory.file}"
    return moved


def worst_box(boxes: Iterable[BoxReport]) -> BoxReport:
    """The box of the whole: the worst of those that were read. A part that did not read its box
    does not count. A state from a later version of the suite is UNKNOWN here."""
    every = list(boxes)

    def place(box: BoxReport) -> int:
        state = box.state if box.state in _BOX_STATES else BoxState.UNKNOWN
        return _BOX_STATES.index(BoxState(state))

    return min([box for box in every if box.looked_at] or every, key=place)


def _environments(files: Sequence[VerdictFile]) -> dict[str, object]:
    first, others = files[0].environment, {}
    for file in files[1:]:
        record = file.environment
        different = {k: record.get(k) for k in {**first, **record} if first.get(k) != record.get(k)}
        if different and file.shard is not None:
            others[str(file.shard.index)] = different
    return {**first, **({"other_shards": others} if others else {})}
