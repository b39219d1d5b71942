"""The server's prompt for a chat is compared with harmony, and differences are named."""

import datetime
import sys
from contextlib import nullcontext
from types import SimpleNamespace

import pytest

from sm121.api import chat_prompts, chats, rendering, responses
from sm121.api.client import Api, Refused
from sm121.api.rendering import parse_prompt
from sm121.api.tools import tools
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
    """A server that renders a chat in a given way, and reports its ids and usage."""

    def serve(self, ids) -> "Rendering":
        object.__setattr__(self, "made", ids)
        return self

    def send_chat(self, messages, **options):
        return {"prompt_token_ids": self.made, "usage": {"prompt_tokens": len(self.made)}}


def hold(case: str, ids: list[int], **environment: str) -> None:
    endpoint = Endpoint("http://127.0.0.1:1", "key", "canary")
    server = Rendering(endpoint, capabilities.capabilities_of("vllm", "0.32.0")).serve(ids)
    chat_prompts.prompt_is_harmony(server, chats.find_chat(case), environment)


def as_vllm_writes_calls(ids: list[int]) -> list[int]:
    """Write the recipient of a call before the channel, as vLLM 0.32 does
    (_use_legacy_tool_call_headers)."""
    text = decode(ids)
    for name in ("get_weather", "get_time"):
        header = f"assistant<|channel|>commentary to=functions.{name} <|constrain|>json"
        text = text.replace(header, f"assistant to=functions.{name}<|channel|>commentary json")
    return encode(text)


@pytest.mark.parametrize("case", chats.load_chats(), ids=str)
def test_harmonys_own_rendering_is_right(case):
    ids = rendering.rendered(case, TODAY)
    hold(case.id, ids)
    hold(case.id, rendering.rendered(case, TODAY, in_system=True))
    if "special" not in case.id:
        written = as_vllm_writes_calls(ids)
        hold(case.id, written)
        assert {len(ids), len(written)} == responses.lengths(case)


@pytest.mark.parametrize(
    ("conversation", "old", "new", "said"),
    [
        pytest.param(
            "system",
            "You are a geography",
            "You are a rude",
            "expected developer '# Instructions",
            id="system, You are a geography, You are a rude, required",
        ),
        pytest.param(
            "turns",
            "<|start|>assistant<|channel|>final<|message|>Berlin.<|end|>",
            "",
            "message 5",
            id="turns",
        ),
        ("tools", "Get the weather", "", "message 1: expected developer '# Tools"),
        ("effort-high", "Reasoning: high", "Reasoning: medium", "message 0: expected system"),
        ("question", "commentary, final", "final", "message 0"),
        ("question", "Current date: TODAY", "Current date: 2023-01-01", "got 2023-01-01"),
        ("question", "Current date: TODAY", "", "got none"),
        pytest.param(
            "tool-result-and-its-reasoning",
            " to=functions.get_weather",
            " to=get_weather",
            "to=get",
            id="tool-result-and-its-reasoning",
        ),
        ("tool-result-and-its-reasoning", "<|call|>", "<|end|>", "ended by 200007"),
        ("question", "<|start|>assistant", "", "got the end"),
        ("later-instructions", "developer", "user", "message 3: expected developer"),
    ],
)
def test_another_rendering_is_seen_and_named(conversation, old, new, said):
    text = decode(rendering.rendered(chats.find_chat(conversation), TODAY))
    old = old.replace("TODAY", TODAY)
    assert old in text
    with pytest.raises(AssertionError) as caught:
        hold(conversation, encode(text.replace(old, new)))
    text = str(caught.value)
    assert text.startswith(f"{conversation}: ") and said in text, text


def test_the_difference_of_two_long_prompts_is_in_the_first_lines():
    """The two texts are shown from their first difference on, so a long prompt hides neither."""
    text = decode(rendering.rendered(chats.find_chat("eight-tools"), TODAY))
    start, end = text.index("// Get the hotels"), text.index("} // namespace functions")
    with pytest.raises(AssertionError) as caught:
        hold("eight-tools", encode(text[:start] + text[end:]))
    expected, got = str(caught.value)[:700].split(", got ")
    assert "Get the hotels" in expected and "Get the weather" not in expected
    assert "} // namespace functions" in got


@pytest.mark.parametrize("case", [c.id for c in chats.load_chats() if "special" in c.id])
def test_control_tokens_made_from_user_text_fail(case):
    text = decode(rendering.rendered(chats.find_chat(case), TODAY))
    with pytest.raises(AssertionError, match="expected "):
        hold(case, encode(text))


def test_a_pinned_date_and_a_schema_in_the_prompt_are_accepted():
    ids = rendering.rendered(chats.find_chat("question"), "2025-01-01")
    hold("question", ids, VLLM_SYSTEM_START_DATE="2025-01-01")
    with pytest.raises(AssertionError, match="got 2025-01-01"):
        hold("question", ids)
    case = chats.find_chat("response-format")
    text = decode(rendering.rendered(case, TODAY))
    schema = "Be concise.\n\n# Response Formats\n\n## city\n\n{}"
    hold("response-format", encode(text.replace("Be concise.", schema)))
    with pytest.raises(AssertionError):
        hold("response-format", encode(text.replace("Be concise.", "# Response Formats\n\n{}")))


