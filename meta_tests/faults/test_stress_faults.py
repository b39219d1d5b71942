"""A sample of the faults under load is detected. docs/tables/stress-faults.md contains all
faults."""

import json

import pytest

from meta_tests.faults import stress_faults
from meta_tests.faults.stress_faults import segments
from sm121.machine import machine_lock

SAMPLE = ("pytest-killed",)  # wrong answers are tested faster in test_level.py


@pytest.mark.timeout(180)
@pytest.mark.parametrize("name", SAMPLE)
def test_the_fault_is_noticed_classified_and_cleaned_up(name, warm_pytest):
    outcome = stress_faults.run(stress_faults.CASES[name], warm_pytest())
    assert not outcome.wrong, outcome


def test_the_lock_of_the_machine_is_not_left_over(tmp_path):
    """The machine's lock file, which stays for the next run, does not count as left behind."""
    machine_lock.lock_machine(tmp_path).close()
    assert stress_faults._remains(segments(), tmp_path, "") == []
    (tmp_path / "tmpabc").touch()
    assert stress_faults._remains(segments(), tmp_path, "") == ["temporary files left: ['tmpabc']"]


def test_the_documentation_shows_every_fault_and_every_sample():
    """The table and the bundles contain every case.

    After a new case, this fails until `make catalogues` has been run."""
    root = stress_faults.ROOT
    rows = (root / "docs" / "tables" / "stress-faults.md").read_text("utf-8")
    cases = [case for name, case in stress_faults.CASES.items() if name != "clean"]
    missing = [case.name for case in cases if f"| {case.text} | `{case.kind or '-'}` |" not in rows]
    assert not missing, "docs/tables/stress-faults.md has no row for these; run `make catalogues`"
    assert "| **no** |" not in rows
    samples = root / "docs" / "bundles"
    absent = [name for name in stress_faults.SAMPLES if not (samples / name).is_dir()]
    assert not absent, "docs/bundles has no sample of these; run `make catalogues`"


def test_a_hang_without_stacks_is_wrong(tmp_path):
    assert stress_faults._without_stacks(tmp_path) == ["no stacks"]
    stack = "Thread 0x00007f (most recent call first):\n"
    text = f"## python (1)\n{stack}\n## python (2)\nno stack: a signal has stopped it\n"
    (tmp_path / "stacks.txt").write_text(text)
    without = ["no stack of python (2): no stack: a signal has stopped it"]
    assert stress_faults._without_stacks(tmp_path) == without


def test_a_process_without_a_section_in_the_stacks_is_wrong(tmp_path):
    """A process that has not ended must have a section in the stack traces of a bundle."""
    (tmp_path / "process-tree.txt").write_text(
        "     pid   parent status         rss MiB    cpu s  name, command\n"
        "       1        0 sleeping            17     0.27  python: python -m x 2 3\n"
        "       2        1 running             40     0.54  python: python y\n"
        "      31        1 zombie               0     0.00  python: \n"
        "      32        1 stopped             40     0.54  VLLM::Worker: python y\n"
    )
    stack = "Thread 0x00007f (most recent call first):\n"
    (tmp_path / "stacks.txt").write_text(f"## python (1)\n{stack}\n## VLLM::Worker (32)\n{stack}")
    assert stress_faults._without_stacks(tmp_path) == ["no section in the stacks for process 2"]


def test_every_sample_of_a_hang_has_the_stacks_of_each_process():
    hangs = []
    for index in sorted((stress_faults.ROOT / "docs" / "bundles").glob("*/bundle.json")):
        if json.loads(index.read_text("utf-8"))["class"] == "hang":
            hangs.append(index.parent)
    assert hangs
    for bundle in hangs:
        assert not stress_faults._without_stacks(bundle), bundle.name
