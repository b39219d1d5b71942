"""Detect the engine of an attached server from the answers of its API."""

from collections.abc import Mapping
from typing import Any

import httpx

from sm121.core import builds
from sm121.core.server import Server
from sm121.engines.attached_pages import json_of
from sm121.engines.capabilities import (
    Capabilities,
    EngineFile,
    RecognisedBy,
    capabilities_of,
    offered,
    shipped,
)

#: The engine file for a server that no other file recognises (plain OpenAI-compatible API).
FALLBACK = "openai"
#: A counter that vLLM's /metrics contains from the start if speculative decoding is on.
_DRAFTS = "spec_decode_num_drafts"
#: The engine whose /props contain one of these settings; its /metrics always contain the counter.
_LLAMA_SERVER = "llama-cpp"
_SPECULATIVE = ("speculative.types", "speculative.type")


def detect(
    server: Server, named: str | None = None, *, identity: str | None = None
) -> Capabilities:
    """Detect the engine of a running server and its capabilities.

    If the release of the server is unknown, the suite requests /openapi.json.

    Args:
        server: The server.
        named: The name of the server's engine. If None, the engine is recognised by the server's
            answers.
        identity: The release or build (`builds.identity`), if it is known from other evidence than
            the version, for example from the log.

    Raises:
        UsageError: The suite has no file of the named engine.
    """
    with server.endpoint.http(timeout_s=10.0) as http:
        if named is None:
            named = _recognise(http)
        version = server.version or _ask_version(http, capabilities_of(named, None).file.detection)
        offers = None
        if identity is None and builds.identity(version) is None:
            offers = offered(json_of(http, "/openapi.json"))
        if named == _LLAMA_SERVER:
            drafts = _llama_server_drafts(json_of(http, "/props"))
        else:
            drafts = _DRAFTS in (server.endpoint.page("/metrics") or "")
    return capabilities_of(named, version, identity=identity, offers=offers, drafts=drafts)


def _llama_server_drafts(props: Mapping[str, Any]) -> bool:
    """Return whether llama-server uses speculative decoding, as its /props shows."""
    try:
        params = dict(props["default_generation_settings"]["params"])
    except (KeyError, TypeError, ValueError):
        return False  # an older build
    return any(params.get(name) not in (None, "", "none") for name in _SPECULATIVE)


def _recognise(http: httpx.Client) -> str:
    """Return the name of the first engine whose file recognises the server."""
    models = json_of(http, "/v1/models").get("data")
    entries = models if isinstance(models, list) else []
    owners = {str(entry.get("owned_by")) for entry in entries if isinstance(entry, dict)}
    for file in shipped().values():
        if _is_recognised(http, file, owners):
            return file.name
    return FALLBACK


def _is_recognised(http: httpx.Client, file: EngineFile, owners: set[str]) -> bool:
    signs = file.detection
    if owners & {*signs.owned_by}:
        return True
    return signs.path is not None and signs.key in json_of(http, signs.path)


def _ask_version(http: httpx.Client, signs: RecognisedBy) -> str | None:
    if signs.version_path is None or signs.version_key is None:
        return None
    answer = json_of(http, signs.version_path).get(signs.version_key)
    return None if answer is None else str(answer)
