"""Create events of which a stored run may consist, and check the events of a run."""

from pathlib import Path

from sm121.core.json_text import json_text
from sm121.run import events, fold, verdict_file
from sm121.run.events import Event
from sm121.run.shard_report import ShardTest
from sm121.run.verdict_file import VerdictFile


def events_of(file: VerdictFile) -> list[Event]:
    """Return events from which the given verdict file is computed."""
    emitted: list[Event] = [
        events.Opened(
            arch=file.arch,
            profile=file.profile,
            question=file.question,
            started=file.started,
            certificate_levels=file.certificate_levels,
            engine=file.engine.model_copy(update={"path": type(file.engine.path)()}),
        ),
        events.Collected([ShardTest(id=test.id, level=test.level) for test in file.tests]),
        events.EnvironmentRead({}, None),
        events.EnvironmentRead(file.environment, file.fingerprint),
        events.EngineShown(file.engine),
        events.BoxRead(file.box),
        events.Changed(file.changes),
    ]
    if file.shard is not None:
        emitted[1] = events.Collected(emitted[1].tests, file.shard)
    for start in file.starts:
        emitted.append(events.ServerStarting(start.configuration))
        emitted.append(events.StartEnded(start.model_copy(update={"clean_stop": None})))
        if start.clean_stop is not None:
            emitted.append(events.ServerStopped(start.log, start.clean_stop))
    emitted += [events.Died(crash) for crash in file.crashes]
    emitted += [events.Measured(name, metric) for name, metric in file.metrics.items()]
    emitted += [events.Decided(test) for test in file.tests]
    emitted += [events.Unproven(line) for line in file.unproven]
    emitted += [events.Remarked(line) for line in file.remarks]
    if file.memory is not None:
        emitted.append(events.MemoryRead(file.memory))
    if file.against is not None:
        emitted.append(events.Compared(file.against))
    closed = events.Closed(
        finished=file.finished,
        verdict=file.verdict,
        reason=file.reason,
        certified=file.certified,
        duration_s=file.duration_s,
    )
    return [*emitted, closed]


def require_same(report: Path) -> None:
    """Check that the events of a finished run result in its verdict.json, byte for byte."""
    stream = report / events.NAME
    written = report / verdict_file.NAME
    if not stream.is_file() or not written.is_file():
        return
    emitted = events.read_events(stream).events
    if any(isinstance(each.event, events.Closed) for each in emitted):
        assert written.read_text("utf-8") == json_text(fold.fold(emitted)) + "\n"
