"""What is judged becomes something else while the run goes on (20)."""

import itertools
import subprocess
from collections.abc import Callable
from pathlib import Path

from false_greens import Case, Outcome, Place
from false_greens.engine import VARIABLES, environment, script
from sm121.session.session import Session

ITEM = "20 What is judged changes during the run"
_NUMBERS, _PACKAGE = itertools.count(), "flashinfer_cubin-1.0.dist-info/METADATA"
_METADATA = "Metadata-Version: 2.1\nName: flashinfer-cubin\nVersion: 1.0\n"
_FILES = {
    "vllm/__init__.py": "", "vllm/envs.py": "x = 1\n", _PACKAGE: _METADATA,
    "model/config.json": '{"model_type": "gpt_oss"}', "model/README.md": "a model",
    "model/model.safetensors": "0" * 99,
}  # fmt: skip


def _git(folder: Path, *words: str) -> None:
    name = ("-c", "user.name=x", "-c", "user.email=x@example.org")
    subprocess.run(["git", *name, *words], cwd=folder, check=True, capture_output=True)


def _commit(folder: Path) -> None:
    (folder / "vllm" / "envs.py").write_text("x = 2\n")
    _git(folder, "commit", "-qam", "two")


def _write(file: str, text: str) -> Callable[[Path], object]:
    return lambda folder: (folder / file).write_text(text)


def _changes(change: Callable[[Path], object]) -> Callable[[Place], Outcome]:
    """A server is started from a checkout, with a package and a checkpoint; then it is changed."""

    def run(place: Place) -> Outcome:
        folder = place.tmp_path / f"changed-{next(_NUMBERS)}"
        for name, text in _FILES.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(text)
        _git(folder, "init", "-q")
        _git(folder, "add", "vllm")
        _git(folder, "commit", "-qm", "one")

        def doing(session: Session) -> None:
            session.server()
            change(folder)

        with environment({**VARIABLES, "PYTHONPATH": f"{folder}"}):
            model = str(folder / "model")
            return script(place, f"{folder.name}-report", doing, model=model)

    return run


CASES = [
    Case(ITEM, name, _changes(fault), _changes(clean), expected, slow)
    for name, fault, clean, expected, slow in (
        ("a commit of the engine's checkout", _commit, lambda _: None, "version of vllm", False),
        ("a package that is updated", _write(_PACKAGE, _METADATA.replace("1.0", "1.1")),
         _write("notes.txt", "x"), "version of flashinfer-cubin", True),
        ("a checkpoint that is written anew", _write("model/model.safetensors", "other"),
         _write("model/README.md", "better words"), "model's digest", True),
        ("a source file that nobody committed", _write("vllm/envs.py", "x = 3\n"),
         _write("vllm/untracked.log", "x"), "version of vllm", True),
    )
]  # fmt: skip
