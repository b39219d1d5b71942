"""What was asked for against what ran.

An argument or a variable proves nothing. Each one that says something about the kernel path is
looked up in ``fixtures/requests/<engine>.toml`` and compared with what the evidence shows. A
configuration with a difference is not the one that its name says: its numbers are INVALID.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum
from functools import cache
from pathlib import Path

from pydantic import Field, PrivateAttr, model_validator

from sm121.core import data_file
from sm121.core.configuration import ServerConfiguration
from sm121.core.data_file import DataFileError, DataTable, Entries
from sm121.core.redaction import is_secret_name, redact
from sm121.core.verdict import Invalid
from sm121.core.versions import release
from sm121.engines import registry as engines
from sm121.evidence import variables
from sm121.evidence.kernel_path import KernelPath, RequestReport
from sm121.evidence.signatures import load_signatures
from sm121.evidence.variables import Registry


class RequestState(StrEnum):
    """What became of a request."""

    RESOLVED = "resolved"
    """The evidence shows what was asked for."""
    DIFFERENT = "different"
    """The evidence shows something else, or nothing where it would show it."""
    NOT_PROVEN = "not_proven"
    """The engine shows nothing about it, whatever it does."""
    NOT_APPLICABLE = "not_applicable"
    """The installed engine has no such variable: the request has no effect."""


class RequestRule(DataTable):
    """How an argument or a variable speaks of the kernel path."""

    id: str = Field(pattern=r"^[a-z0-9_]+$")
    argument: str | None = Field(default=None, pattern=r"^-{1,2}[A-Za-z]")
    """Of the command line; dots lead into a JSON value, as vLLM writes it."""
    aliases: tuple[str, ...] = ()
    variable: str | None = None
    field: str
    """Of `KernelPath`: where the evidence has the answer."""
    nothing: tuple[str, ...] = ()
    """Values that ask for nothing in particular, such as ``auto``."""
    accepts: dict[str, str] = Field(default={})
    """From a value to a pattern of the resolved values that satisfy it; case does not count."""
    otherwise: str | None = "{value}"
    """Pattern for a value that `accepts` does not list. Null: nothing is known of it."""
    denied_by: tuple[str, ...] = ()
    """Fallbacks of the log (ids of ``fixtures/signatures``) that say that it became another,
    where the resolved value is too coarse to show it."""
    always_shown: bool = True
    """False where the engine may show nothing though it does what was asked."""
    since: str | None = None
    until: str | None = None
    """Versions between which it means this; ``until = "0.13"`` has 0.13.2 in it."""
    source: str = Field(min_length=3)

    _patterns: dict[str, re.Pattern[str]] = PrivateAttr(default_factory=dict)

    @model_validator(mode="after")
    def _check(self) -> RequestRule:
        if (self.argument is None) == (self.variable is None):
            raise ValueError("expected either argument or variable")
        if self.field not in KernelPath.model_fields:
            known = ", ".join(sorted(KernelPath.model_fields))
            raise ValueError(f"field: expected one of {known}; got {self.field!r}")
        try:
            self._patterns.update(
                {name.lower(): re.compile(text, re.I) for name, text in self.accepts.items()}
            )
            re.compile((self.otherwise or "").replace("{value}", "x"))
        except re.error as error:
            raise ValueError(f"expected regular expressions: {error}") from error
        return self

    def covers(self, version: str | None) -> bool:
        """Whether the rule speaks of this version of the engine; of an unknown one it does."""
        at = _numbers(version)
        if not at:
            return True
        if release(version) is None:  # a build of a checkout: as the newest
            return self.until is None
        since, until = _numbers(self.since), _numbers(self.until)
        return (not since or at >= since) and (not until or at[: len(until)] <= until)

    def pattern(self, value: str) -> re.Pattern[str] | None:
        """What the resolved value must match for `value` to be satisfied."""
        if (listed := self._patterns.get(value.lower())) is not None:
            return listed
        if self.otherwise is None:
            return None
        plain = re.sub(r"[\s_-]+", "[ _-]", re.escape(value).replace("\\-", "-"))
        return re.compile(self.otherwise.replace("{value}", plain), re.I)


class RequestRules(DataTable):
    """What is known of one engine's arguments and variables."""

    engine: str
    registry: tuple[Registry, ...] = ()
    request: Entries[RequestRule]


