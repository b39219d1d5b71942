"""`sm121 init-profile`: write a profile for the model that a server serves."""

import contextlib
import dataclasses
import datetime
import math
import re
import sys
import tempfile
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from sm121.answers import exam as exams
from sm121.answers import prompts
from sm121.answers.golden_comparison import GoldenComparison
from sm121.client.completions import Asker
from sm121.clock.measuring import Result, measure
from sm121.core import architecture, profile
from sm121.core.configuration import ServerConfiguration
from sm121.core.errors import Sm121Error, UsageError
from sm121.core.files import refuse_unwritable, write_text
from sm121.core.server import Server
from sm121.core.unmet import Unmet
from sm121.core.verdict import NotRun
from sm121.engines import attached, attached_log, dead_runs, given_key
from sm121.engines.capabilities import Capabilities
from sm121.engines.detection import detect
from sm121.engines.pool import PoolHooks, ServerPool
from sm121.engines.starting import StartLimits
from sm121.evidence import signatures
from sm121.session import answer_spread, served_facts
from sm121.session.known_answers import ExamClient
from sm121.session.profile_draft import Draft, base_profile, prompt_tokens

#: Limits of a start, in seconds.
_READY_WITHIN_S = 3600.0
_STALLED_AFTER_S = 300.0
_STOP_WITHIN_S = 60.0
#: The maximum number of tokens of an answer to a question. The number of tokens in the model's
#: context divided by `_SHARE` is another limit.
_ANSWER_TOKENS = 1536
_SHARE = 2
_ROUNDS = 5

Say = Callable[[str], None]


@dataclass(frozen=True)
class InitRequest:
    """The arguments of the command.

    Attributes:
        base_url: The address of a running server; None: the suite starts one.
        model: The folder or hub id of the checkpoint. With a URL, it is only read.
        served_name: The served name of the model, if the server serves several models.
        log: The log of the running server.
        engine: The name of the engine that is started.
        engine_arguments: The arguments of the engine that is started.
        arch: The architecture of the target; None: that of this machine.
        measures: Whether rates are measured.
        output: The file of the profile.
    """

    base_url: str | None
    model: str | None
    served_name: str | None
    log: Path | None
    engine: str
    engine_arguments: tuple[str, ...]
    arch: str | None
    measures: bool
    output: Path


def run(request: InitRequest, say: Say) -> list[Path]:
    """Write the profile and its exam.

    Args:
        request: The arguments.
        say: Receives a line of progress.

    Returns:
        The files.

    Raises:
        UsageError: The server does not answer, an argument is wrong, or a file exists.
        Sm121Error: The server did not start.
    """
    exam = request.output.with_suffix(".exam.jsonl")
    for path in (request.output, exam):
        if path.exists():
            raise UsageError(f"--output: {path} exists; remove it, or name another file")
        refuse_unwritable("--output", path)
    arch = request.arch or architecture.detect().name
    if arch is None:
        raise UsageError(f"--arch: expected one of {', '.join(architecture.NAMES)}")
    with _server(request, arch, say) as (server, can):
        draft = _draft(request, server, can, arch, say)
    write_text(draft.exam(), exam)
    write_text(draft.text(exam.name), request.output)
    if draft.facts.chat.refusal:
        say(
            "chats: the server refuses them, and no file on this machine shows whether the model "
            "has a chat template. If it has none, edit correctness.chats and correctness.cannot in "
            f"{request.output} before the first run"
        )
    exams.load(profile.load(str(request.output)).correctness.exam)
    return [request.output, exam]


