"""What a server does where a parameter of sampling is not sent: as if the promised value were. vLLM
promises those of the checkpoint's generation_config.json, and else OpenAI's defaults."""

import json
from pathlib import Path

from sm121.api.client import Api, Json
from sm121.api.sampled import TEXTS
from sm121.core.server import Server
from sm121.core.unmet import require
from sm121.core.verdict import NotRun

NEUTRAL: Json = {
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
}
_OWN = ("--generation-config", "--override-generation-config")
_HOT: Json = {"temperature": 2.0}


def promised(api: Api, server: Server) -> list[Json]:
    """The values that hold where none is sent. Of a server that somebody else started two are
    possible: it may have been told to leave the checkpoint's out. Raises NotRun: the engine
    promises none, or was told others."""
    if api.capabilities.engine != "vllm":
        raise NotRun("the engine does not say what holds where a parameter is not sent")
    started = server.configuration
    if started is not None and any(option.startswith(_OWN) for option in started.arguments):
        raise NotRun(f"the server was started with {' or '.join(_OWN)}")
    roots = {entry["id"]: entry.get("root") for entry in api.models()["data"]}
    model = started.model if started is not None else roots.get(api.model)
    file = Path(model or "") / "generation_config.json"
    if started is None and not file.is_file():
        raise NotRun(f"the server's checkpoint is not here ({model}): what it promises is unknown")
    values = json.loads(file.read_text("utf-8")) if file.is_file() else {}
    checkpoint = NEUTRAL | {n: v for n, v in values.items() if n in NEUTRAL and v is not None}
    return [checkpoint] if started is not None else [checkpoint, NEUTRAL]


def hold(api: Api, candidates: list[Json], attempts: int) -> None:
    """With one seed, texts have the same answers where the values are sent as where none is, or a
    high temperature alone; and without a seed they differ."""

    def differing(values: Json) -> list[str]:
        texts: list[str] = []
        for alone in ({}, _HOT):
            others, tries = {*TEXTS}, attempts
            while others and tries:
                tries -= 1
                bare, full = _sampled(api, alone, 11), _sampled(api, values | alone, 11)
                others &= {text for text, a, b in zip(TEXTS, bare, full, strict=True) if a != b}
            texts += sorted(others)
        return texts

    least = min(map(differing, candidates), key=len)
    required = f"answers as with {candidates[0]}, where none of these is sent"
    require(not least, required, f"{len(least)} others", evidence=least)
    answers = {tuple(_sampled(api, _HOT)) for _ in range(2)}
    require(len(answers) > 1, "other answers each time where no seed is sent", "the same")


def _sampled(api: Api, options: Json, seed: int | None = None) -> list[str]:
    body = {"temperature": None, "max_tokens": 24, "ignore_eos": True, **options}
    choices = api.complete([*TEXTS], **body, **({} if seed is None else {"seed": seed}))["choices"]
    return [choice["text"] for choice in sorted(choices, key=lambda choice: choice["index"])]
