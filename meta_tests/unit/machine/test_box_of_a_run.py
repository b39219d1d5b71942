"""In whole runs, the machine's state is read at the right times, and a DEGRADED machine affects the
rates."""

import json

import pytest

from meta_tests.texts import text_file
from sm121.core import profile

SAMPLES = {"tg32@d0": [53.0, 53.2, 52.9, 53.1, 53.05]}


@pytest.fixture
def on_a_box(run_pytest, fault_server, tmp_path):
    def go(samples: dict, *arguments: str, environment: dict[str, str] | None = None, **limits):
        text = profile.shipped()["cpu-tiny-gpt-oss"].read_text("utf-8") + text_file("one-gate.toml")
        head, _, rest = text.partition("[box]\n")
        tail = rest[rest.index("\n[") :]
        lines = "\n".join(f"{key} = {value}" for key, value in limits.items())
        path = tmp_path / "own.toml"
        path.write_text(f"{head}[box]\n{lines}\n{tail}")
        status, run = run_pytest(
            "--profile", str(path), *fault_server().options,
            f"--benchmark-storage={tmp_path}/s", "--benchmark-autosave",
            *arguments, "meta_tests/whole/scenarios/measurements.py",
            environment={"SM121_META_SAMPLES": json.dumps(samples), **(environment or {})},
        )  # fmt: skip
        return status, run.verdict, run

    return go


#: A metric that is counted, so that it does not depend on a clock.
SHARE = {"samples": [82.6], "unit": "%", "higher_is_better": True}
EASY = {"max_spread": 9, "max_drift": 9, "max_other_load": 1}
IMPOSSIBLE = {"bandwidth_gb_s": '{ value = 1e6, source = "nobody" }'}


@pytest.mark.slow("two runs that measure the machine; test_box.py asks in this process")
def test_a_degraded_box_makes_performance_inconclusive(on_a_box, tmp_path):
    """On a DEGRADED machine, timed metrics are INCONCLUSIVE, and counted metrics stay valid."""
    status, file, run = on_a_box(SAMPLES, **EASY, roofline_tolerance=100)
    assert status == 0, run.output
    assert file["box"]["state"] == "QUALIFIED", file["box"]
    assert file["box"]["before"]["device"] and file["box"]["after"]["device"]
    assert file["metrics"]["tg32@d0"]["roofline"] is None, "no log shows what this server reads"

    status, file, run = on_a_box(SAMPLES | {"acceptance@1": SHARE}, **EASY, **IMPOSSIBLE)
    assert status == 1 and file["verdict"] == "INCONCLUSIVE", run.output
    assert file["box"]["state"] == "DEGRADED"
    assert file["metrics"]["tg32@d0"]["verdict"] == "INCONCLUSIVE"
    assert file["metrics"]["acceptance@1"]["verdict"] == "PASS"
    assert "the machine is DEGRADED" in file["tests"][0]["message"]
    stored = [json.loads(path.read_text()) for path in sorted(tmp_path.glob("s/*/*.json"))]
    infos = [item["benchmarks"][0]["extra_info"] for item in stored]
    assert [info["box"]["state"] for info in infos] == ["QUALIFIED", "DEGRADED"]
    assert [info["verdict"] for info in infos] == ["PASS", "INCONCLUSIVE"]
    assert all(info["box"]["after"] for info in infos), "how it ended, not how it was then"


TWO = SAMPLES | {"pp2048@d0": [900.0, 901.0, 899.0, 900.5, 900.2]}


@pytest.mark.parametrize(
    ("slow_in", "verdict", "state"),
    [
        pytest.param(["test_later"], "PASS", "QUALIFIED", id="slow after the measurements"),
        pytest.param(["pp2048"], "INCONCLUSIVE", "DEGRADED", id="slow while measured"),
        pytest.param(["pp2048", "later"], "INCONCLUSIVE", "DEGRADED", id="slow to the end"),
        pytest.param(["nothing"], "PASS", "QUALIFIED", id="healthy"),
    ],
)
def test_the_box_is_read_when_the_last_measuring_level_ends(on_a_box, slow_in, verdict, state):
    """The machine is read when the last measuring level ends, because later changes of the machine
    do not affect the numbers."""
    least = {"bandwidth_gb_s": '{ value = 50.0, source = "the test" }'}
    plugin = ("-p", "meta_tests.whole.scenarios.scripted_box")
    _, file, run = on_a_box(
        TWO, *plugin, "meta_tests/whole/scenarios/after_measuring.py",
        environment={"SM121_META_SLOW_IN": json.dumps(slow_in)}, **EASY, **least,
    )  # fmt: skip
    assert (file["verdict"], file["box"]["state"]) == (verdict, state), run.output
    assert file["metrics"]["tg32@d0"]["verdict"] == verdict
    assert [test["verdict"] for test in file["tests"] if "later" in test["id"]] == ["PASS"]
    assert file["box"]["after"]["device"]