def _draft(request: InitRequest, server: Server, can: Capabilities, arch: str, say: Say) -> Draft:
    """Read everything that the profile needs from the server."""
    facts = served_facts.read_facts(server, can, request.model)
    limit = min(_ANSWER_TOKENS, (facts.context or 4096) // _SHARE)
    examiner = ExamClient(server.endpoint, limit, can.file.reasoning_field, say)
    known = examiner.examine()
    if not known.completions:
        raise UsageError(
            f"{server.endpoint.served_name}: expected the right continuation of at least one text "
            "of the suite's exams (such as The capital of France is), got none in three rounds. "
            "Check /v1/completions"
        )
    measured, no_rates = None, "not measured, as --no-rates was given"
    if request.measures:
        measured, no_rates = _measured(server, prompt_tokens(facts.context), say)
    draft = Draft(
        name=_name(server.endpoint.served_name, arch),
        arch=arch,
        date=datetime.datetime.now(datetime.UTC).date().isoformat(),
        facts=facts,
        known=known,
        measured=measured,
        arguments=request.engine_arguments,
        no_rates=no_rates,
    )
    spread, no_spread = _spread(server, draft.fork, say)
    return dataclasses.replace(draft, spread=spread, no_spread=no_spread)


def _spread(server: Server, fork: float, say: Say) -> tuple[GoldenComparison | None, str]:
    """Measure the spread of the answers; the second value is the reason if this is not possible."""
    try:
        spread = answer_spread.measure(Asker(server), prompts.continuations(), fork)
    except (Sm121Error, NotRun, Unmet) as error:
        say(f"answers alone and in a batch: not compared: {error}")
        return None, str(error)
    say(f"answers alone and in a batch: {spread.summary()}")
    return spread, ""


def _measured(server: Server, prompt: int, say: Say) -> tuple[Result | None, str]:
    """Measure rates without context; the second value is the reason for missing rates."""
    endpoint = server.endpoint
    try:
        result = measure(
            endpoint.base_url,
            model=endpoint.served_name,
            api_key=endpoint.api_key,
            prompt_tokens=prompt,
            rounds=_ROUNDS,
            show=say,
        )
    except (Sm121Error, NotRun) as error:
        return None, str(error)
    numbers = result.numbers.values()
    if any(number.value and math.isfinite(number.value) for number in numbers):
        return result, ""
    why = "; ".join(dict.fromkeys(str(each) for one in numbers for each in one.measurement.invalid))
    say(f"rates: not measured: {why}")
    return None, why


def _name(served: str, arch: str) -> str:
    """Return a profile's name for a served model: lower-case words with hyphens."""
    words = re.sub(r"[^a-z0-9]+", "-", served.rsplit("/", 1)[-1].lower()).strip("-")
    return f"{arch}-{words or 'model'}"


@contextlib.contextmanager
def _server(request: InitRequest, arch: str, say: Say) -> Iterator[tuple[Server, Capabilities]]:
    """Attach to the running server, or start one and stop it afterwards."""
    if request.base_url is not None:
        yield _attached(request, request.base_url, say)
        return
    if request.model is None:
        raise UsageError("expected --base-url URL, or --model DIR|ID")
    configuration = ServerConfiguration(
        name="served",
        engine=request.engine,
        python=sys.executable,
        model=request.model,
        served_name=request.served_name or Path(request.model).name,
        arguments=request.engine_arguments,
        environment=(),
        speaking_worker=base_profile(arch, request.engine).engine.speaking_worker,
    )
    dead_runs.end_dead_runs()
    with tempfile.TemporaryDirectory(prefix="sm121-init-profile-") as folder:
        pool = ServerPool(
            limits=StartLimits(_READY_WITHIN_S, _STALLED_AFTER_S, _STOP_WITHIN_S),
            directory=Path(folder),
            run_id=uuid.uuid4().hex,
            hooks=PoolHooks(notify=lambda _name, phase: say(f"start: {phase.text}")),
        )
        try:
            server = pool.get(configuration)
            yield server, detect(server, request.engine)
        finally:
            pool.stop()


def _attached(request: InitRequest, url: str, say: Say) -> tuple[Server, Capabilities]:
    """Probe the running server.

    Its log is ignored unless the log is proven to be of this server.
    """
    server = attached.attach(
        url,
        api_key=given_key.api_key(lambda _option: None),
        served_name=request.served_name,
        default_name="",
        log=request.log,
        naming="--served-model-name",
    )
    can = detect(server)
    if can.engine in signatures.known_engines():
        server = dataclasses.replace(server, reader=can.engine)
    if request.log is not None:
        doubt = attached_log.doubt(server, can, request.log, f"--server-log {request.log}")
        if doubt is not None:
            say(f"log: not read: {doubt.text}")
            server = dataclasses.replace(server, log=None, why_no_log=doubt.text)
    return server, can
