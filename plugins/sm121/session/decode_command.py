"""``sm121 profile``: measures the shares of the model's parts and of the host in decoding time."""

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sm121.client import models
from sm121.core import architecture, builds, templates
from sm121.core import profile as profiles
from sm121.core.engine_arguments import parse_options
from sm121.core.errors import UsageError
from sm121.core.files import write_text
from sm121.core.profile import Profile
from sm121.core.server import Endpoint, Server
from sm121.core.verdict import NotRun, Verdict
from sm121.engines import attached, attached_log, given_key, registry
from sm121.engines.detection import detect
from sm121.engines.options import GivenEngine
from sm121.engines.protocol import Profiling
from sm121.evidence import decode_time, kernel_profile, profile_files
from sm121.evidence.decode_parts import Row
from sm121.evidence.decode_time import DecodeTime, StreamTime
from sm121.evidence.kernel_path import detect_engine, read_log
from sm121.evidence.kernel_profile import KernelProfile
from sm121.evidence.profiler import NoProfiler, profile_decode
from sm121.measure.prompts import Prompts
from sm121.performance.options import MeasuringOptions
from sm121.session import decode_backends, decode_subject, given_engine
from sm121.session.decode_limits import (
    faster_than_memory,
    judge_drafts,
    limits_of,
    longest_answer,
    of_another_model,
)
from sm121.session.decode_subject import Subject
from sm121.session.opening import open_session
from sm121.session.options import GivenTarget
from sm121.session.settings import Settings

#: The titles of the rows in the Markdown table.
TITLES: Mapping[Row, str] = {
    "moe_fc1": "MoE FC1",
    "moe_fc2": "MoE FC2",
    "moe_products": "MoE FC1 and FC2, not distinguishable",
    "moe_other": "MoE, other",
    "attention": "attention",
    "norms": "norms",
    "quantise": "quantisation",
    "routing": "routing",
    "dense": "dense",
    "other": "other",
    "host": "host: no kernel runs",
}
#: Every model has at least this many ordinary tokens.
_VOCABULARY = 30_000
_START_WITH = (
    "start vLLM (0.13 or later) with --profiler-config "
    '\'{"profiler": "torch", "torch_profiler_dir": "DIR", '
    '"torch_profiler_with_stack": false}\', and give --traces DIR'
)


@dataclass(frozen=True)
class DecodeRequest:
    """The arguments of the command.

    Attributes:
        target: The URL of a server, the name of a configuration, or a file of a profiler.
        prompt: Tokens of the prompt.
        tokens: The fewest decode steps that are profiled.
        layout: The KV layout that is required; None: any.
        profile: Name or path of the profile that has the configuration.
        configuration: The configuration that a server of a URL or of a file runs; None: not known.
        backends: The experts' backends that were requested; empty: those of the configuration.
        traces: The folder into which a running server writes its traces.
        log: The log of a running server.
        engine_python: The Python interpreter of the engine that is started; None: this one.
        arguments: More arguments of the engine that is started.
        environment: More environment variables of this engine.
        output: The folder of the report.
    """

    target: str
    prompt: int
    tokens: int
    layout: str | None
    profile: str | None
    configuration: str | None
    backends: tuple[str, ...]
    traces: Path | None
    log: Path | None
    engine_python: str | None
    arguments: tuple[str, ...]
    environment: tuple[tuple[str, str], ...]
    output: Path


