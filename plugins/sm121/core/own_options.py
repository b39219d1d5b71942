"""The options that the suite adds to pytest's, as ``fixtures/options.toml`` has them."""

from sm121.core import arguments, data_file


class Marker(data_file.DataTable):
    """A marker beside those of levels and architectures."""

    name: str
    help: str


class Group(data_file.DataTable):
    """Options that stand together in ``pytest --help``."""

    title: str
    option: tuple[arguments.Argument, ...]


class OptionsFile(data_file.DataTable):
    """What ``fixtures/options.toml`` says."""

    group: tuple[Group, ...]
    marker: tuple[Marker, ...]


def file() -> OptionsFile:
    """``fixtures/options.toml``."""
    return data_file.load("options.toml", OptionsFile)


def every() -> dict[str, arguments.Argument]:
    """The options by their names, ``--arch`` first."""
    return {option.name: option for group in file().group for option in group.option}
