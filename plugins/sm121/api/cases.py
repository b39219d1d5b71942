"""Requests that a server must refuse, or serve: the cases of ``fixtures/api/cases.toml``. Three
tiers, as in NiLabs conform: what is *specified* and what is *implied* by it can fail; what is
*unspecified* is a note. None excuses a 5xx, a request that hangs, or wrong answers afterwards."""

import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from pydantic import Field

from sm121.api import schema
from sm121.api.client import CHAT, COMPLETIONS, RESPONSES, Api
from sm121.client.exchange import Exchange
from sm121.core import data_file
from sm121.core.unmet import Fact, Unmet
from sm121.core.verdict import Inapplicable, Severity
from sm121.engines.capabilities import Deviation, Name, needed

Json = dict[str, Any]
Tier = Literal["specified", "implied", "unspecified"]
ProblemKind = Literal[
    "hang", "server_error", "served", "refused", "wrong_status", "no_error_object",
    "serves_wrongly_afterwards",
]  # fmt: skip
#: Whatever the tier, and whatever is known of the engine.
_NEVER: tuple[ProblemKind, ...] = ("hang", "server_error", "serves_wrongly_afterwards")


class Case(data_file.DataTable):
    """One request, and what must become of it."""

    id: str = Field(pattern=r"^[a-z0-9-]+$")
    tier: Tier
    #: ``refused``: a 4xx with an error object. ``served``: 200. ``either``: one of the two.
    expect: Literal["refused", "served", "either"]
    status: tuple[int, ...] = ()
    method: Literal["GET", "POST"] = "POST"
    path: str
    #: Laid over the plain request of that path.
    body: Json = Field(default_factory=dict)
    without: tuple[str, ...] = ()
    #: The body as text, where no JSON can say it. ``%MODEL%`` is the served name.
    raw: str | None = None
    #: The body as bytes in hexadecimal.
    raw_hex: str | None = None
    key: str | None = None
    #: A key of the body that becomes a text of more tokens than the model's context.
    overlong: str | None = None
    needs: tuple[Name, ...] = ()
    why: str = Field(min_length=3)

    def __str__(self) -> str:
        return self.id


class CaseFile(data_file.DataTable):
    """All cases, and how long an answer may take."""

    answer_within_s: float = Field(gt=0)
    #: The plain request of each path: valid, short, and the same for every model.
    plain: dict[str, Json]
    case: data_file.Entries[Case]


@dataclass(frozen=True)
class CaseProblem:
    """What a case showed. It fails unless the tier, or a known deviation, makes it a note."""

    kind: ProblemKind
    fact: Fact
    fails: bool
    #: Of the answer.
    status: int | None

    @property
    def severity(self) -> Severity:
        """A refusal in another form is a courtesy that was not paid."""
        if self.kind in _NEVER:
            return Severity.BLOCKER
        refused = self.status is not None and 400 <= self.status < 500
        form = self.kind in ("no_error_object", "wrong_status")
        return Severity.COURTESY if refused and form else Severity.CONTRACT


def shipped() -> CaseFile:
    """The cases that come with the suite. Raises UsageError: the file is not valid."""
    return data_file.load("api/cases.toml", CaseFile)


def judge(api: Api, case: Case, healthy: str) -> tuple[str, CaseProblem | None]:
    """Send a case: what the server answered, and what is wrong with that or with it afterwards.
    `healthy`: what :func:`healthy` gave before. Raises NotRun: the server cannot do what the case
    is about; Inapplicable: it is about the key of a server that asks for none."""
    body = {"model": api.model, **shipped().plain.get(case.path, {}), **case.body}
    if case.key is not None and not api.endpoint.asks_for_a_key:
        raise Inapplicable(
            "the server was attached without --api-key: one that asks for no key serves any"
        )
    by_path = needed(case.path, {}) if case.path in (COMPLETIONS, CHAT, RESPONSES) else ()
    api.capabilities.require(*case.needs, *by_path)
    exchange = api.send(
        case.method,
        case.path.replace("%MODEL%", api.model),
        _content(api, case, body) if case.method == "POST" else None,
        key=case.key,
        timeout_s=shipped().answer_within_s,
    )
    problem = _judge_answer(case, exchange)
    reply = exchange.observed
    well, after = _sentinel(api)
    if not well or after != healthy:
        after = after if well else f"no answer: {after}"
        fact = Fact(f"after this request the answer is still {healthy!r}", f"{after!r}")
        return reply, CaseProblem("serves_wrongly_afterwards", fact, True, exchange.status)
    if problem is None:
        return reply, None
    kind, fact = problem
    deviation = api.capabilities.deviation(case.id, kind)
    if deviation is not None and kind not in _NEVER:
        about = f"known of {api.capabilities.file.title} {deviation.versions}"
        fact = replace(fact, about=about, evidence=deviation.source)
        return reply, CaseProblem(kind, fact, False, exchange.status)
    fails = kind in _NEVER or case.tier != "unspecified"
    return reply, CaseProblem(kind, fact, fails, exchange.status)


