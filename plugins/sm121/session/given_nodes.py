"""Options about the machines of a server: its logs, and how its other nodes are reached."""

from pathlib import Path
from typing import get_args

from sm121.core.engine_settings import Launcher
from sm121.core.errors import UsageError
from sm121.core.options import Option
from sm121.core.profile import Profile
from sm121.engines import followed_log
from sm121.evidence import log_lines
from sm121.regression.ab import Side
from sm121.session import given_engine

_NODE_OPTIONS = ("--launcher", "--node-command", "--master-addr")


def is_log_on_stdin(option: Option) -> bool:
    """Whether the log of the attached server comes on standard input.

    Args:
        option: Gives the value of an option.
    """
    logs: list[str] = option("--server-log")
    return logs == ["-"]


def server_logs(
    option: Option,
    ab: tuple[Side, Side] | None,
    base_url: str | None,
    profile: Profile | None,
) -> tuple[Path, ...]:
    """Return the files of an attached server's log.

    Args:
        option: Gives the value of an option.
        ab: The sides of ``--ab``; None without it.
        base_url: The URL of the attached server; None without one.
        profile: The profile that was named; None if none was.

    Returns:
        One file, or one of each node. None at all if no log is known, or if it is a stream.

    Raises:
        UsageError: A log is missing, or options contradict each other.
    """
    container = option("--container")
    if container is not None:
        followed_log.check_container(container)
    if container is not None or is_log_on_stdin(option):
        _refuse_stream(option, profile)
        return ()
    logs = tuple(Path(given) for given in option("--server-log"))
    if not logs and ab is not None and base_url == ab[0].url and ab[0].log is not None:
        logs = (ab[0].log,)
    for log in logs:
        if not log.is_file():
            raise UsageError(f"--server-log {log}: expected the log file of the server")
    _refuse_number_of_logs(logs, _nodes_of(profile))
    return logs


def _refuse_stream(option: Option, profile: Profile | None) -> None:
    """Raise UsageError if a log that is a stream is not the only one."""
    if option("--container") is not None and option("--server-log"):
        raise UsageError("--container with --server-log: expected one of them")
    if profile is not None and profile.nodes is not None:
        raise UsageError("--container, --server-log -: expected --server-log FILE for each node")


def _refuse_number_of_logs(logs: tuple[Path, ...], count: int) -> None:
    """Raise UsageError if not every node has a log, but for Ray's, whose driver has all of them."""
    if not logs:
        return
    if len(logs) == 1 < count and log_lines.has_rays_workers(logs[0]):
        return
    different = {log.resolve() for log in logs}
    if len(different) == count:
        return
    whose = "of the server"
    if count != 1:
        whose = f"of each of its {count} nodes, rank 0 first"
    listed = ", ".join(str(log) for log in logs)
    raise UsageError(f"--server-log: expected {count}, the log {whose}; got {listed}")


def _nodes_of(profile: Profile | None) -> int:
    """The number of machines that a server of a profile spans."""
    if profile is None or profile.nodes is None:
        return 1
    return profile.nodes.count


def launcher(option: Option, profile: Profile | None, base_url: str | None) -> str | None:
    """Return what ``--launcher`` names; None without it.

    Args:
        option: Gives the value of an option.
        profile: The profile that was named; None if none was.
        base_url: The URL of the attached server; None without one.

    Raises:
        UsageError: There is no such launcher, or the run starts no server on several nodes.
    """
    named = [name for name in _NODE_OPTIONS if option(name)]
    if named and base_url:
        raise UsageError(f"{', '.join(named)}: an attached server is never started")
    if named and (profile is None or profile.nodes is None):
        raise UsageError(f"{', '.join(named)}: expected a --profile of nodes")
    given: str | None = option("--launcher")
    if given not in (None, *get_args(Launcher)):
        expected = " or ".join(get_args(Launcher))
        raise UsageError(f"--launcher {given}: expected {expected}")
    return given


def commands(option: Option, profile: Profile | None) -> tuple[tuple[str, ...], ...]:
    """Return the commands that run Python on the other nodes, as words; empty without them.

    Args:
        option: Gives the value of an option.
        profile: The profile that was named; None if none was.

    Raises:
        UsageError: A command is empty, or not every other node has one.
    """
    given = []
    for text in option("--node-command"):
        given.append(tuple(given_engine.words("--node-command", text)))
    if () in given:
        raise UsageError("--node-command: expected a command that runs Python on a node")
    others = _nodes_of(profile) - 1
    if given and len(given) != others:
        raise UsageError(
            f"--node-command: expected {others}, one of each other node; got {len(given)}"
        )
    return tuple(given)
