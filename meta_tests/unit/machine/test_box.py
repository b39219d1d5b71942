"""Each defect of the machine is found, a healthy machine is QUALIFIED, and nothing is guessed."""

import pytest

from meta_tests.fakes.box_readings import GB10, reading
from sm121.core import profile
from sm121.machine import box_judgement, this_machine
from sm121.machine.box import BoxState


def judged(*readings, **options) -> tuple[BoxState, str]:
    judgement = box_judgement.judge_machine(*readings, **options)
    return judgement.state, judgement.reason


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        pytest.param(
            {"bandwidth_gb_s": 150.0},
            "memory bandwidth: expected 200 GB/s",
            id="memory at 150 GB/s",
        ),
        pytest.param(
            {"sm_clock_mhz": 799, "power_w": 19.5},
            "SM clock under load: expected 2050 MHz",
            id="stuck at 799 MHz",
        ),
        pytest.param(
            {"matrix_tflop_s": 36.5},
            "matrix rate: expected 70 TFLOP/s",
            id="matrices at half",
        ),
        pytest.param(
            {"bandwidth_gb_s": 70.0},
            "memory bandwidth: expected 200 GB/s",
            id="memory at a third",
        ),
        pytest.param(
            {"matrix_tflop_s": 60.0},
            "matrix rate: expected 70 TFLOP/s",
            id="a cap at 100 W, by the matrix rate",
        ),
        pytest.param(
            {"sm_clock_mhz": 1900},
            "SM clock under load: expected 2050 MHz",
            id="a cap at 100 W, by the clock",
        ),
        pytest.param(
            {"power_limit_w": 100.0, "power_limit_default_w": 140.0},
            "the GPU's power is limited: expected its default of 140 W, got 100 W",
            id="a cap at 100 W, by its limit",
        ),
        pytest.param(
            {"power_capped": 0.95, "power_w": 74.0},
            "got one in 95% of the samples at 74 W",
            id="a cap at 100 W, by its samples",
        ),
        pytest.param(
            {"bandwidth_spread": 0.4},
            "memory bandwidth is unsteady",
            id="unsteady memory",
        ),
        pytest.param(
            {"matrix_spread": 0.4},
            "matrix rate is unsteady",
            id="unsteady matrices",
        ),
        pytest.param({"throttled": True}, "clocks are throttled", id="throttled"),
        pytest.param(
            {"other_load": 0.6, "others": ["make (7): 300%"]},
            "other processes are working",
            id="somebody compiles",
        ),
        pytest.param(
            {"gpu_others": [4711]},
            "other processes use the GPU: [4711]",
            id="somebody is on the GPU",
        ),
    ],
)
def test_each_defect_degrades_the_box(fields, why):
    state, reason = judged(GB10, reading(**fields))
    assert state is BoxState.DEGRADED and why in reason, reason
    state, after = judged(GB10, reading(), reading(**fields))
    assert state is BoxState.DEGRADED and "after the measurements" in after


@pytest.mark.parametrize(
    ("profile_of", "before", "after", "load_during", "state", "why"),
    [
        pytest.param(
            "sm121-gpt-oss-120b",
            {"bandwidth_gb_s": 250.0},
            {"bandwidth_gb_s": 219.0},
            None,
            "DEGRADED",
            "changed from 250 to 219",
            id="it changes in between",
        ),
        pytest.param(
            "sm121-gpt-oss-120b",
            {},
            {},
            0.6,
            "DEGRADED",
            "during the measurements",
            id="others worked in between",
        ),
        pytest.param("sm121-gpt-oss-120b", {}, {}, 0.1, "QUALIFIED", None, id="hardly anybody did"),
        pytest.param(
            "sm121-gpt-oss-120b",
            {},
            {"other_load": 0.9},
            0.1,
            "QUALIFIED",
            None,
            id="others come at the end",
        ),
        pytest.param(
            "sm121-gpt-oss-120b",
            {"other_load": 0.9},
            {},
            0.1,
            "DEGRADED",
            None,
            id="others were there at first",
        ),
        pytest.param("sm121-gpt-oss-120b", {}, {}, None, "QUALIFIED", None, id="healthy"),
        pytest.param(
            "sm121-gpt-oss-120b",
            {"sm_clock_mhz": None, "power_w": None, "temperature_c": None, "throttled": None},
            None,
            None,
            "QUALIFIED",
            None,
            id="healthy, and NVML says nothing",
        ),
        # Data centre GPUs reach their power limit under any matrix load, so their profiles do not
        # limit that.
        pytest.param(
            "sm90-tiny-gpt-oss",
            {"power_capped": 1.0, "power_limit_w": 700.0},
            None,
            None,
            "QUALIFIED",
            None,
            id="at the power limit of a data centre's GPU",
        ),
        pytest.param(None, {}, None, None, "UNKNOWN", None, id="no box is required"),
        pytest.param(
            "sm121-gpt-oss-120b", None, None, None, "UNKNOWN", None, id="nothing was measured"
        ),
        pytest.param(
            "sm121-gpt-oss-120b",
            {"problem": "measuring cuda:0 needs torch"},
            None,
            None,
            "UNKNOWN",
            "needs torch",
            id="it could not be measured",
        ),
    ],
)
def test_readings_give_a_state(profile_of, before, after, load_during, state, why):
    """The state of the machine follows from a profile's requirements and two readings."""
    required = profile_of and profile.load(profile_of).box
    readings = []
    for fields in (before, after):
        if fields is None:
            readings.append(fields)
        else:
            readings.append(reading(**fields))
    judgement = box_judgement.judge_machine(required, *readings, load_during=load_during)
    assert judgement.state is BoxState[state] and (why or "") in judgement.reason, judgement


