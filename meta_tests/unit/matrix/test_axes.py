"""Axes, covering arrays and wrong input; cells are also examined on servers that already run."""

import functools
import itertools
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from meta_tests.fakes.run_events import stand_in, with_events
from meta_tests.folders import DATA, FAKES
from meta_tests.texts import text_file
from sm121 import cli
from sm121.core import data_file, profile, verdict, waiting
from sm121.core.configuration import ServerConfiguration
from sm121.core.errors import Sm121Error, UsageError
from sm121.core.server import Endpoint, Server
from sm121.core.unmet import Fact, Unmet
from sm121.engines import pool, starting
from sm121.engines.attached import attach
from sm121.engines.life import ServerDied
from sm121.engines.server_errors import StartError
from sm121.evidence.failure import Cause
from sm121.evidence.kernel_path import KernelPath, read_log
from sm121.matrix import axes, covering, examine, feature_matrix, level, plan
from sm121.matrix.space import Space, count_allowed
from sm121.measure.measurement import Invalidity
from sm121.run.cell_record import CellOutcome
from sm121.run.servers import NoCrashReports

pytestmark = pytest.mark.usefixtures("a_cpu_without_fp8")
SM121 = axes.load("sm121")
SHIPPED = {name: file.read_text("utf-8") for name, file in data_file.shipped("matrix").items()}


def load_text(text: str, origin: str) -> axes.AxesFile:
    return data_file.parse(text, axes.AxesFile, f"matrix {origin}")


CPU = axes.load("cpu")
with pytest.MonkeyPatch.context() as patch:
    # The test must not depend on the CPU flags of this machine.
    patch.setattr("sm121.matrix.space.cpu_flags", str)
    SPACES = [
        Space(CPU, "vllm", "0.32.0"),
        Space(SM121, "vllm", "0.32.0"),
        Space(SM121, "vllm", "0.33.0"),
        Space(SM121, "vllm", "0.14.0+mxfp4"),
        Space(SM121, "sglang", "0.5.23"),
        Space(axes.load("cpu-llama-cpp"), "llama-cpp"),
    ]
NAMES = ["cpu", "0.32", "0.33", "mxfp4", "sglang", "llama"]


@functools.cache
def array_of(number: int, strength: int) -> covering.Array:
    return covering.build(SPACES[number], strength)


def counted(space: Space, cells: list[dict[str, str]], strength: int) -> tuple[int, int]:
    """Return the numbers of allowed combinations and of those that occur in the cells."""
    every = [*itertools.combinations(space.axes, strength)]
    allowed, occurring = (
        {tuple((a, cell[a]) for a in names) for names in every for cell in some}
        for some in ([*space.full()], cells)
    )
    return len(allowed), len(allowed & occurring)


@pytest.mark.parametrize("strength", [1, 2, 3])
@pytest.mark.parametrize("number", range(len(SPACES)), ids=NAMES)
def test_every_allowed_combination_is_in_the_array(number, strength):
    space, array = SPACES[number], array_of(number, strength)
    cells = [planned.cell for planned in array.cells]
    coverage = covering.coverage(space, cells, strength)
    assert not coverage.missing and coverage.covered == coverage.allowed
    assert len(cells) >= covering.lower_bound(space, strength)
    assert not any(space.excluded(cell) for cell in cells)
    assert len({tuple(cell.items()) for cell in cells}) == len(cells)
    if space.product <= 2000:
        assert counted(space, cells, strength) == (coverage.allowed, coverage.covered)


def test_arrays_are_small_and_the_same_every_time_and_full_is_all_of_it():
    space = SPACES[2]
    first, second = (covering.build(space, 2) for _ in range(2))
    assert first.cells == second.cells
    assert covering.bare(space, 2) <= 1.25 * covering.lower_bound(space, 2)
    assert covering.bare(SPACES[0], 2) <= 8  # eight axes with two values need at least six cells
    space = SPACES[0]
    assert len(covering.build(space, "full").cells) == space.product == 384
    assert len(covering.build(space, "none").cells) == 1
    assert count_allowed(SPACES[1]) == 2304


