"""A selection of options gives no certificate, and the certificate records what was certified."""

import json
import os
import re
from pathlib import Path
from types import SimpleNamespace
from unittest import mock
from urllib.parse import quote

import pytest

from meta_tests.fakes.scripted_sessions import FALLBACK, VARIABLES, tell
from meta_tests.fakes.whole_run import CPU, PATH, gated, waive, waiver_file, whole
from meta_tests.faults import certificates
from meta_tests.folders import FAKES, ROOT
from sm121.checkpoint.identity import contradiction, identity, is_of_shape
from sm121.core import profile, profile_fields, waivers
from sm121.core.verdict import Verdict
from sm121.engines.options import GivenEngine
from sm121.plugin import certificate, selection
from sm121.plugin.stash import APPLIES_TO, ID, LEVEL, SETTINGS
from sm121.report import summary
from sm121.run.event_log import EventLog
from sm121.run.fingerprint import Fingerprint
from sm121.run.machine_report import CrashReport
from sm121.run.record import RunRecord, Target
from sm121.run.verdict_file import EngineReport, MetricReport, VerdictFile
from sm121.session import certification, ending, fingerprinting, opening
from sm121.session.given_judging import GivenJudging
from sm121.session.options import GivenTarget
from sm121.session.settings import Settings


@pytest.mark.slow(
    why="a whole run of vLLM each; `python -m meta_tests.faults.certificates` does fifty"
)
@pytest.mark.timeout(0)
def test_an_honest_engine_is_certified_every_time(tmp_path):
    number = int(os.environ.get("SM121_META_CERTIFICATES", "1"))
    for verdict in certificates.runs(number, tmp_path, []):
        assert verdict.get("certified") and verdict["verdict"] == "PASS", verdict.get("reason")
        assert verdict["fingerprint"]["profile_shipped"] is False


# Requirements of a certificate for a run that was not refused


def certified(file: VerdictFile, judging: profile.Profile = CPU, **options) -> VerdictFile:
    fields = {"deselected": [], "inapplicable": set(), **options}
    certification.certify(file, judging, certification.inventory(), **fields)
    return file


@pytest.mark.parametrize("name", profile.shipped())
def test_a_run_with_everything_is_certified(name):
    judging = profile.load(name).judging()
    run = certified(whole(judging), judging)
    assert run.certified and run.verdict is Verdict.PASS, run.reason


def test_a_certificate_without_an_oracle_needs_a_golden_file():
    before = CPU.correctness
    cannot = {**before.cannot, "oracle": "this test"}
    update = {"cannot": cannot, "log_probability_tolerance": {}}
    judging = CPU.model_copy(update={"correctness": before.model_copy(update=update)})
    run = certified(without(whole(judging), "golden_file"), judging)
    assert not run.certified and "golden file (--golden PATH), and there is no oracle" in run.reason
    assert certified(without(whole(), "golden_file")).certified


def test_the_first_line_of_a_certificate_says_that_there_is_no_oracle():
    why = "no oracle for this architecture"
    cannot = {**CPU.correctness.cannot, "oracle": why}
    update = {"cannot": cannot, "log_probability_tolerance": {}}
    correctness = CPU.correctness.model_copy(update=update)
    judging = CPU.model_copy(update={"correctness": correctness})
    file = whole(judging)
    file.certificate_levels = ["smoke"]
    record = RunRecord(directory=Path(), log=EventLog(file), say=lambda *_: None)
    record.emit(
        ending.closed(
            record, Settings(judging=GivenJudging(certify=True)),
            Target("cpu", judging, obstacle=None), ending.CertificateGaps([], set(), None),
            finished=True,
        )
    )  # fmt: skip
    record.log.fold.settle()
    first = f"PASS (certified, without an oracle: {why})"
    assert file.certified and first in summary.markdown(file).replace("\\", "")
    assert "without an oracle" not in certified(whole()).certificate