OTHERS = "end the other work on this machine"
LIMIT = "remove the limit of the GPU (nvidia-smi -q -d PERFORMANCE,POWER,CLOCK)"
UNPLUG = "unplug the machine for a minute"
WAIT = "wait until `sm121 box` reports QUALIFIED"


@pytest.mark.parametrize(
    ("fields", "remedy"),
    [
        pytest.param({"sm_clock_mhz": 799, "power_w": 19.5}, UNPLUG, id="a stuck clock"),
        pytest.param(
            {"sm_clock_mhz": 799, "bandwidth_gb_s": 70.0, "other_load": 0.9},
            UNPLUG,
            id="a stuck clock, and others",
        ),
        pytest.param({"sm_clock_mhz": 799, "throttled": True}, LIMIT, id="a hot GPU"),
        pytest.param({"sm_clock_mhz": 1890}, LIMIT, id="a low clock, and NVML says no more"),
        pytest.param({"power_capped": 0.95}, LIMIT, id="a power cap"),
        pytest.param({"other_load": 0.9, "bandwidth_spread": 0.4}, OTHERS, id="others"),
        pytest.param({"gpu_others": [7]}, OTHERS, id="others on the GPU"),
        pytest.param({"bandwidth_spread": 0.4}, WAIT, id="unsteady, and nobody is seen"),
        pytest.param({}, None, id="healthy"),
    ],
)
def test_an_unfit_machine_has_one_remedy(fields, remedy):
    assert box_judgement.judge_machine(GB10, reading(**fields)).remedy == remedy


def test_others_during_the_measurements_are_the_remedy():
    judgement = box_judgement.judge_machine(GB10, reading(), reading(), load_during=0.9)
    assert judgement.remedy == OTHERS
    of_cpu = profile.load("cpu-tiny-gpt-oss").box
    slow = reading(sm_clock_mhz=799, other_load=0.9)
    assert box_judgement.judge_machine(of_cpu, slow).remedy == OTHERS, (
        "no profile's machine is unplugged"
    )


@pytest.mark.parametrize(
    ("before", "after", "refuted"),
    [
        pytest.param({"bandwidth_gb_s": 201.0}, {}, ("FAIL", "INCONCLUSIVE"), id="faster"),
        pytest.param(
            {"bandwidth_gb_s": 201.0},
            {"matrix_tflop_s": 75.0},
            ("FAIL", "INCONCLUSIVE", "PASS"),
            id="memory faster, matrices slower",
        ),
        pytest.param({}, {"bandwidth_gb_s": 201.0}, ("FAIL", "INCONCLUSIVE", "PASS"), id="slower"),
        pytest.param(
            {"bandwidth_gb_s": 201.0},
            {"throttled": True},
            ("FAIL", "INCONCLUSIVE", "PASS"),
            id="faster and throttled",
        ),
        pytest.param({}, {}, (), id="the same"),
    ],
)
def test_a_machine_that_became_faster_refutes_no_pass(before, after, refuted):
    """If the machine became faster, a PASS stays valid.

    A test that passed on the slower machine passes on the faster one; a test that failed may pass.
    """
    judgement = box_judgement.judge_machine(GB10, reading(**before), reading(**after))
    assert judgement.refuted == {*refuted}
    assert (judgement.state is BoxState.DEGRADED) == bool(refuted), "no baseline for later runs"


