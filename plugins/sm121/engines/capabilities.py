"""The capabilities of engines, as data: one file per engine in ``fixtures/engines``.

A test that requires a capability which the engine lacks is NOT_RUN, with the reason of the file.
"""

import fnmatch
import functools
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from pydantic import Field, model_validator

from sm121.core import builds, data_file, errors, verdict
from sm121.core.data_file import DataTable
from sm121.core.level_settings import Ability
from sm121.core.node_id import name_of
from sm121.core.versions import Versions, release, within

#: All capabilities that a test may require. A new capability needs a row in the file of every
#: engine.
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
    """A capability: whether an engine has it, in which releases, and the source for this."""

    can: bool
    #: Releases that have the capability.
    versions: Versions = ""
    #: If the release of a server is unknown, it has the capability if its /openapi.json contains
    #: this path (for example ``/v1/responses``) or schema field
    #: (``CompletionRequest.return_token_ids``).
    shown_by: str | None = None
    #: A text for users of an engine without the capability: what is missing, and how to get it if
    #: possible.
    reason: str = ""
    #: Options that a server must be started with to have the capability.
    start: str = ""
    #: Why a server with speculative decoding lacks the capability, although the engine has it.
    drafting: str = ""
    #: Whether other checks need the capability in order to measure. If so, a run against an engine
    #: without it gets no certificate.
    is_evidence: bool = False
    #: The field of a request that uses the capability, if engines differ in this: a key, or keys
    #: joined by dots.
    wire: str | None = None
    source: str = Field(min_length=3)

    @model_validator(mode="after")
    def _says_why(self) -> "Capability":
        if not self.can and not self.reason:
            raise ValueError("expected a reason, because `can` is false")
        if self.can and self.versions and self.shown_by is None:
            raise ValueError(
                "expected shown_by together with versions: the parser option or "
                "request field by which the suite recognises the capability in a build that is "
                "not a release"
            )
        return self


class RecognisedBy(DataTable):
    """How the engine of an attached server is recognised, and which path returns its version."""

    #: Values of ``owned_by`` in the model's entry of /v1/models.
    owned_by: tuple[str, ...] = ()
    #: A path whose JSON answer contains ``key``.
    path: str | None = None
    #: The key that the answer of ``path`` must have.
    key: str | None = None
    #: A path whose JSON answer contains the version.
    version_path: str | None = None
    #: The key of the version in the answer of ``version_path``.
    version_key: str | None = None


class Deviation(DataTable):
    """A case of ``fixtures/api`` in which these versions deviate from the specification.

    A deviation is reported as a note, and not as a failure. The range of versions has no upper end
    until a release follows the specification.
    """

    case: str = Field(min_length=1)
    kind: Literal[
        "served", "refused", "no_error_object", "wrong_status", "special_token", "silent",
        "unpublished_event",
    ]  # fmt: skip
    versions: Versions
    #: The severity of the test failure that this deviation would cause if it were not listed here.
    severity: verdict.Severity = verdict.Severity.COURTESY
    seen: str = Field(min_length=3)
    source: str = Field(min_length=3)
    #: True if the deviation occurs only with models that use the harmony chat format, False if only
    #: with other models, None if with all models.
    harmony: bool | None = None
    #: For `unpublished_event`: the types of the events.
    events: tuple[str, ...] = ()


class Bug(DataTable):
    """A known bug of these versions. The check still fails, and its failure names the bug.

    The range of versions has no upper end until a release has fixed the bug.
    """

    #: Names of the tests that the bug makes fail, with `*` for any text and `?` for a bracket. The
    #: first of these tests fails in every configuration that has the bug. If only some
    #: configurations are affected, the first name is `*`.
    checks: tuple[str, ...] = Field(min_length=1)
    #: A regular expression that matches the failure: its requirement, its observed value, or its
    #: crash.
    says: str = Field(min_length=3)
    versions: Versions
    #: The only build that has the bug: a row of ``fixtures/builds.toml`` whose release is in the
    #: range of ``versions``.
    build: builds.Name | None = None
    severity: verdict.Severity
    what: str = Field(min_length=3)
    #: The issue or the change upstream.
    source: str = Field(min_length=3)

    def shown_by(self, check: str) -> bool:
        """Return whether the bug makes a check fail.

        Args:
            check: The id of a test.
        """
        return any(_is(check, pattern) for pattern in self.checks)

    def mended_by(self, check: str) -> bool:
        """Return whether the bug counts as fixed if a check passes.

        Args:
            check: The id of a test.
        """
        return self.checks[0] != "*" and _is(check, self.checks[0])


