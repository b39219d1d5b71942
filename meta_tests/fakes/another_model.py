"""A scripted server of another model than gpt-oss.

Chats are in ChatML, and each token is a Unicode code point."""

import json
import re
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from meta_tests.fakes.loopback import JsonHandler, serving
from meta_tests.folders import DATA

CHECKPOINT = DATA / "small-models" / "qwen3"
MODEL = "tiny-qwen3"
CONTEXT = 4096
PROMPT = "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
END = 1019
#: The refusal of vLLM 0.32 if the checkpoint has no chat template.
NO_TEMPLATE = (
    "As of transformers v4.44, default chat template is no longer allowed, so you must provide a "
    "chat template if the tokenizer does not define one."
)
CAPITALS = {
    "France": "Paris",
    "Germany": "Berlin",
    "Spain": "Madrid",
    "Peru": "Lima",
    "Norway": "Oslo",
}
#: The country whose capital the server no longer knows when a prompt is sent for the third time.
FORGOTTEN = "Peru"


class Handler(JsonHandler):
    """vLLM's HTTP endpoints. Each handler class counts the requests that it got."""

    thinks = True
    calls_tools = True
    #: Whether answers contain the result of a tool.
    reads_results = True
    knows = True
    #: Whether the server has a chat template.
    chats = True
    #: Whether the server streams completions. Otherwise, it answers with HTTP 500.
    streams = True
    root = str(CHECKPOINT)
    name = MODEL
    asked_so_far: Counter[str]

    def do_GET(self) -> None:
        if self.path == "/v1/models":
            entry = {
                "id": self.name,
                "object": "model",
                "owned_by": "vllm",
                "root": self.root,
            }
            self.say({"object": "list", "data": [{**entry, "max_model_len": CONTEXT}]})
        elif self.path == "/version":
            self.say({"version": "0.32.0"})
        else:
            self.say({"error": "not found"}, 404)

    def do_POST(self) -> None:
        asked = self.asked()
        if not self.chats and ("messages" in asked or self.path == "/v1/responses"):
            self.say({"error": {"message": NO_TEMPLATE, "code": 400}}, 400)
        elif asked.get("stream") and not self.streams:
            self.say({"error": {"message": "no stream", "code": 500}}, 500)
        elif self.path == "/tokenize":
            text = PROMPT if "messages" in asked else asked["prompt"]
            self.say({"tokens": [ord(letter) for letter in text], "count": len(text)})
        elif self.path == "/detokenize":
            ids = asked["tokens"]
            self.say({"prompt": "<|im_end|>" if ids == [END] else "".join(map(chr, ids))})
        elif self.path == "/v1/completions":
            self.say(self.completion(self._continued(asked["prompt"]), 5, 8))
        elif self.path == "/v1/chat/completions":
            self._chat(asked)
        else:
            self.say({"error": "not found"}, 404)

    def _continued(self, prompt: str) -> str:
        for country, city in CAPITALS.items():
            if country in prompt and self.knows:
                return f" {city}."
        return " and"

    def _chat(self, asked: dict) -> None:
        if "tools" in asked and not self.calls_tools:
            self.say({"error": {"message": "needs --tool-call-parser"}}, 400)
            return
        message = {"role": "assistant", "content": self._answered(asked["messages"])}
        if self.thinks:
            message["reasoning"] = "I know it."
        last = asked["messages"][-1]
        city = re.search(r"weather in (\w+)\?", str(last["content"]))
        if city and "tools" in asked:
            arguments = json.dumps({"city": city[1]})
            function = {"name": "get_weather", "arguments": arguments}
            message["tool_calls"] = [{"id": "1", "type": "function", "function": function}]
        choice = {"index": 0, "message": message, "finish_reason": "stop", "token_ids": [65, END]}
        usage = {"prompt_tokens": 9, "completion_tokens": 40, "total_tokens": 49}
        self.say({"choices": [choice], "usage": usage})

    def _answered(self, messages: list[dict]) -> str:
        last = messages[-1]
        if last["role"] == "tool":
            return f"The result is {last['content'] if self.reads_results else 'there'}."
        question = last["content"]
        self.asked_so_far[question] += 1
        if FORGOTTEN in question and self.asked_so_far[question] == 3:
            return "I do not know."
        return f"The answer is{self._continued(question)}"


@contextmanager
def another_model(**members: bool | str) -> Iterator[str]:
    """Start the server with these class variables, yield its address, and stop the server at the
    end."""
    with serving(type("Handler", (Handler,), {**members, "asked_so_far": Counter()})) as url:
        yield url
