"""Times of kernels, compared with those of stored and trusted runs."""

import dataclasses
import json
from types import SimpleNamespace

import pytest

from meta_tests.fakes import past_runs
from meta_tests.folders import DATA, ROOT
from sm121.regression import measured
from sm121.regression.measured import MeasuredHistory
from sm121.run.stored_run import StoredMetric

pytestmark = pytest.mark.timeout(300)


@pytest.fixture
def moe(run_pytest, tmp_path):
    """A run that times the experts of one token, and compares the time with a stored one."""

    def run(provider, *options):
        return run_pytest(
            "tests/test_kernel.py::test_kernel_speed[moe-1]", "tests/test_regression.py",
            "--arch", "cpu", "--profile", str(DATA / "five-percent.toml"),
            "--kernel-provider", f"meta_tests.fakes.kernel_providers:{provider}",
            f"--benchmark-storage={tmp_path / 'storage'}", *options,
            environment={"PYTHONPATH": str(ROOT)},
        )  # fmt: skip

    return run


@pytest.fixture
def compared(moe):
    """The options that compare a run with a trusted run of the kernel `steady`."""
    status, trusted = moe("steady", "--benchmark-autosave")
    assert status == 0, trusted.output
    metric = trusted.verdict["metrics"]["moe_decode_us"]
    assert metric["unit"] == "µs" and metric["verdict"] == "PASS" and metric["minimum"] is None
    assert 390_000 < metric["value"] < 900_000, "microseconds"
    assert metric["case"] == "fused_moe of 1 x 576 by 4 of 8 experts of 576"
    return "--benchmark-compare", "--against", str(trusted.report)


@pytest.mark.slow("two runs that time; test_regression_level.py has an equal run that is green")
def test_an_equal_moe_kernel_is_green_in_regression_and_against(moe, compared):
    status, again = moe("steady", *compared)
    assert status == 0, again.output
    assert any("moe_decode_us" in line for line in again.verdict["against"]["metrics"])


def test_a_slower_moe_kernel_is_red_in_regression_and_against(moe, compared):
    status, slower = moe("slower", *compared)
    assert status == 1, slower.output
    tests = {test["id"].partition("::")[2]: test for test in slower.verdict["tests"]}
    worse = tests["test_no_metric_is_worse"]
    assert worse["verdict"] == "FAIL" and "moe_decode_us" in worse["message"], worse
    (line,) = slower.verdict["against"]["worse"]
    assert line.startswith("moe_decode_us: ") and not slower.verdict["against"]["no_worse"]


@pytest.mark.parametrize(
    ("provider", "shard", "verdict"),
    [
        pytest.param("steady", (), "PASS", id="equal"),
        pytest.param("slower", ("--shard=1/1",), "FAIL", id="slower in a shard"),
    ],
)
def test_kernels_alone_are_compared_with_those_of_a_whole_run(
    moe, tmp_path, provider, shard, verdict
):
    """A run of only the kernel level is compared with the kernel times of a whole stored run.

    The stored run also has a server with a kernel path, and a rate of that server."""
    status, trusted = moe("steady", "--benchmark-autosave")
    assert status == 0, trusted.output
    (file,) = tmp_path.glob("storage/*/0001*.json")
    content = json.loads(file.read_text())
    (kernel,) = content["benchmarks"]
    rate = json.loads(json.dumps(kernel))
    rate["extra_info"] |= {"metric": "tg32@d0", "unit": "tok/s", "case": None}
    content["benchmarks"].append(rate)
    for benchmark in content["benchmarks"]:
        extra = benchmark["extra_info"]
        extra["path"] |= {"attention": "FLASHINFER", "moe": "MARLIN"}
        extra |= {"path_requests": ["--attention-backend FLASHINFER"], "configuration": "stock"}
    file.write_text(json.dumps(content))
    _, run = moe(provider, "--benchmark-compare", *shard)
    tests = {test["id"].partition("::")[2]: test["verdict"] for test in run.verdict["tests"]}
    assert tests["test_no_metric_is_worse"] == verdict, run.output
    assert tests["test_no_metric_is_missing"] == "PASS", run.output
    assert run.verdict["verdict"] == verdict, run.output


KERNEL = StoredMetric("moe_decode_us", "µs", False, None, (1.0,) * 3, 1.0, case="moe of 1")


@pytest.mark.parametrize(
    ("stored", "comparable"),
    [
        pytest.param(KERNEL, True, id="the same kernel"),
        pytest.param(dataclasses.replace(KERNEL, case="moe of 8"), False, id="other sizes"),
        pytest.param(
            StoredMetric("tg32@d0", "tok/s", True, None, (60.0,) * 3, 60.0), False, id="a rate"
        ),
    ],
)
def test_kernels_alone_are_not_compared_with_a_run_without_them(
    tmp_path, monkeypatch, stored, comparable
):
    """A run of only the kernel level is not comparable with a stored run without kernel times.

    Otherwise nothing would be compared, and the run would pass."""
    ledger = [SimpleNamespace(level="kernel", skipped=False)]
    run = SimpleNamespace(record=SimpleNamespace(ledger=ledger))
    history = MeasuredHistory(SimpleNamespace(run=run), "storage", tmp_path)
    history.__dict__["_now"] = past_runs.stored_run("this run", KERNEL)
    runs = [past_runs.stored_run("0001_x.json", stored)]
    monkeypatch.setattr(measured.stored_benchmarks, "load_benchmarks", lambda *_: runs)
    assert bool(history._stored()) is comparable
