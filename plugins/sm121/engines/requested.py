"""What was asked for against what ran. What says something about the kernel path is looked up in
``fixtures/requests/<engine>.toml`` and compared with what the evidence shows. A configuration with
a difference is not what its name says: its numbers are INVALID."""

import ast
import re
from collections.abc import Iterable, Iterator, Mapping
from enum import StrEnum
from pathlib import Path

from pydantic import Field, PrivateAttr, model_validator

from sm121.core import builds, data_file, engine_arguments
from sm121.core.configuration import ServerConfiguration
from sm121.core.data_file import DataTable, Entries, Regex
from sm121.core.engine_arguments import flat, normal_name
from sm121.core.redaction import is_secret_name, redact
from sm121.core.verdict import Invalid
from sm121.core.versions import Versions, within
from sm121.engines import registry as engines
from sm121.evidence import signatures, variables
from sm121.evidence.kernel_path import KernelPath, RequestReport


class RequestState(StrEnum):
    """What became of a request."""

    RESOLVED = "resolved"
    """The evidence shows what was asked for."""
    DIFFERENT = "different"
    """The evidence shows something else, or nothing where it would show it."""
    NOT_PROVEN = "not_proven"
    """The engine shows nothing about it, whatever it does."""
    NOT_APPLICABLE = "not_applicable"
    """It changes nothing here: the installed engine has no such variable, or no such value."""


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
    """Fallbacks of the log (their ids) that deny it where the resolved value is too coarse."""
    always_shown: bool = True
    """False where the engine may show nothing though it does what was asked."""
    without_effect: Regex | None = None
    """Values that change nothing."""
    build: builds.Name | None = None
    """The only build that it speaks of; it knows the variable, whether it lists it or not."""
    versions: Versions = ""
    """Releases in which it means this; a build goes by its release. Where that is not known, an
    argument means this, since the engine took it, and a variable's meaning is not known."""
    source: str = Field(min_length=3)

    _patterns: dict[str, re.Pattern[str]] = PrivateAttr(default_factory=dict)

    @model_validator(mode="after")
    def _check(self) -> "RequestRule":
        if (self.argument is None) == (self.variable is None):
            raise ValueError("expected either argument or variable")
        if self.field not in KernelPath.model_fields:
            fields = ", ".join(sorted(KernelPath.model_fields))
            raise ValueError(f"field: expected one of {fields}; got {self.field!r}")
        try:
            self._patterns.update(
                {name.lower(): re.compile(text, re.I) for name, text in self.accepts.items()}
            )
            re.compile((self.otherwise or "").replace("{value}", "x"))
        except re.error as error:
            raise ValueError(f"expected regular expressions: {error}") from error
        return self

    def covers(self, version: str | None, build: str | None = None) -> bool | None:
        """Whether the rule speaks of this engine; None where that is not known. `version`: as the
        engine calls itself; `build`: the name of the build that its log shows, if it shows one."""
        identity = builds.identity(version, build=build)
        if self.build is not None:
            named_build = builds.named(identity)
            return named_build is not None and named_build.name == self.build
        if identity is None and self.versions:
            return True if self.variable is None else None
        return within(identity, self.versions)

    def pattern(self, value: str) -> re.Pattern[str] | None:
        """What the resolved value must match for `value` to be satisfied; None where it has no
        effect, or nothing is known of it."""
        if self.without_effect is not None and self.without_effect.fullmatch(value):
            return None
        if (listed := self._patterns.get(value.lower())) is not None:
            return listed
        if self.otherwise is None:
            return None
        plain = re.sub(r"[\s_-]+", "[ _-]", re.escape(value).replace("\\-", "-"))
        return re.compile(self.otherwise.replace("{value}", plain), re.I)


class RequestRules(DataTable):
    """What is known of one engine's arguments and variables."""

    engine: str
    registry: tuple[variables.Registry, ...] = ()
    request: Entries[RequestRule]


def load_requests(engine: str) -> RequestRules:
    """The rules of an engine. Raises DataFileError when there are none or the file is wrong."""
    return data_file.load(f"requests/{engine}.toml", RequestRules)


