"""Compare the requested kernel path with the kernel path that ran.

``fixtures/requests/<engine>.toml`` lists the arguments and environment variables that request a
part of the kernel path. This module compares these requests with the evidence. If they differ, the
server does not run the requested kernels, so its numbers are INVALID.
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
    """Whether a requested part of the kernel path ran."""

    RESOLVED = "resolved"
    """The evidence shows the requested value."""
    DIFFERENT = "different"
    """The evidence shows another value, or no value although the engine would log one."""
    NOT_PROVEN = "not_proven"
    """The engine never logs this value."""
    NOT_APPLICABLE = "not_applicable"
    """The request has no effect, because the installed engine lacks the variable or the value."""


@dataclass(frozen=True)
class _Request:
    """One request for a part of the kernel path."""

    rule: RequestRule
    #: The argument or environment variable with its value, as the user wrote it.
    by: str
    value: str


@dataclass(frozen=True)
class _Outcome:
    """The result of a request: its state, and a message."""

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
        environment: The engine's whole environment. If None, the environment of a start is used.
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
    """Add to a path the requests that its log shows, unless the path already has requests.

    If the log does not show the result of a request, the request counts as unproven, and not as a
    difference, because the log may be incomplete. For an engine without rules, no requests are
    added. The suite does not start such an engine, because it could not compare the requests.

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
    """Return the value of a server's argument that the log shows, or None.

    Args:
        path: The kernel path of the log.
        name: The name of the argument, for example ``max_num_seqs``.
    """
    return flat(_literal(path.log.asked or "")).get(name)


def arguments_in_log(path: KernelPath) -> list[str]:
    """Return the server's arguments that the log shows, as ``--name=value``.

    Args:
        path: The kernel path of the log.
    """
    return [f"--{name}={value}" for name, value in flat(_literal(path.log.asked or "")).items()]


def patterns(configuration: ServerConfiguration) -> dict[str, list[re.Pattern[str]]]:
    """Return, for each field of the kernel path, the patterns that a configuration requests.

    The engine is not queried, so the result may include variables that have no effect.

    Args:
        configuration: The configuration.
    """
    by_field: dict[str, list[re.Pattern[str]]] = {}
    settings = dict(configuration.environment)
    rules = load_requests(configuration.engine)
    for request in _requests_of_a_start(rules, configuration.arguments, settings):
        pattern = request.rule.pattern(request.value)
        if pattern is not None:
            by_field.setdefault(request.rule.field, []).append(pattern)
    return by_field


def values_of_start(
    engine: str, field: str, arguments: Sequence[str], environment: Mapping[str, str]
) -> list[str]:
    """Return the values that a start requests for a field of the kernel path.

    The engine is not queried, so the result may include variables that have no effect.

    Args:
        engine: The name of the engine.
        field: The field of `KernelPath`.
        arguments: The arguments of the start.
        environment: The environment variables of the start.

    Returns:
        The values as they are written in the arguments and variables; none for an engine without
        rules.
    """
    if not has_rules(engine):
        return []
    found = []
    for request in _requests_of_a_start(load_requests(engine), arguments, environment):
        has_effect = request.rule.pattern(request.value) is not None
        if request.rule.field == field and has_effect:
            found.append(request.value)
    return found


def _requests_of_a_start(
    rules: RequestRules, arguments: Sequence[str], environment: Mapping[str, str]
) -> Iterator[_Request]:
    """Yield the requests of a start, whatever the release of the engine is."""
    options = engine_arguments.parse_options(arguments)
    for rule in rules.request:
        request = _request_of(rule, options, environment)
        if request is not None:
            yield request


def require_requested_path(configuration: ServerConfiguration, path: KernelPath, log: Path) -> None:
    """Raise an error if the requested kernel path did not run. Each test that measures calls this.

    Args:
        configuration: The configuration.
        path: The kernel path that ran.
        log: The log, for the message.

    Raises:
        Invalid: A requested part did not run. The message lists all such requests and the evidence.
    """
    differences = different(compare(configuration, path))
    if differences:
        raise Invalid(f"{'; '.join(differences)}. Evidence: {log}")


def different(reports: Iterable[RequestReport]) -> list[str]:
    """Return one line for each request that did not run, so that the server's numbers are INVALID.

    Variables that the installed engine does not know ("not applicable") are included.

    Args:
        reports: The requests.
    """
    states = (RequestState.DIFFERENT.value, RequestState.NOT_APPLICABLE.value)
    return [report.message for report in reports if report.state in states]


def judged(configuration: ServerConfiguration, path: KernelPath) -> KernelPath:
    """Return a path for verdict.json, completed by the requests of its configuration.

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
    """Yield the requests whose rules apply, or may apply, to the engine of the path."""
    for rule in rules.request:
        request = _request_of(rule, arguments, environment)
        if request is not None and rule.covers(path.log.version, path.log.build) is not False:
            yield request


def _request_of(
    rule: RequestRule, arguments: Mapping[str, str], environment: Mapping[str, str]
) -> _Request | None:
    """Return the request if the rule's argument or environment variable is set, else None."""
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
    """Parse a printed Python object. Parts that are not literals become None.

    A member of an enumeration becomes its name, and an object becomes a dictionary of its
    arguments.
    """
    named = re.sub(r"<\w+\.(\w+): [^<>]*>", r"'\1'", text)
    # For example <function f at 0x7f>.
    for printed in (named, re.sub(r"<[A-Za-z_][^<>]*>", "None", named)):
        try:
            return _value(ast.parse(printed, mode="eval").body)
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            continue
    return None  # the log line was truncated, so the value is unknown


def _value(node: ast.expr) -> object:
    if isinstance(node, ast.Call):
        return {item.arg: _value(item.value) for item in node.keywords}
    if isinstance(node, ast.Dict):
        pairs = zip(node.keys, node.values, strict=True)
        return {key.value: _value(value) for key, value in pairs if isinstance(key, ast.Constant)}
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError):
        return None  # an expression or a set of lists; no argument of an engine has such a value


def _judge(
    rule: RequestRule, by: str, value: str, path: KernelPath, *, is_whole: bool = True
) -> RequestReport:
    """Determine the result of one request.

    Args:
        rule: The rule of the request.
        by: The argument or environment variable with its value, as the user wrote it.
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
    """Return the result of a request if it does not depend on the resolved value, else None."""
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
    """The environment variables that the installed engine does not know, or may not know."""

    #: The report for each variable without effect; the keys are the variables' names.
    reports: dict[str, RequestReport]
    #: Variables for which the query did not show whether the engine knows them.
    unanswered: set[str]


def _unknown_variables(
    configuration: ServerConfiguration, environment: Mapping[str, str], rules: RequestRules
) -> _UnknownVariables:
    """Find the environment variables of a configuration that the installed engine does not know."""
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
            # A variable from the user's shell may belong to a package that is not installed.
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
