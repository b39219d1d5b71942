"""Store a crash bundle as a sample, without names of this machine."""

import os
import pwd
import re
import shutil
import site
import socket
import sys
from pathlib import Path

from meta_tests.folders import ROOT

#: The maximum length of a stored file, in characters. Of a longer file, for example of the memory
#: sampled every second, only the beginning and the end are stored.
_LONGEST = 60_000
_ROOT = str(ROOT)


def keep(bundle: Path, target: Path) -> None:
    """Copy a bundle, and replace the paths of this machine by placeholders."""
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir(parents=True)
    for file in sorted(bundle.iterdir()):
        text = neutral(file.read_text("utf-8", "replace"))
        if len(text) > _LONGEST:
            left_out = len(text) - _LONGEST
            text = (
                f"{text[: _LONGEST // 2]}\n[{left_out} characters left out of this sample]\n"
                + (text[-_LONGEST // 2 :])
            )
        (target / file.name).write_text(text, "utf-8")


def neutral(text: str) -> str:
    """Return a text in which paths and names of this machine are replaced."""
    for path in sorted({sys.prefix, sys.base_prefix, *_environments()}, key=len, reverse=True):
        text = text.replace(path, "ENVIRONMENT")
    text = text.replace(_ROOT, "SUITE")
    text = re.sub(r"/tmp/[\w.-]+(/t|/disk|/report)?(?=[/\s\"',;:)]|$)", "TMP", text)
    text = re.sub(r"/(?:root|home/\w+|work)(?:/[\w.+-]+)*", "HOME", text)
    text = re.sub(r"/process_api(/[0-9a-f]{8,})?", "/CONTAINER", text)
    text = re.sub(r"(tainted:? )\d+\.\d+\.\S+", r"\1KERNEL", text)
    text = re.sub(rf"(?<![\w-]){re.escape(socket.gethostname())}(?![\w-])", "HOST", text)
    user = pwd.getpwuid(os.getuid()).pw_name
    return text.replace(f"/{user}/", "/USER/")


def _environments() -> set[str]:
    folders = {str(Path(entry).parents[2]) for entry in sys.path if entry.endswith("site-packages")}
    return {folder for folder in folders | set(site.PREFIXES) if len(folder) > 5}
