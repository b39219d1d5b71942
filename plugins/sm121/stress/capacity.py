"""How much a server holds: the length of its context, the blocks of its KV cache."""

from __future__ import annotations

import itertools
import re

from sm121.core.server import Endpoint, Server
from sm121.core.verdict import NotRun

#: vLLM's --max-num-batched-tokens where it is not given.
_CHUNK_TOKENS = 2048
_CACHE_BLOCKS = re.compile(r'cache_config_info\{[^}]*\bnum_gpu_blocks="(\d+)"')
_BLOCK_TOKENS = re.compile(r'cache_config_info\{[^}]*\bblock_size="(\d+)"')


def context_tokens(endpoint: Endpoint) -> int:
    """Most tokens of a prompt and its answer.

    Raises:
        NotRun: the server does not say.
    """
    with endpoint.http() as http:
        models = http.get("/v1/models").json()["data"]
    for entry in models:
        if entry.get("id") == endpoint.served_name and entry.get("max_model_len"):
            return int(entry["max_model_len"])
    raise NotRun("the length of the context is not known: /v1/models has no max_model_len")


def cache_blocks(endpoint: Endpoint) -> tuple[int, int]:
    """Blocks of the KV cache, and tokens of each.

    Raises:
        NotRun: the server does not say.
    """
    with endpoint.http() as http:
        text = http.get("/metrics").text
    blocks, size = _CACHE_BLOCKS.search(text), _BLOCK_TOKENS.search(text)
    if blocks is None or size is None:
        raise NotRun("the size of the KV cache is not known: no vllm:cache_config_info")
    return int(blocks[1]), int(size[1])


def chunk_tokens(server: Server) -> int:
    """Tokens of a prompt that are worked on at once."""
    arguments = server.configuration.arguments if server.configuration is not None else ()
    for name, value in itertools.pairwise(arguments):
        if name == "--max-num-batched-tokens" and value.isdecimal():
            return int(value)
    return _CHUNK_TOKENS
