"""Times of kernels, compared with those of stored and trusted runs."""

import pytest

from meta_tests.folders import DATA, ROOT
from meta_tests.releases import needs_torch

pytestmark = [pytest.mark.timeout(300), needs_torch]


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
