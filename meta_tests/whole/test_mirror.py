"""The folder meta_tests/unit mirrors the plugins: a file has the name of the module that it
tests."""

from pathlib import Path

import pytest

from meta_tests.folders import META, ROOT

PLUGINS = ROOT / "plugins"
PACKAGE = PLUGINS / "sm121"
TOOLS = ROOT / "tools"


def modules_of(folder: Path) -> set[str]:
    """Return the names of the modules and packages of a folder, and the folder's own name."""
    names = {path.stem for path in folder.glob("*.py")} | {path.name for path in folder.iterdir()}
    return names | {folder.name}


def folder_of(name: str) -> Path:
    """Return the folder of tools, a plugin or a package to which a folder of unit tests belongs."""
    if name == "tools":
        return TOOLS
    if (PLUGINS / name).is_dir():
        return PLUGINS / name
    return PACKAGE / name


@pytest.mark.parametrize(
    "path",
    [
        pytest.param(path, id=path.relative_to(META).as_posix())
        for path in sorted((META / "unit").rglob("test_*.py"))
    ],
)
def test_a_file_is_named_after_its_module(path):
    """A test file has its module's name, and a suffix if several files test the module.

    For example, `unit/measure/test_gate.py` and `test_gate_starts.py` test the module `gate`."""
    tested = folder_of(path.parent.name)
    assert path.parent.parent == META / "unit" and tested.is_dir(), "a folder for each package"
    words = path.stem.removeprefix("test_").split("_")
    prefixes = {"_".join(words[:count]) for count in range(1, len(words) + 1)}
    assert prefixes & modules_of(tested), f"expected test_<module of {tested.name}>_<topic>.py"


def test_other_tests_have_a_folder():
    assert not list(META.glob("test_*.py"))
    assert not list((META / "fakes").rglob("test_*.py"))
