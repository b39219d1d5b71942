"""The load on a server."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from sm121.machine.timeline import Timeline

if TYPE_CHECKING:
    # This imports aiohttp, which only a run with the stress level needs.
    from sm121.client.load import LoadClient


@dataclass(frozen=True)
class Load:
    """The load on a server."""

    #: The client that sends the requests.
    client: LoadClient
    #: The samples of the server during the load.
    timeline: Timeline
