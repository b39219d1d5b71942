"""The KV cache of a server under load: its size, and a load that fills it."""

import re
from dataclasses import dataclass

from sm121.core import engine_arguments
from sm121.core.server import Endpoint, Server
from sm121.core.verdict import NotRun

#: The assumed --max-num-batched-tokens of vLLM, if it is neither given nor logged.
_CHUNK_TOKENS = 2048
_LOGGED_CHUNK = re.compile(r"max_num_batched_tokens=(\d+)")
#: How many bytes at the beginning of a log are searched for --max-num-batched-tokens.
_LOG_BEGINS = 1 << 20
#: Tokens that a stream keeps in layers with a sliding window: 128 for gpt-oss, plus one or two
#: blocks.
_WINDOW_TOKENS = 256
_CACHE_BLOCKS = re.compile(r'cache_config_info\{[^}]*\bnum_gpu_blocks="(\d+)"')
_BLOCK_TOKENS = re.compile(r'cache_config_info\{[^}]*\bblock_size="(\d+)"')


def context_tokens(server: Server) -> int:
    """Return the maximum number of tokens of a prompt with its answer.

    Args:
        server: The server.

    Raises:
        NotRun: The server does not report it.
    """
    length = server.context_tokens()
    if length is None:
        raise NotRun("the length of the context is not known: /v1/models has no max_model_len")
    return length


@dataclass(frozen=True)
class CacheBlocks:
    """The blocks of a KV cache."""

    count: int
    #: Tokens of each block.
    tokens: int


def cache_blocks(endpoint: Endpoint) -> CacheBlocks:
    """Return the blocks of a server's KV cache.

    Args:
        endpoint: The server.

    Raises:
        NotRun: The server does not report them.
    """
    text = endpoint.page("/metrics") or ""
    count = _CACHE_BLOCKS.search(text)
    tokens = _BLOCK_TOKENS.search(text)
    if count is None or tokens is None:
        raise NotRun("the size of the KV cache is not known: no vllm:cache_config_info")
    return CacheBlocks(int(count[1]), int(tokens[1]))


@dataclass(frozen=True)
class Pressure:
    """A load that fills a KV cache: all requests are admitted, but their answers do not fit.

    Attributes:
        prompt: The number of tokens of each prompt.
        answer: The number of tokens of each answer.
    """

    prompt: int
    answer: int


def pressure(blocks: int, block: int, *, chunk: int, streams: int, spare: int) -> Pressure:
    """Return the load that fills a KV cache.

    The last request is admitted only if a whole chunk of its prompt fits, or two chunks if layers
    have a sliding window; the space beyond the window is freed afterwards. If the cache is large
    compared with a chunk, or its blocks are small compared with the window, the load must leave
    this space free. Each step that reads a chunk also makes the earlier answers one token longer,
    so that they may take the last request's space, or end before it is admitted.

    Args:
        blocks: The number of blocks of the cache.
        block: The number of tokens per block.
        chunk: The number of prompt tokens that the server processes per step.
        streams: The number of concurrent requests.
        spare: The number of blocks per request that are left free.
    """
    margin = max(2 * min(block, 16), block // 4)
    short = (blocks - 1) // (streams + 1)
    if chunk // block > short:
        # The server processes a whole prompt in one step, which temporarily needs twice its space.
        length = (short - spare - _WINDOW_TOKENS // block) * block
        return Pressure(length, blocks * block // streams - length + margin)
    tokens = chunk // streams + margin
    beside = (blocks - 1 - 2 * (chunk // block)) // (streams - 1)
    whole = (blocks - 1) // streams
    length = (min(beside, whole) - spare) * block - block // 16
    if beside > whole or block < _WINDOW_TOKENS // 2:
        steps = -(-blocks * block // chunk)  # rounded up
        room = 2 * chunk // streams + _WINDOW_TOKENS
        length -= steps + room
        tokens += 2 * steps + room
    return Pressure(length, tokens)


def chunk_tokens(server: Server) -> int:
    """Return the number of prompt tokens that a server processes per step.

    Args:
        server: The server.

    Returns:
        The value of the server's argument, else the value in its log, else vLLM's default.

    Raises:
        OSError: The log cannot be read.
    """
    arguments = server.configuration.arguments if server.configuration is not None else ()
    value = engine_arguments.parse_options(arguments).get("max_num_batched_tokens", "")
    if value.isdecimal():
        return int(value)
    if server.log is not None:
        with server.log.open("rb") as log:
            match = _LOGGED_CHUNK.search(log.read(_LOG_BEGINS).decode("utf-8", "replace"))
        if match is not None:
            return int(match[1])
    return _CHUNK_TOKENS