@cache
def load_requests(engine: str) -> RequestRules:
    """The rules of an engine. Raises DataFileError when there are none or the file is wrong."""
    rules = data_file.load(f"requests/{engine}.toml", RequestRules)
    if rules.engine != engine:
        raise DataFileError(f"{engine}.toml: engine must be {engine!r}, seen {rules.engine!r}")
    return rules


def compare(
    configuration: ServerConfiguration,
    path: KernelPath,
    environment: Mapping[str, str] | None = None,
) -> list[RequestReport]:
    """All that the configuration asks for of the kernel path, and what became of it.

    Args:
        configuration: its arguments and its environment, whoever set them.
        path: what the evidence shows.
        environment: the engine's whole environment (default: as the engine would be started).
    """
    if environment is None:
        engine = engines.engine(configuration.engine)
        environment = engine.environment(configuration, api_key="")
    rules = load_requests(configuration.engine)
    own = dict(configuration.environment)
    without_effect, unanswered = _unknown_variables(configuration, environment, rules)
    given = read_arguments(configuration.arguments)
    found = [*without_effect.values()]
    for rule in rules.request:
        if not rule.covers(path.version):
            continue
        if (asked := _given(rule, given, environment)) is None:
            continue
        by, value = asked
        if rule.variable is not None and (
            rule.variable in without_effect
            or (rule.variable in unanswered and rule.variable not in own)
        ):
            continue
        found.append(_judge(rule, by, value, path))
    return found


def patterns(configuration: ServerConfiguration) -> dict[str, list[re.Pattern[str]]]:
    """By value of the path, what it will match after what the configuration itself asks for.

    No engine is asked: a variable may have no effect.
    """
    given, own = read_arguments(configuration.arguments), dict(configuration.environment)
    found: dict[str, list[re.Pattern[str]]] = {}
    for rule in load_requests(configuration.engine).request:
        asked = _given(rule, given, own)
        if asked is not None and (pattern := rule.pattern(asked[1])) is not None:
            found.setdefault(rule.field, []).append(pattern)
    return found


def require_as_asked(configuration: ServerConfiguration, path: KernelPath, log: Path) -> None:
    """What a test that measures calls first.

    Raises:
        Invalid: something that was asked for is not what ran; names all of it and the evidence.
    """
    if wrong := different(compare(configuration, path)):
        raise Invalid(f"{'; '.join(wrong)}. Evidence: {log}")


def different(reports: Iterable[RequestReport]) -> list[str]:
    """What was asked for and is not what ran, a line each; empty when all of it is.

    A variable that the installed engine does not know is among them ("not applicable"): whoever set
    it asked for something that this engine cannot do. With any of these lines, numbers measured on
    the configuration are INVALID.
    """
    wrong = (RequestState.DIFFERENT.value, RequestState.NOT_APPLICABLE.value)
    return [report.message for report in reports if report.state in wrong]


def judged(configuration: ServerConfiguration, path: KernelPath) -> KernelPath:
    """The path with what was asked for beside it, for verdict.json."""
    reports = compare(configuration, path)
    return path.model_copy(
        update={"requested": reports, "differences": different(reports)}, deep=True
    )


def read_arguments(arguments: Sequence[str]) -> dict[str, str]:
    """Options of a command line by their normal names, the last of a name winning.

    ``--a-b C``, ``--a-b=C``, ``--a.b C`` and ``--a '{"b": "C"}'`` are read; an option without a
    value is ``true``, and ``--no-x`` makes ``x`` false.
    """
    found: dict[str, str] = {}
    index = 0
    while index < len(arguments):
        token = arguments[index]
        index += 1
        if not re.match(r"^--?[A-Za-z]", token):
            continue
        name, equals, value = token.partition("=")
        if not equals:
            following = arguments[index] if index < len(arguments) else "-x"
            if re.match(r"^--?[A-Za-z]", following):
                value = "true"
            else:
                value, index = following, index + 1
        key = _normal(name)
        if key.startswith("no_") and not equals and value == "true":
            key, value = key.removeprefix("no_"), "false"
        found[key] = value
        found.update({f"{key}.{inner}": text for inner, text in _nested(value)})
    return found


