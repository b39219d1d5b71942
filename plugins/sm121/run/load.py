"""The load on a server."""

from dataclasses import dataclass

from sm121.client.load import LoadClient
from sm121.machine.timeline import Timeline


@dataclass(frozen=True)
class Load:
    """The load on a server."""

    #: Sends the requests.
    client: LoadClient
    #: The samples of the server meanwhile.
    timeline: Timeline
