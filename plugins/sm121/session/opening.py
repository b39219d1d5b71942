"""Opens a run. All mistakes in the request are reported before a server starts."""

import dataclasses
import datetime
import json
import os
import sys
import uuid
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from sm121.core import architecture
from sm121.core.configuration import ServerConfiguration
from sm121.core.files import write_text
from sm121.core.profile import Profile
from sm121.core.server import Node, Server
from sm121.engines import (
    dead_runs,
    nodes,
    pool,
    process_tree,
    protocol,
    ray_cluster,
    registry,
    starting,
)
from sm121.engines.attached_life import AttachedLife
from sm121.engines.followed_log import FollowedLog
from sm121.engines.kept_log import KeptLog
from sm121.engines.server_memory import ServerMemoryReader
from sm121.engines.starting import StartLimits
from sm121.evidence import environment, host, resources
from sm121.machine import this_machine
from sm121.run import directory as report_directory
from sm121.run import events, fold, stored_run
from sm121.run.engine_report import EngineReport
from sm121.run.event_log import EventLog
from sm121.run.events import (
    Collected,
    EngineShown,
    EnvironmentRead,
    Opened,
    ServerAttached,
    ServerStarting,
    StartEnded,
)
from sm121.run.record import ProgressLine, RunRecord, Say, Target
from sm121.run.run import Run
from sm121.session import attached_model, fingerprinting, show_config, signals, workload
from sm121.session import target as targets
from sm121.session.crashes import CrashDesk
from sm121.session.session import SelectedTests, Session, secrets_given
from sm121.session.settings import Settings


def _print(what: str, line: str, kind: ProgressLine = ProgressLine.NOTE) -> None:  # noqa: ARG001
    sys.stderr.write(f"{what}: {line}\n")


def open_session(settings: Settings) -> Session:
    """Open the session of a script: see `prepare`.

    Args:
        settings: The settings of the run.

    Raises:
        UsageError: See `prepare`.
    """
    session = prepare(settings)
    session.say_where_the_earlier_report_is()
    return session


def prepare(
    settings: Settings,
    chosen: Target | None = None,
    collected: Collected | None = None,
    *,
    selected: SelectedTests | None = None,
    say: Say = _print,
    verbose: bool = False,
    resume: bool = False,
    again: Callable[[str | None], str] | None = None,
) -> Session:
    """Attach to the server, or prepare to start servers; take the report directory.

    Args:
        settings: The settings of the run.
        chosen: The target; resolved from the settings if it is not given.
        collected: The tests that will get a verdict; None without tests.
        selected: Facts about the tests, for the decisions at the end; None without tests.
        say: Shows a line of progress.
        verbose: Whether remarks are also shown at once.
        resume: Whether the directory's run is continued. The caller sets the `log` of its events.
        again: See `CrashDesk`.

    Returns:
        The session, which has started nothing.

    Raises:
        UsageError: The choices contradict each other, no server answers, or the directory is not a
            report directory or is in use.
    """
    chosen = chosen or targets.resolve(settings, ())
    followed = _follow(settings) if chosen.obstacle is None else None
    settings = _with_log(settings, followed)
    try:
        chosen, attached, engine = _look_at_engine(settings, chosen)
        settings, run_id, taken = _take_directory(settings, resume=resume)
    except BaseException:
        if followed is not None:
            followed.close()
        raise
    opened = _opened(settings, chosen, engine)
    record = RunRecord(
        directory=settings.report_dir,
        log=_log(settings.report_dir, opened, resume=resume),
        say=say,
        secrets=secrets_given(settings),
        verbose=verbose,
    )
    desk = CrashDesk(record, settings, again)
    session = Session(
        run=Run.of(chosen, record, attached, desk),
        crashes=desk,
        settings=settings,
        report=taken,
        run_id=run_id,
        followed_log=followed,
        selected=selected or SelectedTests(),
    )
    _begin(session, opened, collected or Collected([]))
    return session


def _begin(session: Session, opened: Opened, collected: Collected) -> None:
    """Record that the run begins; then attach to the server, or prepare to start servers."""
    session.run.record.emit(opened)
    session.run.record.emit(collected)
    _remark_on(session)
    _prepare_engine(session)
    os.environ[process_tree.RUN_ID] = session.run_id


def _log(directory: Path, opened: Opened, *, resume: bool) -> EventLog:
    """Return the log of a run's events.

    If the run continues an earlier one, the log has no file yet.
    """
    path = None if resume else directory / events.NAME
    return EventLog(fold.begun(opened), path)


def _with_log(settings: Settings, followed: FollowedLog | None) -> Settings:
    """Return the settings with the file into which the server's log is copied.

    If the log is not a stream, the settings are unchanged.
    """
    if followed is None or settings.attached is None:
        return settings
    given = dataclasses.replace(settings.attached, log=followed.path, log_name=followed.name)
    return dataclasses.replace(settings, attached=given)


