"""The configuration of an engine's FlashInfer: ``python -m flashinfer show-config``.

Its last sections need NVIDIA's server of cubins (seen in 0.7.4). Without a network the sections
before them are there.
"""

import subprocess
from collections.abc import Mapping
from dataclasses import dataclass

from sm121.core.redaction import redact, secrets_of

#: Seconds that the command may take: it imports torch, and looks for cubins.
_WITHIN_S = 120.0
#: Characters of a message of it.
_LONGEST_MESSAGE = 200


@dataclass(frozen=True)
class FlashInferConfig:
    """The output of the command, or why there is none.

    Attributes:
        text: The output, without secrets; None without any.
        problem: Why there is none, or why it is not whole; else empty.
    """

    text: str | None = None
    problem: str = ""


def read(python: str, environment: Mapping[str, str]) -> FlashInferConfig:
    """Ask the FlashInfer of an interpreter for its configuration.

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
            env=dict(environment),
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return FlashInferConfig(problem=f"flashinfer show-config: {error}")
    secrets = secrets_of(environment)
    text = redact(run.stdout, secrets) if run.stdout.strip() else None
    problem = ""
    if run.returncode != 0 or text is None:
        lines = run.stderr.strip().splitlines() or ["no message"]
        problem = f"flashinfer show-config: {redact(lines[-1], secrets)[:_LONGEST_MESSAGE]}"
    return FlashInferConfig(text, problem)
