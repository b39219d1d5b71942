"""An engine whose features can be broken in known ways.

As a pytest plugin (``-p matrix_engine``) it replaces vLLM; as a program it is the server. Its flags
and its log are vLLM's, as far as the matrix level reads them. ``MATRIX_FAULTS`` injects faults,
words of the form ``KIND:flag+flag``: fallback, crash, crash-once (only at the first start with
these arguments), refuse, die, die-streaming and fail-streaming (during the requests of the
performance sample), corrupt, corrupt-together, slow.
"""

import argparse
import asyncio
import hashlib
import json
import os
import sys
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[2]))  # for its imports, as it runs as a script

from meta_tests.folders import FAKES

FAULTS = "MATRIX_FAULTS"
KINDS = ("fallback", "crash", "crash-once", "refuse", "die", "die-streaming", "fail-streaming",
         "corrupt", "corrupt-together", "slow")  # fmt: skip
_BOOTS = "MATRIX_BOOTS"
#: The questions of the canary's exam.
_CAPITALS = {"France is": " Paris", "Japan is": " Tokyo", "Italy is": " Rome"}


def active(arguments: Sequence[str]) -> dict[str, str]:
    """Return the faults whose flags are all given.

    The keys are the kinds, the values are the flags."""
    flags_of = {word.lstrip("-") for word in arguments}
    planted = {}
    for word in os.environ.get(FAULTS, "").split():
        kind, _, flags = word.partition(":")
        assert kind in KINDS, kind
        if all(flag in flags_of for flag in flags.split("+")):
            planted[kind] = flags
    return planted


# ------------------------------------------------------------------------------------- The plugin

if __name__ != "__main__":
    from sm121.core.configuration import ServerConfiguration
    from sm121.engines import registry
    from sm121.engines.vllm import Vllm

    class MatrixEngine(Vllm):
        """Starts this file in place of vLLM."""

        def check_interpreter(self, python: str, environment: Mapping[str, str]) -> str | None:
            return "0.33.0"

        def command(self, configuration: ServerConfiguration, *, port: int) -> list[str]:
            command = [sys.executable, str(FAKES / "matrix_engine.py"), "--port", str(port)]
            return [*command, *configuration.arguments]

        def environment(
            self, configuration: ServerConfiguration, *, api_key: str
        ) -> Mapping[str, str]:
            others = ("VLLM_", "FLASHINFER_")
            inherited = {k: v for k, v in os.environ.items() if not k.startswith(others)}
            return {**inherited, "MATRIX_KEY": api_key, **dict(configuration.environment)}

        def can_profile(self, python: str, environment: Mapping[str, str]) -> bool:
            return False

        def check_arguments(
            self, python: str, lists: Sequence[Sequence[str]], environment: Mapping[str, str]
        ) -> list[str | None]:
            flags = {"--moe-backend", "--enforce-eager", "--load-format", "--spec", "--window"}
            messages: list[str | None] = []
            for words in lists:
                strange = [w for w in words if w.startswith("--") and w not in flags]
                messages.append(f"unrecognized arguments: {strange[0]}" if strange else None)
            return messages

    registry.register(MatrixEngine())


# ------------------------------------------------------------------------------------- The server


def ids_of(prompt: Any, count: int, *, corrupt: bool = False) -> list[int]:
    """Return the token ids with which a correct server continues a prompt (a text or token ids)."""
    words = prompt if isinstance(prompt, list) else [int(b) for b in str(prompt).encode()]
    ids = []
    state = hashlib.sha256(json.dumps(words).encode()).digest()
    for n in range(count):
        state = hashlib.sha256(state + bytes([n % 251])).digest()
        ids.append(int.from_bytes(state[:4], "big") % 190_000)
    if corrupt and count > 2:
        ids[2] = (ids[2] + 1) % 190_000
    return ids


def text_of(ids: list[int], prompt: Any) -> str:
    asked = prompt if isinstance(prompt, str) else ""
    first = next((city for text, city in _CAPITALS.items() if asked.endswith(text)), "")
    return first + "".join(f" w{i}" for i in ids)