def _opened(settings: Settings, chosen: Target, engine: EngineReport) -> Opened:
    """Return the first event of a run."""
    profile = chosen.profile
    profile_name = "none"
    certificate_levels: list[str] | None = None
    if profile is not None:
        profile_name = profile.name
        if settings.judging.certify:
            certificate_levels = list(profile.certify.levels)
    return Opened(
        arch=chosen.arch,
        profile=profile_name,
        question=_question(settings, profile),
        started=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        engine=engine,
        certificate_levels=certificate_levels,
    )


def _remark_on(session: Session) -> None:
    """Add remarks on faults of the machine, and on an engine whose version names no release."""
    run = session.run
    engine = run.record.file.engine
    for line in this_machine.faults(run.target.arch):
        run.record.remark(line)
    if engine.version is not None and engine.identity is None:
        run.record.remark(
            f"{engine.name} {engine.version} is not a release (a checkout without tags): its "
            "capabilities are known only as far as its parser or its server reports them, and "
            "no known deviation applies"
        )


def _follow(settings: Settings) -> FollowedLog | None:
    """Start to copy the attached server's log, if it is a stream; otherwise return None."""
    given = settings.attached
    if given is None:
        return None
    if given.container is not None:
        return FollowedLog.of_container(given.container)
    if given.log_on_stdin:
        return FollowedLog.of_standard_input()
    return None


def _look_at_engine(
    settings: Settings, chosen: Target
) -> tuple[Target, Server | None, EngineReport]:
    """Find the release of the attached or installed engine, and adapt the target to it."""
    report = EngineReport(
        name=settings.engine.name, managed=True, model=settings.target.model or ""
    )
    if chosen.profile is None:
        return chosen, None, report
    report.model = settings.target.model or chosen.profile.model.id
    report.dense = chosen.profile.model.dense
    attached = None
    if chosen.obstacle is None:
        attached = targets.attached_server(settings, chosen.profile)
        if attached is None:
            installed = targets.installed_engine(settings, chosen.profile)
            report.version = installed.version
            report.identity = installed.identity
        else:
            report.name = attached.reader or attached.engine
            report.version = attached.version
            report.managed = False
            report.model = attached.endpoint.served_name
            chosen = targets.judging_attached(settings, chosen, attached)
            report.identity = chosen.engine.identity
    report.configuration = chosen.profile.under_test if chosen.profile is not None else None
    return chosen, attached, report


def refuse_attached(settings: Settings, chosen: Target) -> None:
    """Refuse an attached server that does not answer, or is not the requested one. Open no run.

    Args:
        settings: The settings of the run; nothing happens without ``--base-url``.
        chosen: The target.

    Raises:
        UsageError: The server does not answer or is another one, or its log cannot be read.
    """
    if settings.attached is None or chosen.obstacle is not None:
        return
    followed = _follow(settings)
    try:
        _look_at_engine(_with_log(settings, followed), chosen)
    finally:
        if followed is not None:
            followed.close()


def _take_directory(
    settings: Settings, *, resume: bool
) -> tuple[Settings, str, report_directory.ReportDirectory]:
    """Take the report directory, or a worker's folder in it.

    Returns:
        The settings with that folder, the run's id, and the directory, which stays locked.
    """
    worker = settings.worker
    run_id = uuid.uuid4().hex[:12]
    if worker is None:
        return settings, run_id, report_directory.lock_directory(settings.report_dir, resume=resume)
    directory = report_directory.lock_directory(settings.report_dir, worker.run)
    folder = directory.path / stored_run.WORKERS / worker.id
    folder.mkdir(parents=True)
    # The folder belongs to this worker only.
    settings = dataclasses.replace(settings, report_dir=folder)
    # Only the first process of the run shows where the earlier report was moved to.
    mine = dataclasses.replace(directory, earlier=None)
    return settings, f"{run_id}-{worker.id}", mine


def _question(settings: Settings, profile: Profile | None) -> str | None:
    questions = []
    if settings.judging.against is not None:
        questions.append(f"is it not worse than {settings.judging.against.name}")
    if profile is not None and profile.asks is not None:
        questions.append(profile.asks)
    return ", and ".join(questions) or None


def _prepare_engine(session: Session) -> None:
    """Watch the attached server, or prepare to start servers; record the environment."""
    run = session.run
    settings = session.settings
    profile = run.target.profile
    if run.target.obstacle is not None or profile is None:
        return
    arguments: tuple[str, ...] = ()
    variables: dict[str, str] = dict(os.environ)
    if settings.engine.image_id is not None:
        variables[host.IMAGE_ID] = settings.engine.image_id
    if run.servers.attached is None:
        _make_pool(session, profile)
        under_test = run.configurations.by_name[profile.under_test]
        tokenizer = workload.tokenizer_of(under_test)
        run.record.emit(EngineShown.of(run.record.file.engine, model=under_test.model))
        arguments = under_test.arguments
        variables.update(under_test.environment)
    else:
        tokenizer = run.servers.attached.endpoint.served_name
        _watch_attached(session, run.servers.attached, profile)
    python = settings.engine.python
    if isinstance(registry.engine(settings.engine.name), protocol.Program):
        python = sys.executable  # the engine is no Python package: record the suite's packages

    def read() -> EnvironmentRead:
        record = environment.record(
            python,
            arguments=arguments,
            environment=variables,
            workload=workload.describe_workload(settings, profile, tokenizer=tokenizer),
        )
        fingerprint = fingerprinting.fingerprint_of(session, record, variables)
        return EnvironmentRead(record.model_dump(mode="json"), fingerprint)

    session.record_environment(read)
    if run.servers.attached is None and profile.arch != architecture.CPU:
        show_config.note_later(run.record, python, variables)