@pytest.mark.parametrize("strength", [1, 2])
@pytest.mark.parametrize(("number", "activation"), [(2, "mxfp8"), (3, None)], ids=["0.33", "mxfp4"])
def test_named_cells_are_always_in(number, activation, strength):
    cells = array_of(number, strength).cells
    by_reason = {why: planned.cell for planned in cells for why in planned.why}
    assert by_reason["Test-B"]["moe"] == "cutlass" and by_reason["Test-C"]["graphs"] == "off"
    assert by_reason["Test-B"].get("activation") == activation
    assert strength == 1 or "moe=cutlass + activation=mxfp8 + spec=eagle3-short" in by_reason
    assert cells[0].cell == SPACES[number].baseline


def test_values_missing_upstream_are_not_applicable():
    upstream = SPACES[1]
    assert "tile" not in upstream.axes and "sinks" not in upstream.axes
    assert "no release has such a backend" in upstream.absent["moe", "gemv"]
    array = covering.build(upstream, 2)
    assert "not applicable" in array.absent["Test-F"]
    assert array.absent["Test-B"] == "tried without sinks=on, which is not applicable here"


def test_options_of_a_build_apply_to_no_release():
    build, before = SPACES[3], Space(SM121, "vllm", "0.14.0")
    assert build.given({**build.baseline, "moe": "cutlass", "dense": "all", "kv": "fp8"})[0] == (
        *("--mxfp4-backend", "CUTLASS", "--attention-backend", "FLASHINFER"),
        *("--mxfp4-layers", "moe,qkv,o,lm_head", "--kv-cache-dtype", "fp8"),
    )
    assert not build.given(build.baseline)[1]
    for changes_nothing in (("activation", "mxfp8"), ("tile", "64x128"), ("moe", "gemv")):
        assert changes_nothing in build.absent and changes_nothing not in build.unproven()
    assert "changes nothing" in build.absent["activation", "fp6"]
    every_argument = [s.arguments for values in before.settings.values() for s in values.values()]
    assert not any("--mxfp4" in word for arguments in every_argument for word in arguments)
    assert before.absent["dense", "fp8"].startswith("before vLLM 0.30 the option is accepted")
    gb10 = profile.load("sm121-gpt-oss-120b")
    for version, options in (
        ("0.14.0rc1.dev375+g8409484b4", None),
        ("0.1.dev12770+g045293d82", None),
        ("a1b2c3", {"--mxfp4-backend"}),
    ):
        assert plan.space_of(gb10, version=version, options=options).settings == build.settings


def test_an_unknown_build_has_what_its_parser_takes_and_never_the_newest():
    """`options` are what the build's parser accepts; None is a run without an engine."""
    unknown = "0.1.dev16581+g0a1b2c3"
    options = {"--attention-backend", "--kv-cache-dtype", "--enforce-eager", "--load-format"}
    older = Space(SM121, "vllm", unknown, options=options)
    assert set(older.axes) == {"attention", "graphs", "kv", "load"}
    assert older.settings["attention"]["triton"].arguments == ("--attention-backend", "TRITON_ATTN")
    newer = Space(SM121, "vllm", unknown, options={*options, "--quantization-config"})
    assert newer.values("dense") == ("bf16", "fp8", "mxfp8", "qkv-o")
    assert "moe" in Space(SM121, "vllm", unknown).axes
    assert Space(SM121, "vllm", "0.33.0", options=()).axes == SPACES[2].axes


def with_axes(more: str) -> Space:
    """Return the axes and rules of the CPU, with additional ones."""
    return Space(load_text(SHIPPED["cpu"] + more, "mine.toml"), "vllm", "0.32.0")


def test_a_rule_about_an_axis_without_a_choice_counts():
    """A rule about an axis with only one value excludes the combinations with this value."""
    space = with_axes(text_file("axis-without-a-choice.toml"))
    assert "only" not in space.axes and space.fixed["only"] == "here"
    assert not space.allowed((("dtype", "bfloat16"), ("seqs", "1")))
    assert space.allowed((("graphs", "compiled"),))
    cells = [planned.cell for planned in covering.build(space, 2).cells]
    assert not any(cell["dtype"] == "bfloat16" and cell["seqs"] == "1" for cell in cells)


