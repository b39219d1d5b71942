"""Find a free TCP port of this machine, and check whether a port is free."""

import socket

#: The address at which the suite's own servers listen.
LOOPBACK = "127.0.0.1"


def free_port(host: str = LOOPBACK) -> int:
    """Return a port that was free a moment ago.

    Another process may take the port before the caller binds it, so the caller must retry.

    Args:
        host: The IPv4 address on which the port must be free.

    Raises:
        OSError: The address does not belong to this machine.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


def is_free(port: int) -> bool:
    """Return whether a server could listen on a port of the loopback address now.

    Args:
        port: The number of the TCP port.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        # Servers set this option, too. With it, connections in TIME_WAIT do not occupy the port.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((LOOPBACK, port))
        except OSError:
            return False
        return True
