"""How a package declares its pytest options.

A package that owns options has a module ``options`` with a frozen dataclass for each group of them.
Each field declares one option::

    @dataclass(frozen=True)
    class StressOptions:
        crowd: int | None = option("--crowd", whole_number(), metavar="N", help="at the same time")
        slow: bool = flag("--slow", help="also run the slow tests")

`sm121.session.own_options` lists these classes in the order of ``pytest --help``, and
`sm121.session.settings` reads them from a command line. `sm121.core.option_values` contains the
kinds of values.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeAlias, TypeVar

#: Returns the value of the option with a given command-line name; None if it was not given.
Option: TypeAlias = Callable[[str], Any]

_T = TypeVar("_T")
_Group = TypeVar("_Group")
#: The key of a declaration in the metadata of a field.
_KEY = "option"


class AddOption(Protocol):
    """Adds an option: ``addoption`` of pytest's groups, or ``add_argument`` of argparse."""

    def __call__(self, *names: str, **keywords: Any) -> object:
        """Add an option.

        Args:
            *names: The names of the option, such as ``--soak``.
            **keywords: Keyword arguments of ``argparse.ArgumentParser.add_argument``.
        """


@dataclass(frozen=True)
class Value(Generic[_T]):
    """A kind of value: how the text of an option is checked and converted.

    Attributes:
        read: Takes the name and the text of an option, and returns its value. It refuses a wrong
            text by a UsageError.
        wrong: Texts that `read` refuses. A test tries them with each option of this kind.
    """

    read: Callable[[str, str], _T]
    wrong: tuple[str, ...] = ()


#: Any text, unchanged.
TEXT = Value(lambda _name, text: text)


@dataclass(frozen=True)
class Declaration:
    """An option of a group.

    Attributes:
        name: The name of the option on a command line.
        keywords: Keyword arguments of ``argparse.ArgumentParser.add_argument``.
        value: The kind of its value; None if the value of the parser is used unchanged.
    """

    name: str
    keywords: Mapping[str, Any]
    value: Value[Any] | None = None

    def value_of(self, given: Any) -> Any:
        """Check and convert what a parser has read.

        Args:
            given: The text, or the list of texts of an option that can be repeated.

        Raises:
            UsageError: The value is wrong.
        """
        if self.value is None:
            return given
        if self.keywords.get("action") == "append":
            return tuple(self.value.read(self.name, text) for text in given)
        return self.value.read(self.name, given)


def option(
    name: str,
    value: Value[Any] | None = TEXT,
    *,
    default: Any = None,
    default_text: str | None = None,
    **keywords: Any,
) -> Any:
    """Declare an option with a value, as a field of a dataclass.

    Args:
        name: The name of the option, such as ``--rounds``.
        value: The kind of its value; None for an option with several values (``nargs``).
        default: The value of the field without the option.
        default_text: The text that stands for the missing option, in place of `default`.
        **keywords: ``help`` and other arguments of ``argparse.ArgumentParser.add_argument``.
    """
    declaration = Declaration(name, keywords, value)
    if default_text is None:
        return _declared(declaration, default)
    keywords["default"] = default_text
    return _declared(declaration, declaration.value_of(default_text))


def flag(name: str, *, help: str) -> Any:  # noqa: A002 - argparse's name
    """Declare an option without a value, as a field that is True if the option was given.

    Args:
        name: The name of the option, such as ``--slow``.
        help: What the option does.
    """
    return _declared(Declaration(name, {"action": "store_true", "help": help}), False)


def choice(name: str, choices: Sequence[str], *, help: str) -> Any:  # noqa: A002 - argparse's name
    """Declare an option with a fixed set of values, as a field of a dataclass.

    Args:
        name: The name of the option, such as ``--format``.
        choices: The values. The first one is the default.
        help: What the option does.
    """
    keywords = {"choices": tuple(choices), "default": choices[0], "help": help}
    return _declared(Declaration(name, keywords), choices[0])


def repeated(name: str, value: Value[Any] = TEXT, **keywords: Any) -> Any:
    """Declare an option that can be given several times, as a field with a tuple of the values.

    Args:
        name: The name of the option, such as ``--engine-arg``.
        value: The kind of each value.
        **keywords: ``help`` and other arguments of ``argparse.ArgumentParser.add_argument``.
    """
    return _declared(Declaration(name, {"action": "append", "default": [], **keywords}, value), ())


def _declared(declaration: Declaration, default: Any) -> Any:
    return dataclasses.field(default=default, metadata={_KEY: declaration})


def declarations(group: type) -> Mapping[str, Declaration]:
    """Return the options of a group, by the names of their fields.

    Args:
        group: A dataclass. Fields that declare no option are left out.
    """
    declared = {}
    for each in dataclasses.fields(group):
        if _KEY in each.metadata:
            declared[each.name] = each.metadata[_KEY]
    return declared


def add_options(group: type, add: AddOption) -> None:
    """Add the options of a group to a parser.

    Args:
        group: The dataclass that declares them.
        add: A function that adds an option.
    """
    for declared in declarations(group).values():
        add(declared.name, **declared.keywords)


def read(group: type[_Group], given: Option) -> _Group:
    """Read the options of a group from a command line.

    Args:
        group: The dataclass that declares them.
        given: A function that returns the value of an option.

    Returns:
        The group. The field of an option that was not given has its default.

    Raises:
        UsageError: A value is wrong.
    """
    values = {}
    for field_name, declared in declarations(group).items():
        text = given(declared.name)
        if text is not None:
            values[field_name] = declared.value_of(text)
    return group(**values)
