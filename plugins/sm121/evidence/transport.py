"""Find the transport that the ranks of a server use between each other.

The proof is NCCL's channels, the network that NCCL chose, a line of gloo, or the counters of RDMA
ports. That NCCL found a device is no proof.
"""

import contextlib
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from sm121.core import data_file
from sm121.evidence.kernel_path import KernelPath
from sm121.evidence.ranks import RankPath
from sm121.evidence.requirement import Contradiction

#: The data counters of an RDMA device.
_COUNTER = "ports/*/counters/port_*_data"
#: The unit of these counters in bytes, from the InfiniBand specification.
_WORD_BYTES = 4
#: The value at which a 32-bit counter stops, from the InfiniBand specification.
_FULL = 0xFFFFFFFF
#: A device counts as used if it carried at least the expected bytes divided by this number.
_CARRYING_PARTS = 100
#: The size of the 16-bit values that the ranks exchange, in bytes.
_VALUE_BYTES = 2
REMEDY = "start all ranks with NCCL_DEBUG=INFO"
#: An entry of NCCL's list: the number of a device, and its name. A merged device has the names of
#: its parts instead.
_DEVICE = re.compile(r"\[(\d+)\](=\{[^}]*\}|[^\s\[]+)")
_LINK = re.compile(r":\d+/(\w+)")
#: The names of RDMA networks in NCCL's log: NCCL's own name, and those of its plugins.
_RDMA = re.compile(r"IB(ext)?(_v\d+)?")


class Transport(data_file.Record):
    """The transport of one rank."""

    kinds: list[str]
    """The kinds of channels: ``RoCE``, ``IB``, ``Socket``, ``P2P``, ``SHM``, ``gloo``, or the name
    that an NCCL plugin uses."""
    devices: int | None = None
    """The number of RDMA devices with a channel; None if it is unknown."""
    evidence: str
    """The log line, or the values of the counters."""


@dataclass(frozen=True)
class _Channel:
    """A channel to another rank, for example ``NET/IB/0``, ``NET/Socket/0`` or ``SHM``."""

    text: str
    kind: str
    #: The device's number in NCCL's list; empty if the channel has no device.
    number: str


def of_path(path: KernelPath) -> Transport | None:
    """Return the transport that the lines of a rank prove.

    Args:
        path: The path of the rank.

    Returns:
        The transport of the rank's channels. If the log shows none, the transport of the chosen
        network, or else gloo. None if the log shows none of these.
    """
    links = path.log.links
    listed = links.rdma_devices or ""
    kinds = _LINK.findall(listed)
    rdma = kinds[0] if kinds else "IB"
    sizes = {number: _count_merged(text) for number, text in _DEVICE.findall(listed)}
    if links.channels:
        channels = [_parse_channel(text, rdma) for text in links.channels]
        # As the evidence, prefer the line of a channel that does not use RDMA.
        suspect = [channel for channel in channels if channel.kind != rdma]
        proof = (suspect or channels)[0]
        numbers = {channel.number for channel in channels if channel.kind == rdma}
        return Transport(
            kinds=sorted({channel.kind for channel in channels}),
            devices=_count_devices(numbers, links.rerouted, sizes),
            evidence=path.evidence[f"channels.{proof.text}"],
        )
    if links.network is not None:
        has_one = list(sizes.values()) == [1]
        return Transport(
            kinds=[_kind_of_network(links.network, rdma)],
            devices=1 if has_one else None,
            evidence=path.evidence["network"],
        )
    if links.group == "gloo":
        return Transport(kinds=["gloo"], evidence=path.evidence["group"])
    return None


def _count_merged(text: str) -> int:
    """Count the devices in an entry of NCCL's list, which are separated by slashes or by +."""
    return max(text.count("/"), text.count("+") + 1)


def _parse_channel(text: str, rdma: str) -> _Channel:
    """Parse a channel. `rdma` is the kind of the RDMA devices, ``RoCE`` or ``IB``."""
    medium, _, rest = text.partition("/")
    if medium != "NET":
        return _Channel(text, kind=medium, number="")
    network, _, number = rest.partition("/")
    return _Channel(text, _kind_of_network(network, rdma), number.partition("/")[0])


def _kind_of_network(network: str, rdma: str) -> str:
    return rdma if _RDMA.fullmatch(network) else network


def _count_devices(
    numbers: Collection[str], rerouted: Sequence[str], sizes: Mapping[str, int]
) -> int | None:
    """Count the RDMA devices that are used by channels, given the channels' device numbers.

    `rerouted` contains, for example, ``2>0`` if NCCL uses device 0 instead of 2. `sizes` has the
    number of devices that were merged into each entry of NCCL's list.
    """
    instead = dict(pair.split(">") for pair in rerouted)
    total = 0
    for number in {instead.get(number, number) for number in numbers}:
        if number in sizes:
            total += sizes[number]
        elif sizes:
            return None  # a virtual device, which NCCL merged from others
        else:
            total += 1
    return total or None


