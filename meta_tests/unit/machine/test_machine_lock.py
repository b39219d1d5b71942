"""If there are several runs on one machine, only one measures.

A second measuring run is refused.
"""

import os
import re
from types import SimpleNamespace

import pytest

from meta_tests.fakes import servers
from sm121.core.errors import UsageError
from sm121.machine import machine_lock
from sm121.plugin import opening
from sm121.plugin.selection import WHY_NOT
from sm121.plugin.stash import LEVEL

#: A scenario that contains tests of the performance level.
MEASURES = "meta_tests/whole/scenarios/measurements.py"


def test_a_refused_second_run_names_pid_and_time_of_the_first(tmp_path):
    first = machine_lock.lock_machine(tmp_path)
    holder = rf"pid {os.getpid()}, since 20\d\d-\d\d-\d\d \d\d:\d\d:\d\d"
    with pytest.raises(UsageError, match=rf"^this machine: .* got another \({holder}\)\. Wait"):
        machine_lock.lock_machine(tmp_path)
    first.close()
    machine_lock.lock_machine(tmp_path).close()


def test_a_dead_run_holds_no_lock(tmp_path):
    with servers.program("holder-of-the-machine.txt", str(tmp_path)) as holder:
        assert holder.stdout.readline() == "has\n"
        with pytest.raises(UsageError, match=rf"pid {holder.pid}, since"):
            machine_lock.lock_machine(tmp_path)
    machine_lock.lock_machine(tmp_path).close()


def test_a_link_in_place_of_the_lock_is_not_followed(tmp_path):
    (tmp_path / "precious").write_text("precious")
    (tmp_path / machine_lock.name()).symlink_to(tmp_path / "precious")
    with pytest.raises(UsageError, match=r"measures\.lock: expected a file of this user"):
        machine_lock.lock_machine(tmp_path)
    assert (tmp_path / "precious").read_text() == "precious"


@pytest.mark.parametrize(
    ("level", "fixtures", "measures"),
    [
        pytest.param("smoke", (), False, id="smoke"),
        pytest.param("kernel", ("kernels",), False, id="numerics"),
        pytest.param("kernel", ("kernels", "benchmark"), True, id="kernel benchmark"),
        pytest.param("kernel", ("benchmark", "price_of_rounding"), False, id="price, not timed"),
        pytest.param("stress", (), True, id="stress"),
        pytest.param("performance", (), True, id="performance"),
        pytest.param("regression", (), True, id="regression"),
        pytest.param("matrix", (), True, id="matrix"),
    ],
)
@pytest.mark.parametrize("is_run", [True, False], ids=["run", "skipped"])
def test_levels_that_need_the_machine_lock(level, fixtures, measures, is_run):
    stash = {LEVEL: level} if is_run else {LEVEL: level, WHY_NOT: "not here"}
    item = SimpleNamespace(stash=stash, fixturenames=fixtures)
    assert opening.needs_the_machine([item], on_gpu=False) == (measures and is_run)
    assert opening.needs_the_machine([item], on_gpu=True) == is_run, "GB10 holds the model once"


def test_a_second_measuring_run_is_refused_in_one_line(run_pytest, fault_server, tmp_path):
    first = machine_lock.lock_machine(tmp_path)
    words = ("--arch", "cpu", *fault_server().options)
    environment = {machine_lock.FOLDER: str(tmp_path), "SM121_META_SAMPLES": '{"x_s": [1.0]}'}
    status, run = run_pytest(*words, MEASURES, environment=environment)
    assert status == 4, run.output
    (line,) = [line for line in run.output.splitlines() if line.startswith("ERROR")]
    assert re.search(rf"got another \(pid {os.getpid()}, since", line)
    assert not (run.report / "verdict.json").exists()
    # A run that measures nothing needs no lock.
    one = "meta_tests/whole/scenarios/verdicts.py::test_pass"
    status, run = run_pytest(*words, one, environment=environment)
    assert status == 0, run.output
    first.close()
