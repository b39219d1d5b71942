"""Faults of sampling: what an engine makes of a request before it samples. `test_samples.py` plants
them in an engine by script."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fault_proxy import Fault

Json = dict[str, Any]
Change = Callable[[Json], Json]
TEMPERATURE, CUT = "test_samples_follow_the_temperature", "test_samples_keep_the_cut"
PENALISED, ALLOWED = "test_samples_are_penalised", "test_samples_are_allowed_tokens"
PENALTIES = ("presence_penalty", "frequency_penalty", "repetition_penalty")


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


def _renamed(key: str, other: str) -> Change:
    return lambda request: {other if name == key else name: request[name] for name in request}


def _with(option: str) -> Change:
    return lambda request: {**request, option: True}


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
        *(
            (f"{name} {error}", f"{PENALISED}[{name}]", change)
            for name in PENALTIES
            for error, change in (
                ("is ignored", _without(name)),
                *((f"x {factor}", _scaled(name, factor)) for factor in (0.8, 0.9, 1.1, 1.2)),
            )
        ),
        *(
            (f"{one} is taken as {other}", f"{PENALISED}[{one}]", _renamed(one, other))
            for one, other in (PENALTIES[:2], PENALTIES[1::-1])
        ),
        *(
            (f"{name} counts the prompt", f"{PENALISED}[{name}]", _with("prompt_counts"))
            for name in PENALTIES[:2]
        ),
        *(
            (f"{PENALTIES[2]} leaves out {part}", f"{PENALISED}[{PENALTIES[2]}]", _with(option))
            for part, option in (("the prompt", "output_only"), ("the answer", "prompt_only"))
        ),
        ("bad_words is ignored", f"{ALLOWED}[bad_words]", _without("bad_words")),
        (
            "allowed_token_ids is ignored",
            f"{ALLOWED}[allowed_token_ids]",
            _without("allowed_token_ids"),
        ),
    )
}
