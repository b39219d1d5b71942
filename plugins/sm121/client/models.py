"""The models that a server lists."""

from typing import Any

import httpx

from sm121.core.errors import UsageError


def listed(http: httpx.Client, expected: str) -> dict[str, Any]:
    """Return the answer of /v1/models, whose ``data`` has an entry with ``id`` for each model.

    Args:
        http: A client of the server.
        expected: The beginning of error messages: the address, and what is expected there.

    Raises:
        UsageError: No server answers, it refuses the API key, or its answer is not a list of
            models.
    """
    answer = _get(http, expected)
    try:
        models: dict[str, Any] = answer.json()
        for model in models["data"]:
            _ = model["id"], model.get("root")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        kind = answer.headers.get("content-type", "no content type")
        raise UsageError(
            f"{expected}; /v1/models answered with {kind}, not a list of models"
        ) from error
    return models


def _get(http: httpx.Client, expected: str) -> httpx.Response:
    try:
        answer = http.get("/v1/models")
    except httpx.HTTPError as error:
        reason = str(error) or type(error).__name__
        if "CERTIFICATE_VERIFY_FAILED" in reason:
            reason += "; name your own certificate authority in the variable SSL_CERT_FILE"
        raise UsageError(
            f"{expected}, got no answer from /v1/models ({reason}). Start the server, or name "
            "the address at which it listens"
        ) from error
    if answer.status_code in (401, 403):
        raise UsageError(
            f"{expected} that accepts the key, got status {answer.status_code}. Give the key in "
            "the variable OPENAI_API_KEY"
        )
    if answer.status_code != 200:
        raise UsageError(f"{expected}; /v1/models answered with status {answer.status_code}")
    return answer