@pytest.mark.parametrize(
    ("changed", "deselected", "doubt"),
    [
        pytest.param({}, (), None, id="nothing"),
        pytest.param(
            {"metrics": {}},
            ("tests/test_performance.py::test_decode_rate",),
            None,
            id="metrics, tests/test_performance.py:test_decode_rate",
        ),
        pytest.param(
            {"finished": False}, (), "has not finished", id="finished False, has not finished"
        ),
        pytest.param(
            {},
            ("tests/test_correctness.py::test_seed_is_used",),
            "left out checks of correctness",
            id="tests/test_correctness.py:test_seed_is_used, left out",
        ),
        pytest.param(
            {"failed": "test_correctness.py::test_known_answers"},
            (),
            "correctness of .* FAIL",
            id="failed test_correctness.py:test_known_answers",
        ),
        pytest.param(
            {"failed": "test_smoke.py::test_health"},
            (),
            "level smoke of the run .* is FAIL",
            id="failed test_smoke.py:test_health, level smoke of the",
        ),
        pytest.param(
            {"waived": "test_correctness.py::test_known_answers"},
            (),
            "a waiver tolerated .*answers",
            id="waived test_correctness.py:test_known_answers, a waiver",
        ),
        pytest.param(
            {"absent": "test_correctness.py::test_usage"},
            (),
            "left out checks of correctness",
            id="absent test_correctness.py:test_usage, left out checks",
        ),
    ],
)
def test_answers_of_a_run_that_did_not_hold_are_no_trusted_ones(changed, deselected, doubt):
    """A certificate accepts no golden file of a run that failed or was incomplete."""
    keys = ("failed", "waived", "absent")
    failed, waived, absent = (changed.get(key, "no such test") for key in keys)
    file = whole(**{key: value for key, value in changed.items() if key not in keys})
    for test in file.tests:
        if failed in test.id or waived in test.id:
            test.verdict = Verdict.FAIL
            test.waived = waived in test.id
    file = without(file, absent)
    reason = certification.doubt_of_answers(file, CPU, certification.inventory(), deselected)
    assert reason is None if doubt is None else re.search(doubt, reason), reason


def without(file: VerdictFile, part: str) -> VerdictFile:
    file.tests = [test for test in file.tests if part not in test.id]
    file.levels = {}
    file.judge()
    return file


@pytest.mark.parametrize(
    ("left_out", "reason"),
    [
        pytest.param(
            "test_smoke.py::test_health",
            "1 tests of smoke are missing (tests/test_smoke.py",
            id="test_smoke.py:test_health, 1 tests of smoke are not",
        ),
        ("test_kernel.py::test_moe", "5 tests of kernel are missing"),
        ("tests/test_stress.py", "no test of level stress was selected"),
    ],
)
def test_a_test_of_the_inventory_that_is_not_there_is_a_gap(left_out, reason):
    run = certified(without(whole(), left_out))
    assert run.verdict is Verdict.NOT_RUN and not run.certified and reason in run.reason


def test_a_crash_refuses_the_certificate():
    file = whole()
    file.crashes = [CrashReport(kind="xid", summary="Xid 13", owner="driver")]
    run = certified(file)
    assert run.verdict is Verdict.FAIL and not run.certified
    assert "1 crashes, the first: Xid 13" in run.reason


def test_a_certificate_refuses_waivers_of_blockers_and_names_others():
    """The first line and the summary of a certificate name all waivers that do not refuse it."""
    file = whole()
    counts = "test_token_counts_are_exact"
    how = "certified with 2 waivers"
    file.certificate_levels = ["smoke"]
    waive(file, counts, "test_health", severity="contract")
    run = certified(file)
    health, name = (test.id for test in file.tests if test.waived)
    assert run.certified and f"2 failed and are waived; {how} ({health}, {name})" in run.reason
    assert f"SM121 conformance: PASS ({how})" in summary.markdown(run).replace("\\", "")
    waive(file, counts)
    run = certified(file)
    assert run.verdict is Verdict.FAIL and not run.certified, run
    assert run.reason == f"not certified: no certificate waives a gate or a blocker: {name}"


@pytest.mark.parametrize("is_shipped", [True, False, None])
def test_a_certificate_says_whether_its_profile_is_shipped(is_shipped):
    """If the profile is not the shipped one, the first line and the summary say so."""
    file = whole()
    by = "certified by profile cpu-tiny-gpt-oss, which is not the shipped one"
    file.certificate_levels = ["smoke"]
    file.fingerprint = Fingerprint(profile_shipped=is_shipped)
    run = certified(file)
    texts = run.reason, summary.markdown(run).replace("\\", "")
    assert run.certified and all((by in text) == (is_shipped is False) for text in texts), texts


