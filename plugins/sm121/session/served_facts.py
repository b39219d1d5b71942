"""Reads what a running server shows: its engine, kernel path, chat template and checkpoint."""

import contextlib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from sm121.checkpoint import inspection
from sm121.checkpoint.inspection import Inspection
from sm121.core import model_folder
from sm121.core.errors import Sm121Error
from sm121.core.server import Server
from sm121.engines.capabilities import Capabilities
from sm121.evidence import kernel_path
from sm121.evidence.kernel_path import KernelPath

#: The time limit in seconds of a request that generates no text.
_PAGE_WITHIN_S = 30.0
#: A question that any capable model answers.
QUESTION = "What is the capital of France?"
#: The word in the refusal of a chat if the server has no chat template.
_NO_TEMPLATE = re.compile(r"chat[ _]template")
#: The files of a checkpoint that contain a chat template, and the settings of which it can be one.
_TEMPLATES = ("chat_template.jinja", "chat_template.json", "additional_chat_templates")
_TOKENIZER_CONFIG = "tokenizer_config.json"
#: Special tokens, as the texts of most families write them.
_SPECIAL = re.compile(r"<\|[^|<>]+\|>|</?s>|<(?:start|end)_of_turn>")
#: Special tokens with a smaller id are at the beginning of a vocabulary, before the plain tokens.
_FIRST_IDS = 1000


@dataclass(frozen=True)
class ChatTemplate:
    """A chat as the server renders it."""

    #: The text up to the answer; None if it is unknown.
    prompt: str | None = None
    #: The id of the token that ended the answer; None if it is unknown.
    end_token: int | None = None
    #: The special tokens of the prompt and the end.
    special: tuple[str, ...] = ()
    #: Why the model cannot chat, with the server's refusal; empty if it can, or if the reason is
    #: not known to be a missing chat template.
    why_none: str = ""
    #: The refusal of a chat for lack of a chat template, if no file on this machine shows whether
    #: the model or only this server has none; else empty.
    refusal: str = ""


@dataclass(frozen=True)
class ServedFacts:
    """The facts of a server, each of which may be unknown."""

    server: Server
    can: Capabilities
    path: KernelPath
    context: int | None
    chat: ChatTemplate
    #: The folder of the checkpoint; None if it is not on this machine.
    folder: Path | None
    checkpoint: Inspection | None
    #: The reason why the checkpoint is missing.
    why_no_checkpoint: str = ""

    @property
    def model(self) -> str:
        """The path or the hub id of the model; its served name if the server shows no other."""
        server = self.server
        return self.path.log.model or server.root or server.endpoint.served_name

    @property
    def has_experts(self) -> bool | None:
        """Whether the model is a mixture of experts; None: unknown."""
        if self.checkpoint is None:
            return None
        return self.checkpoint.experts is not None

    @property
    def plain_tokens(self) -> int | None:
        """The number of token ids below the special tokens; None: unknown."""
        if self.folder is None:
            return None
        size = (self.checkpoint.config if self.checkpoint else {}).get("vocab_size")
        try:
            tokenizer = json.loads((self.folder / "tokenizer.json").read_text("utf-8"))
            ids = [int(token["id"]) for token in tokenizer["added_tokens"]]
        except (OSError, ValueError, KeyError, TypeError):
            ids = []
        least = min((each for each in ids if each >= _FIRST_IDS), default=None)
        return least or size


def read_facts(server: Server, can: Capabilities, model: str | None = None) -> ServedFacts:
    """Read the facts from a server's HTTP endpoints, its answers, its log and its checkpoint.

    Args:
        server: The server, probed, with its log if that is proven to be its own.
        can: The capabilities of its engine.
        model: The folder or hub id of its checkpoint, if the user names it.
    """
    path = KernelPath()
    if server.log is not None and server.reader is not None:
        path = kernel_path.read_log(server.log, server.reader)
    named = model or path.log.model or server.root or server.endpoint.served_name
    folder = model_folder.served_folder(named, path.log.asked)
    checkpoint = None
    why = f"{named} is neither a folder nor in the hub's cache of this machine"
    if folder is not None:
        try:
            checkpoint = inspection.of_folder(folder)
        except (Sm121Error, OSError) as error:
            why = str(error)
    return ServedFacts(
        server=server,
        can=can,
        path=path,
        context=server.context_tokens(),
        chat=_chat_template(server, folder),
        folder=folder,
        checkpoint=checkpoint,
        why_no_checkpoint="" if checkpoint is not None else why,
    )


