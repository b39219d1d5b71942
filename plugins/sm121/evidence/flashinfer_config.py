"""The configuration of an engine's FlashInfer: ``python -m flashinfer show-config``.

In FlashInfer 0.7.4, the last sections of the output need NVIDIA's cubin server. Without a network,
the output ends before these sections.
"""

import subprocess
from collections.abc import Mapping
from dataclasses import dataclass

from sm121.core.redaction import redact, secrets_of

#: The time limit of the command, in seconds. The command imports torch. Without a network,
#: FlashInfer 0.6.12 on a GPU would then repeat its requests for one to two minutes.
_WITHIN_S = 45.0
#: The maximum length of a quoted error message, in characters.
_LONGEST_MESSAGE = 200


@dataclass(frozen=True)
class FlashInferConfig:
    """The output of the command, or the reason why there is none.

    Attributes:
        text: The output, with secrets redacted; None if there is none.
        problem: The reason why the output is missing or incomplete; empty if it is complete.
    """

    text: str | None = None
    problem: str = ""


def run_show_config(python: str, environment: Mapping[str, str]) -> FlashInferConfig:
    """Run the command in the engine's environment.

    Args:
        python: The interpreter of the engine.
        environment: The whole environment of the engine.
    """
    command = [python, "-m", "flashinfer", "show-config"]
    try:
        run = subprocess.run(
            command,
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
            timeout=_WITHIN_S,
            env={**environment, "PYTHONUNBUFFERED": "1"},  # to get the output up to the time limit
        )
    except subprocess.TimeoutExpired as error:
        problem = (
            f"flashinfer show-config: expected its end within {_WITHIN_S:g} s; it needs a network"
        )
        return FlashInferConfig(_redacted(error.stdout, environment), problem)
    except OSError as error:
        return FlashInferConfig(problem=f"flashinfer show-config: {error}")
    text = _redacted(run.stdout, environment)
    problem = ""
    if run.returncode != 0 or text is None:
        lines = run.stderr.strip().splitlines() or ["no message"]
        last = redact(lines[-1], secrets_of(environment))
        problem = f"flashinfer show-config: {last[:_LONGEST_MESSAGE]}"
    return FlashInferConfig(text, problem)


def _redacted(output: str | bytes | None, environment: Mapping[str, str]) -> str | None:
    """Return an output without secrets; None if it is empty."""
    text = output.decode(errors="replace") if isinstance(output, bytes) else output or ""
    return redact(text, secrets_of(environment)) if text.strip() else None