def compare(
    configuration: ServerConfiguration,
    path: KernelPath,
    environment: Mapping[str, str] | None = None,
) -> list[RequestReport]:
    """All that the `configuration`'s arguments and environment ask for of the kernel path, and what
    became of it on `path`. `environment`: the engine's whole (default: as it would be started)."""
    if environment is None:
        engine = engines.engine(configuration.engine)
        environment = engine.environment(configuration, api_key="")
    rules = load_requests(configuration.engine)
    without_effect, unanswered = _unknown_variables(configuration, environment, rules)
    covers = (rule for rule in rules.request if rule.covers(path.version, path.build))
    of_build = {rule.variable for rule in covers if rule.build}
    reports = [r for name, r in without_effect.items() if name not in of_build]
    unread = {*without_effect, *(unanswered - dict(configuration.environment).keys())} - of_build
    requests = _asked(rules, engine_arguments.read(configuration.arguments), environment, path)
    return reports + [
        _judge(rule, by, value, path) for rule, by, value in requests if rule.variable not in unread
    ]


def of_log(path: KernelPath, engine: str) -> KernelPath:
    """A path with what its log says that the server was asked for, where nobody else knows. What
    such a log does not show is not proven, and no difference: it may be a part of one."""
    values = flat(_literal(path.asked or ""))
    reports = [
        _judge(rule, by, value, path, is_whole=False)
        for rule, by, value in _asked(load_requests(engine), values, {}, path)
    ]
    return _with_reports(path, reports)


def in_log(path: KernelPath, name: str) -> str | None:
    """What a log says that its server was given for an argument (``max_num_seqs``), or None."""
    return flat(_literal(path.asked or "")).get(name)


def arguments_in_log(path: KernelPath) -> list[str]:
    """The arguments that the server was given, as far as its log prints them, as
    ``--name=value``."""
    return [f"--{name}={value}" for name, value in flat(_literal(path.asked or "")).items()]


def patterns(configuration: ServerConfiguration) -> dict[str, list[re.Pattern[str]]]:
    """By value of the path, what it will match after what the configuration itself asks for. No
    engine is asked: a variable may have no effect."""
    values = engine_arguments.read(configuration.arguments)
    settings = dict(configuration.environment)
    by_field: dict[str, list[re.Pattern[str]]] = {}
    for rule in load_requests(configuration.engine).request:
        request = _given(rule, values, settings)
        if request is not None and (pattern := rule.pattern(request[1])) is not None:
            by_field.setdefault(rule.field, []).append(pattern)
    return by_field


def require_as_asked(configuration: ServerConfiguration, path: KernelPath, log: Path) -> None:
    """What a test that measures calls first. Raises Invalid: something that was asked for is not
    what ran; names all of it and the evidence."""
    if wrong := different(compare(configuration, path)):
        raise Invalid(f"{'; '.join(wrong)}. Evidence: {log}")


def different(reports: Iterable[RequestReport]) -> list[str]:
    """What was asked for and is not what ran, a line each: numbers measured on it are INVALID. A
    variable that the installed engine does not know ("not applicable") is among them."""
    wrong = (RequestState.DIFFERENT.value, RequestState.NOT_APPLICABLE.value)
    return [report.message for report in reports if report.state in wrong]


def judged(configuration: ServerConfiguration, path: KernelPath) -> KernelPath:
    """The path with what was asked for beside it, for verdict.json."""
    return _with_reports(path, compare(configuration, path))


def _with_reports(path: KernelPath, reports: list[RequestReport]) -> KernelPath:
    update = {"requested": reports, "differences": different(reports)}
    return path.model_copy(update=update, deep=True)


def _asked(
    rules: RequestRules,
    arguments: Mapping[str, str],
    environment: Mapping[str, str],
    path: KernelPath,
) -> Iterator[tuple[RequestRule, str, str]]:
    for rule in rules.request:
        request = _given(rule, arguments, environment)
        if request is not None and rule.covers(path.version, path.build) is not False:
            yield rule, *request


