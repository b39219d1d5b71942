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


#: The start of the converter with the name of a pre-tokenizer. The converter knows the tokenizers
#: of published models by their digests, and refuses others.
_WITH_PRE_TOKENIZER = """
import runpy, sys
converter, name = sys.argv[1:3]
sys.path.insert(0, converter.rpartition("/")[0])
from conversion.base import TextModel
TextModel.get_vocab_base_pre = lambda self, tokenizer: name
sys.argv = [converter, *sys.argv[3:]]
runpy.run_path(converter, run_name="__main__")
"""


def convert(
    checkpoint: Path,
    llama_cpp: Path,
    output: Path,
    progress: Callable[[str], None],
    *,
    pre_tokenizer: str = "",
) -> Path:
    """Convert a checkpoint folder with the converter of a llama.cpp checkout.

    Args:
        checkpoint: The folder.
        llama_cpp: The checkout.
        output: The GGUF file.
        progress: Called with a line of progress.
        pre_tokenizer: llama.cpp's name of the pre-tokenizer, for a tokenizer that the converter
            does not know.

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
        start = [str(converter.absolute())]
        if pre_tokenizer:
            start = ["-c", _WITH_PRE_TOKENIZER, str(converter.absolute()), pre_tokenizer]
        done = subprocess.run(
            [
                sys.executable, *start, str(folder), "--outtype", "bf16",
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