def test_only_a_waiver_of_a_blocker_is_refused_at_once(tmp_path):
    contract = Item("x::a", "correctness")
    blocker = Item("x::b", "correctness")
    contract.severity = SimpleNamespace(args=["contract"])
    settings = Settings(
        judging=GivenJudging(waivers=waivers.load(waiver_file(tmp_path, "x::a", "x::c")))
    )
    assert [*certificate._wrong_waivers(settings, [contract, blocker])] == []
    contract.severity = None
    (line,) = certificate._wrong_waivers(settings, [contract, blocker])
    assert line.startswith("--waivers names x::a: no certificate waives")


def test_a_parameter_counts_for_its_test_and_another_file_does_not():
    file = whole()
    file.tests[0].id += "[a-b]"
    assert certified(file).certified
    for test in file.tests:
        test.id = test.id.replace("tests/", "mine/")
    assert "are missing" in certified(file).reason


@pytest.mark.parametrize(
    ("metric", "verdict", "reason"),
    [
        (None, "NOT_RUN", "gate tg32@d4096 has no number"),
        pytest.param(
            {"verdict": "FAIL"},
            "NOT_RUN",
            "gate tg32@d4096 has no number",
            id="verdict FAIL, NOT_RUN, gate tg32@d4096 has no number",
        ),
        pytest.param(
            {"value": 60.0, "verdict": "INCONCLUSIVE"},
            "INCONCLUSIVE",
            "is INCONCLUSIVE",
            id="value 60.0 verdict INCONCLUSIVE, INCONCLUSIVE, is",
        ),
        pytest.param(
            {"value": 60.0, "verdict": "PASS", "minimum": 2.0},
            "INVALID",
            "another gate",
            id="value 60.0 verdict PASS minimum 2.0, INVALID, another",
        ),
    ],
)
def test_every_gate_has_a_number(metric, verdict, reason):
    gates = gated("tg32@d0", "tg32@d4096")
    assert certified(whole(gates), gates).certified
    file = whole(gates)
    del file.metrics["tg32@d4096"]
    if metric is not None:
        fields = {"value": None, "unit": "tok/s", "minimum": 52.0, **metric}
        file.metrics["tg32@d4096"] = MetricReport(**fields)
    judged = certified(file, gates)
    assert judged.verdict is Verdict[verdict] and reason in judged.reason, judged.reason


def test_the_other_gaps():
    file = whole()
    skipped = file.tests[3].id
    file.tests[3].skipped = True
    file.tests[3].verdict = Verdict.NOT_RUN
    file.judge()
    reason = certified(file.model_copy(deep=True)).reason
    assert f"1 tests of smoke were skipped ({skipped})" in reason
    assert certified(file, inapplicable={skipped}).certified
    assert "1 tests were deselected (x)" in certified(whole(), deselected=["x"]).reason
    unproven = certified(whole(unproven=["the log", "its life"]))
    assert "unproven: the log; its life" in unproven.reason
    no_path = certified(whole(engine=EngineReport(name="vllm", managed=True, model="m")))
    assert "kernel path not proven" in no_path.reason and no_path.verdict is Verdict.INVALID


def test_only_a_test_that_applies_is_missed():
    """A deselected test is missed only if it applies: `-m cpu` deselects the tests of a GPU."""
    config = SimpleNamespace(stash=pytest.Stash())
    selection.note_deselected(config, [Item("of a GPU", "kernel", "sm121")])
    assert selection.missed(config, "cpu") == []
    assert selection.missed(config, "sm121") == ["of a GPU"]
    selection.note_deselected(config, [Item("of both", "kernel", "cpu", "sm121")])
    assert selection.missed(config, "cpu") == ["of both"]


# The levels of the certificate


def asking(*levels: str) -> profile.Profile:
    certify = CPU.certify.model_copy(update={"levels": levels})
    return CPU.model_copy(update={"certify": certify})


class Item:
    """A test with the attributes that the selection uses."""

    severity: object = None

    def __init__(self, name: str, level: str, *applies_to: str) -> None:
        self.stash = pytest.Stash()
        self.stash[LEVEL] = level
        self.stash[ID] = name
        self.stash[APPLIES_TO] = frozenset(applies_to or {"cpu"})
        self.name = name
        self.config = SimpleNamespace(getoption=lambda *_: None)

    def get_closest_marker(self, name: str) -> object:
        return self.severity if name == "severity" else None

    def iter_markers(self) -> list[object]:
        return []