def test_one_axis_alone_has_each_value():
    alone = load_text(SHIPPED["cpu"].partition("[axes.graphs]")[0], "mine.toml")
    array = covering.build(Space(alone, "vllm", "0.32.0"), 1)
    assert [planned.cell["dtype"] for planned in array.cells] == ["float32", "bfloat16"]


def test_each_axis_value_has_evidence_or_a_reason_without_it():
    text, reason = "\n" + text_file("axis-unproven.toml"), "no line of the log names it"
    with pytest.raises(UsageError, match=r"axes\.mine.*values\.on: vllm: expected evidence"):
        with_axes(text)
    space = with_axes(f'{text}unproven = "{reason}"\n')
    assert space.unproven() == {"mine=on": reason}
    file = feature_matrix.build(space, covering.build(space, 1), [], [], profile="p")
    assert f"- `mine=on`: {reason}" in feature_matrix.markdown(space, file)


def test_an_axes_file_that_cannot_be_read_is_one_line(tmp_path, monkeypatch):
    file = tmp_path / "mine.toml"
    file.write_bytes(b"\xff\xfe\x00axes")
    with pytest.raises(UsageError, match="expected a text file in UTF-8") as refused:
        axes.load(str(file))
    assert "\n" not in str(refused.value)
    unreadable = Mock(side_effect=PermissionError(13, "Permission denied"))
    monkeypatch.setattr(Path, "read_text", unreadable)
    with pytest.raises(UsageError, match="permission denied"):
        axes.load(str(file))


def test_contradicting_incompatibilities_are_named():
    rules = (
        f"\n[[incompatible]]\nwhen = {{ dtype = 'bfloat16', graphs = '{value}' }}\n"
        "reason = 'why'\nsource = 'the test'\n"
        for value in ("eager", "compiled")
    )
    with pytest.raises(UsageError, match="no combination is left with dtype=bfloat16"):
        with_axes("".join(rules))


@pytest.mark.parametrize("text", ["0", "-1", "two", "1.5", ""])
def test_an_invalid_strength_is_refused(text):
    with pytest.raises(UsageError, match="expected 1, 2"):
        covering.parse_strength(text)
    with pytest.raises(UsageError, match="at most 8"):
        covering.build(SPACES[0], 9)


def test_the_outlook_is_printed(capsys):
    assert cli.main(["matrix", "--profile", "sm121-gpt-oss-120b", "--version", "0.33.0"]) == 0
    text = capsys.readouterr().out
    assert "| 2 | 16 | 20 | 16 |" in text and "hours" not in text
    of_cpu = ["matrix", "--profile", "cpu-tiny-gpt-oss", "--strength", "2"]
    assert cli.main(of_cpu) == 0
    assert "96 of 96 allowed pairs (100%)" in capsys.readouterr().out
    assert cli.main([*of_cpu, "--axes", "cpu"]) == 0
    assert "126 of 126 allowed pairs (100%)" in capsys.readouterr().out


# --------------------------------------------------------------------------------- Before any start


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        pytest.param(
            ("--matrix", "0"),
            "--matrix 0: expected 1, 2",
            id="--matrix 0, --matrix 0: expected 1, 2",
        ),
        pytest.param(
            ("--matrix", "9"),
            "--matrix 9: expected at most 5",
            id="--matrix 9, --matrix 9: expected at most 5",
        ),
        pytest.param(
            ("--matrix-axes", "nowhere.toml"),
            "expected a file or one of cpu",
            id="--matrix-axes nowhere.toml, expected a file or one of",
        ),
        pytest.param(
            ("--engine-arg=--colour",),
            "refuses it: unrecognized arguments: --colour",
            id="--engine-arg=--colour, refuses it: unrecognized",
        ),
    ],
)
def test_bad_input_is_named_before_the_first_start(run_matrix, tmp_path, arguments, why):
    status, run, _ = run_matrix(*arguments)
    assert status == 4 and why in run.output, run.output
    assert not (tmp_path / "boots.txt").exists()
    assert "Traceback" not in run.output