def _watch_attached(session: Session, attached: Server, profile: Profile) -> None:
    """Watch whether an attached server is alive, and its memory; keep a copy of its log."""
    run = session.run
    line = attached_model.name_remark(attached, session.settings, profile)
    if line is not None:
        run.record.remark(line)
    life = AttachedLife(attached)
    log = None
    if attached.log is not None:
        log = KeptLog(attached.log, run.record.directory / "server-attached.log")
    sampler = _sampler(session, profile, life.processes.find)
    run.servers.begin(sampler, life=life, log=log)
    run.record.emit(ServerAttached.of(life.signs))
    unwatched = life.unwatched
    if unwatched is not None:
        run.record.emit(EngineShown.of(run.record.file.engine, unwatched=unwatched))
        run.record.unproven(unwatched)
    if log is None:
        run.record.unproven(f"kernel path: {attached.why_no_log}")
    else:
        run.log_errors.judge()


def _make_pool(session: Session, profile: Profile) -> None:
    run = session.run
    settings = session.settings
    for ended in dead_runs.end_dead_runs():
        names = "; ".join(str(process) for process in ended.processes)
        run.record.remark(
            f"a server of the killed run {ended.run} was still running and was ended: {names}"
        )
    by_name = targets.configurations(
        settings, profile, notify=lambda line: run.record.say("canary", line)
    )
    run.configurations.begin(by_name, _look_at_nodes(session, profile, by_name[profile.under_test]))
    servers = pool.ServerPool(
        limits=StartLimits(
            ready_s=profile.engine.ready_within_s.value,
            stalled_s=profile.engine.stalled_after_s,
            stop_s=profile.engine.stop_within_s,
            cold_s=profile.engine.cold_ready_within_s.value,
        ),
        directory=run.record.directory,
        run_id=session.run_id,
        secrets=run.record.secrets,
        hooks=pool.PoolHooks(
            notify=starting.StartProgress(partial(_show_start, session), begins=run.record.verbose),
            on_start=lambda managed: run.record.emit(ServerStarting(managed.configuration.name)),
            on_start_end=lambda start: run.record.emit(StartEnded(start)),
            before_stop=run.log_errors.judge,
            on_stop=session.server_stopped,
            on_cold=signals.give_time,
            added=run.configurations.bound_compilers,
        ),
    )
    elsewhere = servers.available_elsewhere
    sampler = _sampler(session, profile, servers.processes, elsewhere)
    run.servers.begin(sampler, pool=servers)


def _show_start(session: Session, name: str, phase: starting.StartPhase) -> None:
    kind = ProgressLine.READY if phase.ready else ProgressLine.PASSING
    session.run.record.say(f"server {name}", phase.text, kind)


def _look_at_nodes(
    session: Session, profile: Profile, under_test: ServerConfiguration
) -> dict[Node, dict[str, Any]]:
    """Return the facts about each node of a server on several machines; write nodes.json."""
    run = session.run
    if profile.nodes is None or under_test.span is None:
        return {}
    if under_test.span.launcher == "ray":
        ranks = profile.nodes.tensor_parallel // profile.nodes.count
        looked_at = ray_cluster.check_cluster(under_test, arch=profile.arch, ranks=ranks)
    else:
        looked_at = nodes.check_nodes(under_test)
    node_facts = {}
    for found in looked_at:
        node_facts[found.node] = found.facts
        for left in found.leftovers:
            run.record.remark(f"{found.node}: a server of a killed run was ended: {left}")
    by_name = {str(node): facts for node, facts in node_facts.items()}
    text = run.record.redact(json.dumps(by_name, indent=2))
    write_text(text, run.record.directory / "nodes.json")
    return node_facts


def _sampler(
    session: Session,
    profile: Profile,
    processes: Callable[[], list[psutil.Process]],
    elsewhere: Callable[[], dict[str, int]] = dict,
) -> resources.ResourceSampler:
    """Return the sampler of the memory of the server's processes; it does not sample yet.

    ``elsewhere`` returns the available memory of other nodes; without it, none is known.
    """
    run = session.run
    return resources.ResourceSampler(
        processes,
        held=ServerMemoryReader(gpu=profile.arch != architecture.CPU).read,
        floor_bytes=profile.stress.memory_floor_gib.value * 2**30,
        nodes=elsewhere,
        on_floor=run.servers.abort,
        on_trouble=run.record.remark,
    )
