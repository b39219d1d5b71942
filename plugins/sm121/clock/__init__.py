"""Measure one running server by its HTTP API alone, from a notebook or a command line.

The numbers are the performance level's: the same client, the same metrics and the same checks. It
needs httpx, aiohttp, uvloop, numpy, scipy and pydantic, and nothing else of what the suite needs.

    from sm121 import clock

    result = clock.measure("http://127.0.0.1:8000")
    print(result)
    print(result.numbers["tg32@d0"].value)
"""

from sm121.clock.measuring import Number, Result, measure

__all__ = ["Number", "Result", "measure"]
