"""The rules of ``fixtures/requests/<engine>.toml``.

A rule is about an argument or environment variable with which a user requests a part of the kernel
path. It also lists the resolved values that satisfy the request.
"""

import re

from pydantic import Field, PrivateAttr, model_validator

from sm121.core import builds, data_file
from sm121.core.data_file import DataTable, Entries, Regex
from sm121.core.versions import Versions, within
from sm121.evidence import variables
from sm121.evidence.kernel_path import PATH_FIELDS


class RequestRule(DataTable):
    """An argument or environment variable that requests a part of the kernel path."""

    id: str = Field(pattern=r"^[a-z0-9_]+$")
    argument: str | None = Field(default=None, pattern=r"^-{1,2}[A-Za-z]")
    """The argument of the command line. Dots select a key of a JSON value, as in vLLM's
    arguments."""
    aliases: tuple[str, ...] = ()
    variable: str | None = None
    field: str
    """The field of `KernelPath` with the resolved value."""
    nothing: tuple[str, ...] = ()
    """Values that leave the choice to the engine, for example ``auto``."""
    accepts: dict[str, str] = Field(default={})
    """For each requested value, a pattern for resolved values that satisfy it, ignoring case."""
    otherwise: str | None = "{value}"
    """The pattern of resolved values for a requested value that `accepts` does not list.
    ``{value}`` stands for the requested value. If null, such requests are not compared."""
    denied_by: tuple[str, ...] = ()
    """Ids of fallbacks in the log that contradict the request. They are needed if the resolved
    value is not precise enough to contradict a request."""
    always_shown: bool = True
    """False if the engine may log nothing although it follows the request."""
    without_effect: Regex | None = None
    """A pattern for values that have no effect."""
    build: builds.Name | None = None
    """The only build to which the rule applies. This build reads the variable, even if its list of
    known variables does not contain it."""
    versions: Versions = ""
    """The releases to which the rule applies. A build counts as the release on which it is based.
    If the release is unknown, the rule of an argument applies, because the engine accepted the
    argument. Whether the rule of an environment variable applies is then unknown."""
    source: str = Field(min_length=3)

    _patterns: dict[str, re.Pattern[str]] = PrivateAttr(default_factory=dict)

    @model_validator(mode="after")
    def _check(self) -> "RequestRule":
        if (self.argument is None) == (self.variable is None):
            raise ValueError("expected either argument or variable")
        if self.field not in PATH_FIELDS:
            fields = ", ".join(sorted(PATH_FIELDS))
            raise ValueError(f"field: expected one of {fields}; got {self.field!r}")
        try:
            for name, text in self.accepts.items():
                self._patterns[name.lower()] = re.compile(text, re.I)
            re.compile((self.otherwise or "").replace("{value}", "x"))
        except re.error as error:
            raise ValueError(f"expected regular expressions: {error}") from error
        return self

    def covers(self, version: str | None, build: str | None = None) -> bool | None:
        """Return whether the rule applies to an engine; None if that is unknown.

        Args:
            version: The version that the engine reports.
            build: The name of the build, if the engine's log shows one.
        """
        identity = builds.identity(version, build=build)
        if self.build is not None:
            named_build = builds.named(identity)
            return named_build is not None and named_build.name == self.build
        if identity is None and self.versions:
            return True if self.variable is None else None
        return within(identity, self.versions)

    def pattern(self, value: str) -> re.Pattern[str] | None:
        """Return the pattern of the resolved values that satisfy a request.

        Args:
            value: The requested value.

        Returns:
            None if the value has no effect, or is not compared.
        """
        if self.without_effect is not None and self.without_effect.fullmatch(value):
            return None
        listed = self._patterns.get(value.lower())
        if listed is not None:
            return listed
        if self.otherwise is None:
            return None
        plain = re.sub(r"[\s_-]+", "[ _-]", re.escape(value).replace("\\-", "-"))
        return re.compile(self.otherwise.replace("{value}", plain), re.I)


class RequestRules(DataTable):
    """The rules for one engine's arguments and environment variables."""

    engine: str
    registry: tuple[variables.Registry, ...] = ()
    request: Entries[RequestRule]


def load_requests(engine: str) -> RequestRules:
    """Return the rules of an engine.

    Args:
        engine: The name of the engine.

    Raises:
        DataFileError: The engine has no file of rules, or the file is wrong.
    """
    return data_file.load(f"requests/{engine}.toml", RequestRules)


def has_rules(engine: str) -> bool:
    """Return whether an engine has rules.

    Args:
        engine: The name of the engine.
    """
    return engine in data_file.shipped("requests")
