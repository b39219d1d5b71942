"""Checks the options about an attached server: its address, API key, engine and log."""

from dataclasses import dataclass, field
from pathlib import Path

from sm121.core import options
from sm121.core.errors import UsageError
from sm121.core.options import Option
from sm121.core.profile import Profile
from sm121.engines import given_key
from sm121.engines.options import AttachedOptions
from sm121.evidence import log_lines
from sm121.regression.ab import Side
from sm121.session import given_nodes


@dataclass(frozen=True)
class GivenServer:
    """An attached server, as described by the options."""

    base_url: str
    api_key: str | None = field(default=None, repr=False)
    #: The engine, if the user has named it.
    engine: str | None = None
    log: Path | None = None
    #: The option that names the log, if the log is a stream.
    log_name: str | None = None
    #: Whether the log is read from standard input.
    log_on_stdin: bool = False
    #: The container that writes the log.
    container: str | None = None
    #: The logs of the other nodes of a server on several machines.
    node_logs: tuple[Path, ...] = ()


def read_options(
    option: Option, url: str | None, sides: tuple[Side, Side] | None, profile: Profile | None
) -> GivenServer | None:
    """Read the options.

    Args:
        option: A function that returns the value of an option.
        url: The URL of the server (`url_of`).
        sides: The sides of ``--ab``; None without it.
        profile: The profile that was named; None if none was.

    Returns:
        The server; None if the suite starts one.

    Raises:
        UsageError: An option is wrong, or contradicts another one.
    """
    given = options.read(AttachedOptions, option)
    logs = _server_logs(given, sides, url, profile)
    if url is None:
        return None
    return GivenServer(
        base_url=url,
        api_key=given_key.api_key(option),
        engine=option("--engine"),
        log=logs[0] if logs else None,
        log_on_stdin=_is_log_on_stdin(given),
        container=given.container,
        node_logs=logs[1:],
    )


def url_of(option: Option, sides: tuple[Side, Side] | None) -> str | None:
    """Return the URL of the attached server: of ``--base-url``, or of the first side of ``--ab``.

    Args:
        option: A function that returns the value of an option.
        sides: The sides of ``--ab``; None without it.

    Returns:
        The URL; None if the suite starts a server.

    Raises:
        UsageError: It is no URL of a server.
    """
    url = base_url(option)
    if url is None and sides is not None:
        return sides[0].url
    return url


def base_url(option: Option) -> str | None:
    """Return the URL that ``--base-url`` names; None without it.

    Args:
        option: A function that returns the value of an option.

    Raises:
        UsageError: It is no URL of a server.
    """
    return options.read(AttachedOptions, option).base_url


def _is_log_on_stdin(given: AttachedOptions) -> bool:
    return given.server_logs == ("-",)


def _server_logs(
    given: AttachedOptions,
    ab: tuple[Side, Side] | None,
    base_url: str | None,
    profile: Profile | None,
) -> tuple[Path, ...]:
    """Return the files of an attached server's log: one, or one per node.

    It is empty if no log was given, or if the log is a stream. Raises UsageError if a log is
    missing, or if options contradict each other.
    """
    if given.container is not None or _is_log_on_stdin(given):
        _refuse_stream(given, profile)
        return ()
    logs = tuple(Path(log) for log in given.server_logs)
    if not logs and ab is not None and base_url == ab[0].url and ab[0].log is not None:
        logs = (ab[0].log,)
    for log in logs:
        if not log.is_file():
            got = "something that is not a file" if log.exists() else "no file of that name"
            raise UsageError(
                f"--server-log {log}: expected the log file of the server, got {got}. "
                "Give the file that the server writes, or --container NAME"
            )
    _refuse_number_of_logs(logs, given_nodes.count_of(profile))
    return logs


def _refuse_stream(given: AttachedOptions, profile: Profile | None) -> None:
    """Raise UsageError if there are several logs and one of them is a stream."""
    if given.container is not None and given.server_logs:
        raise UsageError("--container with --server-log: expected one of them, got both")
    if profile is not None and profile.nodes is not None:
        raise UsageError("--container, --server-log -: expected --server-log FILE for each node")


def _refuse_number_of_logs(logs: tuple[Path, ...], count: int) -> None:
    """Raise UsageError if a node has no log. With Ray, the driver's log is sufficient."""
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
