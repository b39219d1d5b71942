"""What an engine can do, as data: one file per engine in ``fixtures/engines``. A test that asks for
something the engine cannot do is NOT_RUN, with the reason that the file gives."""

import fnmatch
import functools
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from pydantic import Field, model_validator

from sm121.core import builds, data_file, errors, verdict
from sm121.core.data_file import DataTable
from sm121.core.versions import Versions, release, within

#: Everything a test may ask for. A new one must be answered in the file of every engine.
Name = Literal[
    "completions", "prompt_lists", "token_prompts", "token_ids", "chat_token_ids", "logprobs",
    "logprob_ids", "chat_logprobs", "prompt_logprobs", "echo", "several_choices", "seed",
    "min_tokens", "default_length", "ignore_eos", "stop", "stop_token_ids", "hidden_special_tokens",
    "logit_bias", "top_logprobs_20", "top_k", "min_p", "penalties", "repetition_penalty",
    "divided_bias", "bad_words", "allowed_token_ids", "stream_usage", "continuous_usage", "chat",
    "reasoning", "reasoning_effort", "tools", "tool_choice", "responses", "responses_tools",
    "json_schema", "regex", "choice", "tokenize", "context_length", "api_key", "prefix_cache_reset",
]  # fmt: skip
NAMES: tuple[Name, ...] = get_args(Name)


class Capability(DataTable):
    """Whether an engine can do one thing, since when, and who says so."""

    can: bool
    #: Releases in which it can.
    versions: Versions = ""
    #: What /openapi.json has where a server of an unknown release can: a path (``/v1/responses``),
    #: or a field of a schema (``CompletionRequest.return_token_ids``).
    shown_by: str | None = None
    #: What a user reads where it cannot: what is missing, and how to get it if there is a way.
    reason: str = ""
    #: Options that a server is started with so that it can.
    start: str = ""
    #: Why a server that speculates cannot, though the engine can.
    drafting: str = ""
    #: Whether other checks measure by it, so that nothing is certified without it.
    is_evidence: bool = False
    #: How it is asked for on the wire, where engines differ: a key, or keys with dots between.
    wire: str | None = None
    source: str = Field(min_length=3)

    @model_validator(mode="after")
    def _says_why(self) -> "Capability":
        if not self.can and not self.reason:
            raise ValueError("expected a reason where can is false")
        if self.can and self.versions and self.shown_by is None:
            raise ValueError("expected shown_by where versions differ")
        return self


class RecognisedBy(DataTable):
    """How an attached server is recognised, and where it says its version."""

    #: ``owned_by`` of its entry in /v1/models.
    owned_by: tuple[str, ...] = ()
    #: A path whose JSON answer has ``key``.
    path: str | None = None
    key: str | None = None
    version_path: str | None = None
    version_key: str | None = None


class Deviation(DataTable):
    """A case of ``fixtures/api`` in which these versions do not do what is specified: a note, no
    failure. The range is open at its new end until a version is seen that does as specified."""

    case: str = Field(min_length=1)
    kind: Literal[
        "served", "refused", "no_error_object", "wrong_status", "special_token", "silent",
        "unpublished_event",
    ]  # fmt: skip
    versions: Versions
    #: What its failure would be.
    severity: verdict.Severity = verdict.Severity.COURTESY
    seen: str = Field(min_length=3)
    source: str = Field(min_length=3)
    #: Of `unpublished_event`: their types.
    events: tuple[str, ...] = ()


