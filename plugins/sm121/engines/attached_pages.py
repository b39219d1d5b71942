"""Read JSON objects, the list of models and a short answer from an attached server's API."""

from typing import Any

import httpx


def json_of(http: httpx.Client, path: str) -> dict[str, Any]:
    """Request a path and return the JSON object in the answer; empty if it is anything else.

    Args:
        http: A client of the server.
        path: The path, for example ``/version``.
    """
    try:
        return json_in(http.get(path))
    except httpx.HTTPError:
        return {}


def json_in(answer: httpx.Response) -> dict[str, Any]:
    """Return the JSON object of an answer; empty if it has none, or is an error.

    Args:
        answer: The answer of a server.
    """
    if answer.status_code != 200:
        return {}
    try:
        content = answer.json()
    except (ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


def entry_of(models: dict[str, Any], name: str) -> dict[str, Any] | None:
    """Return the entry of one model in a list of models; None if the list does not name it.

    Args:
        models: The JSON object of ``/v1/models``.
        name: The id of the model.
    """
    data = models.get("data")
    for entry in data if isinstance(data, list) else []:
        if isinstance(entry, dict) and entry.get("id") == name:
            return entry
    return None


def request_token(http: httpx.Client, model: str, tokens: int = 1) -> dict[str, Any]:
    """Request a short answer of a chat, or else of a completion.

    Args:
        http: A client of the server.
        model: The name of the served model.
        tokens: The maximum number of tokens of the answer.

    Returns:
        The JSON object of the answer; empty if neither request is answered.
    """
    limit = {"model": model, "max_tokens": tokens, "temperature": 0}
    for path, prompt in (
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hello"}]}),
        ("/v1/completions", {"prompt": "Hello"}),
    ):
        try:
            answer = json_in(http.post(path, json=limit | prompt))
        except httpx.HTTPError:
            return {}
        if answer:
            return answer
    return {}
