"""Compare the kernel path that was requested with the one that ran.

``fixtures/requests/<engine>.toml`` has the arguments and variables that request a part of the
kernel path. This module compares them with the evidence. If they differ, the server does not run
what its configuration requests, so its numbers are INVALID.
"""

import ast
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from sm121.core import engine_arguments
from sm121.core.configuration import ServerConfiguration
from sm121.core.engine_arguments import flat, normal_name
from sm121.core.redaction import is_secret_name, redact
from sm121.core.verdict import Invalid
from sm121.engines import registry as engines
from sm121.engines.request_rules import RequestRule, RequestRules, has_rules, load_requests
from sm121.evidence import signatures, variables
from sm121.evidence.kernel_path import KernelPath, RequestReport


class RequestState(StrEnum):
    """The result of a request."""

    RESOLVED = "resolved"
    """The evidence shows the requested value."""
    DIFFERENT = "different"
    """The evidence shows another value, or none though the engine would show one."""
    NOT_PROVEN = "not_proven"
    """The engine never logs this value."""
    NOT_APPLICABLE = "not_applicable"
    """The request has no effect: the installed engine has no such variable, or no such value."""


@dataclass(frozen=True)
class _Request:
    """One request for a part of the kernel path."""

    rule: RequestRule
    #: The argument or variable with its value, as it was written.
    by: str
    value: str


@dataclass(frozen=True)
class _Outcome:
    """The result of a request, as a state and as a text."""

    state: RequestState
    message: str


def compare(
    configuration: ServerConfiguration,
    path: KernelPath,
    environment: Mapping[str, str] | None = None,
) -> list[RequestReport]:
    """Return the requests of a configuration for the kernel path, and their results.

    Args:
        configuration: The configuration, with its arguments and variables.
        path: The kernel path that ran.
        environment: The engine's whole environment (default: that of a start).
    """
    if environment is None:
        engine = engines.engine(configuration.engine)
        environment = engine.environment(configuration, api_key="")
    rules = load_requests(configuration.engine)
    unknown = _unknown_variables(configuration, environment, rules)
    of_build = set()
    for rule in rules.request:
        if rule.build and rule.covers(path.log.version, path.log.build):
            of_build.add(rule.variable)
    reports = [report for name, report in unknown.reports.items() if name not in of_build]
    unread = {*unknown.reports, *(unknown.unanswered - dict(configuration.environment).keys())}
    unread -= of_build
    arguments = engine_arguments.parse_options(configuration.arguments)
    for request in _requests(rules, arguments, environment, path):
        if request.rule.variable not in unread:
            reports.append(_judge(request.rule, request.by, request.value, path))
    return reports


def of_log(path: KernelPath, engine: str) -> KernelPath:
    """Return a path with the requests in its log, unless the path already has requests.

    If the log does not show the result of a request, the request counts as unproven, and not as a
    difference, because the log may be incomplete. An engine without rules has no requests in its
    log; the suite starts no such engine, because what it requests could not be compared.

    Args:
        path: The kernel path of the log.
        engine: The name of the engine.
    """
    if not has_rules(engine):
        return path
    values = flat(_literal(path.log.asked or ""))
    reports = []
    for request in _requests(load_requests(engine), values, {}, path):
        report = _judge(request.rule, request.by, request.value, path, is_whole=False)
        reports.append(report)
    return _with_reports(path, reports)


def in_log(path: KernelPath, name: str) -> str | None:
    """Return the value of an argument that a log prints, or None.

    Args:
        path: The kernel path of the log.
        name: The name of the argument, for example ``max_num_seqs``.
    """
    return flat(_literal(path.log.asked or "")).get(name)


def arguments_in_log(path: KernelPath) -> list[str]:
    """Return the server's arguments that a log prints, as ``--name=value``.

    Args:
        path: The kernel path of the log.
    """
    return [f"--{name}={value}" for name, value in flat(_literal(path.log.asked or "")).items()]


def patterns(configuration: ServerConfiguration) -> dict[str, list[re.Pattern[str]]]:
    """Return the patterns that a configuration requests, by the field of the kernel path.

    The engine is not queried, so a variable may have no effect.

    Args:
        configuration: The configuration.
    """
    values = engine_arguments.parse_options(configuration.arguments)
    settings = dict(configuration.environment)
    by_field: dict[str, list[re.Pattern[str]]] = {}
    for rule in load_requests(configuration.engine).request:
        request = _request_of(rule, values, settings)
        if request is None:
            continue
        pattern = rule.pattern(request.value)
        if pattern is not None:
            by_field.setdefault(rule.field, []).append(pattern)
    return by_field