def _chat_template(server: Server, folder: Path | None) -> ChatTemplate:
    """Return the chat as an HTTP endpoint of vLLM or llama-server renders it."""
    messages = [{"role": "user", "content": QUESTION}]
    with server.endpoint.http(timeout_s=_PAGE_WITHIN_S) as http:
        prompt = _by_tokens(http, server.endpoint.served_name, messages)
        if prompt is None:
            prompt = _posted(http, "/apply-template", {"messages": messages}).get("prompt")
        end = _end_token(http, server.endpoint.served_name, messages)
        has_template = None if folder is None else _has_template(folder)
        refusal = ""
        if end is None:
            end = _end_of_checkpoint(folder)
            if not has_template:
                refusal = _refusal_of_chats(http, server.endpoint.served_name, messages)
        texts = _SPECIAL.findall(prompt or "")
        if end is not None:
            texts.append(_text(http, server.endpoint.served_name, [end]) or "")
    special = tuple(dict.fromkeys(text for text in texts if _SPECIAL.fullmatch(text)))
    if has_template is None or not refusal:
        return ChatTemplate(prompt, end, special, refusal=refusal)
    why_none = f"the model has no chat template. The server refuses a chat: {refusal}"
    return ChatTemplate(prompt, end, special, why_none)


def _refusal_of_chats(http: httpx.Client, model: str, messages: Sequence[Any]) -> str:
    """Return the refusal of a chat for lack of a chat template; empty if there is none."""
    body = {"model": model, "messages": messages, "max_tokens": 1}
    try:
        answer = http.post("/v1/chat/completions", json=body)
    except httpx.HTTPError:
        return ""
    is_refusal = answer.status_code in (400, 422, 500) and _NO_TEMPLATE.search(answer.text)
    if not is_refusal:
        return ""
    text = answer.text
    with contextlib.suppress(ValueError, KeyError, TypeError):
        text = str(answer.json()["error"]["message"])
    return text[:240]


def _has_template(folder: Path) -> bool | None:
    """Whether a checkpoint has a chat template, in a file of its own or in its tokenizer.

    None if its folder does not contain the tokenizer's settings, such as a folder with GGUF files.
    """
    if any((folder / name).exists() for name in _TEMPLATES):
        return True
    try:
        settings = json.loads((folder / _TOKENIZER_CONFIG).read_text("utf-8"))
    except (OSError, ValueError):
        return None
    return bool(settings.get("chat_template")) if isinstance(settings, dict) else None


def _by_tokens(http: httpx.Client, model: str, messages: Sequence[Any]) -> str | None:
    """Return the text of a chat's tokens, without a first token that the server always adds."""
    rendered = {"model": model, "messages": messages, "add_generation_prompt": True}
    ids = _posted(http, "/tokenize", rendered).get("tokens")
    if not ids:
        return None
    text = _text(http, model, ids)
    if text is None:
        return None
    again = _posted(http, "/tokenize", {"model": model, "prompt": text}).get("tokens")
    if again and len(again) == len(ids) + 1 and again[1:] == ids:
        first = _text(http, model, ids[:1]) or ""
        text = text.removeprefix(first)
    return text


def _text(http: httpx.Client, model: str, ids: Sequence[int]) -> str | None:
    return _posted(http, "/detokenize", {"model": model, "tokens": list(ids)}).get("prompt")


def _end_token(http: httpx.Client, model: str, messages: Sequence[Any]) -> int | None:
    """Return the last token of a chat that ended by itself."""
    body = {
        "model": model,
        "messages": messages,
        "temperature": 0.0,
        "max_tokens": 512,
        "return_token_ids": True,
    }
    try:
        choice = _posted(http, "/v1/chat/completions", body)["choices"][0]
        if choice["finish_reason"] == "stop":
            return int(choice["token_ids"][-1])
    except (KeyError, IndexError, TypeError, ValueError):
        pass
    return None


def _end_of_checkpoint(folder: Path | None) -> int | None:
    """Return the first end token of the checkpoint's generation_config.json or config.json."""
    if folder is None:
        return None
    for name in ("generation_config.json", "config.json"):
        try:
            ends = json.loads((folder / name).read_text("utf-8")).get("eos_token_id")
        except (OSError, ValueError, AttributeError):
            continue
        if isinstance(ends, list):
            ends = ends[0] if ends else None
        if isinstance(ends, int):
            return ends
    return None


def _posted(http: httpx.Client, path: str, body: dict[str, Any]) -> dict[str, Any]:
    """Return the JSON object that answers a request; empty if the server has none."""
    try:
        answer = http.post(path, json=body)
        content = answer.json() if answer.status_code == 200 else {}
    except (httpx.HTTPError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}
