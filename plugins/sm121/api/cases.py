"""Send requests that a server must refuse or serve (``fixtures/api/cases.toml``).

Each case has one of three tiers, as in NiLabs conform. If the server deviates, *specified* and
*implied* cases fail, and *unspecified* cases lead to a remark. A 5xx, a request that hangs, and a
wrong answer to the next request fail in every tier.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

from pydantic import Field

from sm121.api import schema
from sm121.api.client import CHAT, COMPLETIONS, RESPONSES, Api
from sm121.client.exchange import Exchange
from sm121.core import data_file
from sm121.core.level_settings import Ability
from sm121.core.unmet import Fact, Unmet
from sm121.core.verdict import Inapplicable, Severity
from sm121.engines.capabilities import Deviation, Name, needed

Json = dict[str, Any]
Tier = Literal["specified", "implied", "unspecified"]
ProblemKind = Literal[
    "hang",
    "server_error",
    "served",
    "refused",
    "wrong_status",
    "no_error_object",
    "serves_wrongly_afterwards",
]
#: Problems that are failures in every tier, even if a known deviation exists.
_NEVER_EXCUSED: tuple[ProblemKind, ...] = ("hang", "server_error", "serves_wrongly_afterwards")
#: Problems with the format of a refusal.
_OF_FORM: tuple[ProblemKind, ...] = ("no_error_object", "wrong_status")
#: By how many tokens an overlong text exceeds the model's context.
_OVERLONG = 64


class Case(data_file.DataTable):
    """One request, and the answer that the server must give."""

    id: str = Field(pattern=r"^[a-z0-9-]+$")
    tier: Tier
    #: ``refused`` means a 4xx with an error object, ``served`` means 200, ``either`` means either
    #: of these.
    expect: Literal["refused", "served", "either"]
    #: The allowed statuses of a refusal; empty for any 4xx.
    status: tuple[int, ...] = ()
    method: Literal["GET", "POST"] = "POST"
    path: str
    #: Fields to add to the plain request of the path.
    body: Json = Field(default_factory=dict)
    #: Fields to remove from the plain request.
    without: tuple[str, ...] = ()
    #: The body as text, if it is not JSON. ``%MODEL%`` is the served name.
    raw: str | None = None
    #: The body as bytes in hexadecimal.
    raw_hex: str | None = None
    #: The API key to send; None for the server's key.
    key: str | None = None
    #: A field whose value is replaced by a text that is longer than the model's context.
    overlong: str | None = None
    #: Capabilities that the engine needs.
    needs: tuple[Name, ...] = ()
    #: The ability that the model needs; None if the case needs no special ability.
    ability: Ability | None = None
    #: Why the server must answer in this way, with the source.
    why: str = Field(min_length=3)

    def __str__(self) -> str:
        return self.id


class CaseFile(data_file.DataTable):
    """The file of all cases."""

    #: Timeout of an answer in seconds.
    answer_within_s: float = Field(gt=0)
    #: The plain request of each path. It is valid, short, and the same for every model.
    plain: dict[str, Json]
    case: data_file.Entries[Case]


@dataclass(frozen=True)
class CaseProblem:
    """A deviation of a server from a case."""

    kind: ProblemKind
    fact: Fact
    #: Whether the deviation is a failure. It is only a remark if the tier allows it or it is known.
    fails: bool
    #: The status of the answer; None if no answer arrived.
    status: int | None

    @property
    def severity(self) -> Severity:
        """The severity of the problem.

        It is `Severity.COURTESY` if the server refused the request correctly, but not in the
        published format.
        """
        if self.kind in _NEVER_EXCUSED:
            return Severity.BLOCKER
        refused = self.status is not None and 400 <= self.status < 500
        if refused and self.kind in _OF_FORM:
            return Severity.COURTESY
        return Severity.CONTRACT


class JudgedCase(NamedTuple):
    """The result of a case."""

    #: The answer of the server, as text.
    reply: str
    #: The deviation from the case; None if there is none.
    problem: CaseProblem | None


def shipped() -> CaseFile:
    """Load the cases that come with the suite.

    Raises:
        UsageError: The file is not valid.
    """
    return data_file.load("api/cases.toml", CaseFile)


def judge_case(api: Api, case: Case, healthy: str) -> JudgedCase:
    """Send the request of a case, then a plain request.

    Args:
        api: The API of the server.
        case: The case.
        healthy: The result of :func:`healthy` before the first case.

    Returns:
        The answer, and the problem with it or with the plain request.

    Raises:
        NotRun: The engine lacks a capability of the case.
        Inapplicable: The case is about the API key, but the server needs none.
    """
    if case.key is not None and not api.endpoint.asks_for_a_key:
        raise Inapplicable(
            "the server was attached without --api-key: a server without a key accepts every "
            "request"
        )
    needs = list(case.needs)
    if case.path in (COMPLETIONS, CHAT, RESPONSES):
        needs += needed(case.path, {})
    api.capabilities.require(*needs)
    exchange = api.send(
        case.method,
        case.path.replace("%MODEL%", api.model),
        _content(api, case) if case.method == "POST" else None,
        key=case.key,
        timeout_s=shipped().answer_within_s,
    )
    found = _judge_answer(case, exchange)
    problem = _problem_afterwards(api, healthy, exchange)
    if problem is None and found is not None:
        problem = _classified(api, case, found, exchange)
    return JudgedCase(exchange.observed, problem)


class _Found(NamedTuple):
    """A deviation, before the tier of the case and known deviations are taken into account."""

    kind: ProblemKind
    fact: Fact


def _problem_afterwards(api: Api, healthy: str, exchange: Exchange) -> CaseProblem | None:
    """Return a problem if a plain request now gets another answer than before the first case."""
    sentinel = _ask_plainly(api)
    if sentinel.is_answered and sentinel.text == healthy:
        return None
    after = sentinel.text if sentinel.is_answered else f"no answer: {sentinel.text}"
    fact = Fact(f"the answer {healthy!r} again after this request", f"{after!r}")
    return CaseProblem("serves_wrongly_afterwards", fact, True, exchange.status)


def _classified(api: Api, case: Case, found: _Found, exchange: Exchange) -> CaseProblem:
    """Return a deviation from a case as a problem.

    The problem is only a remark if the deviation is known or the case is unspecified.
    """
    if found.kind in _NEVER_EXCUSED:
        return CaseProblem(found.kind, found.fact, True, exchange.status)
    deviation = api.capabilities.deviation(case.id, found.kind)
    if deviation is None:
        fails = case.tier != "unspecified"
        return CaseProblem(found.kind, found.fact, fails, exchange.status)
    about = f"a known deviation of {api.capabilities.file.title} {deviation.versions}"
    fact = replace(found.fact, about=about, evidence=deviation.source)
    return CaseProblem(found.kind, fact, False, exchange.status)


@dataclass(frozen=True)
class Judge:
    """Compares one server with the cases, and collects remarks and known deviations."""

    api: Api
    #: Called with each remark.
    remark: Callable[[str], object]
    #: The answer of each server to the plain request before its first case. The keys are the
    #: addresses of the servers.
    well: dict[str, str]
    #: The result of all cases: the excused deviations, each as "case: kind".
    excused: list[str] = field(default_factory=list)
    #: The result of all cases: one line for each excused deviation, with its symptom.
    symptoms: list[str] = field(default_factory=list)
    #: The result of all cases: one line for each known deviation that did not occur.
    mended: list[str] = field(default_factory=list)

    def __call__(self, case: Case) -> None:
        """Judge one case.

        Args:
            case: The case.

        Raises:
            Unmet: The server deviates, and neither the tier nor a known deviation excuses it.
            NotRun: The engine lacks a capability of the case.
            Inapplicable: The case is about the API key, but the server has none.
        """
        address = self.api.endpoint.base_url
        if address not in self.well:
            self.well[address] = healthy(self.api)
        reply, problem = judge_case(self.api, case, self.well[address])
        for deviation in self.api.capabilities.deviations(case.id):
            if problem is None or problem.kind != deviation.kind:
                self.known_or_mended(deviation, "")
        if problem is None:
            if case.tier == "unspecified":
                self.remark(f"{case.id}: unspecified ({case.why}); got {reply[:100]}")
            return
        if problem.fails:
            about = f"{case.id} ({case.tier}: {case.why})"
            fact = replace(problem.fact, about=about, kind=problem.kind)
            raise Unmet(fact, severity=problem.severity)
        symptom = f"{case.id}: {problem.fact}"
        if self.api.capabilities.deviation(case.id, problem.kind) is None:
            self.remark(symptom)
        else:
            self.excused.append(f"{case.id}: {problem.kind}")
            self.symptoms.append(symptom)

    def known(self, case: str, kind: str, text: str) -> bool:
        """Return whether a failure is a known deviation of the engine's version; if so, record it.

        Args:
            case: The id of the deviation's case.
            kind: The kind of the deviation.
            text: The symptom.
        """
        deviation = self.api.capabilities.deviation(case, kind)
        if deviation is None:
            return False
        self.known_or_mended(deviation, text)
        return True

    def known_or_mended(self, deviation: Deviation, symptom: str) -> None:
        """Record whether a deviation that is known for the engine's version occurred.

        Args:
            deviation: The deviation.
            symptom: The observed symptom. If it is empty, the deviation did not occur, and a remark
                recommends limiting the deviation's range of versions.
        """
        engine = self.api.capabilities
        release = f"{engine.file.title} {deviation.versions}"
        if symptom:
            self.excused.append(f"{deviation.case}: {deviation.kind}")
            self.symptoms.append(f"{deviation.case}: a known deviation of {release}: {symptom}")
        else:
            line = (
                f"{deviation.case}: {deviation.kind} is a known deviation of {release}, but "
                f"{engine.version} does not show it: end the range of versions in "
                f"fixtures/engines/{engine.file.name}.toml"
            )
            self.mended.append(line)
            self.remark(line)


def _judge_answer(case: Case, exchange: Exchange) -> _Found | None:
    """Compare the answer with the case."""
    reply = exchange.observed
    if exchange.status is None:
        return _Found("hang", Fact("an answer", reply))
    if exchange.status >= 500:
        return _Found("server_error", Fact("no 5xx", reply))
    if exchange.status == 200:
        return _judge_served(case, exchange)
    if case.expect == "served":
        return _Found("refused", Fact("200", reply))
    not_allowed = bool(case.status) and exchange.status not in case.status
    if not 400 <= exchange.status < 500 or not_allowed:
        required = " or ".join(map(str, case.status)) or "a 4xx"
        return _Found("wrong_status", Fact(required, reply))
    errors = schema.violations("error", exchange.parsed())
    if errors:
        return _Found("no_error_object", Fact(f"an error object ({errors[0]})", reply))
    return None


def _judge_served(case: Case, exchange: Exchange) -> _Found | None:
    """Compare an answer of status 200 with the case."""
    reply = exchange.observed
    if case.expect == "refused":
        # A case with a key runs only if the user gave --api-key.
        hint = "; omit --api-key if the server requires none" if case.key else ""
        return _Found("served", Fact("a 4xx with an error object", f"{reply}{hint}"))
    is_error_object = not schema.violations("error", exchange.parsed())
    if is_error_object:
        return _Found("wrong_status", Fact("no error object with 200", reply))
    return None


def _content(api: Api, case: Case) -> bytes:
    """Return the body of a case's request."""
    if case.raw is not None:
        return case.raw.replace("%MODEL%", api.model).encode()
    if case.raw_hex is not None:
        return bytes.fromhex(case.raw_hex)
    body: Json = {"model": api.model, **shipped().plain.get(case.path, {}), **case.body}
    if case.overlong is not None:
        text = "a " * (api.context_length() + _OVERLONG)  # each repetition has at least one token
        if case.overlong == "messages":
            body["messages"] = [{"role": "user", "content": text}]
        else:
            body[case.overlong] = text
    for name in case.without:
        body.pop(name, None)
    return json.dumps(body).encode()


def healthy(api: Api) -> str:
    """Return the answer of a healthy server to a plain request.

    Args:
        api: The API of the server.

    Raises:
        Unmet: The server does not answer.
    """
    sentinel = _ask_plainly(api)
    if not sentinel.is_answered:
        raise Unmet(Fact("an answer to a plain request, before any invalid one", sentinel.text))
    return sentinel.text


class _Sentinel(NamedTuple):
    """The result of a plain request."""

    is_answered: bool
    #: The text of the answer. If there is no answer, a description of what the server sent instead.
    text: str


def _ask_plainly(api: Api) -> _Sentinel:
    """Send a plain request."""
    path = CHAT
    kind: schema.Kind = "chat completion"
    if api.capabilities.can("completions"):
        path = COMPLETIONS
        kind = "completion"
    body = {"model": api.model, "temperature": 0.0, **shipped().plain[path]}
    exchange = api.send("POST", path, json.dumps(body).encode())
    answer = exchange.parsed()
    if exchange.status != 200 or schema.violations(kind, answer):
        return _Sentinel(False, exchange.observed)
    choice = answer["choices"][0]
    return _Sentinel(True, str(choice.get("text") or choice.get("message")))
