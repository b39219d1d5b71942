"""Which engine an attached server is, from what it says of itself."""

import httpx

from sm121.core import builds
from sm121.core.server import Server
from sm121.engines.attached_pages import json_of
from sm121.engines.capabilities import Capabilities, EngineFile, of, offered, shipped

#: A server that no file recognises is held to what every OpenAI-compatible server has.
FALLBACK = "openai"
#: Of a counter that /metrics of vLLM have where it speculates, from the start on.
_DRAFTS = "spec_decode_num_drafts"


def detect(
    server: Server, named: str | None = None, *, identity: str | None = None
) -> Capabilities:
    """What a running server can do; one whose release is not known is asked. `named`: the engine
    that it is (default: recognised by its answers); `identity`: of `builds.identity`, where more
    than its version tells it. Raises UsageError: the suite has no file of ``named``."""
    with server.endpoint.http(timeout_s=10.0) as http:
        if named is None:
            models = json_of(http, "/v1/models").get("data")
            entries = models if isinstance(models, list) else []
            owners = {str(entry.get("owned_by")) for entry in entries if isinstance(entry, dict)}
            files = (file for file in shipped().values() if _recognised(http, file, owners))
            named = next((file.name for file in files), FALLBACK)
        version, signs = server.version or None, of(named, None).file.detection
        if not version and signs.version_path is not None and signs.version_key is not None:
            answer = json_of(http, signs.version_path).get(signs.version_key)
            version = None if answer is None else str(answer)
        offers = None
        if identity is None and builds.identity(version) is None:
            offers = offered(json_of(http, "/openapi.json"))
    drafts = _DRAFTS in (server.endpoint.page("/metrics") or "")
    return of(named, version, identity=identity, offers=offers, drafts=drafts)


def _recognised(http: httpx.Client, file: EngineFile, owners: set[str]) -> bool:
    signs = file.detection
    return bool(owners & {*signs.owned_by}) or (
        signs.path is not None and signs.key in json_of(http, signs.path)
    )
