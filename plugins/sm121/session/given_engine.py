"""Checks the options about the engine: its name, program, arguments, variables and nodes."""

import itertools
import shutil
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from sm121.core import architecture, options, profile
from sm121.core.errors import UsageError
from sm121.core.option_values import path_that
from sm121.core.options import Option
from sm121.core.profile import Profile
from sm121.engines import capabilities, protocol, registry
from sm121.engines.options import DEFAULT, GivenEngine
from sm121.session import given_nodes, given_target

#: Options of the engine that the suite starts.
_OF_A_START = (
    "--engine-python",
    "--engine-binary",
    "--engine-arg",
    "--engine-args",
    "--engine-env",
    "--engine-debug",
)
#: Options that describe an attached server.
_OF_AN_ATTACHED = ("--api-key", "--api-key-file", "--server-log", "--container")
_PYTHON = path_that(Path.is_file, "a Python interpreter, got no such file")


def read_options(
    option: Option, chosen: Profile | None, base_url: str | None, marked: Sequence[str] = ()
) -> GivenEngine:
    """Read the options.

    Args:
        option: A function that returns the value of an option.
        chosen: The profile that was named; None if none was.
        base_url: The URL of the attached server; None if the suite starts one.
        marked: Architectures that ``-m`` names.

    Raises:
        UsageError: An option is wrong, or contradicts another one.
    """
    name = started(option, chosen, base_url, marked)
    refuse_conflicts(option, base_url)
    given = options.read(GivenEngine, option)
    nodes = given_nodes.read_options(option, chosen, base_url)
    return replace(
        given,
        name=name,
        python=program(option, name, base_url),
        arguments=_arguments(given),
        launcher=nodes.launcher,
        node_commands=nodes.commands,
        master_address=nodes.master_address,
    )


def started(
    option: Option, chosen: Profile | None, attached: str | None, marked: Sequence[str] = ()
) -> str:
    """Return the name of the engine whose profile the run uses.

    Args:
        option: A function that returns the value of an option.
        chosen: The profile that was named; None if none was.
        attached: The URL of the attached server, or None. The suite finds its engine by requests.
            If an option names the engine and the suite ships no profile for it, the profile of the
            default engine is used.
        marked: Architectures that ``-m`` names.

    Raises:
        UsageError: The engine does not exist, or the profile is for another engine or
            architecture.
    """
    arch_name = given_target.arch(option)
    name: str | None = option("--engine")
    if name and attached:
        capabilities.capabilities_of(name, None)  # refuses an unknown engine
        if chosen is not None or not _has_profile(arch_name, name, marked):
            name = None
    if not name:
        name = DEFAULT if chosen is None else chosen.engine.name
    registry.engine(name)
    if chosen is not None:
        _refuse_another("--arch", arch_name, chosen.arch, option("--profile"))
        _refuse_another("--engine", name, chosen.engine.name, option("--profile"))
    return name


def _has_profile(arch: str | None, engine: str, marked: Sequence[str]) -> bool:
    """Whether the suite ships a profile for an engine and the architecture of the run."""
    try:
        profile.for_architecture(arch or architecture.expected(marked), engine)
    except UsageError:
        return False
    return True


def _refuse_another(flag: str, value: str | None, of_profile: str, profile_name: str) -> None:
    """Raise UsageError if an option contradicts the profile."""
    if value in (None, of_profile):
        return
    expected = f"expected a profile for {value}, this one is for {of_profile}"
    raise UsageError(f"{flag} {value} and --profile {profile_name}: {expected}")


def program(option: Option, engine: str, attached: str | None) -> str:
    """Return the engine's Python interpreter, or the executable of an engine that is a program.

    Args:
        option: A function that returns the value of an option.
        engine: The name of the engine.
        attached: The URL of the attached server; None if the suite starts one.

    Raises:
        UsageError: There is no such file.
    """
    binary = option("--engine-binary")
    description = registry.engine(engine)
    if not isinstance(description, protocol.Program):
        if binary:
            raise UsageError(f"--engine-binary: {engine} is started by --engine-python")
        # Do not resolve links, because Python finds a virtual environment by the link to its
        # interpreter.
        python = option("--engine-python")
        if python is None:
            return sys.executable
        return str(_PYTHON.read("--engine-python", python))
    if attached:
        return sys.executable
    path = binary or shutil.which(description.program)
    if path is None or not Path(path).is_file():
        missing = f"; there is no file {binary}" if binary else ""
        raise UsageError(
            f"--engine {engine}: expected {description.program} on the PATH, or "
            f"--engine-binary PATH{missing}"
        )
    return str(Path(path).absolute())


def refuse_conflicts(option: Option, attached: str | None) -> None:
    """Refuse options that contradict each other, and values that the suite sets itself.

    Args:
        option: A function that returns the value of an option.
        attached: The URL of the attached server; None if the suite starts one.

    Raises:
        UsageError: One of the options is wrong.
    """
    if attached and option("--model") and option("--served-model-name"):
        raise UsageError("--model and --served-model-name: expected one of them, got both")
    _refuse_reserved(option, attached)
    if attached:
        conflicting = [name for name in _OF_A_START if option(name)]
        where = "--base-url: expected a server that the suite starts. Leave out one of them"
    else:
        conflicting = [name for name in _OF_AN_ATTACHED if option(name)]
        where = (
            "no --base-url: expected the URL of the attached server that these options describe. "
            "Give --base-url URL"
        )
    if conflicting:
        raise UsageError(f"{', '.join(conflicting)} with {where}")


def _refuse_reserved(option: Option, attached: str | None) -> None:
    """Raise UsageError for an argument or a variable of the engine that the suite sets itself."""
    given = options.read(GivenEngine, option)
    engine = DEFAULT if attached else given.name
    argument = registry.reserved(engine, _arguments(given))
    if argument is not None:
        raise UsageError(
            f"--engine-arg {argument.written}: {argument.name} is set by the "
            "suite itself (use --model and --served-model-name; give the settings of a --config "
            "file with --engine-arg)"
        )
    variable = registry.reserved(engine, (), dict(given.environment))
    if variable is not None:
        raise UsageError(f"--engine-env {variable.name}: it is set by the suite itself")


def _arguments(given: GivenEngine) -> tuple[str, ...]:
    """Return the engine's arguments of ``--engine-arg`` and ``--engine-args``."""
    return (*given.arguments, *itertools.chain.from_iterable(given.argument_texts))
