"""Convert the canary to GGUF with llama.cpp's own converter, so that llama-server can serve the
same weights.
"""

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from sm121.core.errors import Sm121Error, UsageError

NAME = "canary.gguf"
_CONVERTER = "convert_hf_to_gguf.py"
_WITHIN_S = 900.0


def convert(
    checkpoint: Path, llama_cpp: Path, output: Path, progress: Callable[[str], None]
) -> Path:
    """Convert a checkpoint folder with the converter of a llama.cpp checkout.

    Raises:
        UsageError: ``llama_cpp`` is not a checkout.
        Sm121Error: The converter failed; the message is its last line.
    """
    converter = llama_cpp / _CONVERTER
    if not converter.is_file():
        raise UsageError(
            f"--gguf {llama_cpp}: expected a checkout of llama.cpp, with {_CONVERTER} "
            "(also in the sources of llama-cpp-python, vendor/llama.cpp)"
        )
    output.parent.mkdir(parents=True, exist_ok=True)
    draft = output.with_name(f".{output.name}.draft")
    progress(f"{converter.name} of {checkpoint.name}, BF16")
    with tempfile.TemporaryDirectory() as parent:
        (folder := Path(parent) / checkpoint.name).mkdir()  # the model's name in the file
        for file in checkpoint.absolute().iterdir():
            (folder / file.name).symlink_to(file)
        done = subprocess.run(
            [
                sys.executable, str(converter.absolute()), str(folder), "--outtype", "bf16",
                "--outfile", str(draft.absolute()),
            ],
            capture_output=True,
            text=True,
            timeout=_WITHIN_S,
            env={**os.environ, "HF_HUB_OFFLINE": "1"},
        )  # fmt: skip
    if done.returncode != 0:
        last = done.stderr.strip().splitlines()[-1:] or ["no message"]
        draft.unlink(missing_ok=True)
        raise Sm121Error(
            f"{converter}: ended with {done.returncode}: {last[0]} "
            "(it needs torch, transformers, sentencepiece and the rest of llama.cpp's "
            "requirements/requirements-convert_hf_to_gguf.txt)"
        )
    draft.replace(output)
    progress(f"{output}: {output.stat().st_size >> 20} MiB")
    return output