@dataclass(frozen=True)
class DecodeResult:
    """The kernels of decoding, and the conclusions.

    Attributes:
        subject: What was profiled.
        profile: The kernels.
        time: Their times by part; None on a CPU.
        faults: The unmet requirements.
        not_run: The requirements that could not be judged, with the reasons.
        remarks: The times that are shorter than the memory allows.
        follows: The conclusions, by the decision table of the SM121 testing guide
            (`docs/from-the-plan.md`).
    """

    subject: Subject
    profile: KernelProfile
    time: DecodeTime | None
    faults: list[str]
    not_run: list[str]
    remarks: list[str]
    follows: list[str]

    @property
    def verdict(self) -> Verdict:
        """The verdict on the requirements."""
        if self.faults:
            return Verdict.FAIL
        return Verdict.NOT_RUN if self.not_run else Verdict.PASS

    def text(self) -> str:
        """Return the result as Markdown."""
        return templates.rendered(
            "decode.md.j2",
            subject=self.subject,
            profile=self.profile,
            time=self.time,
            faults=self.faults,
            not_run=self.not_run,
            remarks=self.remarks,
            follows=self.follows,
            titles=TITLES,
            operators=kernel_profile.table(self.profile),
        )

    def record(self) -> dict[str, Any]:
        """Return the result as data for JSON."""
        return {
            "subject": dataclasses.asdict(self.subject),
            "decode": None if self.time is None else self.time.model_dump(mode="json"),
            "faults": self.faults,
            "not_run": self.not_run,
            "remarks": self.remarks,
            "follows": self.follows,
            "kernels": self.profile.model_dump(mode="json"),
        }


def run(request: DecodeRequest) -> DecodeResult:
    """Profile a decode, and write the result to the folder of the report.

    Args:
        request: The arguments.

    Raises:
        UsageError: The target is not known, or an argument is wrong.
        NotRun: The server has no profiler, or wrote no trace. The message says what to do.
    """
    stream: StreamTime | None = None
    if request.target.startswith(("http://", "https://")):
        subject, profile, stream = _of_running(request)
    elif Path(request.target).is_file():
        subject, profile = _of_file(request)
    else:
        subject, profile, stream = _of_start(request)
    time = decode_time.measure(profile, stream)
    faults = list(subject.faults)
    if time is None:
        not_run = ["kernels: expected a trace of a GPU, got one of a CPU. No limit is judged"]
        remarks: list[str] = []
        follows: list[str] = []
    else:
        judgement = decode_time.judge(profile, time, subject.limits, backends=subject.backends)
        faults += of_another_model(profile, subject.layers, subject.model)
        judge_drafts(judgement, profile, time, subject.speculative)
        faults += judgement.faults
        not_run = judgement.not_run
        if subject.no_backend:
            not_run.insert(0, subject.no_backend)
        remarks = faster_than_memory(time, subject.bound_ms, subject.moe_bound_ms)
        follows = decode_time.follows(time)
    result = DecodeResult(subject, profile, time, faults, not_run, remarks, follows)
    request.output.mkdir(parents=True, exist_ok=True)
    write_text(result.text(), request.output / "decode.md")
    write_text(json.dumps(result.record(), indent=2) + "\n", request.output / "decode.json")
    return result


def _of_file(request: DecodeRequest) -> tuple[Subject, KernelProfile]:
    """Read a file of a profiler."""
    _refuse_options_of_a_start(request, "a file")
    if request.layout is not None:
        raise UsageError(
            "--layout: expected a configuration or the URL of a server, got a file; sm121 path LOG "
            "shows the layout"
        )
    _refuse_options_of_a_url(request, "a file")
    profile = profile_files.read_profile(Path(request.target))
    return _of_another(request.target, None, request), profile


