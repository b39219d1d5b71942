"""What a server makes of a chat is compared with harmony: what differs is seen, and named."""

import datetime
import sys
from types import SimpleNamespace

import pytest
from data_rows import from_data

from sm121.api import rendering, responses
from sm121.api.client import Api, Refused
from sm121.api.rendering import read
from sm121.client.exchange import Exchange
from sm121.core.configuration import ServerConfiguration
from sm121.core.server import Endpoint
from sm121.core.verdict import NotRun
from sm121.engines import capabilities

pytest.importorskip("openai_harmony", reason="oss-harmony is not installed")

TODAY = str(datetime.datetime.now(datetime.UTC).date())


def encode(text: str) -> list[int]:
    return rendering.encoding().encode(text, allowed_special="all")


def decode(ids) -> str:
    return rendering.encoding().decode(ids)


class Rendering(Api):
    """A server that renders a chat in some way, and tells ids and usage of it."""

    def serve(self, ids) -> "Rendering":
        object.__setattr__(self, "made", ids)
        return self

    def send_chat(self, messages, **options):
        return {"prompt_token_ids": self.made, "usage": {"prompt_tokens": len(self.made)}}


def hold(case: str, ids: list[int], **environment: str) -> None:
    endpoint = Endpoint("http://127.0.0.1:1", "key", "canary")
    server = Rendering(endpoint, capabilities.of("vllm", "0.32.0")).serve(ids)
    rendering.becomes_its_harmony(server, rendering.named(case), environment)


def as_vllm_writes_calls(ids: list[int]) -> list[int]:
    """The recipient before the channel (vLLM 0.32, _use_legacy_tool_call_headers)."""
    text = decode(ids)
    for name in ("get_weather", "get_time"):
        there = f"assistant<|channel|>commentary to=functions.{name} <|constrain|>json"
        text = text.replace(there, f"assistant to=functions.{name}<|channel|>commentary json")
    return encode(text)


@pytest.mark.parametrize("case", rendering.shipped(), ids=str)
def test_harmonys_own_rendering_is_right(case):
    ids = rendering.rendered(case, TODAY)
    hold(case.id, ids)
    hold(case.id, rendering.rendered(case, TODAY, in_system=True))
    if "special" not in case.id:
        written = as_vllm_writes_calls(ids)
        hold(case.id, written)
        assert {len(ids), len(written)} == responses.lengths(case)


@from_data
def test_another_rendering_is_seen_and_named(conversation, old, new, said):
    text = decode(rendering.rendered(rendering.named(conversation), TODAY))
    old = old.replace("TODAY", TODAY)
    assert old in text
    with pytest.raises(AssertionError) as caught:
        hold(conversation, encode(text.replace(old, new)))
    text = str(caught.value)
    assert text.startswith(f"{conversation}: ") and said in text, text


@pytest.mark.parametrize("case", [c.id for c in rendering.shipped() if "special" in c.id])
def test_control_tokens_made_of_text_are_seen(case):
    text = decode(rendering.rendered(rendering.named(case), TODAY))
    with pytest.raises(AssertionError, match="required: "):
        hold(case, encode(text))


def test_a_pinned_date_is_the_servers():
    ids = rendering.rendered(rendering.named("question"), "2025-01-01")
    hold("question", ids, VLLM_SYSTEM_START_DATE="2025-01-01")
    with pytest.raises(AssertionError, match="seen: 2025-01-01"):
        hold("question", ids)


def test_a_schema_may_be_told_to_the_model():
    case = rendering.named("response-format")
    text = decode(rendering.rendered(case, TODAY))
    said = "Be concise.\n\n# Response Formats\n\n## city\n\n{}"
    hold("response-format", encode(text.replace("Be concise.", said)))
    with pytest.raises(AssertionError):
        hold("response-format", encode(text.replace("Be concise.", "# Response Formats\n\n{}")))