@dataclass(frozen=True)
class Judge:
    """Holds one server against cases; what decides nothing is remarked on."""

    api: Api
    remark: Callable[[str], object]
    #: What the server answered when it was well, by its address; filled in by the first case.
    well: dict[str, str]
    #: Filled in: the deviations that were excused.
    excused: list[str] = field(default_factory=list)
    #: Filled in: how each of them showed, one line.
    symptoms: list[str] = field(default_factory=list)

    def __call__(self, case: Case) -> None:
        """Judge one case. Raises Unmet: something is wrong that no tier excuses, and that is not
        known; NotRun: the server cannot do what the case is about."""
        address = self.api.endpoint.base_url
        if address not in self.well:
            self.well[address] = healthy(self.api)
        reply, problem = judge(self.api, case, self.well[address])
        for deviation in self.api.capabilities.deviations(case.id):
            if problem is None or problem.kind != deviation.kind:
                self.known_or_mended(deviation, "")
        if problem is not None and problem.fails:
            about = f"{case.id} ({case.tier}: {case.why})"
            fact = replace(problem.fact, about=about, kind=problem.kind)
            raise Unmet(fact, severity=problem.severity)
        if problem is not None:
            text = f"{case.id}: {problem.fact}"
            if self.api.capabilities.deviation(case.id, problem.kind) is not None:
                self.excused.append(f"{case.id}: {problem.kind}")
                self.symptoms.append(text)
            else:
                self.remark(text)
        elif case.tier == "unspecified":
            self.remark(f"{case.id}: unspecified ({case.why}); seen: {reply[:100]}")

    def known(self, case: str, kind: str, text: str) -> bool:
        """Whether a failure is a known deviation of this engine's version; it is noted as such."""
        if (deviation := self.api.capabilities.deviation(case, kind)) is not None:
            self.known_or_mended(deviation, text)
        return deviation is not None

    def known_or_mended(self, deviation: Deviation, symptom: str) -> None:
        """Note a deviation that is known of this version. `symptom`: how it showed; empty where it
        did not, and a remark says that its range should be closed."""
        engine = self.api.capabilities
        release = f"{engine.file.title} {deviation.versions}"
        if symptom:
            self.excused.append(f"{deviation.case}: {deviation.kind}")
            self.symptoms.append(f"{deviation.case}: known of {release}: {symptom}")
        else:
            self.remark(
                f"{deviation.case}: {deviation.kind} is known of {release}, and {engine.version} "
                f"does not show it: close the range in fixtures/engines/{engine.file.name}.toml"
            )


def _judge_answer(case: Case, exchange: Exchange) -> tuple[ProblemKind, Fact] | None:
    reply = exchange.observed
    if exchange.status is None:
        return "hang", Fact("an answer", reply)
    if exchange.status >= 500:
        return "server_error", Fact("no 5xx", reply)
    if exchange.status == 200:
        if case.expect == "refused":
            # The key was given: whoever started the server knows whether it asks for one.
            hint = "; leave out --api-key where the server asks for none" if case.key else ""
            return "served", Fact("a 4xx with an error object", f"{reply}{hint}")
        if schema.violations("error", exchange.parsed()) == []:
            return "wrong_status", Fact("no error object with 200", reply)
        return None
    if case.expect == "served":
        return "refused", Fact("200", reply)
    if not 400 <= exchange.status < 500 or (case.status and exchange.status not in case.status):
        required = " or ".join(map(str, case.status)) or "a 4xx"
        return "wrong_status", Fact(required, reply)
    wrong = schema.violations("error", exchange.parsed())
    return ("no_error_object", Fact(f"an error object ({wrong[0]})", reply)) if wrong else None


def _content(api: Api, case: Case, body: Json) -> bytes:
    if case.raw is not None:
        return case.raw.replace("%MODEL%", api.model).encode()
    if case.raw_hex is not None:
        return bytes.fromhex(case.raw_hex)
    if case.overlong is not None:
        text = "a " * (api.context_length() + 64)  # at least one token for each
        is_chat = case.overlong == "messages"
        body[case.overlong] = [{"role": "user", "content": text}] if is_chat else text
    return json.dumps({k: v for k, v in body.items() if k not in case.without}).encode()


def healthy(api: Api) -> str:
    """What the server answers when it is well. Raises Unmet: it does not answer at all."""
    well, text = _sentinel(api)
    if not well:
        raise Unmet(Fact("an answer to a plain request, before any bad one", text))
    return text


def _sentinel(api: Api) -> tuple[bool, str]:
    """Whether a plain request is answered, and the text of the answer or what came instead."""
    path = COMPLETIONS if api.capabilities.can("completions") else CHAT
    kind: schema.Kind = "completion" if path == COMPLETIONS else "chat completion"
    body = {"model": api.model, "temperature": 0.0, **shipped().plain[path]}
    exchange = api.send("POST", path, json.dumps(body).encode())
    answer = exchange.parsed()
    if exchange.status != 200 or schema.violations(kind, answer):
        return False, exchange.observed
    choice = answer["choices"][0]
    return True, str(choice.get("text") or choice.get("message"))