def test_an_axis_that_the_engine_refuses_is_named(run_matrix, tmp_path):
    text = (DATA / "matrix-axes.toml").read_text()
    mine = tmp_path / "axes.toml"
    mine.write_text(text.replace('"--window", "half"', '"--windows", "half"'))
    status, run, _ = run_matrix("--matrix-axes", str(mine))
    refusal = "window=half (--windows half): vllm 0.33.0 refuses it: unrecognized arguments: --wi"
    assert status == 4 and refusal in run.output, run.output


def test_no_matrix_is_no_gap(run_matrix):
    status, run, _ = run_matrix("--matrix", "none", "--collect-only", "-q")
    assert status == 5 and "test_cell" not in run.output


def test_cells_are_collected_for_a_machine_that_is_not_here(run_pytest):
    status, run = run_pytest("--arch", "sm121", "tests/test_matrix.py", "--collect-only", "-q")
    assert status == 0 and "test_cell[moe=cutlass,activation=mxfp8]" in run.output


@pytest.mark.parametrize("value", [("scheduling", "sync"), ("seqs", "1"), ("load", "eager")])
def test_a_value_that_the_log_does_not_show_is_a_fallback(value):
    expected, label = SPACES[0].value(*value).expected, "=".join(value)
    log = text_file("vllm-given.log")
    assert expected.unmet(label, KernelPath(), log) == []
    silent = log.replace(": False", ": True").replace("(eager)", "").replace("s': 1", "s': 16")
    (wrong,) = expected.unmet(label, KernelPath(), silent)
    assert wrong.startswith(f"{label}: expected a line")


def test_a_setting_has_evidence_of_its_own():
    """Another engine may prove the same value by another log line."""
    vllm, sglang = SPACES[2], SPACES[4]
    assert vllm.settings["prefix"]["off"].expected.path == {"prefix_caching": "False"}
    assert sglang.settings["prefix"]["off"].expected.must_see == (
        "disable_radix_cache'?(=|: )True",
    )
    assert [*SPACES[3].unproven()] == ["dense=qkv-o"] and not vllm.unproven()


# ---------------------------------------------------------------------------------- Performance

STARTED = ServerConfiguration("n", "vllm", "python", "m", "canary", (), ())


def examiner(tmp_path: Path, alive) -> examine.Examiner:
    """Return an examiner whose checks pass until the performance sample."""
    cpu = profile.load("cpu-tiny-gpt-oss")
    endpoint = Endpoint("http://127.0.0.1:1", "", "canary")
    server = Server(endpoint, True, "vllm", None, None, None, 1.0)
    run = stand_in(
        profile=cpu, start=lambda _configuration: server, check_alive=alive,
        redact=lambda text: text, test="a::test", crashes=Mock(wraps=NoCrashReports()),
    )  # fmt: skip
    made = examine.Examiner(run, SPACES[0], cpu.matrix, tmp_path / "matrix")
    for check in ("_path", "_known_answers", "_equivalence", "_stress"):
        setattr(made, check, lambda _record, _server: None)
    return made


def failed(_record, _server):
    return "tg64@d0", [], [Invalidity(reason="request_failed", evidence="5 of 5 requests: reset")]


def no_client(_record, _server):
    raise Sm121Error("timed client: exit status 1")