class Bug(DataTable):
    """What these versions do wrong, for which a check is red and stays red. Whoever reads the
    failure learns that it is known, and where. The range is open like that of a deviation."""

    #: Names of the tests that show it, with `*` for any text and `?` for a bracket; the first one
    #: always shows it, and `*` alone is for what only some configurations show.
    checks: tuple[str, ...] = Field(min_length=1)
    #: A regular expression: what was required or observed, or the crash in it, has a match of it.
    says: str = Field(min_length=3)
    versions: Versions
    #: It is of this build alone (a row of ``fixtures/builds.toml``), whose release is in the range.
    build: builds.Name | None = None
    severity: verdict.Severity
    what: str = Field(min_length=3)
    #: The issue or the change upstream.
    source: str = Field(min_length=3)

    def shown_by(self, check: str) -> bool:
        """Whether the check is one that shows it."""
        return any(_is(check, pattern) for pattern in self.checks)

    def mended_by(self, check: str) -> bool:
        """Whether it is fixed where this check holds."""
        return self.checks[0] != "*" and _is(check, self.checks[0])


def _is(check: str, pattern: str) -> bool:
    return fnmatch.fnmatchcase(check.rpartition("::")[2], pattern)


class EngineFile(DataTable):
    """What is known of an engine."""

    schema_version: Literal[1]
    name: str = Field(pattern=r"^[a-z0-9][a-z0-9-]*$")
    title: str
    #: Versions that this file was written for.
    versions: Versions
    detection: RecognisedBy
    #: The field of a chat message that holds the reasoning.
    reasoning_field: str | None = None
    capabilities: dict[Name, Capability]
    deviations: tuple[Deviation, ...] = ()
    bugs: tuple[Bug, ...] = ()

    @model_validator(mode="after")
    def _complete(self) -> "EngineFile":
        missing = [name for name in NAMES if name not in self.capabilities]
        if missing:
            raise ValueError(f"capabilities: expected an answer to each, missing: {missing[0]}")
        return self


@dataclass(frozen=True, eq=False)
class Capabilities:
    """What one server can do: the file of its engine, and its release where that is known.
    `version`: as the engine calls itself; `identity`: of `builds.identity`; `offers`: of the server
    (`offered`), None where it was not asked; `drafts`: whether it speculates."""

    file: EngineFile
    version: str | None
    identity: str | None
    offers: Collection[str] | None
    drafts: bool = False

    @property
    def engine(self) -> str:
        """The engine's name."""
        return self.file.name

    def missing(self, name: Name) -> str | None:
        """Why the server cannot do that; None if it can."""
        capability = self.file.capabilities[name]
        which = f"{self.file.title} {self.version or '(version unknown)'}"
        if not capability.can:
            return f"{which}: {name}: {capability.reason}"
        if self.drafts and capability.drafting:
            return f"{which}, which speculates: {name}: {capability.drafting}"
        if within(self.identity, capability.versions):
            return None
        if release(self.identity) is not None:
            return f"{which}: {name}: from version {capability.versions} on"
        if capability.shown_by in (self.offers or ()):
            return None
        why = f"lacks {capability.shown_by}" if self.offers else "cannot be read"
        return f"{which}, of no known release: {name}: its /openapi.json {why}"

    def can(self, name: Name) -> bool:
        """Whether the server can do that."""
        return self.missing(name) is None

    def require(self, *names: Name) -> None:
        """Go on only if the server can do all of that. Raises NotRun: what it cannot, and why;
        Inapplicable: its release has it not, or not while it speculates."""
        for name in names:
            if (reason := self.missing(name)) is not None:
                capability = self.file.capabilities[name]
                by_draft, by_release = self.drafts and capability.drafting, release(self.identity)
                documented = by_draft or (by_release is not None and not capability.is_evidence)
                lacks = capability.can and documented
                raise (verdict.Inapplicable if lacks else verdict.NotRun)(reason)

    def structured(self, name: Literal["json_schema", "regex", "choice"], value: Any) -> Any:
        """The part of a body that asks for structured output. Raises NotRun: the server cannot."""
        self.require(name)
        wire = self.file.capabilities[name].wire or name
        return functools.reduce(lambda body, key: {key: body}, reversed(wire.split(".")), value)

    def deviation(self, case: str, kind: str) -> Deviation | None:
        """The known deviation of this version in a case, if there is one of that kind."""
        return next((row for row in self.deviations(case) if row.kind == kind), None)

    def deviations(self, case: str) -> list[Deviation]:
        """The known deviations of this release in a case. An unknown release has none."""
        return [row for row in self.file.deviations if row.case == case and self._has(row)]

    def bugs(self, check: str) -> list[Bug]:
        """The known bugs of this version that a check shows. An unknown version has none."""
        build = builds.named(self.identity)
        matching_builds = (None, build.name if build is not None else None)
        bugs = filter(self._has, self.file.bugs)
        return [bug for bug in bugs if bug.shown_by(check) and bug.build in matching_builds]

    def _has(self, own: Deviation | Bug) -> bool:
        return self.identity is not None and within(self.identity, own.versions)


