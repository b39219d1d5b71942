"""The suite accepts the known differences between llama-server and other engines."""

import sys
from types import SimpleNamespace

import pytest

from sm121.api import cases
from sm121.client.completion_json import parse
from sm121.core import server, verdict
from sm121.engines import capabilities
from sm121.engines.options import GivenEngine
from sm121.session.session import Session
from sm121.session.settings import Settings
from sm121.stress.shapes import BAD_REQUESTS, Shapes
from tools import engines


def answer(*ids: int) -> dict:
    named = [{"id": n, "token": f"t{n}", "logprob": -0.1, "top_logprobs": []} for n in ids]
    return {"choices": [{"text": "x", "finish_reason": "length", "logprobs": {"content": named}}]}


def test_ids_come_with_the_log_probabilities():
    assert parse(answer(7, 9)).ids == (7, 9)
    assert parse(answer(7), answer(9)).ids == (7, 9)
    answered = answer(7)
    answered["choices"][0]["token_ids"] = [8]
    assert parse(answered).ids == (8,), "its own are what counts"
    del answered["choices"][0]["token_ids"], answered["choices"][0]["logprobs"]["content"][0]["id"]
    assert parse(answered).ids is None, "a text is no id"


def test_a_program_is_imported_by_no_interpreter():
    def interpreter(engine: str) -> str:
        settings = Settings(engine=GivenEngine(name=engine, python="/p"))
        return Session.engine_interpreter.fget(SimpleNamespace(settings=settings))

    assert interpreter("vllm") == "/p"
    with pytest.raises(verdict.NotRun, match="llama-server is an executable"):
        interpreter("llama-cpp")


def test_only_what_an_engine_refuses_is_held_against_it():
    def asked(engine: str, version: str) -> set[str]:
        of = capabilities.capabilities_of(engine, version)
        shapes = Shapes(
            model="m", prompts=[SimpleNamespace(text="x", name="x")], ask=lambda _request: None,
            salted=False, log_probabilities=False,
            refuses=lambda case: of.deviation(case, "served") is None,
        )  # fmt: skip
        shapes.job = lambda *_args, name, **_more: name
        jobs = shapes.unruly(8)
        return {next(jobs) for _ in range(60)} & {request.name for request in BAD_REQUESTS}

    assert asked("vllm", "0.32.0") == {request.name for request in BAD_REQUESTS}
    for version in ("0.6.0-dev", "b11434-0c1e570"):
        assert asked("llama-cpp", version) == {
            "prompt of numbers that are no tokens", "messages in place of a prompt"
        }  # fmt: skip


def test_every_bad_request_is_a_case():
    shipped = {case.id for case in cases.shipped().case}
    assert {request.case for request in BAD_REQUESTS} <= shipped


def test_the_context_stands_in_the_list_of_models():
    entries = [{"id": "other", "meta": {"n_ctx": 1}}, {"id": "m", "meta": {"n_ctx": 4608}}]
    assert server.context_of({"data": entries}, "m") == 4608
    assert server.context_of({"data": entries}, "none") is None


def test_the_page_has_no_path_of_this_machine():
    text = engines.page(f"| {engines.ROOT}/.cache/canary/bf16 | {sys.version_info.major} |")
    assert "| .cache/canary/bf16 | 3 |" in text and str(engines.ROOT) not in text
