"""The command line: its options, the markers, and the settings that they make."""

from __future__ import annotations

import functools

import pytest

from sm121.core import architecture, data_file, profile
from sm121.core.arguments import Argument
from sm121.core.data_file import DataTable
from sm121.core.errors import UsageError
from sm121.engines import capabilities
from sm121.kernels import registry as kernel_providers
from sm121.matrix import covering
from sm121.run import shards
from sm121.session import settings
from sm121.session.settings import Settings, Worker


class _Marker(DataTable):
    """A marker beside those of levels and architectures."""

    name: str
    help: str


class _OptionsFile(DataTable):
    option: tuple[Argument, ...]
    marker: tuple[_Marker, ...]


class _AnyWords(int):
    """So many words of the command line, whatever they begin with.

    argparse takes ``--enforce-eager`` behind ``--ab ""`` for an option of its own. It makes the
    pattern of an option's words by ``"A" * nargs``, A being a word that is no option, and O one.
    """

    def __rmul__(self, _word: object) -> list[str]:  # type: ignore[override]
        return ["[AO]"] * int(self)


@functools.cache
def _file() -> _OptionsFile:
    return data_file.load("options.toml", _OptionsFile)


def add(parser: pytest.Parser) -> None:
    """Add every option of ``fixtures/options.toml``."""
    group = parser.getgroup("sm121", "SM121 conformance")
    shipped = {
        "engines": ", ".join(capabilities.shipped()),
        "providers": ", ".join(kernel_providers.NAMES),
    }
    for option in _file().option:
        given = option.given(**shipped)
        if isinstance(given.get("nargs"), int):
            given["nargs"] = _AnyWords(given["nargs"])
        group.addoption(option.name, **given)


def markers() -> list[str]:
    """All markers, as pytest shows them: for levels, for architectures, and the others."""
    return [
        *(f"{name}: tests of the {name} level" for name in profile.LEVELS),
        *(
            f"{name}: tests that apply to {name} (set by applies_to, not by hand)"
            for name in architecture.NAMES
        ),
        "gpu: tests that apply to some GPU architecture",
        *(f"{marker.name}: {marker.help}" for marker in _file().marker),
    ]


def read(config: pytest.Config) -> Settings:
    """The settings from the command line, validated.

    Raises:
        UsageError: an option is wrong, or contradicts another one.
    """
    given = getattr(config, "workerinput", None)
    worker = None
    if given is not None and "sm121_run" in given:
        worker = Worker(str(given["workerid"]), str(given["sm121_run"]), int(given["workercount"]))
    if (strength := config.getoption("--matrix")) is not None:
        covering.parse_strength(strength)
    shard = shards.parse(config.getoption("--shard"))
    if shard is not None and config.getoption("--certify"):
        raise UsageError("--shard with --certify: a certificate is about a whole run")
    return settings.read(
        config.getoption,
        started_in=config.invocation_params.dir,
        root=config.rootpath,
        worker=worker,
    )


def refuse_a_selection(config: pytest.Config) -> None:
    """Refuse options with which ``--certify`` would not see that tests are missing.

    Tests removed by -m, -k or --deselect are seen, and are reported as gaps.

    Raises:
        UsageError: paths, node ids or options that leave files out were given.
    """
    narrowing = {
        "--ignore": config.option.ignore,
        "--ignore-glob": config.option.ignore_glob,
        "--lf": getattr(config.option, "lf", False),
        "--sw": getattr(config.option, "stepwise", False),
    }
    given = [name for name, value in narrowing.items() if value]
    if config.args_source is not pytest.Config.ArgsSource.TESTPATHS:
        given.append("paths or node ids")
    if given:
        raise UsageError(
            f"--certify with {', '.join(given)}: expected a run of all levels; leave these out"
        )