@pytest.mark.parametrize("measure", [failed, no_client])
@pytest.mark.parametrize("dies", [True, False])
def test_outcomes_of_the_performance_sample(tmp_path, measure, dies):
    log = tmp_path / "server.log"
    log.write_text("torch.OutOfMemoryError: CUDA out of memory\n")
    cause = Cause(kind="oom", summary="out of memory", owner="the engine")
    died = ServerDied("it ended", cause, log)
    made = examiner(tmp_path, Mock(side_effect=[None, *[died] * 9] if dies else None))
    made._measure = measure
    record = made.examine(covering.Planned(SPACES[0].baseline, ("baseline",)), STARTED)
    if dies:  # the server lived until the performance sample
        assert record.outcome is CellOutcome.CRASH and record.kind == "oom"
        assert record.reason.startswith("alive: died (checking: performance): oom")
        assert (tmp_path / str(record.bundle) / "server.log").read_text() == log.read_text()
        assert made.run.servers.crashes.after_crash.call_args.args[1:] == (died, "a::test")
    elif measure is failed:
        assert record.outcome is CellOutcome.FAIL and "5 of 5 requests" in record.reason
    else:
        assert record.outcome is CellOutcome.INVALID and record.works
        assert record.reason == "performance: timed client: exit status 1"


def attached_run(directory: Path, settings: profile.Profile, server: Server) -> SimpleNamespace:
    """Return a run with an attached server, which can start no server and watches none."""
    run = stand_in(
        aborted=None, pool=None, life=None, file=SimpleNamespace(fingerprint=None),
        by_name={}, directory=directory, profile=settings, attached=server,
        server=lambda: server, obstacle=lambda: None, check_alive=lambda **_when: None,
        of=lambda of: read_log(of.log, "vllm"), say=lambda *_words: None,
        redact=lambda text: text,
    )  # fmt: skip
    return with_events(run)


@pytest.fixture
def serve_cell(tmp_path):
    """Start ``matrix_engine.py`` with a cell's arguments, and yield its address and its log."""
    started = []

    def serve(*arguments: str) -> tuple[str, Path]:
        log = tmp_path / f"server-{len(started)}.log"
        engine = FAKES / "matrix_engine.py"
        with log.open("w") as stream:
            command = [sys.executable, str(engine), "--port", "0", *arguments]
            environment = {**os.environ, "MATRIX_KEY": "key", "MATRIX_FAULTS": "slow:half"}
            started.append(subprocess.Popen(command, stdout=stream, env=environment))
        assert waiting.until(lambda: "listening on " in log.read_text(), 30.0), log.read_text()
        return f"http://127.0.0.1:{log.read_text().split()[-1]}", log

    yield serve
    for process in started:
        process.kill()
        process.wait()


def attached_level(directory, settings, serve_cell, *arguments, baseline=None, log=True):
    url, file = serve_cell(*arguments)
    server = attach(
        url, api_key="key", served_name=None, default_name="canary", log=file if log else None
    )
    run = attached_run(directory, settings, server)
    return level.MatrixLevel(run, plan.make_plan(settings, strength="1"), baseline=baseline)


def test_cells_are_examined_on_attached_servers(tmp_path, matrix_profile, serve_cell):
    """An attached server is the baseline, or a cell if its log shows the values of this cell."""
    settings, half = profile.load(str(matrix_profile)), ("--window", "half")
    first = attached_level(tmp_path / "first", settings, serve_cell)
    record = first.examine(first.plan.cells[0])
    assert record.outcome is CellOutcome.PASS and record.rate is not None, record
    cell = covering.Planned({**first.space.baseline, "window": "half"}, ("mine",))
    with pytest.raises(verdict.NotRun, match="cannot be compared with itself"):
        attached_level(tmp_path / "alone", settings, serve_cell, *half).examine(cell)
    folder = tmp_path / "second"
    second = attached_level(folder, settings, serve_cell, *half, baseline=first.baseline)
    record = second.examine(cell)
    assert record.outcome is CellOutcome.SLOWER, record
    assert (folder / "matrix" / "FEATURE_MATRIX.md").is_file()


def test_a_cell_on_an_attached_server_without_a_log_is_not_run(
    tmp_path, matrix_profile, serve_cell
):
    silent = attached_level(tmp_path, profile.load(str(matrix_profile)), serve_cell, log=False)
    record = silent.examine(silent.plan.cells[0])
    assert record.outcome is CellOutcome.NOT_RUN and record.reason.startswith("path: ")
    assert "the attached server's log is unknown" in record.reason
    passed = {step.name for step in record.steps if step.outcome is CellOutcome.PASS}
    others = "start answers equivalence stress drafts alive performance"
    assert passed == {*others.split()}


