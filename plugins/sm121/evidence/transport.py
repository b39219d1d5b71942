"""What carries the bytes between the ranks of a server: by NCCL's channels or the network that it
chose, by gloo's line, or by counters of RDMA ports. What NCCL only found proves nothing."""

import contextlib
import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from sm121.core import data_file
from sm121.evidence.kernel_path import KernelPath
from sm121.evidence.ranks import RankPath
from sm121.evidence.requirement import Contradiction

_COUNTER = "ports/*/counters/port_*_data"
_WORD_BYTES = 4  # of those counters, by the InfiniBand specification
_FULL = 0xFFFFFFFF  # where one of 32 bits stops, by the same
REMEDY = "start all ranks with NCCL_DEBUG=INFO"
#: Of NCCL's list: a device's number, and it, or those that were merged into it.
_DEVICE = re.compile(r"\[(\d+)\](=\{[^}]*\}|[^\s\[]+)")
_LINK = re.compile(r":\d+/(\w+)")


class Transport(data_file.Record):
    """What carries the bytes of one rank."""

    kinds: list[str]
    """``RoCE``, ``IB``, ``Socket``, ``P2P``, ``SHM``, ``gloo``; a plugin's own name."""
    devices: int | None = None
    """RDMA devices with a channel; None where nothing shows it."""
    evidence: str
    """The line, or what the counters counted."""


def of_path(path: KernelPath) -> Transport | None:
    """What the lines of a rank prove; None: nothing. A channel decides over the chosen network."""
    listed = path.rdma_devices or ""
    merged = {n: max(text.count("/"), text.count("+") + 1) for n, text in _DEVICE.findall(listed)}
    rdma = next(iter(_LINK.findall(listed)), "IB")
    if path.channels:
        kinds = sorted({_kind(channel, rdma) for channel in path.channels})
        # A line of a kind that may be wrong is the evidence, if there is one.
        worst = next((c for c in path.channels if _kind(c, rdma) != rdma), path.channels[0])
        instead = dict(pair.split(">") for pair in path.rerouted)
        used = [c.split("/")[2] for c in path.channels if _kind(c, rdma) == rdma]
        carrying = {instead.get(number, number) for number in used}
        # A number that is not in the list is a device that NCCL has made of others.
        counts = [merged.get(number, None if merged else 1) for number in carrying]
        return Transport(
            kinds=kinds,
            devices=sum(filter(None, counts)) or None if all(counts) else None,
            evidence=path.evidence[f"channels.{worst}"],
        )
    if path.network is not None:
        return Transport(
            kinds=[_kind(f"NET/{path.network}", rdma)],
            devices=1 if list(merged.values()) == [1] else None,
            evidence=path.evidence["network"],
        )
    if path.group == "gloo":
        return Transport(kinds=["gloo"], evidence=path.evidence["group"])
    return None


def _kind(channel: str, rdma: str) -> str:
    net, _, name = channel.partition("/")
    if net != "NET":
        return net
    name = name.partition("/")[0]
    return rdma if re.fullmatch(r"IB(ext)?(_v\d+)?", name) else name


def by_counters(counted: Mapping[str, int | None], least: int) -> Transport | None:
    """What the counters of RDMA ports prove of a prompt's bytes; None: too little, and not all
    tell. `counted`: bytes by device, of one node; `least`: what its ranks had to exchange."""
    bytes_of = {device: count for device, count in sorted(counted.items()) if count is not None}
    total = sum(bytes_of.values())
    if total < least and len(bytes_of) < len(counted):
        return None
    figures = ", ".join(f"{device} {count:,} B" for device, count in bytes_of.items()) or "none"
    return Transport(
        kinds=["RoCE"] if total >= least else ["Socket"],
        devices=sum(count >= least / 100 for count in bytes_of.values()) or None,
        evidence=f"RDMA ports counted {figures} during a prompt that needs {least:,} B",
    )


def read_counters(root: Path = Path("/sys/class/infiniband")) -> dict[Path, int | None]:
    """Bytes sent and received by the RDMA devices of a machine, by counter; None of one that tells
    nothing: its driver has none (``N/A``), its port is dead, its 32 bits are full."""
    counters: dict[Path, int | None] = {}
    for file in root.glob(f"*/{_COUNTER}"):
        counters[file.relative_to(root)] = None
        with contextlib.suppress(OSError, ValueError):
            if (words := int(file.read_text("ascii"))) != _FULL:
                counters[file.relative_to(root)] = _WORD_BYTES * words
    return counters


def difference(
    before: Mapping[Path, int | None], after: Mapping[Path, int | None]
) -> dict[str, int | None]:
    """Bytes by device between two readings; None where one of its counters does not tell them: it
    could not be read, is full, or began anew."""
    counted: dict[str, int | None] = {}
    for counter, start in before.items():
        end, device = after.get(counter), counter.parts[0]
        total = counted.get(device, 0)
        if start is None or end is None or end < start or total is None:
            counted[device] = None
        else:
            counted[device] = total + end - start
    return counted


def least_bytes(tokens: int, hidden: int, collectives: int) -> int:
    """Half of what each of two ranks sends for a prompt, in bytes: `collectives` sums a token of
    `hidden` values of two bytes."""
    return tokens * hidden * 2 * collectives // 2


def contradictions(
    ranks: Sequence[RankPath],
    carried: Mapping[int, Transport],
    accepted: Collection[str],
) -> list[Contradiction]:
    """Where bytes go another way than is accepted. `carried`: by index in `ranks`."""
    found = []
    for index, transport in carried.items():
        wrong = ", ".join(kind for kind in transport.kinds if kind not in accepted)
        if wrong:
            part = f"transport of {ranks[index]}"
            required = " or ".join(accepted)
            text = f"{part}: required {required}, seen {wrong} ({transport.evidence})"
            found.append(Contradiction(part, wrong, text))
    return found


def remarks(ranks: Sequence[RankPath], carried: Mapping[int, Transport], devices: int) -> list[str]:
    """Where fewer RDMA devices carry than a node has, a line each. `devices`: of a node."""
    return [
        f"{ranks[index]}: {transport.devices} of {devices} RDMA devices carry bytes: a part of the "
        f"link's rate is not used ({transport.evidence})"
        for index, transport in carried.items()
        if transport.devices is not None and transport.devices < devices
    ]