def _of_another(
    name: str, prompt: int | None, request: DecodeRequest, version: str | None = None
) -> Subject:
    """Return the subject for a running server, or for a profiler's file.

    The limits are those of the configuration that ``--configuration`` names. Without this option,
    the limits and the bound are those of the profile's model.
    """
    loaded = profiles.load(
        request.profile or profiles.for_architecture(architecture.detect().name or "unknown")
    )
    named = request.configuration
    if named is None:
        subject = Subject(name, prompt, limits_of(loaded, prompt), request.backends)
        decode_subject.require_model(subject, loaded, ())
        decode_subject.add_least_bound(subject, loaded)
        return subject
    identity = builds.identity(version)
    chosen = loaded.judging(named, identity)
    subject = Subject(name, prompt, limits_of(chosen, prompt))
    row = chosen.configurations[named]
    decode_subject.require_model(subject, chosen, row.arguments)
    subject.speculative = chosen.path_of(named).speculative or ()
    of_any_release = []
    if identity is None and not request.backends:
        of_any_release = decode_backends.of_any_release(loaded.configurations[named])
        subject.any_release = named if of_any_release else ""
    required = (
        request.backends
        or of_any_release
        or chosen.path_of(named).moe
        or decode_backends.named(chosen, row.arguments, row.environment)
    )
    decode_subject.require_backends(subject, required, named)
    decode_subject.add_bound(subject, chosen, named, chosen.model.id)
    if subject.bound_ms is not None:
        subject.bound_formats = f"configuration {named}"
    return subject


def _of_running(request: DecodeRequest) -> tuple[Subject, KernelProfile, StreamTime | None]:
    """Profile a server that somebody else has started."""
    _refuse_options_of_a_start(request, "a URL")
    if request.layout is not None and request.log is None:
        raise UsageError(
            "--layout: expected --server-log FILE with the URL of a server, whose log shows the "
            "layout. To request a layout, start the server with "
            f"{decode_subject.LAYOUT}={request.layout}"
        )
    if request.log is not None and not request.log.is_file():
        raise UsageError(f"--server-log {request.log}: expected the log file of the server")
    server = attached.attach(
        request.target,
        api_key=given_key.api_key(lambda _option: None),
        served_name=None,
        default_name="gpt-oss-120b",
        log=None,
        naming=None,
        option="URL",
    )
    if request.traces is None:
        raise NotRun(
            f"--traces: expected the folder into which this server writes its traces; {_START_WITH}"
        )
    if not request.traces.is_dir():
        raise UsageError(f"--traces {request.traces}: expected a folder on this machine")
    subject = _of_another(server.endpoint.base_url, request.prompt, request, server.version)
    if request.log is not None:
        _require_layout_of_log(subject, server, request.log, request.layout)
    try:
        profile, stream = _take(server.endpoint, request.traces, request)
    except NoProfiler as error:
        raise NotRun(f"the server has no route of the profiler; {_START_WITH}") from error
    return subject, profile, stream


def _refuse_options_of_a_start(request: DecodeRequest, what: str) -> None:
    """Raise UsageError for an option that only the start of a configuration uses."""
    given = []
    if request.arguments:
        given.append("--engine-arg")
    if request.environment:
        given.append("--engine-env")
    if request.engine_python is not None:
        given.append("--engine-python")
    if given:
        raise UsageError(
            f"{', '.join(given)}: expected a configuration, whose server the command starts, "
            f"got {what}"
        )


def _refuse_options_of_a_url(request: DecodeRequest, what: str) -> None:
    """Raise UsageError for an option that only a running server uses."""
    for option, value in (("--traces", request.traces), ("--server-log", request.log)):
        if value is not None:
            raise UsageError(f"{option}: expected the URL of a server with it, got {what}")


def _require_layout_of_log(
    subject: Subject, server: Server, log: Path, requested: str | None
) -> None:
    """Judge the KV layout in the log; raise NotRun if it is not proven to be the server's."""
    engine = detect_engine(log)
    if engine is None:
        raise UsageError(f"--server-log {log}: expected the log of a server, from its start on")
    can = detect(server, engine)
    doubt = attached_log.doubt(server, can, log, f"--server-log {log}")
    if doubt is not None:
        raise UsageError(doubt.text) if doubt.is_of_another else NotRun(doubt.text)
    shown = read_log(log, engine).kv_layout
    decode_subject.require_layout(subject, requested, shown, engine)