def a_run(judging: profile.Profile, *, certify: bool) -> SimpleNamespace:
    """pytest's configuration with the attributes that the selection uses, for a run of a
    profile."""
    names: list[str] = []
    config = SimpleNamespace(stash=pytest.Stash(), deselected=names, getoption=lambda *_: None)
    config.stash[SETTINGS] = Settings(
        target=GivenTarget(profile=judging), judging=GivenJudging(certify=certify)
    )

    def pytest_deselected(items: list[Item]) -> None:
        names.extend(item.stash[ID] for item in items)
        selection.note_deselected(config, items)

    config.hook = SimpleNamespace(pytest_deselected=pytest_deselected)
    selection.by_level(config, [])
    return config


def test_tests_of_levels_that_are_not_asked_for_are_left_out():
    """A certificate leaves out the levels that its profile does not require, such as the matrix."""
    for certify in (True, False):
        config = a_run(asking("smoke", "performance"), certify=certify)
        items = [Item(name, name) for name in profile_fields.LEVELS]
        selection.note_deselected(config, [Item("by -m", "kernel")])
        selection.leave_out(config, items)
        remaining = [item.stash[ID] for item in items]
        assert remaining == (["smoke", "performance"] if certify else [*profile_fields.LEVELS])
        assert len(config.deselected) == (5 if certify else 0)
        assert len(config.stash.get(selection.LEFT_OUT, [])) == len(config.deselected)
    line = "1 tests are left out: the certificate of profile cpu-tiny-gpt-oss does not require the"
    config = a_run(asking("smoke", "performance"), certify=True)
    selection.leave_out(config, [Item("a", "matrix")])
    assert config.stash.get(selection.LEFT_OUT, []) == [f"{line} matrix level"]


def test_deselected_tests_of_a_certified_level_are_gaps():
    config = a_run(asking("smoke", "performance"), certify=True)
    selection.note_deselected(config, [Item("a", "matrix"), Item("b", "performance")])
    assert selection.missed(config, "cpu") == ["b"]


def test_the_profile_of_the_certificates_asks_for_the_levels_that_are_named(tmp_path):
    for levels in ([], ["smoke", "performance"]):
        judging = profile.load(str(certificates.with_levels(levels, tmp_path)))
        assert judging.certify.levels == tuple(levels or CPU.certify.levels)
        assert judging.engine.stop_within_s == 60 and judging.matrix is None


def test_a_certificate_says_what_it_covers():
    two = asking("smoke", "performance")
    file = whole(two, certificate_levels=["smoke", "performance"])
    file.tests = [test for test in file.tests if test.level in two.certify.levels]
    covers = "smoke, performance; not selected: kernel, correctness, stress, regression, matrix"
    run = certified(without(file, "no such test"), two)
    assert run.certified and run.reason.endswith(f"; certified: {covers}"), run.reason
    assert f"| certificate for | {covers} |" in summary.markdown(run).replace("\\", "")
    # All selected tests are still required, so a missing test of them is named.
    shorter = certified(without(file, "test_startup_time"), two)
    assert "1 tests of performance are missing" in shorter.reason
    assert whole().certificate_covers is None


def test_a_path_difference_is_a_gap_without_the_kernel_level():
    path = PATH.model_copy(update={"differences": ["--moe-backend marlin: TRITON ran"]})
    judging = asking("smoke", "stress")
    file = whole(judging, engine=EngineReport(name="vllm", managed=True, model="m", path=path))
    run = certified(file, judging)
    assert run.verdict is Verdict.INVALID and "TRITON ran" in run.reason, run.reason


@pytest.mark.parametrize("line", [pytest.param("", marks=pytest.mark.slow), FALLBACK])
def test_the_path_is_judged_where_no_test_of_the_kernel_level_does(tmp_path, line):
    """With ``--certify``, the kernel path is judged even if no test of the kernel level runs."""
    for certify in (True, False):
        chosen = Settings(
            target=GivenTarget(profile=asking("smoke", "stress")),
            engine=GivenEngine(python=str(FAKES / "fake_python.py")),
            judging=GivenJudging(certify=certify),
            root=ROOT,
            report_dir=tmp_path / f"{certify}",
        )
        variables = {**VARIABLES, "SM121_META_ARGUMENTS": ""}
        with mock.patch.dict(os.environ, variables), opening.open_session(chosen) as session:
            session.run.server()
            if line:
                tell(session, f"do=print&text={quote(line)}")
        tests = [
            test for test in session.run.record.file.tests if "kernel path of float32" in test.id
        ]
        assert [test.verdict for test in tests] == ([Verdict.FAIL] if line and certify else [])
        assert session.run.record.file.certificate_levels == (
            ["smoke", "stress"] if certify else None
        )


