"""Item 20: the tested software changes during the run."""

import itertools
import os
from collections.abc import Callable
from pathlib import Path
from unittest import mock

from meta_tests.fakes.scripted_sessions import VARIABLES, script
from meta_tests.fakes.servers import git
from meta_tests.faults.false_greens import Case, Kit, Outcome
from meta_tests.two_steps import in_two_steps
from sm121.session.session import Session

_NUMBERS = itertools.count()
_PACKAGE = "flashinfer_cubin-1.0.dist-info/METADATA"
_METADATA = "Metadata-Version: 2.1\nName: flashinfer-cubin\nVersion: 1.0\n"
_FILES = {
    "vllm/__init__.py": "", "vllm/envs.py": "x = 1\n", _PACKAGE: _METADATA,
    "model/config.json": '{"model_type": "gpt_oss"}', "model/README.md": "a model",
    "model/model.safetensors": "0" * 99,
}  # fmt: skip


def _commit(folder: Path) -> None:
    (folder / "vllm" / "envs.py").write_text("x = 2\n")
    git(folder, "commit", "-qam", "two")


@in_two_steps
def _write(folder: Path, file: str, text: str) -> None:
    (folder / file).write_text(text)


def _nothing(_folder: Path) -> None: ...


@in_two_steps
def _changes(kit: Kit, change: Callable[[Path], object]) -> Outcome:
    """Start a server from a checkout with a package and a checkpoint, and then change one of these
    three."""
    folder = kit.tmp_path / f"changed-{next(_NUMBERS)}"
    for name, text in _FILES.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    git(folder, "init", "-q")
    git(folder, "add", "vllm")
    git(folder, "commit", "-qm", "one")

    def doing(session: Session) -> None:
        session.run.server()
        change(folder)

    with mock.patch.dict(os.environ, {**VARIABLES, "PYTHONPATH": f"{folder}"}):
        return script(kit, f"{folder.name}-report", doing, model=str(folder / "model"))


CASES = [
    Case(
        item="20 What is judged changes during the run",
        name="a commit of the engine's checkout",
        fault=_changes(_commit),
        clean=_changes(_nothing),
        expected="version of vllm",
    ),
    Case(
        item="20 What is judged changes during the run",
        name="a package that is updated",
        fault=_changes(
            _write(_PACKAGE, ("Metadata-Version: 2.1\nName: flashinfer-cubin\nVersion: 1.1\n"))
        ),
        clean=_changes(_write("notes.txt", "x")),
        expected="version of flashinfer-cubin",
        slow=True,
    ),
    Case(
        item="20 What is judged changes during the run",
        name="a checkpoint that is written anew",
        fault=_changes(_write("model/model.safetensors", "other")),
        clean=_changes(_write("model/README.md", "better words")),
        expected="model's digest",
        slow=True,
    ),
    Case(
        item="20 What is judged changes during the run",
        name="a source file that nobody committed",
        fault=_changes(_write("vllm/envs.py", "x = 3\n")),
        clean=_changes(_write("vllm/untracked.log", "x")),
        expected="version of vllm",
        slow=True,
    ),
]