def _is(check: str, pattern: str) -> bool:
    return fnmatch.fnmatchcase(name_of(check), pattern)


class EngineFile(DataTable):
    """The file of an engine."""

    schema_version: Literal[1]
    name: str = Field(pattern=r"^[a-z0-9][a-z0-9-]*$")
    title: str
    #: Versions for which this file was written.
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
            raise ValueError(f"capabilities: expected a row for each, got none for {missing[0]}")
        return self


#: Capabilities whose requests contain a chat, which a model without a chat template refuses.
_OF_CHATS: frozenset[Name] = frozenset(
    {
        "chat", "chat_logprobs", "chat_token_ids", "reasoning", "reasoning_effort", "responses",
        "responses_tools", "tool_choice", "tools",
    }
)  # fmt: skip


@dataclass(frozen=True, eq=False)
class Capabilities:
    """The capabilities of one server, computed from its engine's file and its release, if known."""

    file: EngineFile
    #: The version that the engine reports.
    version: str | None
    #: The release or build (`builds.identity`).
    identity: str | None
    #: The paths and schema fields in the server's /openapi.json (`offered`); None if it was not
    #: requested.
    offers: Collection[str] | None
    #: Whether the server uses speculative decoding.
    drafts: bool = False
    #: The abilities that the served model lacks, with the reasons in the profile.
    lacks: Mapping[Ability, str] = field(default_factory=dict)

    @property
    def engine(self) -> str:
        """The engine's name."""
        return self.file.name

    def missing(self, name: Name) -> str | None:
        """Return why the server lacks a capability; None if it has it.

        Args:
            name: The capability.
        """
        capability = self.file.capabilities[name]
        which = f"{self.file.title} {self.version or '(version unknown)'}"
        if name in _OF_CHATS and "chats" in self.lacks:
            return f"the served model: chats: {self.lacks['chats']}"
        if not capability.can:
            return f"{which}: {name}: {capability.reason}"
        if self.drafts and capability.drafting:
            return f"{which} with speculative decoding: {name}: {capability.drafting}"
        if within(self.identity, capability.versions):
            return None
        if release(self.identity) is not None:
            return f"{which}: {name}: only in versions {capability.versions}"
        if capability.shown_by in (self.offers or ()):
            return None
        why = f"lacks {capability.shown_by}" if self.offers else "cannot be read"
        return f"{which}, of no known release: {name}: its /openapi.json {why}"

    def can(self, name: Name) -> bool:
        """Return whether the server has a capability.

        Args:
            name: The capability.
        """
        return self.missing(name) is None

    def require(self, *names: Name) -> None:
        """Raise an error if the server lacks any of the capabilities.

        Args:
            names: The capabilities.

        Raises:
            NotRun: The server lacks a capability; the message contains the reason.
            Inapplicable: The engine's release lacks a capability, perhaps only with speculative
                decoding.
        """
        for name in names:
            reason = self.missing(name)
            if reason is not None:
                raise self._error(self.file.capabilities[name], reason)

    def _error(self, capability: Capability, reason: str) -> Exception:
        """Return the error for a capability that the server lacks."""
        by_draft = self.drafts and capability.drafting
        by_release = release(self.identity) is not None and not capability.is_evidence
        if capability.can and (by_draft or by_release):
            return verdict.Inapplicable(reason)
        return verdict.NotRun(reason)

    def structured(self, name: Literal["json_schema", "regex", "choice"], value: Any) -> Any:
        """Return the fields of a request's body that request structured output.

        Args:
            name: The kind of the constraint.
            value: The constraint.

        Raises:
            NotRun: The server has no such constraint.
        """
        self.require(name)
        wire = self.file.capabilities[name].wire or name
        body = value
        for key in reversed(wire.split(".")):
            body = {key: body}
        return body

    def deviation(self, case: str, kind: str) -> Deviation | None:
        """Return the known deviation of the given kind in a case, or None.

        Args:
            case: The case of ``fixtures/api``.
            kind: The kind of the deviation.
        """
        return next((row for row in self.deviations(case) if row.kind == kind), None)

    def deviations(self, case: str) -> list[Deviation]:
        """Return the known deviations of this release in a case; none for an unknown release.

        Args:
            case: The case of ``fixtures/api``.
        """
        rows = [row for row in self.file.deviations if row.case == case and self._has(row)]
        harmony = "harmony" not in self.lacks
        return [row for row in rows if row.harmony in (None, harmony)]

    def bugs(self, check: str) -> list[Bug]:
        """Return the known bugs of this version that make a check fail.

        If the version is unknown, the list is empty.

        Args:
            check: The id of a test.
        """
        build = builds.named(self.identity)
        matching_builds = (None, build.name if build is not None else None)
        bugs = filter(self._has, self.file.bugs)
        return [bug for bug in bugs if bug.shown_by(check) and bug.build in matching_builds]

    def _has(self, own: Deviation | Bug) -> bool:
        return self.identity is not None and within(self.identity, own.versions)