def by_counters(counted: Mapping[str, int | None], least: int) -> Transport | None:
    """Return the transport that the counters of RDMA ports prove.

    Args:
        counted: The bytes that each device of one node carried during a prompt; None for a device
            that does not count them.
        least: The minimum number of bytes that the node's ranks must have exchanged for the prompt.

    Returns:
        ``RoCE`` if the devices carried at least these bytes, else ``Socket``. None if they carried
        fewer, but one of the devices has no counter.
    """
    bytes_of = {device: count for device, count in sorted(counted.items()) if count is not None}
    total = sum(bytes_of.values())
    if total < least and len(bytes_of) < len(counted):
        return None
    figures = ", ".join(f"{device} {count:,} B" for device, count in bytes_of.items()) or "none"
    carrying = [device for device, count in bytes_of.items() if count >= least / _CARRYING_PARTS]
    return Transport(
        kinds=["RoCE"] if total >= least else ["Socket"],
        devices=len(carrying) or None,
        evidence=f"RDMA ports counted {figures} during a prompt that needs {least:,} B",
    )


def read_counters(root: Path = Path("/sys/class/infiniband")) -> dict[Path, int | None]:
    """Read how many bytes the RDMA devices of this machine have sent and received.

    Args:
        root: The folder of the devices.

    Returns:
        The bytes of each counter. The value is None if the driver does not support the counter
        (``N/A``), if the port is down, or if the 32-bit counter has reached its maximum.
    """
    counters: dict[Path, int | None] = {}
    for file in root.glob(f"*/{_COUNTER}"):
        counter = file.relative_to(root)
        counters[counter] = None
        with contextlib.suppress(OSError, ValueError):
            words = int(file.read_text("ascii"))
            if words != _FULL:
                counters[counter] = _WORD_BYTES * words
    return counters


def difference(
    before: Mapping[Path, int | None], after: Mapping[Path, int | None]
) -> dict[str, int | None]:
    """Return the bytes between two readings of `read_counters`.

    Args:
        before: The first reading.
        after: The second reading.

    Returns:
        The bytes of each device. The value is None if one of the device's counters could not be
        read, has reached its maximum, or was reset.
    """
    counted: dict[str, int | None] = {}
    for counter, start in before.items():
        device = counter.parts[0]
        end = after.get(counter)
        total = counted.get(device, 0)
        if start is None or end is None or end < start or total is None:
            counted[device] = None
        else:
            counted[device] = total + end - start
    return counted


def least_bytes(tokens: int, hidden: int, collectives: int) -> int:
    """Return a lower bound for the bytes that each of two ranks sends for a prompt.

    The bound is half of the bytes that the ranks are expected to send.

    Args:
        tokens: The number of tokens of the prompt.
        hidden: The hidden size: the number of values per token, of two bytes each.
        collectives: The number of all-reduce operations per token.
    """
    return tokens * hidden * _VALUE_BYTES * collectives // 2


def contradictions(
    ranks: Sequence[RankPath],
    carried: Mapping[int, Transport],
    accepted: Collection[str],
) -> list[Contradiction]:
    """Find the ranks that use a transport which is not accepted.

    Args:
        ranks: The ranks.
        carried: The transport of each rank; the keys are indices of `ranks`.
        accepted: The accepted kinds of transport.
    """
    found: list[Contradiction] = []
    for index, transport in carried.items():
        unaccepted = ", ".join(kind for kind in transport.kinds if kind not in accepted)
        if unaccepted:
            part = f"transport of {ranks[index]}"
            required = " or ".join(accepted)
            text = f"{part}: expected {required}, got {unaccepted} ({transport.evidence})"
            found.append(Contradiction(part, unaccepted, text))
    return found


def remarks(ranks: Sequence[RankPath], carried: Mapping[int, Transport], devices: int) -> list[str]:
    """Find the ranks that use fewer RDMA devices than their node has.

    Args:
        ranks: The ranks.
        carried: The transport of each rank; the keys are indices of `ranks`.
        devices: The number of devices of a node.

    Returns:
        A line for each such rank.
    """
    lines: list[str] = []
    for index, transport in carried.items():
        if transport.devices is not None and transport.devices < devices:
            lines.append(
                f"{ranks[index]}: {transport.devices} of {devices} RDMA devices carry bytes: a "
                f"part of the link's rate is not used ({transport.evidence})"
            )
    return lines
