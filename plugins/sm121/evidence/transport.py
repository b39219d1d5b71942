"""The transport of the bytes between the ranks of a server.

NCCL's channels prove it, or the network that NCCL chose, or gloo's line, or the counters of RDMA
ports. A device that NCCL only found proves nothing.
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

#: The counters of an RDMA device that count its bytes.
_COUNTER = "ports/*/counters/port_*_data"
#: Bytes of a word of these counters, by the InfiniBand specification.
_WORD_BYTES = 4
#: The value at which a counter of 32 bits stops, by the same.
_FULL = 0xFFFFFFFF
#: A device carries bytes if it counted at least one of so many parts of them.
_CARRYING_PARTS = 100
#: Bytes of a value in 16 bits, which the ranks exchange.
_VALUE_BYTES = 2
REMEDY = "start all ranks with NCCL_DEBUG=INFO"
#: In NCCL's list: the number of a device, and its name, or those of the devices merged into it.
_DEVICE = re.compile(r"\[(\d+)\](=\{[^}]*\}|[^\s\[]+)")
_LINK = re.compile(r":\d+/(\w+)")
#: NCCL's names of RDMA: its own network, and that of its plugin.
_RDMA = re.compile(r"IB(ext)?(_v\d+)?")


class Transport(data_file.Record):
    """The transport of one rank."""

    kinds: list[str]
    """``RoCE``, ``IB``, ``Socket``, ``P2P``, ``SHM``, ``gloo``; a plugin's own name."""
    devices: int | None = None
    """RDMA devices with a channel; None where nothing shows it."""
    evidence: str
    """The line, or the numbers of the counters."""


@dataclass(frozen=True)
class _Channel:
    """A channel to another rank, as ``NET/IB/0``, ``NET/Socket/0`` or ``SHM``."""

    text: str
    kind: str
    #: The device's number in NCCL's list; empty without one.
    number: str


def of_path(path: KernelPath) -> Transport | None:
    """Return the transport that the lines of a rank prove.

    Args:
        path: The path of the rank.

    Returns:
        The transport of its channels, else of the chosen network, else gloo; None if there is none
        of these.
    """
    links = path.log.links
    listed = links.rdma_devices or ""
    kinds = _LINK.findall(listed)
    rdma = kinds[0] if kinds else "IB"
    sizes = {number: _count_merged(text) for number, text in _DEVICE.findall(listed)}
    if links.channels:
        channels = [_parse_channel(text, rdma) for text in links.channels]
        # A line of a kind that may be wrong is the evidence, if there is one.
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
    """Count the devices of an entry of NCCL's list: ``=[...]`` with slashes, or names with +."""
    return max(text.count("/"), text.count("+") + 1)


def _parse_channel(text: str, rdma: str) -> _Channel:
    """Parse a channel. `rdma`: the kind of the RDMA devices, ``RoCE`` or ``IB``."""
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
    """Count the RDMA devices behind the numbers of channels.

    `rerouted`: ``2>0`` if NCCL uses device 0 in the place of 2; `sizes`: the devices that were
    merged into each number of NCCL's list.
    """
    instead = dict(pair.split(">") for pair in rerouted)
    total = 0
    for number in {instead.get(number, number) for number in numbers}:
        if number in sizes:
            total += sizes[number]
        elif sizes:
            return None  # a device that NCCL has made of others
        else:
            total += 1
    return total or None


def by_counters(counted: Mapping[str, int | None], least: int) -> Transport | None:
    """Return the transport that the counters of RDMA ports prove.

    Args:
        counted: The bytes of a prompt by device, of one node. None: not counted.
        least: The bytes that its ranks had to exchange for the prompt.

    Returns:
        ``RoCE`` if the devices counted them, ``Socket`` if they did not; None if they did not and
        one of them counts nothing.
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
    """Read how many bytes the RDMA devices of this machine sent and received.

    Args:
        root: The folder of the devices.

    Returns:
        The bytes by counter. None: its driver has none (``N/A``), its port is dead, or its 32 bits
        are full.
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
        after: The second one.

    Returns:
        The bytes by device. None: one of its counters could not be read, is full, or began anew.
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
    """Return half of the bytes that each of two ranks sends for a prompt.

    Args:
        tokens: The tokens of the prompt.
        hidden: The values of a token, of two bytes each.
        collectives: The sums over all ranks for each token.
    """
    return tokens * hidden * _VALUE_BYTES * collectives // 2


def contradictions(
    ranks: Sequence[RankPath],
    carried: Mapping[int, Transport],
    accepted: Collection[str],
) -> list[Contradiction]:
    """Find the ranks whose bytes use another transport than is accepted.

    Args:
        ranks: The ranks.
        carried: The transport of each, by its index in `ranks`.
        accepted: The accepted kinds.
    """
    found: list[Contradiction] = []
    for index, transport in carried.items():
        unaccepted = ", ".join(kind for kind in transport.kinds if kind not in accepted)
        if unaccepted:
            part = f"transport of {ranks[index]}"
            required = " or ".join(accepted)
            text = f"{part}: required {required}, seen {unaccepted} ({transport.evidence})"
            found.append(Contradiction(part, unaccepted, text))
    return found


def remarks(ranks: Sequence[RankPath], carried: Mapping[int, Transport], devices: int) -> list[str]:
    """Find the ranks whose bytes use fewer RDMA devices than their node has.

    Args:
        ranks: The ranks.
        carried: The transport of each, by its index in `ranks`.
        devices: The devices of a node.

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
