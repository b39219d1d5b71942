"""The options that the suite adds to pytest's, as ``fixtures/options.toml`` has them."""

from sm121.core import data_file
from sm121.core.arguments import Argument
from sm121.core.data_file import DataTable


class Marker(DataTable):
    """A marker beside those of levels and architectures."""

    name: str
    help: str


class Group(DataTable):
    """Options that stand together in ``pytest --help``."""

    title: str
    option: tuple[Argument, ...]


class OptionsFile(DataTable):
    """What ``fixtures/options.toml`` says."""

    group: tuple[Group, ...]
    marker: tuple[Marker, ...]


def file() -> OptionsFile:
    """``fixtures/options.toml``."""
    return data_file.load("options.toml", OptionsFile)


def every() -> dict[str, Argument]:
    """The options by their names, ``--arch`` first."""
    return {option.name: option for group in file().group for option in group.option}
