"""Write harmony's vocabulary to a file, so that an engine's openai-harmony need not download it.

oss-harmony contains the vocabulary. openai-harmony reads ``o200k_base.tiktoken`` from the folder in
``TIKTOKEN_ENCODINGS_BASE``. The file has a line for each token, with its bytes in base64 and its
rank.
"""

import base64
import hashlib
from pathlib import Path

from sm121.checkpoint import tokenizer
from sm121.core.errors import Sm121Error

#: The name of the file.
NAME = "o200k_base.tiktoken"
#: openai-harmony refuses files with another digest (src/tiktoken_ext/public_encodings.rs).
_SHA256 = "446a9538cb6c348e3516120d7c08b09f57c36495e2acfffe59a5bf8b0cfb1a2d"


def write(folder: Path) -> Path:
    """Write the vocabulary file.

    Args:
        folder: The folder, which is created if needed.

    Returns:
        The path of the file.

    Raises:
        ModuleNotFoundError: oss-harmony is not installed.
        Sm121Error: openai-harmony is installed instead of oss-harmony, or the vocabulary differs.
    """
    from openai_harmony import HarmonyError

    try:
        ranks = tokenizer.ranks()
    except HarmonyError as error:
        raise Sm121Error(
            "expected the package oss-harmony, which contains the vocabulary, got a harmony "
            f"package that cannot load it ({error}). Install it: pip install oss-harmony"
        ) from error
    text = b"".join(base64.b64encode(token) + b" %d\n" % n for n, token in enumerate(ranks))
    digest = hashlib.sha256(text).hexdigest()
    if digest != _SHA256:
        raise Sm121Error(f"{NAME}: expected SHA-256 {_SHA256}, got {digest}")
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / NAME
    file.write_bytes(text)
    return file