def test_a_start_that_failed_can_be_made_again(tmp_path, monkeypatch):
    calls: list[str] = []

    class Once:
        """An engine that fails only at its first start."""

        stopped = None
        launch = SimpleNamespace(pids_when_ready=frozenset(), log=tmp_path / "server.log")

        def __init__(self, configuration, *_more) -> None:
            self.configuration, self.secrets, self.running = configuration, (), True

        def start(self):
            calls.append("start")
            if len(calls) == 1:
                raise StartError("no", Cause(kind="oom", summary="s", owner="o"), self.launch.log)
            return SimpleNamespace(startup_s=1.0, compiled=())

        def stop(self):
            calls.append("stop")
            return SimpleNamespace(clean=True)

    Once.launch.log.write_text("")
    monkeypatch.setattr(pool, "ManagedServer", Once)
    limits = starting.StartLimits(1, 1, 1)
    servers = pool.ServerPool(limits=limits, directory=tmp_path, run_id="r")
    for _ in range(2):
        with pytest.raises(StartError):
            servers.get(STARTED)
    assert calls == ["start"]
    servers.forget(STARTED)
    assert servers.get(STARTED) is servers.get(STARTED)
    servers.stop()
    servers.get(STARTED)
    assert calls == ["start", "start", "stop", "start"]


@pytest.mark.parametrize("axes_of", ["sm121", "sm90"])
@pytest.mark.parametrize("printed", ["fp8", "fp8_e4m3", "float8_e4m3fn"])  # the last: SGLang
def test_fp8_of_the_kv_cache_is_known_by_each_engine_s_name(axes_of, printed):
    expected = axes.load(axes_of).axes["kv"].values["fp8"].expected.path["kv_cache_dtype"]
    assert re.fullmatch(expected, printed) and not re.fullmatch(expected, "fp8_e5m2")


# Cells whose server rounds more than its checkpoint does


@pytest.mark.parametrize("flags", ["sse avx512f", "amx_tile", "sse4_2 avx512fp16"])
def test_a_value_may_need_a_flag_of_the_cpu(monkeypatch, flags):
    monkeypatch.setattr("sm121.matrix.space.cpu_flags", lambda: flags)
    space, has = Space(CPU, "vllm", "0.32.0"), "fp16" not in flags
    assert (space.settings["kv"].keys() == {"auto", "fp8"}) == has
    assert ("AVX-512" in space.absent.get(("kv", "fp8"), "")) == (not has)
    if has:
        cells = [planned.cell for planned in covering.build(space, 1).cells]
        assert len(cells) == 4
        assert {cell["dtype"] for cell in cells if cell["kv"] == "fp8"} == {"float32"}


@pytest.mark.parametrize(
    "wrong",
    [
        pytest.param(Unmet(Fact("rounded as kv=fp8-cut", "kv=fp8")), id="rounded as kv=fp8-cut"),
        pytest.param(None, id="agrees"),
    ],
)
@pytest.mark.parametrize("cell", [{"kv": "fp8"}, {"kv": "fp8", "graphs": "compiled"}, {}])
def test_a_value_may_ask_for_the_oracle(tmp_path, monkeypatch, wrong, cell):
    """Only the server of a cell whose value changes the rounding is compared with the oracle."""
    monkeypatch.setattr("sm121.matrix.space.cpu_flags", lambda: "avx512f")
    agrees = Mock(return_value="off by 1e-5 nats", side_effect=wrong)
    monkeypatch.setattr(examine.oracle, "agrees", agrees)
    made = examiner(tmp_path, lambda **_when: None)
    made.space, made._measure = Space(CPU, "vllm", "0.32.0"), failed
    record = made.examine(covering.Planned({**made.space.baseline, **cell}, ("mine",)), STARTED)
    if cell and wrong:
        assert record.reason == f"oracle: Unmet: {wrong}" and record.outcome is CellOutcome.FAIL
    else:
        assert "oracle" not in record.reason and ("oracle" in record.path) == bool(cell)