def require_requested_path(configuration: ServerConfiguration, path: KernelPath, log: Path) -> None:
    """Return only if the requested kernel path ran. Each test that measures calls this first.

    Args:
        configuration: The configuration.
        path: The kernel path that ran.
        log: The log, for the message.

    Raises:
        Invalid: A request has another result; the message has all of them and the evidence.
    """
    differences = different(compare(configuration, path))
    if differences:
        raise Invalid(f"{'; '.join(differences)}. Evidence: {log}")


def different(reports: Iterable[RequestReport]) -> list[str]:
    """Return the requests that did not run, one line each: numbers with them are INVALID.

    A variable that the installed engine does not know ("not applicable") is among them.

    Args:
        reports: The requests.
    """
    states = (RequestState.DIFFERENT.value, RequestState.NOT_APPLICABLE.value)
    return [report.message for report in reports if report.state in states]


def judged(configuration: ServerConfiguration, path: KernelPath) -> KernelPath:
    """Return a path with the requests of its configuration, for verdict.json.

    Args:
        configuration: The configuration.
        path: The kernel path that ran.
    """
    return _with_reports(path, compare(configuration, path))


def _with_reports(path: KernelPath, reports: list[RequestReport]) -> KernelPath:
    update = {"requested": reports, "differences": different(reports)}
    return path.model_copy(update=update, deep=True)


def _requests(
    rules: RequestRules,
    arguments: Mapping[str, str],
    environment: Mapping[str, str],
    path: KernelPath,
) -> Iterator[_Request]:
    """Yield the requests whose rules hold for the engine of the path, or may hold."""
    for rule in rules.request:
        request = _request_of(rule, arguments, environment)
        if request is not None and rule.covers(path.log.version, path.log.build) is not False:
            yield request


def _request_of(
    rule: RequestRule, arguments: Mapping[str, str], environment: Mapping[str, str]
) -> _Request | None:
    """Return the request by the argument or variable of a rule, or None."""
    if rule.variable is not None:
        value = environment.get(rule.variable)
        by = f"{rule.variable}={value}"
    else:
        assert rule.argument is not None
        names = [normal_name(name) for name in (rule.argument, *rule.aliases)]
        value = next((arguments[name] for name in names if name in arguments), None)
        by = f"{rule.argument} {value}"
    if value is None or value.lower() in {item.lower() for item in rule.nothing}:
        return None
    return _Request(rule, by, value)


def _literal(text: str) -> object:
    """Return the value of a printed Python object; None for a part that is no literal.

    Members of an enumeration count as their names, and an object as the dictionary of its
    arguments.
    """
    named = re.sub(r"<\w+\.(\w+): [^<>]*>", r"'\1'", text)
    for printed in (named, re.sub(r"<[A-Za-z_][^<>]*>", "None", named)):  # <function f at 0x7f>
        try:
            return _value(ast.parse(printed, mode="eval").body)
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            continue
    return None  # the line was cut, so the value is unknown


def _value(node: ast.expr) -> object:
    if isinstance(node, ast.Call):
        return {item.arg: _value(item.value) for item in node.keywords}
    if isinstance(node, ast.Dict):
        pairs = zip(node.keys, node.values, strict=True)
        return {key.value: _value(value) for key, value in pairs if isinstance(key, ast.Constant)}
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError):
        return None  # an expression, or a set of lists: no argument has such a value


def _judge(
    rule: RequestRule, by: str, value: str, path: KernelPath, *, is_whole: bool = True
) -> RequestReport:
    """Judge one request.

    Args:
        rule: Its rule.
        by: The argument or variable with its value, as it was written.
        value: The requested value.
        path: The kernel path that ran.
        is_whole: Whether the log of the path is complete.
    """
    by = redact(by)
    actual = getattr(path, rule.field)
    resolved = None if actual is None else str(actual)
    outcome = _early_outcome(rule, value, path)
    if outcome is None and isinstance(actual, list):
        outcome = _outcome_of_list(rule, value, path, actual)
    if outcome is None:
        outcome = _outcome_of_value(rule, value, path, resolved, is_whole)
    return RequestReport(
        by=by,
        field=rule.field,
        resolved=resolved,
        state=outcome.state.value,
        message=f"{by}: {outcome.message}",
    )