def test_ids_that_are_no_harmony_are_read_as_well():
    assert [part.author for part in parse_prompt(encode("hello"))] == ["(no <|start|>)"]
    assert len(parse_prompt([])) == 1 and parse_prompt([200006])[0].author == ""


def test_without_harmony_it_says_how_to_get_it(monkeypatch):
    rendering.encoding.cache_clear()
    monkeypatch.setitem(sys.modules, "openai_harmony", None)
    with pytest.raises(NotRun, match="pip install oss-harmony"):
        chat_prompts.prompt_is_harmony(None, chats.find_chat("question"), {})
    with pytest.raises(NotRun, match="pip install oss-harmony"):
        responses.lengths(chats.find_chat("question"))
    monkeypatch.undo()
    assert rendering.encoding() is not None


def test_a_missing_vocabulary_does_not_lead_to_overwriting_vllms_module(monkeypatch):
    """If vLLM's own package of harmony cannot load the vocabulary, the message does not advise to
    install oss-harmony over it."""
    rendering.encoding.cache_clear()
    failing = SimpleNamespace(HarmonyEncodingName=SimpleNamespace(HARMONY_GPT_OSS="gpt-oss"))
    failing.load_harmony_encoding = {}.__getitem__
    monkeypatch.setitem(sys.modules, "openai_harmony", failing)
    with pytest.raises(NotRun, match=r"sm121 vocabulary DIR.*separate environment"):
        rendering.encoding()
    rendering.encoding.cache_clear()


class Counting(Api):
    """A server that reports only the usage, without the parts of a chat that it drops."""

    dropped: tuple[int, ...] = ()

    def send_chat(self, messages, **options):
        count = len(messages)
        remaining = [m for n, m in enumerate(messages) if not {n, n - count} & {*self.dropped}]
        used = 60 + sum(len(encode(str(m.get("content") or ""))) + 4 for m in remaining)
        calls = []
        for m in remaining:
            for c in m.get("tool_calls") or ():
                calls.append(c["function"])
        used += sum(len(encode(f["name"] + f["arguments"])) + 4 for f in calls)
        return {"usage": {"prompt_tokens": used + 40 * bool(options.get("tools"))}}


@pytest.mark.parametrize(
    ("conversation", "dropped", "wrong"),
    [
        ("system", None, False),
        ("turns", None, False),
        ("tools", None, False),
        pytest.param("system", (0,), True, id="system, 0, wrong"),
        pytest.param("turns", (1, 2, 3, 4), True, id="turns, 1 2 3 4, wrong"),
        ("two-calls-and-their-results", None, False),
        pytest.param(
            "two-calls-and-their-results", (-1,), True, id="two-calls-and-their-results, -1, wrong"
        ),
        pytest.param("later-instructions", (1, 2), True, id="later-instructions, 1 2, wrong"),
        # `encode` reads the special tokens of the text as control tokens
        ("special-tokens-as-text", None, True),
    ],
)
def test_usage_shows_what_is_dropped(conversation, dropped, wrong):
    """The usage shows which messages are dropped.

    `dropped` contains their positions, from the beginning or the end."""
    server = type("Dropping", (Counting,), {"dropped": dropped or ()})(
        Endpoint("http://127.0.0.1:1", "key", "canary"),
        capabilities.capabilities_of("openai", None),
    )
    with pytest.raises(AssertionError, match="expected usage ") if wrong else nullcontext():
        chat_prompts.prompt_is_harmony(server, chats.find_chat(conversation), {})


def started_with(*environment: tuple[str, str]) -> ServerConfiguration:
    return ServerConfiguration("n", "vllm", "python", "m", "canary", (), environment)


STORE = ("VLLM_ENABLE_RESPONSES_API_STORE", "1")


@pytest.mark.parametrize(
    ("configuration", "expected"),
    [
        pytest.param(None, NotRun, id="NotRun"),
        pytest.param(started_with(), NotRun, id="started_with, NotRun"),
        pytest.param(started_with(STORE), Refused, id="started_with STORE, Refused"),
    ],
)
def test_a_server_that_stores_responses_must_find_them(configuration, expected):
    def respond(_input, **options):
        if "previous_response_id" in options:
            raise Refused("/v1/responses", Exchange(404, "text/plain", b"Response not found"))
        content = [{"type": "output_text", "text": "Paris"}]
        return {"id": "resp_1", "output": [{"type": "message", "content": content}]}

    api = SimpleNamespace(respond=respond)
    limits = SimpleNamespace(max_answer_tokens=64)
    with pytest.raises(expected):
        responses.goes_on_from_another(api, limits, print, configuration)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("question", marks=pytest.mark.slow),
        pytest.param("effort-high", marks=pytest.mark.slow),
        pytest.param("tools", marks=pytest.mark.slow),
        "tools-and-system",
    ],
)
def test_the_canarys_template_renders_harmony(canary_bf16, name):
    """The canary has gpt-oss's own template, so an engine without a harmony renderer shows the same
    prompt."""
    from transformers import AutoTokenizer

    case = chats.find_chat(name)
    made = AutoTokenizer.from_pretrained(canary_bf16).apply_chat_template(
        [message.model_dump(exclude_none=True) for message in case.messages],
        tools=[*tools()] if case.tools else None, add_generation_prompt=True,
        reasoning_effort=case.reasoning_effort or "medium", tokenize=False,
    )  # fmt: skip
    assert made == decode(rendering.rendered(case, TODAY))