# The fingerprint


def test_a_changed_profile_under_a_shipped_name_is_not_shipped(tmp_path):
    text = profile.shipped()["cpu-tiny-gpt-oss"].read_text("utf-8")
    same = tmp_path / "same.toml"
    other = tmp_path / "other.toml"
    same.write_text(text)
    other.write_text(text.replace("repeats = 3", "repeats = 1"))
    assert fingerprinting.is_shipped(profile.load(str(same)))
    mine = profile.load(str(other))
    assert mine.name == "cpu-tiny-gpt-oss" and not fingerprinting.is_shipped(mine)
    assert fingerprinting.is_shipped(CPU.model_copy(update={"under_test": "bfloat16"}))
    for is_shipped, label in (
        (True, "cpu-tiny-gpt-oss, digest 12"),
        (False, "(not the shipped one)"),
    ):
        file = whole(fingerprint=Fingerprint(profile="12", profile_shipped=is_shipped,
                                             options={"--rounds": "9"}, waivers="w"))  # fmt: skip
        text = summary.markdown(file).replace("\\", "")
        assert label in text, text
        assert "| options | --rounds 9 |" in text and "| waivers | digest w |" in text


def test_the_digest_of_a_checkpoint_does_not_depend_on_its_folder(tmp_path):
    def made(name: str, config: str, weights: bytes) -> str:
        folder = tmp_path / name
        folder.mkdir()
        (folder / "config.json").write_text(config)
        (folder / "model.safetensors").write_bytes(weights)
        return str(folder)

    weights = bytes(range(256)) * 8192
    cache = {"HF_HUB_CACHE": str(tmp_path)}
    one = made("one", "{}", weights)
    copy = made("copy", "{}", weights)
    assert identity(one) == identity(copy)
    changed = weights[:-1] + b"\0"
    others = [made("a", "{} ", weights), made("b", "{}", changed), made("c", "{}", weights[:-1])]
    assert len({identity(one), *map(identity, others)}) == 4
    assert identity("owner/name", cache) == "hub:owner/name"
    hub = tmp_path / "models--owner--name"
    for name in ("refs", "snapshots"):
        (hub / name).mkdir(parents=True)
    (hub / "refs" / "main").write_text("abc")
    (hub / "snapshots" / "abc").symlink_to(one)
    assert identity("owner/name", cache) == identity(one)


SHAPE = (ROOT / "fixtures/models/gpt-oss-120b.json").read_text("utf-8")


def test_the_shape_of_another_model_is_detected(tmp_path):
    (tmp_path / "config.json").write_text(SHAPE)
    assert is_of_shape(str(tmp_path), "openai/gpt-oss-120b")
    (tmp_path / "config.json").write_text(json.dumps({**json.loads(SHAPE), "num_hidden_layers": 2}))
    assert not is_of_shape(str(tmp_path), "openai/gpt-oss-120b")
    assert not is_of_shape(str(tmp_path), "openai/another")
    assert not is_of_shape(str(tmp_path / "nothing"), "openai/gpt-oss-120b")


def test_a_model_that_is_not_the_profiles_contradicts_its_path(tmp_path):
    config = tmp_path / "config.json"
    config.write_text(SHAPE)
    hub = "openai/gpt-oss-120b"
    loaded = str(tmp_path)
    digest = identity(loaded)
    assert contradiction(hub, None, loaded) is None
    assert contradiction(hub, digest, loaded) is None
    assert contradiction(hub, digest, "openai/not-here") is None, "nothing tells"
    config.write_text(f"{SHAPE} ")
    assert "model's digest: expected " + digest in contradiction(hub, digest, loaded)
    assert contradiction(hub, None, loaded) is None, "another file of the same shape"
    config.write_text(SHAPE.replace('"num_hidden_layers": 36', '"num_hidden_layers": 24'))
    assert "got num_hidden_layers 24" in contradiction(hub, None, loaded)
    assert contradiction("canary:bf16", None, loaded) is None, "its shape is not known"
    weights = tmp_path / "model.gguf"
    weights.write_bytes(b"GGUF")
    assert contradiction("canary:gguf", identity(str(weights)), str(weights)) is None
    assert "model's digest" in contradiction("canary:gguf", digest, str(weights))