#: Capabilities that are each asked for by a parameter of that name.
_PARAMETERS: tuple[Name, ...] = (
    *("prompt_logprobs", "echo", "seed", "min_tokens", "ignore_eos", "stop", "stop_token_ids"),
    *("logit_bias", "tools", "reasoning_effort"),
)


def needed(path: str, body: Mapping[str, Any]) -> list[Name]:
    """The capabilities that a request uses, read from the request itself."""
    if path.endswith("/responses"):
        return ["responses", "responses_tools"] if body.get("tools") else ["responses"]
    chat = path.endswith("/chat/completions")
    names: list[Name] = ["chat" if chat else "completions"]
    prompt = body.get("prompt")
    if isinstance(prompt, list) and prompt:
        names.append("prompt_lists" if isinstance(prompt[0], str) else "token_prompts")
    choice = body.get("tool_choice")
    uses: dict[Name, Any] = {
        "chat_token_ids" if chat else "token_ids": body.get("return_token_ids"),
        "chat_logprobs" if chat else "logprobs": _asked(body.get("logprobs")),
        "several_choices": (body.get("n") or 1) > 1,
        "tool_choice": isinstance(choice, dict) or choice == "required",
        "json_schema": (body.get("response_format") or {}).get("type") == "json_schema",
        "stream_usage": (body.get("stream_options") or {}).get("include_usage"),
        **{name: _asked(body.get(name)) for name in _PARAMETERS},
    }
    return names + [name for name, is_used in uses.items() if is_used]


def _asked(value: Any) -> bool:
    """Whether a parameter asks for something; 0 log-probabilities are a request too."""
    return value is not None and value is not False and value not in ([], {})


@functools.cache
def shipped() -> dict[str, EngineFile]:
    """The engines that the suite knows, by name. Raises UsageError: a file is not valid; one line
    with the file, the key and what was expected."""
    names = data_file.shipped("engines")
    loaded = [data_file.load(f"engines/{name}.toml", EngineFile) for name in names]
    return {file.name: file for file in loaded}


def of(
    engine: str, version: str | None, *, identity: str | None = None,
    offers: Collection[str] | None = None, drafts: bool = False,
) -> Capabilities:  # fmt: skip
    """What a server of that engine can do. `version`: as the engine calls itself; `identity`: of
    `builds.identity`, where more than the version tells it; the rest: see `Capabilities`. Raises
    UsageError: the suite has no file of such an engine."""
    files = shipped()
    if engine not in files:
        raise errors.UsageError(f"--engine {engine}: expected one of {', '.join(files)}")
    identity = identity or builds.identity(version)
    return Capabilities(files[engine], version, identity, offers, drafts)


def offered(openapi: Mapping[str, Any]) -> frozenset[str]:
    """What /openapi.json has: its paths, and the fields of its schemas as ``SCHEMA.FIELD``."""
    schemas = (openapi.get("components") or {}).get("schemas") or {}
    fields = (
        f"{name}.{key}" for name, one in schemas.items() for key in (one.get("properties") or {})
    )
    return frozenset([*(openapi.get("paths") or {}), *fields])
