"""A user's own gates: a rate that they measure, and a function that pytest-benchmark times."""

from our_server import decode_rates, first_token


def test_decoding_is_fast_enough(gate):
    rates = decode_rates(rounds=40)
    gate("tg32@d0", rates, minimum=52, unit="tok/s")


def test_the_first_token_comes_soon(gate, benchmark):
    benchmark.pedantic(first_token, rounds=40)
    gate("ttft", maximum=20, unit="ms")