def _of_start(request: DecodeRequest) -> tuple[Subject, KernelProfile, StreamTime | None]:
    """Start a configuration, profile it, and stop it."""
    name = request.profile or profiles.for_architecture(architecture.detect().name or "unknown")
    chosen = profiles.load(name)
    if request.target not in chosen.configurations:
        known = ", ".join(chosen.configurations)
        raise UsageError(
            f"{request.target}: expected the URL of a server, a file of a profiler, or a "
            f"configuration of {chosen.name}: {known}"
        )
    _refuse_options_of_a_url(request, "a configuration")
    if request.configuration is not None:
        raise UsageError("--configuration: expected a URL or a file with it, got a configuration")
    _require_startable(chosen, request.target)
    row = chosen.configurations[request.target]
    given = parse_options((*chosen.engine.arguments, *row.arguments, *request.arguments))
    length = given.get("max_model_len", "")
    longest_answer(request.prompt, request.tokens, int(length) if length.isdecimal() else None)
    variables = dict(request.environment)
    if request.layout is not None:
        variables[decode_subject.LAYOUT] = request.layout
    settings = Settings(
        target=GivenTarget(profile=chosen, configuration=request.target),
        engine=GivenEngine(
            name=chosen.engine.name,
            python=given_engine.program(
                {"--engine-python": request.engine_python}.get, chosen.engine.name, None
            ),
            arguments=request.arguments,
            environment=tuple(sorted(variables.items())),
        ),
        measuring=MeasuringOptions(kernel_trace="keep"),
        report_dir=request.output,
    )
    with open_session(settings) as session:
        server = session.run.server()
        configuration = server.configuration
        if configuration is None or configuration.traces is None:
            raise NotRun(f"{server.engine} takes no --profiler-config: vLLM 0.13 or later does")
        profile, stream = _take(server.endpoint, Path(configuration.traces), request)
        path = session.run.paths.of(server)
        judged = session.run.profile
    subject = Subject(request.target, request.prompt, limits_of(judged, request.prompt))
    backends = (
        request.backends
        or decode_backends.named(judged, request.arguments, dict(request.environment))
        or judged.path_of(request.target).moe
        or decode_backends.named(judged, configuration.arguments, dict(configuration.environment))
        or decode_backends.logged(configuration, path)
    )
    decode_subject.require_backends(subject, backends, request.target)
    subject.speculative = judged.path_of(request.target).speculative or ()
    decode_subject.require_layout(subject, request.layout, path.kv_layout, server.engine)
    decode_subject.add_bound(
        subject, judged, request.target, configuration.model, arguments=request.arguments, path=path
    )
    return subject, profile, stream


def _require_startable(chosen: Profile, configuration: str) -> None:
    """Raise NotRun if the engine has no profiler, or the profile is for another machine."""
    if not isinstance(registry.engine(chosen.engine.name), Profiling):
        raise NotRun(f"{chosen.engine.name} takes no --profiler-config: vLLM 0.13 or later does")
    here = architecture.detect().name
    if chosen.arch != here:
        machine = here or "a GPU that the suite has no name for"
        raise NotRun(
            f"{configuration}: expected a machine with {chosen.arch}, this one is {machine}. Run "
            "the command there, or give a file of a profiler that was written there, with "
            f"--configuration {configuration}"
        )


def _take(
    endpoint: Endpoint, traces: Path, request: DecodeRequest
) -> tuple[KernelProfile, StreamTime | None]:
    """Time a token, then profile decode steps; both after a prompt of an exact length."""
    with endpoint.http() as http:
        listed = models.listed(http, f"{endpoint.base_url}: expected a list of models")
    context: int | None = None
    for model in listed["data"]:
        if model["id"] == endpoint.served_name and model.get("max_model_len"):
            context = int(model["max_model_len"])
    longest = longest_answer(request.prompt, request.tokens, context)
    prompt = Prompts(endpoint, _VOCABULARY).make(request.prompt)
    trace = profile_decode(
        endpoint,
        traces,
        steps=request.tokens,
        prompt=prompt,
        longest=longest,
        timed=request.tokens,
    )
    profile = profile_files.read_profile(trace.path)
    return profile.model_copy(update={"decoding": True}), trace.stream
