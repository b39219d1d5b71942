"""Attach to a server that somebody else started. Nothing is started or stopped."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from sm121.client import models
from sm121.core.address import root_of
from sm121.core.errors import UsageError
from sm121.core.server import NO_KEY, UNRECOGNISED, Endpoint, Server
from sm121.engines.attached_pages import json_of
from sm121.engines.signs import CLOCK_SLACK_S
from sm121.evidence import metrics

_ANSWER_WITHIN_S = 10.0
#: The number of requests to each path. Behind a load balancer that picks one of two processes at
#: random, all eight requests reach the same process in 1 of 128 cases.
_REQUESTS = 8


def attach(
    base_url: str,
    *,
    api_key: str | None,
    served_name: str | None,
    default_name: str,
    log: Path | None,
    naming: str | None = "--model",
    option: str = "--base-url",
) -> Server:
    """Probe a running OpenAI-compatible server.

    Args:
        base_url: The address of the server.
        api_key: The key that the server requires; None if it requires none.
        served_name: The model that the server must serve. If None, the suite takes the model
            `default_name`, or else the only model that the server has, by its first name.
        default_name: The model that the suite takes if the server has several.
        log: The log of the server, if the user gave one.
        naming: The option that names the model, for the error message; None if there is none.
        option: The option or argument with the address, for the error message.

    Raises:
        UsageError: No server answers, the server has another API, or it serves another model.
    """
    address = root_of(base_url, option)
    endpoint = Endpoint(address, api_key or NO_KEY, served_name or default_name)
    expected = f"{option} {address}: expected an OpenAI-compatible server"
    with endpoint.http(timeout_s=_ANSWER_WITHIN_S) as http:
        listed = models.listed(http, expected)
        version = json_of(http, "/version").get("version")  # only vLLM has this path
    roots = {str(model["id"]): model.get("root") for model in listed["data"]}
    names = _names_of_one_model(roots)
    if served_name is None and names and default_name not in names:
        endpoint = replace(endpoint, served_name=names[0])
    if endpoint.served_name not in roots:
        serves = ", ".join(roots) or "nothing"
        raise another_model(base_url, endpoint.served_name, serves, naming=naming, option=option)
    root = roots[endpoint.served_name]
    return Server(
        endpoint=endpoint,
        managed=False,
        engine=UNRECOGNISED,
        version=str(version) if version is not None else None,
        log=log,
        configuration=None,
        startup_s=None,
        root=root if isinstance(root, str) else None,
        names=tuple(names),
    )


def _names_of_one_model(roots: Mapping[str, object]) -> list[str]:
    """Return the served names if all belong to one model, else none.

    vLLM lists an entry for each value of ``--served-model-name``, all with the model as their root.
    An adapter has its own root.

    Args:
        roots: The model's path or hub id by its served name.
    """
    if len(roots) == 1:
        return list(roots)
    paths = [path for path in roots.values() if isinstance(path, str) and path]
    is_one = len(paths) == len(roots) and len(set(paths)) == 1
    return list(roots) if is_one else []


def another_model(
    base_url: str,
    expected: str,
    serves: str,
    *,
    naming: str | None = "--model",
    option: str = "--base-url",
) -> UsageError:
    """Return the error for a server that serves another model than the expected one.

    Args:
        base_url: The address of the server.
        expected: The name of the expected model; empty: any name, but only one model.
        serves: The names of the served models.
        naming: The option that names the model; None if there is none.
        option: The option or argument with the address.
    """
    model = repr(expected) if expected else "one model"
    advice = f"; name one with {naming}" if naming is not None else ""
    return UsageError(
        f"{option} {base_url}: expected a server of {model}, got one of {serves}{advice}"
    )


def several_processes(base_url: str, api_key: str | None) -> str | None:
    """Return an error if more than one process answers at an address, as behind a load balancer.

    Several requests are sent, each over its own connection.

    Args:
        base_url: The address of the server.
        api_key: The key that the server requires; None if it requires none.

    Returns:
        The error with its evidence; None if only one process is known.
    """
    endpoint = Endpoint(root_of(base_url, "--base-url"), api_key or NO_KEY, "")
    # Send all requests for one path before those for the next path. If two replicas take turns,
    # alternating the paths would get each path from one replica only.
    starts = []
    for _ in range(_REQUESTS):
        start = metrics.total(endpoint.page("/metrics") or "", "process_start_time_seconds")
        if start is not None:
            starts.append(start)
    versions: set[str] = set()
    for _ in range(_REQUESTS):
        with endpoint.http(timeout_s=_ANSWER_WITHIN_S) as http:
            versions.add(str(json_of(http, "/version").get("version")))
    if starts and max(starts) - min(starts) > CLOCK_SLACK_S:
        count = len({round(start) for start in starts})
        signs = f"/metrics shows {count} different start times"
    elif len(versions) > 1:
        signs = f"/version reports {' and '.join(sorted(versions))}"
    else:
        return None
    return f"several processes answer at {base_url} ({signs}): attach to the address of one of them"
