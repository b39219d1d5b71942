"""The load for a KV cache is computed from the cache's size, and causes preemption."""

from types import SimpleNamespace

import pytest

from sm121.stress import cache


def preempted(blocks: int, block: int, *, chunk: int, load: cache.Pressure, streams: int) -> bool:
    """Return whether a simulated scheduler preempts a request.

    It has chunked prefill, admits a request only if there is space for its whole prompt, and its
    sliding layers hold a window of each request and the current chunk."""
    window = 128

    def held(tokens: int, reading: int) -> int:
        sliding = min(tokens, window + reading)
        return -(-tokens // block) + -(-sliding // block)

    free_of = blocks - 1
    read = [0] * streams  # the tokens of the prompt that were read
    made = [0] * streams
    admitted = 0
    for _ in range(10**6):
        reading = admitted - 1 if admitted and read[admitted - 1] < load.prompt else None
        sizes = []
        for n in range(admitted):
            if made[n] < load.answer:
                sizes.append(held(read[n] + made[n], chunk if n == reading else 0))
        used = sum(sizes)
        if used > free_of:
            return True
        if all(tokens >= load.answer for tokens in made):
            return False
        fits = used + held(load.prompt, chunk) <= free_of
        if reading is None and admitted < streams and fits:
            admitted += 1
            continue
        for n in range(admitted):
            if n == reading:
                read[n] = min(load.prompt, read[n] + chunk)
            elif made[n] < load.answer:
                made[n] += 1
    raise AssertionError("unreachable")


@pytest.mark.parametrize(
    ("blocks", "block", "chunk"),
    [
        # 826,823 tokens: earlier, the cache was only 88 % full at the end
        (51676, 16, 2048),
        (51676, 16, 8192),
        (20000, 16, 8192),
        (6459, 128, 8192),
        (120000, 16, 2048),
        # earlier, two chunks did not fit, and the computed prompt had less than zero tokens
        (640, 16, 8192),
        (640, 16, 2048),
        (2048, 32, 4096),
        (5120, 16, 8192),
        (192, 128, 8192),
    ],
)
def test_preemption_is_reached(blocks, block, chunk):
    load = cache.pressure(blocks, block, chunk=chunk, streams=8, spare=2)
    assert 8 * (load.prompt + load.answer) > blocks * block
    assert preempted(blocks, block, chunk=chunk, load=load, streams=8)


def test_the_load_of_a_small_cache_is_what_it_was():
    load = cache.pressure(192, 128, chunk=2048, streams=8, spare=2)
    assert load == cache.Pressure((22 - 2) * 128 - 8, 256 + 32)


@pytest.mark.parametrize(
    ("arguments", "text", "chunk"),
    [
        pytest.param(
            ("--max-num-batched-tokens", "512"),
            "max_num_batched_tokens=8192",
            512,
            id="--max-num-batched-tokens 512",
        ),
        pytest.param(
            (),
            "Chunked prefill is enabled with max_num_batched_tokens=8192.",
            8192,
            id="Chunked prefill is enabled with",
        ),
        pytest.param((), "nothing", 2048, id="nothing, 2048"),
    ],
)
def test_the_size_of_prefill_chunks_comes_from_the_server(tmp_path, arguments, text, chunk):
    log = tmp_path / "server.log"
    log.write_text(text)
    server = SimpleNamespace(configuration=SimpleNamespace(arguments=arguments), log=log)
    assert cache.chunk_tokens(server) == chunk
