"""Check, before a server is started, that all of its nodes are set up in the same way."""

import socket
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sm121.core import data_file
from sm121.core.configuration import ServerConfiguration, Span
from sm121.core.data_file import DataTable
from sm121.core.errors import UsageError
from sm121.core.profile_fields import Sourced
from sm121.core.server import Node
from sm121.engines import listeners, node_agent, process_tree
from sm121.engines.node_process import NodeProcess, question
from sm121.engines.ports import LOOPBACK, free_port

#: The maximum number of differences that a message lists.
_SHOWN_DIFFERENCES = 5


class NodesFile(DataTable):
    """``fixtures/nodes.toml``."""

    answers_within_s: Sourced
    silent_after_s: Sourced
    lease_s: Sourced
    unreachable_after_s: Sourced
    stopped_after_s: Sourced
    token_within_s: Sourced
    packages: tuple[str, ...]
    variables: tuple[str, ...]
    own_variables: frozenset[str]


@dataclass(frozen=True)
class NodeLook:
    """The facts that one node reports for a configuration: packages, variables, GPUs, model."""

    node: Node
    #: The facts that the node reported.
    facts: dict[str, Any]
    #: One line for each server that an earlier, dead run had left on the node and that was ended
    #: now.
    leftovers: tuple[str, ...] = ()


def bounds() -> NodesFile:
    """Return the timeouts of nodes, and the packages and variables that must be equal."""
    return data_file.load("nodes.toml", NodesFile)


def master(span: Span) -> tuple[str, int]:
    """Return the address and the port at which the other ranks connect to rank 0.

    Args:
        span: The settings for starting the server on several machines.

    Raises:
        UsageError: The address does not belong to this machine, or the port is in use.
    """
    host, _, given = (span.address or LOOPBACK).partition(":")
    if given and not _is_port(given):
        raise UsageError(f"--master-addr {span.address}: expected ADDRESS or ADDRESS:PORT, of IPv4")
    if not listeners.is_here(host):
        raise UsageError(f"--master-addr {host}: expected an address of this machine")
    host = _one_address(host)
    if not given:
        return host, free_port(host)
    port = int(given)
    try:
        socket.create_server((host, port)).close()
    except OSError as error:
        holders = process_tree.describe(listeners.listeners(host, port))
        who = "; ".join(map(str, holders)) or (
            "a process that this process cannot see (in a container?)"
        )
        raise UsageError(
            f"--master-addr {span.address}: the port cannot be used ({error.strerror}), because "
            f"it is held by {who}: an earlier server may still be running; end it, or give "
            "another port"
        ) from error
    return host, port


def _is_port(text: str) -> bool:
    return text.isdecimal() and len(text) <= 5 and 0 < int(text) < 1 << 16


def _one_address(host: str) -> str:
    """Return the IPv4 address of a host of this machine.

    The address is used instead of the name, because a name may mean another machine on another
    node, and because connections are recognised by their addresses.
    """
    of_ipv4 = sorted(address for address in listeners.addresses(host) if "." in address)
    outer = [address for address in of_ipv4 if not address.startswith("127.")]
    candidates = outer or of_ipv4[:1]
    if len(candidates) > 1:
        listed = ", ".join(candidates)
        raise UsageError(f"--master-addr {host}: expected an address of this machine: {listed}")
    return candidates[0] if candidates else host


def check_nodes(configuration: ServerConfiguration) -> list[NodeLook]:
    """Check that the facts of all nodes are equal. Return the nodes' facts, rank 0 first.

    Args:
        configuration: The configuration.

    Raises:
        UsageError: A node does not answer, does not reach this machine, or differs from rank 0. The
            message is one line.
    """
    span = configuration.span
    assert span is not None
    host, port = master(span)
    with socket.create_server((host, port)):
        request = question(configuration, "look", reach=[[host, port]])
        processes = []
        for rank, command in enumerate(span.commands, 1):
            processes.append(NodeProcess(rank, command, request))
        try:
            first = node_agent.facts(configuration)
            looks = [NodeLook(Node(0, "this machine"), first)]
            for process in processes:
                answer = process.wait_for("facts", bounds().answers_within_s.value)
                _check_facts(process.node, answer, {*first, "unreachable"})
                looks.append(NodeLook(process.node, answer, tuple(answer.get("leftovers", ()))))
        finally:
            for process in processes:
                process.close(5.0)
    for other in looks[1:]:
        why = other.facts["unreachable"][str(port)]
        if why:
            raise UsageError(
                f"{other.node} cannot connect to {host}:{port} of this machine ({why}): give "
                "--master-addr an address (and a port) of this machine that the node can reach"
            )
        differences = unequal(_compared(first), _compared(other.facts))
        if differences:
            shown = "; ".join(differences[:_SHOWN_DIFFERENCES])
            raise UsageError(f"{other.node} differs from this machine: {shown}")
    return looks


def _check_facts(node: Node, facts: object, expected: set[str]) -> None:
    if not isinstance(facts, dict) or not expected <= facts.keys():
        raise UsageError(
            f"{node}: expected an agent of this suite's version, got other fields. "
            "Install this suite's version on that node"
        )


def unequal(first: Mapping[str, str], other: Mapping[str, str]) -> list[str]:
    """Return how another node differs from the first one, one line for each difference.

    Args:
        first: The facts of the first node; the keys are the facts' names.
        other: The facts of the other node.
    """
    lines = []
    for name in sorted({**first, **other}):
        expected = first.get(name) or "none"
        value = other.get(name) or "none"
        if value != expected:
            lines.append(f"{name} {value}, expected {expected}")
    return lines


def _compared(facts: Mapping[str, Any]) -> dict[str, str]:
    """Return the facts that must be equal on all nodes; the keys are their names in messages."""
    data = bounds()
    record = facts["record"]
    packages = record["engine_packages"]["packages"] or {}
    values = {name: packages[name] for name in data.packages if name in packages}
    for name, made in record["git_shas"].items():
        parts = (made.get(key) for key in ("version", "sha", "changes"))
        values[f"source of {name}"] = " ".join(map(str, filter(None, parts)))
    values["CUDA"] = record["cuda_version"]
    values["GPUs"] = ", ".join(str(gpu["name"]) for gpu in record["gpus"] or ())
    values["the model's files"] = facts["model"]
    for name, value in record["environment"].items():
        if name.startswith(data.variables) and name not in data.own_variables:
            values[name] = value
    return values
