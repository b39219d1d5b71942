"""Which stored runs are a baseline, and which are not."""

import itertools
import json
from types import SimpleNamespace

import pytest

from meta_tests.fakes import past_runs
from meta_tests.unit.regression.trend_runs import CONTEXT, changed, metric, run, stored
from sm121.core.errors import UsageError
from sm121.machine.box import BoxState
from sm121.regression.measured import MeasuredHistory
from sm121.run import stored_benchmarks


@pytest.mark.parametrize(
    ("context", "why"),
    [
        pytest.param(
            {"machine": {"cpu_model": "c", "gpu": "NVIDIA H200"}},
            "another machine (gpu",
            id="machine cpu_model c gpu NVIDIA H200, another machine",
        ),
        pytest.param(
            {"path": {"attention": "FLASHINFER", "moe": "MARLIN"}},
            "the kernel path was moe",
            id="path attention FLASHINFER moe MARLIN, the kernel path",
        ),
        pytest.param({"profile": "sm90"}, "the profile was", id="profile sm90, the profile was"),
        pytest.param(
            {"plan": {"prompt_tokens": 512, "depths": [0]}},
            "the measuring plan was prompt_tokens",
            id="plan prompt_tokens 512 depths 0, the measuring plan was",
        ),
        pytest.param(
            {"plan": {"prompt_tokens": 2048, "depths": [0, 4096], "plan": "quick"}},
            "the plan was quick, now full; add --plan quick",
            id="plan quick",
        ),
    ],
)
def test_another_machine_path_profile_or_plan_is_no_baseline(context, why):
    (reason,) = run(1, **context).unlike(CONTEXT)
    assert why in reason
    assert run(1).unlike(CONTEXT) == []
    unfit = stored_benchmarks.of_benchmarks("0001", "", [stored(box={"state": "DEGRADED"})])
    assert unfit.unlike(CONTEXT) == ["its machine was DEGRADED"]


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        pytest.param(
            {"verdict": "FAIL"}, "its tg32@d0 was FAIL", id="verdict FAIL, its tg32@d0 was FAIL"
        ),
        pytest.param(
            {"verdict": "INCONCLUSIVE"},
            "its tg32@d0 was INCONCLUSIVE",
            id="verdict INCONCLUSIVE, its tg32@d0 was INCONCLUSIVE",
        ),
        pytest.param(
            {"verdict": "INVALID"},
            "its tg32@d0 was INVALID",
            id="verdict INVALID, its tg32@d0 was INVALID",
        ),
        pytest.param({"run": "FAIL"}, "the run was FAIL", id="run FAIL, the run was FAIL"),
        pytest.param(
            {"value": 0.0}, "its tg32@d0 contains a 0", id="value 0.0, its tg32@d0 contains a 0"
        ),
        pytest.param(
            {"value": None}, "its tg32@d0 has no value", id="value None, its tg32@d0 has no value"
        ),
        pytest.param(
            {"samples": [60.0, 0.0]},
            "its tg32@d0 contains a 0",
            id="samples 60.0 0.0, its tg32@d0 contains a 0",
        ),
        pytest.param(
            {"value": float("nan")},
            "its tg32@d0 contains a 0, or a value that is not a number",
            id="value nan, its tg32@d0 contains a 0, or a value that is not a number",
        ),
        pytest.param(
            {"definition": 1},
            "the definition of its metrics was 1, now None",
            id="definition 1, the definition of its metrics was 1, now",
        ),
    ],
)
def test_a_run_that_was_red_or_holds_nothing_is_no_baseline(changes, why):
    good = stored_benchmarks.of_benchmarks("0001", "", [stored()])
    assert good.unlike(CONTEXT) == []
    bad = stored_benchmarks.of_benchmarks(
        "0001", "", [stored(metric="tg128@d0"), stored(**changes)]
    )
    assert any(why in reason for reason in bad.unlike(CONTEXT)), bad.unlike(CONTEXT)


@pytest.mark.parametrize(
    ("name", "short"), [("0003_abc_2026.json", "0003"), ("my_base.json", "my_base.json")]
)
def test_a_message_names_a_stored_run_by_its_number(name, short):
    assert past_runs.stored_run(name).short_name == short


