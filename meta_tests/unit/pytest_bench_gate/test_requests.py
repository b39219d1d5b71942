"""Values of ``--benchmark-compare`` that name no stored run, in a run of pytest."""

import os
import shutil

import pytest

GATED = """
def test_rate(gate):
    gate("rate", [60.0 + 0.01 * number for number in range(20)], minimum=52)
"""


@pytest.fixture(scope="module")
def storage(tmp_path_factory):
    """The folder of the stored run 0001. It is empty until the first test has stored the run."""
    return tmp_path_factory.mktemp("storage")


@pytest.fixture
def run(tmp_path, warm_pytest, storage):
    """Run a project that has a stored run, 0001. Return the exit status and the output."""
    (tmp_path / "test_gated.py").write_text(GATED)
    (tmp_path / "test_other.py").write_text("def test_it(): pass\n")
    (tmp_path / "below").mkdir()

    def run(*words: str) -> tuple[int, str]:
        variables = {k: v for k, v in os.environ.items() if not k.startswith(("PYTEST_", "CI"))}
        output = tmp_path / "output.txt"
        words = ("-p", "no:cacheprovider", *words)
        status = warm_pytest().start(words, output, variables, folder=tmp_path).wait(120.0)
        return status, output.read_text("utf-8")

    if not any(storage.iterdir()):
        status, output = run("--benchmark-autosave")
        assert status == 0, output
        shutil.copytree(tmp_path / ".benchmarks", storage, dirs_exist_ok=True)
    shutil.copytree(storage, tmp_path / ".benchmarks", dirs_exist_ok=True)
    return run


@pytest.mark.parametrize("named", ["test_gated.py", "below", "test_gated.py::test_rate"])
def test_a_path_is_refused_although_no_other_test_has_a_gate(run, named):
    status, output = run("--benchmark-compare", named, "test_other.py")
    assert status == 4, output
    (line,) = [line for line in output.splitlines() if line.startswith("ERROR: ")]
    assert line.startswith(f"ERROR: --benchmark-compare {named!r}: expected the number of a stored")
    assert "write paths first" in line and " passed" not in output, output


@pytest.mark.parametrize(
    ("place", "expected"),
    [
        pytest.param("", "got an empty value", id="empty"),
        pytest.param("foo://", "expected a folder, file://FOLDER", id="unknown kind"),
        pytest.param("elasticsearch+http://h", "the package elasticsearch", id="no package"),
    ],
)
def test_a_storage_that_pytest_benchmark_cannot_use_is_one_line(run, place, expected):
    status, output = run(f"--benchmark-storage={place}")
    assert status == 4 and "Traceback" not in output, output
    (line,) = [line for line in output.splitlines() if line.startswith("ERROR: ")]
    assert line.startswith("ERROR: --benchmark-storage") and expected in line, line


def test_a_folder_with_the_number_of_a_stored_run_is_no_path_of_tests(run, tmp_path):
    (tmp_path / "0001").mkdir()
    status, output = run("--benchmark-compare=0001")
    assert status == 0 and "compared with" in output, output