def _given(
    rule: RequestRule, arguments: Mapping[str, str], environment: Mapping[str, str]
) -> tuple[str, str] | None:
    """What a rule speaks of as it was written, and its value; None where it asks for nothing."""
    if rule.variable is not None:
        value = environment.get(rule.variable)
        by = f"{rule.variable}={value}"
    else:
        assert rule.argument is not None
        names = [_normal(name) for name in (rule.argument, *rule.aliases)]
        value = next((arguments[name] for name in names if name in arguments), None)
        by = f"{rule.argument} {value}"
    if value is None or value.lower() in {item.lower() for item in rule.nothing}:
        return None
    return by, value


def _nested(value: str) -> list[tuple[str, str]]:
    if not value.startswith("{"):
        return []
    try:
        table = json.loads(value)
    except json.JSONDecodeError:
        return []  # the engine will refuse it, with a better message than ours
    found: list[tuple[str, str]] = []
    pending: list[tuple[str, object]] = [("", table)]
    while pending:
        prefix, item = pending.pop()
        if isinstance(item, dict):
            pending.extend((f"{prefix}.{_normal(str(k))}", v) for k, v in item.items())
        elif item is not None:
            text = str(item).lower() if isinstance(item, bool) else str(item)
            found.append((prefix.removeprefix("."), text))
    return found


def _normal(name: str) -> str:
    return name.lstrip("-").replace("-", "_")


def _judge(rule: RequestRule, by: str, value: str, path: KernelPath) -> RequestReport:
    seen = getattr(path, rule.field)
    resolved = None if seen is None else str(seen)
    wanted = rule.pattern(value)
    by = redact(by)
    denied = next((name for name in rule.denied_by if name in path.fallbacks), None)
    if denied is not None:
        line = path.evidence.get(f"fallbacks.{denied}", denied)
        state, message = RequestState.DIFFERENT, f"asked for, but the log says otherwise ({line})"
    elif wanted is None:
        state, message = RequestState.NOT_PROVEN, "what it resolves to is not known here"
    elif resolved is not None and wanted.fullmatch(resolved):
        state, message = RequestState.RESOLVED, f"resolved to {resolved}"
    elif resolved is not None:
        line = path.evidence.get(rule.field, "no line")
        message = f"asked for, but {rule.field} resolved to {resolved} ({line})"
        state = RequestState.DIFFERENT
    elif rule.always_shown:
        message = f"asked for, but no evidence shows what {rule.field} became"
        state = RequestState.DIFFERENT
    else:
        message = f"the engine does not show what {rule.field} became"
        state = RequestState.NOT_PROVEN
    return RequestReport(
        by=by, field=rule.field, resolved=resolved, state=state.value, message=f"{by}: {message}"
    )


def _unknown_variables(
    configuration: ServerConfiguration, environment: Mapping[str, str], rules: RequestRules
) -> tuple[dict[str, RequestReport], set[str]]:
    """Reports of variables without effect, by name; and variables of which nothing could be
    learned."""
    harmless = load_signatures(configuration.engine).is_harmless_env
    own = dict(configuration.environment)
    concerned = [
        registry
        for registry in rules.registry
        if any(name.startswith(registry.prefix) for name in environment)
    ]
    if not concerned:
        return {}, set()
    known = variables.ask(configuration.python, environment, concerned)
    found: dict[str, RequestReport] = {}
    unanswered: set[str] = set()
    for registry in concerned:
        knowledge = known[registry.prefix]
        for name in sorted(environment):
            if not name.startswith(registry.prefix) or harmless(name):
                continue
            if knowledge.problem is not None:
                unanswered.add(name)
                continue
            if knowledge.known is not None and name in knowledge.known:
                continue
            if not knowledge.installed and name not in own:
                unanswered.add(name)  # in somebody's shell, for a package that has no part here
                continue
            shown = "[redacted]" if is_secret_name(name) else redact(environment[name])
            why = (
                f"the installed {registry.package} knows no such variable"
                if knowledge.installed
                else f"{registry.package} is not installed in the engine's environment"
            )
            found[name] = RequestReport(
                by=f"{name}={shown}",
                field=None,
                resolved=None,
                state=RequestState.NOT_APPLICABLE.value,
                message=f"{name}={shown}: not applicable: {why}",
            )
    return found, unanswered


def _numbers(version: str | None) -> tuple[int, ...]:
    match = re.match(r"v?(\d+(?:\.\d+)*)", version or "")
    return tuple(int(part) for part in match[1].split(".")) if match else ()