def test_storage_and_files_that_are_none_are_refused(tmp_path):
    assert stored_benchmarks.storage_folder("file://./x", tmp_path) == tmp_path / "x"
    with pytest.raises(UsageError, match="expected file://PATH"):
        stored_benchmarks.storage_folder("elasticsearch+http://host", tmp_path)
    file = tmp_path / "0001_x.json"
    file.write_text("{}")
    with pytest.raises(UsageError, match=r"0001_x.json: expected a file of pytest-benchmark"):
        stored_benchmarks.read_benchmarks(file)
    file.write_text(json.dumps({"benchmarks": [{"extra_info": {}}]}))
    assert stored_benchmarks.read_benchmarks(file) is None, "somebody else's benchmarks"


@pytest.mark.parametrize(
    "folders",
    [
        pytest.param({"3.11": 5, "3.12": 3}, id="3.11 5 3.12 3"),
        pytest.param({"3.12": 4, "3.9": 2}, id="3.12 4 3.9 2"),
        pytest.param({"3.11": 3, "3.12": 1, "3.13": 1}, id="3.11 3 3.12 1 3.13 1"),
        pytest.param({"3.12": 8}, id="3.12 8"),
    ],
)
def test_another_python_does_not_put_old_runs_behind_new_ones(tmp_path, folders):
    """Stored runs are ordered by their dates, although each Python version has its own folder.

    The last runs of each history have 150 tok/s, and those of its first half 100.
    """
    dates = itertools.count()
    count = sum(folders.values())
    for python, runs in folders.items():
        (folder := tmp_path / f"Linux-CPython-{python}-64bit").mkdir()
        for number in range(1, runs + 1):
            date = next(dates)
            level = 150.0 if 2 * date >= count else 100.0
            samples = [level * each for each in (0.999, 0.9995, 1.0, 1.0005, 1.001)]
            entry = stored(samples=samples, value=level)
            text = {"datetime": f"2026-11-{date + 1:02}", "benchmarks": [{"extra_info": entry}]}
            (folder / f"{number:04}_x.json").write_text(json.dumps(text))
    history = stored_benchmarks.load_benchmarks(tmp_path)
    levels = [each.metrics["tg32@d0"].value for each in history]
    assert levels == sorted(levels) and len(levels) == count
    (named,) = stored_benchmarks.load_benchmarks(tmp_path, "0001")[-1:]
    assert len(folders) == 1 or named.metrics["tg32@d0"].value == 150.0, "the newest of that number"


def test_a_change_shows_bytes_per_token_and_share_of_the_bound():
    """A change of a rate shows the bytes per token and the share of the upper bound.

    Half the rate with twice the bytes per token means another format, and no slower kernel.
    """
    now = metric("tg32@d0", [33.0] * 8, roofline=0.727, bytes_per_token=5.17e9)
    text = changed(now, metric("tg32@d0", [59.4] * 8, roofline=0.716, bytes_per_token=2.83e9)).text
    assert "33 tok/s (73% of the bound of 5.17 GB a token) against 59.4" in text
    assert "(72% of the bound of 2.83 GB a token)" in text
    assert "against 59.4 (1 stored run)" in changed(now, metric("tg32@d0", [59.4] * 8)).text
    share = {"roofline": 0.727, "bytes_per_token": 5.17e9}
    now, older = (
        stored_benchmarks.of_benchmarks("0001", "", [stored(**fields)]).metrics["tg32@d0"]
        for fields in (share, {})
    )
    assert (now.roofline, now.bytes_per_token) == (0.727, 5.17e9)
    assert older.of_bound == ""


@pytest.mark.parametrize(
    ("is_stored", "state", "said"),
    [
        pytest.param(True, BoxState.QUALIFIED, "if it passes, the next run is compared", id="fit"),
        pytest.param(True, BoxState.DEGRADED, "no later run is compared with it", id="degraded"),
        pytest.param(False, BoxState.DEGRADED, "--benchmark-autosave", id="not stored"),
    ],
)
def test_a_first_run_says_whether_a_later_run_is_compared_with_it(tmp_path, is_stored, state, said):
    file = SimpleNamespace(box=SimpleNamespace(state=state))
    recorder = SimpleNamespace(run=SimpleNamespace(record=SimpleNamespace(file=file)))
    history = MeasuredHistory(recorder, str(tmp_path), tmp_path, is_stored=is_stored)
    assert said in history._next_step()