#: Capabilities that a request uses if it has a parameter of the same name.
_PARAMETERS: tuple[Name, ...] = (
    "prompt_logprobs",
    "echo",
    "seed",
    "min_tokens",
    "ignore_eos",
    "stop",
    "stop_token_ids",
    "logit_bias",
    "tools",
    "reasoning_effort",
)


def needed(path: str, body: Mapping[str, Any]) -> list[Name]:
    """Return the capabilities that a request needs, derived from its path and its body.

    Args:
        path: The path of the request.
        body: Its body.
    """
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
        "chat_logprobs" if chat else "logprobs": _is_used(body.get("logprobs")),
        "several_choices": (body.get("n") or 1) > 1,
        "tool_choice": isinstance(choice, dict) or choice == "required",
        "json_schema": (body.get("response_format") or {}).get("type") == "json_schema",
        "stream_usage": (body.get("stream_options") or {}).get("include_usage"),
    }
    for name in _PARAMETERS:
        uses[name] = _is_used(body.get(name))
    return names + [name for name, is_used in uses.items() if is_used]


def _is_used(value: Any) -> bool:
    """Return whether a parameter is in use. The value 0 counts (``logprobs=0``)."""
    return value is not None and value is not False and value not in ([], {})


@functools.cache
def shipped() -> dict[str, EngineFile]:
    """Return the files of all engines, by name.

    Raises:
        UsageError: A file is not valid. The message is one line with the file, the key and the
            expected value.
    """
    names = data_file.shipped("engines")
    loaded = [data_file.load(f"engines/{name}.toml", EngineFile) for name in names]
    return {file.name: file for file in loaded}


def capabilities_of(
    engine: str,
    version: str | None,
    *,
    identity: str | None = None,
    offers: Collection[str] | None = None,
    drafts: bool = False,
) -> Capabilities:
    """Return the capabilities of a server.

    Args:
        engine: The name of the engine.
        version: The version that the engine reports.
        identity: The release or build (`builds.identity`), if it is known from other evidence than
            the version, for example from the log.
        offers: The paths and schema fields in the server's /openapi.json (`offered`); None if it
            was not requested.
        drafts: Whether the server uses speculative decoding.

    Raises:
        UsageError: The suite has no file for an engine of this name.
    """
    files = shipped()
    if engine not in files:
        raise errors.UsageError(f"--engine {engine}: expected one of {', '.join(files)}")
    identity = identity or builds.identity(version)
    return Capabilities(files[engine], version, identity, offers, drafts)


def offered(openapi: Mapping[str, Any]) -> frozenset[str]:
    """Return a server's paths, and the fields of its schemas as ``SCHEMA.FIELD``.

    Args:
        openapi: The JSON object of /openapi.json.
    """
    offers = set(openapi.get("paths") or {})
    schemas = (openapi.get("components") or {}).get("schemas") or {}
    for name, schema in schemas.items():
        for key in schema.get("properties") or {}:
            offers.add(f"{name}.{key}")
    return frozenset(offers)
