"""Checks the options about a server on several machines: how its other nodes start."""

from sm121.core import options
from sm121.core.errors import UsageError
from sm121.core.options import Option
from sm121.core.profile import Profile
from sm121.engines.options import NodeOptions

_NODE_OPTIONS = tuple(each.name for each in options.declarations(NodeOptions).values())


def count_of(profile: Profile | None) -> int:
    """Return the number of machines of a profile's server.

    Args:
        profile: The profile; None without one.
    """
    if profile is None or profile.nodes is None:
        return 1
    return profile.nodes.count


def read_options(option: Option, profile: Profile | None, base_url: str | None) -> NodeOptions:
    """Read the options.

    Args:
        option: A function that returns the value of an option.
        profile: The profile that was named; None if none was.
        base_url: The URL of the attached server; None without one.

    Raises:
        UsageError: An option is wrong, the run starts no server on several nodes, or a node has no
            command.
    """
    given = options.read(NodeOptions, option)
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
    if () in given.commands:
        raise UsageError("--node-command: expected a command that runs Python on a node")
    others = count_of(profile) - 1
    if given.commands and len(given.commands) != others:
        raise UsageError(
            f"--node-command: expected {others}, one for each node other than this one; got "
            f"{len(given.commands)}"
        )
    return given