def _given(
    rule: RequestRule, arguments: Mapping[str, str], environment: Mapping[str, str]
) -> tuple[str, str] | None:
    """What a rule speaks of as it was written, and its value; None where it asks for nothing."""
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
    return by, value


def _literal(text: str) -> object:
    """The value that a printed Python object has; None for what is no literal. Members of an
    enumeration count as their names, and an object as the dictionary of its arguments."""
    named = re.sub(r"<\w+\.(\w+): [^<>]*>", r"'\1'", text)
    for printed in (named, re.sub(r"<[A-Za-z_][^<>]*>", "None", named)):  # <function f at 0x7f>
        try:
            return _value(ast.parse(printed, mode="eval").body)
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            continue
    return None  # a line that was cut: it tells nothing


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
    actual = getattr(path, rule.field)
    resolved = None if actual is None else str(actual)
    pattern = rule.pattern(value)
    by = redact(by)
    denied = next((name for name in rule.denied_by if name in path.fallbacks), None)
    line = path.evidence.get(rule.field, "no line")
    if denied is not None:
        line = path.evidence.get(f"fallbacks.{denied}", denied)
        state, message = RequestState.DIFFERENT, f"asked for, but the log says otherwise ({line})"
    elif rule.without_effect is not None and rule.without_effect.fullmatch(value):
        state = RequestState.NOT_APPLICABLE
        message = "not applicable: it has no effect in this build"
    elif pattern is None or rule.covers(path.version, path.build) is None:
        state, message = RequestState.NOT_PROVEN, "what it resolves to is not known here"
    elif isinstance(actual, list):
        names = {part.strip() for part in value.split(",")} - {*rule.nothing}
        if not names.issuperset(actual):
            state = RequestState.DIFFERENT
            message = f"asked for, but {rule.field} is {resolved} ({line})"
        elif missing := sorted(names - {*actual}):
            state = RequestState.NOT_PROVEN
            message = f"no evidence shows what became of {', '.join(missing)}"
        else:
            state, message = RequestState.RESOLVED, f"resolved to {', '.join(actual)}"
    elif resolved is not None and pattern.fullmatch(resolved):
        state, message = RequestState.RESOLVED, f"resolved to {resolved}"
    elif resolved is not None:
        message = f"asked for, but {rule.field} resolved to {resolved} ({line})"
        state = RequestState.DIFFERENT
    elif rule.always_shown:
        message = f"asked for, but no evidence shows what {rule.field} became"
        state = RequestState.DIFFERENT if is_whole else RequestState.NOT_PROVEN
    else:
        message = f"the engine does not show what {rule.field} became"
        state = RequestState.NOT_PROVEN
    return RequestReport(
        by=by, field=rule.field, resolved=resolved, state=state.value, message=f"{by}: {message}"
    )


def _unknown_variables(
    configuration: ServerConfiguration, environment: Mapping[str, str], rules: RequestRules
) -> tuple[dict[str, RequestReport], set[str]]:
    """Reports of variables without effect, by name; and those of which nothing was learned."""
    harmless = signatures.load_signatures(configuration.engine).is_harmless_env
    start_variables = dict(configuration.environment)
    concerned = [
        registry
        for registry in rules.registry
        if any(name.startswith(registry.prefix) for name in environment)
    ]
    if not concerned:
        return {}, set()
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
            # What is in somebody's shell may be for a package that has no part here.
            is_concerned = knowledge.installed or name in start_variables
            if knowledge.problem is not None or not is_concerned:
                unanswered.add(name)
                continue
            setting = "[redacted]" if is_secret_name(name) else redact(environment[name])
            why = (
                f"the installed {registry.package} knows no such variable"
                if knowledge.installed
                else f"{registry.package} is not installed in the engine's environment"
            )
            reports[name] = RequestReport(
                by=f"{name}={setting}",
                field=None,
                resolved=None,
                state=RequestState.NOT_APPLICABLE.value,
                message=f"{name}={setting}: not applicable: {why}",
            )
    return reports, unanswered