def server_of(faults: Collection[str]) -> tuple[Any, Any]:
    """Return the server of this command line, with the kinds of faults that appear in its
    answers."""
    from aiohttp import web

    from meta_tests.fakes import timed_server

    class Server(timed_server.TimedServer):
        async def complete(self, request: web.Request) -> web.StreamResponse:
            body = json.loads(await request.read())
            if request.headers.get("Authorization") != f"Bearer {os.environ['MATRIX_KEY']}":
                return web.json_response({"error": "Unauthorized"}, status=401)
            if body.get("stream") and "die-streaming" in faults:
                print("torch.OutOfMemoryError: CUDA out of memory.", flush=True)
                os._exit(1)
            if body.get("stream") and "fail-streaming" in faults:
                return web.json_response({"error": "KeyError: 'block'"}, status=500)
            if body.get("stream") or ("logprobs" not in body and "return_token_ids" not in body):
                return await super().complete(request)
            if "die" in faults and "logprobs" in body:
                print("CUDA error: an illegal memory access was encountered", flush=True)
                os._exit(1)
            self.running += 1
            await asyncio.sleep(0.02)  # wait, so that concurrent requests run together
            together = "corrupt-together" in faults and self.running > 1
            prompt = body["prompt"]
            tokens = int(body["max_tokens"])
            ids = ids_of(prompt, tokens, corrupt=together or "corrupt" in faults)
            self.prompted += len(prompt)
            self.generated += tokens
            await asyncio.sleep(0.02)
            self.running -= 1
            names = [f"token_id:{i}" for i in ids]
            choice = {"index": 0, "text": text_of(ids, prompt), "finish_reason": "length"}
            sent = prompt if isinstance(prompt, list) else list(prompt.encode())
            choice |= {"token_ids": ids, "prompt_token_ids": sent, "logprobs": None}
            if body.get("logprobs"):
                top = [{name: -0.1, "token_id:190001": -3.0} for name in names]
                choice["logprobs"] = {"tokens": names, "top_logprobs": top}
                choice["logprobs"] |= {"token_logprobs": [-0.1] * tokens}
            usage = {"prompt_tokens": len(prompt), "completion_tokens": tokens}
            answer = {"id": "c", "object": "text_completion", "choices": [choice]}
            return web.json_response({**answer, "usage": usage})

    pace = timed_server.Pace(
        rate=400.0 * (0.7 if "slow" in faults else 1.0), fixed_ms=3.0, prefill_rate=1e6
    )
    return timed_server.serve, Server(pace, "canary", None)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--moe-backend", default="marlin")
    parser.add_argument("--enforce-eager", action="store_true")
    parser.add_argument("--load-format", default="safetensors")
    parser.add_argument("--spec", default="off")
    parser.add_argument("--window", default="whole")
    options = parser.parse_args()
    faults = active(sys.argv)
    words = " ".join(sys.argv[3:])
    earlier: list[str] = []
    if counted := os.environ.get(_BOOTS):
        earlier = Path(counted).read_text().splitlines() if Path(counted).exists() else []
        with Path(counted).open("a") as stream:
            stream.write(words + "\n")
    if "crash-once" in faults and words not in earlier:
        faults["crash"] = faults["crash-once"]
    say = lambda text: print(f"INFO 11-20 10:00:00 [core.py:133] {text}", flush=True)  # noqa: E731
    say("Initializing a V1 LLM engine (v0.33.0) with config: model='canary', "
        f"speculative_config=None, dtype=torch.float32, load_format={options.load_format}, "
        f"enforce_eager={options.enforce_eager}, enable_prefix_caching=True")  # fmt: skip
    if "crash" in faults:
        print("ERROR 11-20 10:00:01 [core.py:1510] EngineCore failed to start.", flush=True)
        sys.exit("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 61.86 GiB.")
    if "refuse" in faults:
        sys.exit("ValueError: moe_backend='x' is not supported for MXFP4 MoE.")
    kernel = options.moe_backend if "fallback" not in faults else "marlin"
    names = {"flashinfer_cutlass": "FLASHINFER_CUTLASS_MXFP4_MXFP8"}
    say(f"Using '{names.get(kernel, kernel.upper())}' Mxfp4 MoE backend.")
    serve, server = server_of(faults)
    asyncio.run(serve(server, options.port))


if __name__ == "__main__":
    main()