def test_ids_that_are_no_harmony_are_read_as_well():
    assert [part.author for part in read(encode("hello"))] == ["(no <|start|>)"]
    assert len(read([])) == 1 and read([200006])[0].author == ""


def test_without_harmony_it_says_how_to_get_it(monkeypatch):
    rendering.encoding.cache_clear()
    monkeypatch.setitem(sys.modules, "openai_harmony", None)
    with pytest.raises(NotRun, match="pip install oss-harmony"):
        rendering.becomes_its_harmony(None, rendering.named("question"), {})
    with pytest.raises(NotRun, match="pip install oss-harmony"):
        responses.lengths(rendering.named("question"))
    monkeypatch.undo()
    assert rendering.encoding() is not None


class Counting(Api):
    """A server that tells usage only, of what is left of a chat."""

    def send_chat(self, messages, **options):
        left = self.left(messages)
        count = 60 + sum(len(encode(str(m.get("content") or ""))) + 4 for m in left)
        calls = [c["function"] for m in left for c in m.get("tool_calls") or ()]
        count += sum(len(encode(f["name"] + f["arguments"])) + 4 for f in calls)
        count += 40 * bool(options.get("tools"))
        return {"usage": {"prompt_tokens": count}}


@pytest.mark.parametrize(
    ("case", "left", "wrong"),
    [
        ("system", lambda m: m, False),
        ("turns", lambda m: m, False),
        ("tools", lambda m: m, False),
        ("system", lambda m: [x for x in m if x["role"] != "system"], True),
        ("turns", lambda m: m[:1] + m[-1:], True),
        ("two-calls-and-their-results", lambda m: m, False),
        ("two-calls-and-their-results", lambda m: m[:-1], True),
        ("later-instructions", lambda m: m[:1] + m[3:], True),
        ("special-tokens-as-text", lambda m: m, True),  # `encode` reads them as control tokens
    ],
)
def test_usage_shows_what_is_dropped(case, left, wrong):
    server = type("Own", (Counting,), {"left": staticmethod(left)})(
        Endpoint("http://127.0.0.1:1", "key", "canary"), capabilities.of("openai", None)
    )
    if wrong:
        with pytest.raises(AssertionError, match="required: usage "):
            rendering.becomes_its_harmony(server, rendering.named(case), {})
    else:
        rendering.becomes_its_harmony(server, rendering.named(case), {})


def started_with(*environment: tuple[str, str]) -> ServerConfiguration:
    return ServerConfiguration("n", "vllm", "python", "m", "canary", (), environment)


STORE = ("VLLM_ENABLE_RESPONSES_API_STORE", "1")


@from_data
def test_a_server_that_was_told_to_keep_responses_may_not_lose_them(configuration, expected):
    def respond(_input, **options):
        if "previous_response_id" in options:
            raise Refused("/v1/responses", Exchange(404, "text/plain", b"Response not found"))
        said = [{"type": "output_text", "text": "Paris"}]
        return {"id": "resp_1", "output": [{"type": "message", "content": said}]}

    api = SimpleNamespace(respond=respond)
    known = SimpleNamespace(max_answer_tokens=64)
    with pytest.raises(expected):
        responses.goes_on_from_another(api, known, print, configuration)


@pytest.mark.parametrize(
    "name",
    [*(pytest.param(name, marks=pytest.mark.slow) for name in ("question", "effort-high", "tools")),
     "tools-and-system"],
)  # fmt: skip
def test_the_canarys_template_renders_harmony(canary_bf16, name):
    """It is gpt-oss's own: an engine without a renderer of harmony shows the same prompt."""
    from transformers import AutoTokenizer

    case = rendering.named(name)
    made = AutoTokenizer.from_pretrained(canary_bf16).apply_chat_template(
        [message.model_dump(exclude_none=True) for message in case.messages],
        tools=[*rendering.tools()] if case.tools else None, add_generation_prompt=True,
        reasoning_effort=case.reasoning_effort or "medium", tokenize=False,
    )  # fmt: skip
    assert made == decode(rendering.rendered(case, TODAY))
