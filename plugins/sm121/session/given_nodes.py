"""Reads the options about a server on several machines: how its other nodes start."""

from typing import get_args

from sm121.core.engine_settings import Launcher
from sm121.core.errors import UsageError
from sm121.core.options import Option
from sm121.core.profile import Profile
from sm121.session import given_words

_NODE_OPTIONS = ("--launcher", "--node-command", "--master-addr")


def count_of(profile: Profile | None) -> int:
    """Return the number of machines of a profile's server.

    Args:
        profile: The profile; None without one.
    """
    if profile is None or profile.nodes is None:
        return 1
    return profile.nodes.count


def launcher(option: Option, profile: Profile | None, base_url: str | None) -> str | None:
    """Return the value of ``--launcher``; None without it.

    Args:
        option: A function that returns the value of an option.
        profile: The profile that was named; None if none was.
        base_url: The URL of the attached server; None without one.

    Raises:
        UsageError: The launcher does not exist, or the run starts no server on several nodes.
    """
    named = [name for name in _NODE_OPTIONS if option(name)]
    if named and base_url:
        raise UsageError(
            f"{', '.join(named)}: expected a server that the suite starts, got "
            "--base-url. Leave out one of them"
        )
    if named and (profile is None or profile.nodes is None):
        raise UsageError(
            f"{', '.join(named)}: expected a --profile for several machines (with a table [nodes])"
        )
    given: str | None = option("--launcher")
    if given not in (None, *get_args(Launcher)):
        expected = " or ".join(get_args(Launcher))
        raise UsageError(f"--launcher {given}: expected {expected}")
    return given


def commands(option: Option, profile: Profile | None) -> tuple[tuple[str, ...], ...]:
    """Return the commands that run Python on the other nodes, as words; empty without them.

    Args:
        option: A function that returns the value of an option.
        profile: The profile that was named; None if none was.

    Raises:
        UsageError: A command is empty, or a node has no command.
    """
    given = []
    for text in option("--node-command"):
        given.append(tuple(given_words.split("--node-command", text)))
    if () in given:
        raise UsageError("--node-command: expected a command that runs Python on a node")
    others = count_of(profile) - 1
    if given and len(given) != others:
        raise UsageError(
            f"--node-command: expected {others}, one for each node other than this one; got "
            f"{len(given)}"
        )
    return tuple(given)
