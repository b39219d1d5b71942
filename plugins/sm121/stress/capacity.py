"""How much a server holds: the length of its context, the blocks of its KV cache."""

import re
from typing import NamedTuple

from sm121.core.server import Endpoint, Server
from sm121.core.verdict import NotRun
from sm121.engines.requested import read_arguments

#: vLLM's --max-num-batched-tokens where it is neither given nor logged.
_CHUNK_TOKENS = 2048
_LOGGED_CHUNK = re.compile(r"max_num_batched_tokens=(\d+)")
_LOG_BEGINS = 1 << 20
#: What a stream holds in layers with a sliding window: gpt-oss has 128 tokens, and a block or two.
_WINDOW_TOKENS = 256
_CACHE_BLOCKS = re.compile(r'cache_config_info\{[^}]*\bnum_gpu_blocks="(\d+)"')
_BLOCK_TOKENS = re.compile(r'cache_config_info\{[^}]*\bblock_size="(\d+)"')


def context_tokens(server: Server) -> int:
    """Most tokens of a prompt and its answer; `NotRun` where nothing says."""
    if (length := server.context_tokens()) is None:
        raise NotRun("the length of the context is not known: /v1/models has no max_model_len")
    return length


def cache_blocks(endpoint: Endpoint) -> tuple[int, int]:
    """Blocks of the KV cache, and tokens of each. Raises NotRun: the server does not say."""
    text = endpoint.page("/metrics") or ""
    blocks, size = _CACHE_BLOCKS.search(text), _BLOCK_TOKENS.search(text)
    if blocks is None or size is None:
        raise NotRun("the size of the KV cache is not known: no vllm:cache_config_info")
    return int(blocks[1]), int(size[1])


class Pressure(NamedTuple):
    """A load that fills a KV cache: all requests are let in, and grow by more than is free then.
    Tokens of each prompt, and of each answer."""

    prompt: int
    answer: int


def pressure(blocks: int, block: int, *, chunk: int, streams: int, spare: int) -> Pressure:
    """The load of so many streams for a KV cache of `blocks`, each of ``block`` tokens. The last
    one is let in when a whole `chunk` of its prompt fits, twice where layers have a sliding window;
    what that took beyond the window is free afterwards. A cache that is large against a chunk, or
    whose blocks are small against the window, must be left that room on purpose. Each step in which
    a chunk is read makes the answers before it longer by a token, so that they take the last one's
    place, or end before it is let in. `spare`: blocks of each stream left free."""
    margin = max(2 * min(block, 16), block // 4)
    short = (blocks - 1) // (streams + 1)
    if chunk // block > short:  # a prompt is read at once, and takes twice its room meanwhile
        length = (short - spare - _WINDOW_TOKENS // block) * block
        return Pressure(length, blocks * block // streams - length + margin)
    tokens = chunk // streams + margin
    beside = (blocks - 1 - 2 * (chunk // block)) // (streams - 1)
    whole = (blocks - 1) // streams
    length = (min(beside, whole) - spare) * block - block // 16
    if beside > whole or block < _WINDOW_TOKENS // 2:
        steps = -(-blocks * block // chunk)
        room = 2 * chunk // streams + _WINDOW_TOKENS
        length -= steps + room
        tokens += 2 * steps + room
    return Pressure(length, tokens)


def chunk_tokens(server: Server) -> int:
    """Tokens of a prompt that are worked on at once."""
    arguments = server.configuration.arguments if server.configuration is not None else ()
    value = read_arguments(arguments).get("max_num_batched_tokens", "")
    if value.isdecimal():
        return int(value)
    if server.log is not None:
        with server.log.open("rb") as log:
            match = _LOGGED_CHUNK.search(log.read(_LOG_BEGINS).decode("utf-8", "replace"))
        if match is not None:
            return int(match[1])
    return _CHUNK_TOKENS