@pytest.mark.parametrize(
    "published",
    [
        pytest.param(
            {"bandwidth_gb_s": 208.8, "matrix_tflop_s": 75.2, "sm_clock_mhz": 2184},
            id="one of eight nodes, p10",
        ),
        pytest.param(
            {"bandwidth_gb_s": 206.5, "matrix_tflop_s": 75.4, "sm_clock_mhz": 2190},
            id="one of eight nodes, least",
        ),
        pytest.param(
            {"bandwidth_gb_s": 218.5, "matrix_tflop_s": 78.8, "sm_clock_mhz": 2184},
            id="one of eight nodes, median",
        ),
        pytest.param(
            {"bandwidth_gb_s": 230.0, "matrix_tflop_s": 76.9, "sm_clock_mhz": 2190},
            id="medians of another (tonyd2wild#1)",
        ),
        pytest.param(
            {"matrix_tflop_s": 91.6, "sm_clock_mhz": 2281, "power_w": 92.5},
            id="after it was stuck (trap 124)",
        ),
        pytest.param(
            {"matrix_tflop_s": 91.5, "sm_clock_mhz": 2385, "power_capped": 0.1},
            id="hours after it was stuck (trap 124)",
        ),
        pytest.param(
            {"power_limit_w": 140.0, "power_limit_default_w": 140.0, "power_capped": 0.0},
            id="at its default power limit",
        ),
    ],
)
def test_healthy_gb10s_are_qualified(published):
    state, reason = judged(GB10, reading(**published), reading(**published))
    assert state is BoxState.QUALIFIED, reason


@pytest.mark.parametrize(
    ("clock", "share"),
    [
        # the clock is locked at 2,200 MHz, as published, or at 2,100 MHz
        (2184, "2184 MHz under load, 96%"),
        (2190, "2190 MHz under load, 96%"),
        (2085, "2085 MHz under load, 91%"),
        # the clock is not locked, or its value is unknown
        (2281, None),
        (2405, None),
        (None, None),
    ],
)
def test_a_capped_clock_is_reported_with_its_share(clock, share):
    """On a qualified machine, a capped clock is reported with its share.

    `nvidia-smi -lgc 0,2200` slows every rate slightly."""
    capped = reading(sm_clock_mhz=clock)
    state, reason = judged(GB10, capped, capped)
    assert state is BoxState.QUALIFIED and ("the SM clock is capped" in reason) is bool(share)
    assert reason.count(share or "GB/s") == 1 and box_judgement.capped(None, capped) is None


@pytest.mark.parametrize(
    ("system", "arch", "name"),
    [
        pytest.param(
            "Linux 6.17.0-1008-nvidia, driver 580.126.09",
            None,
            "Linux 6.17.0-1008-nvidia",
            id="Linux 6.17.0-1008",
        ),
        ("Linux 7.0.0-1019-nvidia, driver 580.173.02", None, "Linux 7.0.0-1019-nvidia"),
        ("Linux 7.0.0-31-generic, driver 580.173.02", None, "Linux 7.0.0-31"),
        pytest.param(
            "Linux 6.11.0-1016-nvidia, driver 580.95.05",
            None,
            "Linux 6.11.0-1016-nvidia, driver 580.95.05",
            id="Linux 6.11.0-1016 with driver 580.95.05",
        ),
        ("Linux 6.17.0-1031-nvidia, driver 610.43.02", None, "driver 610.43.02"),
        # in this order: eight healthy nodes, the MXFP4 project's node, a release before and after,
        # another GPU
        ("Linux 6.17.0-1032-nvidia, driver 580.173.02", None, None),
        ("Linux 6.17.0-1026-nvidia, driver 580.173.02", None, None),
        ("Linux 7.0.0-30-generic, driver 580.173.02", None, None),
        ("Linux 6.17.0-10080-nvidia, driver 580.126.09", None, None),
        ("Linux 6.11.0-1016-nvidia, driver 580.126.09", None, None),
        ("Linux 6.18.5, driver None", None, None),
        ("Linux 7.0.0-1019-nvidia, driver 580.159.04", "sm90", None),
    ],
)
def test_a_system_with_a_known_fault_is_reported(system, arch, name):
    lines = this_machine.faults(arch or "sm121", system)
    assert [line.partition(": ")[0] for line in lines] == ([name] if name else [])
