"""Faults of sampling: what an engine makes of a request before it samples. `test_samples.py` plants
them in an engine by script."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fault_proxy import Fault

Json = dict[str, Any]
Change = Callable[[Json], Json]
TEMPERATURE, CUT = "test_samples_follow_the_temperature", "test_samples_keep_the_cut"


def _without(key: str) -> Change:
    return lambda request: {name: value for name, value in request.items() if name != key}


def _instead(key: str, change: Callable[[Any], Any]) -> Change:
    """Another value, where the request has one that does something."""

    def apply(request: Json) -> Json:
        neutral = request.get(key, 1.0) in (0.0, 1.0, -1)
        return request if neutral else {**request, key: change(request[key])}

    return apply


def _scaled(key: str, factor: float) -> Change:
    return _instead(key, lambda value: value * factor)


FAULTS = {
    name: Fault(name, test, request=change)
    for name, test, change in (
        ("temperature x 1.6", TEMPERATURE, lambda r: {**r, "temperature": 1.6 * r["temperature"]}),
        ("temperature x 1.1", TEMPERATURE, _scaled("temperature", 1.1)),
        ("temperature / 1.1", TEMPERATURE, _scaled("temperature", 1 / 1.1)),
        ("top_p is ignored", f"{CUT}[top_p]", _without("top_p")),
        ("top_p x 1.1", f"{CUT}[top_p]", _scaled("top_p", 1.1)),
        ("top_p x 0.9", f"{CUT}[top_p]", _scaled("top_p", 0.9)),
        ("top_k is ignored", f"{CUT}[top_k]", _without("top_k")),
        ("top_k is one more", f"{CUT}[top_k]", _instead("top_k", lambda value: value + 1)),
        ("top_k is one less", f"{CUT}[top_k]", _instead("top_k", lambda value: value - 1)),
        ("min_p is ignored", f"{CUT}[min_p]", _without("min_p")),
        ("min_p x 1.1", f"{CUT}[min_p]", _scaled("min_p", 1.1)),
        ("min_p x 0.9", f"{CUT}[min_p]", _scaled("min_p", 0.9)),
    )
}
