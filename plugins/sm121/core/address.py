"""The address of a server, as a user gives it."""

from urllib.parse import urlsplit

from sm121.core import errors, redaction


def root_of(url: str, option: str) -> str:
    """Return a server's address without ``/v1`` and the final slash.

    Args:
        url: The address that a user gave.
        option: The option with the address, for the error message.

    Raises:
        UsageError: The address is not an HTTP URL, or contains a user name or password. The message
            does not show the password.
    """
    scheme, _, rest = url.partition("://")
    expected = "expected http://HOST:PORT, with or without /v1"
    if "@" in rest:
        raise errors.UsageError(
            f"{option} {scheme}://{redaction.REDACTED}@{rest.rpartition('@')[2]}: {expected}, "
            "without user and password, which every report would contain. Give the key in "
            "the variable OPENAI_API_KEY"
        )
    if "?" in rest or "#" in rest:
        path = rest.partition("?")[0].partition("#")[0]
        raise errors.UsageError(f"{option} {scheme}://{path}: {expected}, and nothing after it")
    parts = urlsplit(url)
    try:
        port_is_valid = parts.port is None or parts.port > 0
    except ValueError:
        port_is_valid = False
    if parts.scheme not in ("http", "https") or not parts.hostname or not port_is_valid:
        raise errors.UsageError(f"{option} {url}: {expected}")
    return url.rstrip("/").removesuffix("/v1")