def _early_outcome(rule: RequestRule, value: str, path: KernelPath) -> _Outcome | None:
    """Return the result that does not depend on the resolved value, or None."""
    for name in rule.denied_by:
        if name in path.fallbacks:
            line = path.evidence.get(f"fallbacks.{name}", name)
            message = f"requested, but the log shows another value ({line})"
            return _Outcome(RequestState.DIFFERENT, message)
    if rule.without_effect is not None and rule.without_effect.fullmatch(value):
        message = "not applicable: it has no effect in this build"
        return _Outcome(RequestState.NOT_APPLICABLE, message)
    if rule.pattern(value) is None or rule.covers(path.log.version, path.log.build) is None:
        return _Outcome(RequestState.NOT_PROVEN, "the suite does not know its resolved value")
    return None


def _outcome_of_list(
    rule: RequestRule, value: str, path: KernelPath, actual: Sequence[str]
) -> _Outcome:
    names = {part.strip() for part in value.split(",")} - {*rule.nothing}
    if not names.issuperset(actual):
        line = path.evidence.get(rule.field, "no line")
        message = f"requested, but {rule.field} is {actual} ({line})"
        return _Outcome(RequestState.DIFFERENT, message)
    missing = sorted(names - {*actual})
    if missing:
        message = f"no evidence shows the resolved value of {', '.join(missing)}"
        return _Outcome(RequestState.NOT_PROVEN, message)
    return _Outcome(RequestState.RESOLVED, f"resolved to {', '.join(actual)}")


def _outcome_of_value(
    rule: RequestRule, value: str, path: KernelPath, resolved: str | None, is_whole: bool
) -> _Outcome:
    if resolved is not None:
        pattern = rule.pattern(value)
        if pattern is not None and pattern.fullmatch(resolved):
            return _Outcome(RequestState.RESOLVED, f"resolved to {resolved}")
        line = path.evidence.get(rule.field, "no line")
        message = f"requested, but {rule.field} resolved to {resolved} ({line})"
        return _Outcome(RequestState.DIFFERENT, message)
    if rule.always_shown:
        message = f"requested, but no evidence shows the resolved {rule.field}"
        state = RequestState.DIFFERENT if is_whole else RequestState.NOT_PROVEN
        return _Outcome(state, message)
    message = f"the engine does not show the resolved {rule.field}"
    return _Outcome(RequestState.NOT_PROVEN, message)


@dataclass(frozen=True)
class _UnknownVariables:
    """The variables that the installed engine does not know, or may not know."""

    #: Reports of variables without effect, by name.
    reports: dict[str, RequestReport]
    #: Variables of which it is unknown whether the engine knows them.
    unanswered: set[str]


def _unknown_variables(
    configuration: ServerConfiguration, environment: Mapping[str, str], rules: RequestRules
) -> _UnknownVariables:
    """Query the installed engine for the variables of its environment that it does not know."""
    harmless = signatures.load_signatures(configuration.engine).is_harmless_env
    start_variables = dict(configuration.environment)
    concerned = []
    for registry in rules.registry:
        if any(name.startswith(registry.prefix) for name in environment):
            concerned.append(registry)
    if not concerned:
        return _UnknownVariables({}, set())
    by_prefix = variables.ask(configuration.python, environment, concerned)
    reports: dict[str, RequestReport] = {}
    unanswered: set[str] = set()
    for registry in concerned:
        knowledge = by_prefix[registry.prefix]
        for name in sorted(environment):
            if not name.startswith(registry.prefix) or harmless(name):
                continue
            if name in (knowledge.known or ()):
                continue
            # A variable of a user's shell may be for a package that is not installed here.
            is_concerned = knowledge.installed or name in start_variables
            if knowledge.problem is not None or not is_concerned:
                unanswered.add(name)
                continue
            setting = "[redacted]" if is_secret_name(name) else redact(environment[name])
            if knowledge.installed:
                why = f"the installed {registry.package} knows no such variable"
            else:
                why = f"{registry.package} is not installed in the engine's environment"
            reports[name] = RequestReport(
                by=f"{name}={setting}",
                field=None,
                resolved=None,
                state=RequestState.NOT_APPLICABLE.value,
                message=f"{name}={setting}: not applicable: {why}",
            )
    return _UnknownVariables(reports, unanswered)
