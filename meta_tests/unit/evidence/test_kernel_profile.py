"""Kernel names of a profile are read, assigned to parts of the model, and compared with the
path."""

import gzip
import json
import math
import tracemalloc
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from operator import add, mod, mul
from pathlib import Path
from typing import Any

import pytest

from meta_tests.fakes.servers import executable
from meta_tests.texts import text_file
from meta_tests.unit.evidence.kernel_tables import (
    ALL,
    ATTENTION,
    CUTLASS,
    DENSE,
    GB10,
    MARLIN,
    NAMES,
    QUANTISE,
    REAL,
    TABLES_OF_GB10,
    as_printed,
    event,
)
from sm121 import cli
from sm121.core.errors import UsageError
from sm121.core.server import Endpoint
from sm121.core.verdict import NotRun
from sm121.evidence import kernel_requirement, profiler
from sm121.evidence.kernel_names import load_names, part_of
from sm121.evidence.kernel_profile import KernelProfile
from sm121.evidence.kernel_trace import read_trace
from sm121.evidence.nsys import read_nsys
from sm121.evidence.profile_files import read_profile
from sm121.evidence.profiler import profile_decode
from sm121.measure.counters import Counters

NO_SHARES = dict.fromkeys(("attention", "moe", "dense", "quantise", "other"), 0)


@pytest.fixture
def trace(tmp_path: Path) -> Callable[..., Path]:
    def write(*events: dict, name: str = "w.pt.trace.json.gz") -> Path:
        text = json.dumps({"schemaVersion": 1, "traceEvents": events, "traceName": "x"}, indent=2)
        path = tmp_path / name
        path.write_bytes(gzip.compress(text.encode()) if name.endswith(".gz") else text.encode())
        return path

    return write


def shares_of(profiled: KernelProfile) -> dict[str, float]:
    return {part: time.share for part, time in profiled.parts.items()}


@pytest.mark.parametrize(
    ("name", "part"),
    [(name, part) for part, names in NAMES.items() for name in names]
    + [
        *(
            ("void mul_mat_vec_q<(ggml_type)39, (int)1, (bool)0, (bool)0>(void const*)", "moe"),
            ("void mul_mat_q<(ggml_type)39, (int)64, (bool)0>(char const*)", "moe"),
            ("void mm_ids_helper<(int)4>(int const*)", "moe"),
            ("void mul_mat_vec_q<(ggml_type)8, (int)1, (bool)0, (bool)0>(void const*)", "dense"),
        )
    ],
)
def test_kernel_name_has_its_part(name, part):
    assert part_of(name) == part


def test_every_entry_of_the_data_file_is_reached():
    reached = set()
    for names in NAMES.values():
        for name in names:
            matching = [entry.id for entry in load_names().name if entry.regex.search(name)]
            reached.update(matching[:1])
    assert {entry.id for entry in load_names().name} - reached == set()


def test_gpu_kernels_count_and_operators_beside_them_do_not(trace):
    path = trace(
        event("execute_context_0(0)_generation_1(1)", "user_annotation", 0, 50),
        event("execute_context_1(5)_generation_0(0)", "user_annotation", 60, 50),
        event("aten::mm", "cpu_op", 0, 1000), event(MARLIN, "kernel", 0, 60),
        event(MARLIN, "kernel", 100, 20), event(ATTENTION, "kernel", 70, 15),
        event("rms_norm_kernel", "kernel", 90, 5), event("Memset", "gpu_memset", 0, 1000),
    )  # fmt: skip
    profiled = read_trace(path)
    assert (profiled.kind, profiled.steps) == ("gpu", 1)
    assert profiled.seconds == pytest.approx(100e-6)
    expected = NO_SHARES | {"moe": 0.8, "attention": 0.15, "other": 0.05}
    assert shares_of(profiled) == pytest.approx(expected)
    assert profiled.parts["moe"].calls == 2 and profiled.kernels[0].name == MARLIN


@pytest.mark.parametrize(
    ("steps", "step_tokens"),
    [
        pytest.param(["0(0)_generation_1(1)"], 1, id="no drafts"),
        pytest.param(["0(0)_generation_1(1)", "0(0)_generation_1(4)"], 4, id="drafts"),
        pytest.param(["0(0)_generation_2(8)"], 4, id="two requests"),
        pytest.param(["0(sq0sk0sqsq0sqsk0)_generation_1(sq4sk9sqsq1sqsk9)"], 4, id="long"),
        pytest.param(["0(0)_generation_1"], None, id="not told"),
        pytest.param(["1(5)_generation_0(0)"], None, id="prefill"),
    ],
)
def test_the_tokens_of_a_step_are_those_that_it_computes_for_a_request(trace, steps, step_tokens):
    events = [event(f"execute_4_context_{step}", "user_annotation", 0, 50) for step in steps]
    assert read_trace(trace(*events, event(MARLIN, "kernel", 0, 60))).step_tokens == step_tokens


def test_operators_have_their_own_time_only(trace):
    times = {"aten::linear": (0, 100), "_C::onednn_mm": (10, 80), "aten::view": (20, 5)}
    events = [event(name, "cpu_op", *time) for name, time in times.items()]
    # An event of another thread does not enclose the others.
    events += [event("aten::add", "cpu_op", 100, 10), event("aten::add", "cpu_op", 0, 7, tid=2)]
    profiled = read_trace(trace(*events, name="w.pt.trace.json"))
    own_times = {kernel.name: kernel.seconds * 1e6 for kernel in profiled.kernels}
    expected = {"aten::linear": 20, "_C::onednn_mm": 75, "aten::view": 5, "aten::add": 17}
    assert own_times == pytest.approx(expected) and profiled.kind == "cpu"


def test_trace_is_streamed(tmp_path):
    """A trace is read as a stream: 80,000 kernels (12 MB of text) need only a few megabytes of
    memory."""
    path = tmp_path / "large.pt.trace.json.gz"
    one = json.dumps(event(MARLIN, "kernel", 0, 1))
    with gzip.open(path, "wt", compresslevel=1) as stream:
        stream.write('{"traceEvents": [\n')
        stream.writelines(f"{one},\n" for _ in range(80_000))
        stream.write(f"{one}\n]}}")
    tracemalloc.start()
    try:
        profiled = read_trace(path)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert profiled.parts["moe"].calls == 80_001
    assert peak < 8 << 20


@pytest.mark.parametrize(
    ("content", "of_whole"),
    [
        ("", None),
        ("{}", None),
        ("not a trace", None),
        ('{"traceEvents": []}', "kernels or operators"),
        ('{"traceEvents": [{"ph": "X"', None),
        pytest.param(
            '{"traceEvents": [{"ph": "X"}, 5, "x", null, garbage]}',
            None,
            id='{"traceEvents": ({"ph": "X"}, 5, "x", null, garbage)}',
        ),
        # the events have another form
        pytest.param(
            ('{"traceEvents": [{"ph": "X", "name": "k", "cat": "cpu_op", "dur": 1, "ts": "x"}]}'),
            None,
            id="text",
        ),
        pytest.param(
            ('{"traceEvents": [{"ph": "X", "name": "k", "cat": "cpu_op", "dur": 1, "ts": null}]}'),
            None,
            id="null",
        ),
        pytest.param(
            (
                '{"traceEvents": [{"ph": "X", "name": "k", "cat": "cpu_op", "dur": 1, '
                '"ts": 1, "pid": [1]}]}'
            ),
            None,
            id="list",
        ),
        pytest.param(
            mod(
                '{"traceEvents": [{"ph": "X", "name": "k", "cat": "kernel", "dur": %s}]}',
                mul("9", 5000),
            ),
            None,
            id="digits",
        ),
        pytest.param(
            mod(
                '{"traceEvents": [{"ph": "X", "name": "k", "args": %s}]}',
                add(mul("[", 100000), mul("]", 100000)),
            ),
            None,
            id="depth",
        ),
    ],
)
def test_a_file_that_is_no_trace_is_refused(tmp_path, content, of_whole):
    whole, cut, damaged = (tmp_path / name for name in ("t.json", "cut.json.gz", "bad.json.gz"))
    whole.write_text(content)
    cut.write_bytes(gzip.compress(content.encode() or b"x" * 100)[:-9])
    packed = bytearray(gzip.compress(bytes(range(256)) * 50))
    packed[12:40] = b"\xff" * 28
    damaged.write_bytes(packed)
    for path in (whole, cut, damaged):
        expected = (path == whole and of_whole) or "a Chrome trace"
        with pytest.raises(UsageError, match=rf"{path.name}: expected {expected}"):
            read_trace(path)


@pytest.mark.parametrize("took", [math.nan, -7, math.inf])
def test_kernel_that_took_no_possible_time_was_there(trace, took):
    profiled = read_trace(trace(event("a", "kernel", 0, 5), event("b", "kernel", 0, took)))
    assert sorted(profiled.names()) == ["a", "b"]
    assert profiled.seconds == pytest.approx(5e-6)


@pytest.mark.parametrize("row", ["5,nan,1,x", "5,5,1", "5,5,,x", "5,5,1," + "x" * 200_000])
def test_a_malformed_row_of_nsys_is_refused(row):
    with pytest.raises(UsageError, match="expected"):
        read_nsys(f"Time (%),Total Time (ns),Instances,Name\n{row}\n", Path("k.csv"))


NSYS = text_file("nsys.csv").format(
    CUTLASS=CUTLASS, DENSE=DENSE, QUANTISE=QUANTISE, ATTENTION=ATTENTION
)


def test_table_of_nsys_is_read_the_same_way(tmp_path):
    file = tmp_path / "kernels.csv"
    file.write_text(NSYS)
    profiled = read_profile(file)
    assert profiled.seconds == pytest.approx(0.01)
    shares = {"attention": 0.05, "moe": 0.6, "dense": 0.3, "quantise": 0.05}
    assert shares_of(profiled) == pytest.approx(NO_SHARES | shares)
    assert kernel_requirement.kernel_contradictions(GB10, REAL, profiled) == []


@pytest.mark.parametrize("text", ["", "SKIPPED: no CUDA kernel data", NSYS.splitlines()[2]])
def test_table_of_nsys_without_kernels_is_refused(text):
    with pytest.raises(UsageError, match="expected"):
        read_nsys(text, Path("k.csv"))


def test_nsys_that_is_missing_is_not_run(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(NotRun, match="nsys is not on PATH"):
        read_profile(tmp_path / "report.nsys-rep")


def test_nsys_report_is_read_by_nsys(tmp_path, monkeypatch):
    """An nsys report is read by nsys. Here, a replacement answers as nsys does."""
    (tmp_path / "table.csv").write_text(NSYS)
    prints = f"exec /bin/cat {tmp_path / 'table.csv'}"
    executable(tmp_path / "nsys", f'case "$*" in *cuda_gpu_kern_sum*) {prints};; esac; exit 1')
    monkeypatch.setenv("PATH", str(tmp_path))
    assert read_profile(tmp_path / "report.nsys-rep").parts["moe"].calls == 36
    executable(tmp_path / "nsys", "echo cannot open the report >&2; exit 1")
    with pytest.raises(NotRun, match="cannot open the report"):
        read_profile(tmp_path / "report.nsys-rep")


def test_command_prints_a_trace(trace, capsys):
    path = trace(event(MARLIN, "kernel", 0, 60), event(ATTENTION, "kernel", 70, 20))
    assert cli.main(["path", "--trace", str(path)]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["kernels"]["parts"]["moe"]["share"] == 0.75
    assert cli.main(["path", "--trace", str(path), "--table"]) == 0
    assert "| moe | 75.0% |" in capsys.readouterr().out


def test_command_names_variant_layers_and_what_the_log_says_wrongly(tmp_path, capsys):
    log = tmp_path / "server.log"
    table = tmp_path / "profiled.log"
    line = "INFO 02-09 07:05:01 [cuda.py:345] Using AttentionBackendEnum.FLASH_ATTN backend."
    log.write_text(f"{line}\n")
    table.write_text(as_printed(TABLES_OF_GB10 / "fused_0804_kernels.csv"))
    for logs, contradictions in (([], 0), ([str(log)], 1)):
        assert cli.main(["path", *logs, "--trace", str(table), "--json"]) == 0
        answer = json.loads(capsys.readouterr().out)
        assert (answer["moe_variant"], answer["requantised"]) == ("fused", ALL)
        assert "computeStridesGemm2Only" in answer["evidence"]["moe_variant"]
        assert "5034 calls of dense Marlin" in answer["evidence"]["requantised"]
        assert len(answer["contradictions"]) == contradictions, answer["contradictions"]


def test_server_without_a_profiler_is_not_run(fault_server, tmp_path, monkeypatch):
    monkeypatch.setattr(profiler, "_WRITTEN_WITHIN_S", 0.5)
    server = fault_server()
    endpoint = Endpoint(server.base_url, server.key, "fault-model")
    with pytest.raises(NotRun, match=r"no /start_profile|wrote no trace|0 of 2 decode steps"):
        profile_decode(endpoint, tmp_path, steps=2)


@dataclass
class Clock:
    now: float = 0.0


def chunks(counts: Iterable[int | None], clock: Clock) -> Iterator[dict[str, Any]]:
    """Return the chunks of an answer, 10 ms apart, with the number of tokens so far."""
    for count in counts:
        clock.now += 0.01
        yield {"choices": [{}], "usage": count and {"completion_tokens": count}}


@pytest.mark.parametrize(
    ("before", "now", "tokens_per_step"),
    [
        pytest.param({"generated": 50}, {"generated": 179}, 1.0, id="no drafter"),
        pytest.param(
            {"generated": 0, "accepted_tokens": 0},
            {"generated": 141, "accepted_tokens": 90},
            2.8,
            id="a drafter",
        ),
        pytest.param(
            {"generated": 100, "accepted_tokens": 70},
            {"generated": 229, "accepted_tokens": 70},
            1.0,
            id="no draft accepted",
        ),
        pytest.param({"generated": 50}, {"generated": 50}, None, id="late counters"),
        pytest.param({"running": 0}, {"running": 1}, None, id="no counters of tokens"),
        pytest.param(None, None, None, id="no metrics"),
    ],
)
def test_tokens_of_a_step_are_counted(before, now, tokens_per_step):
    counted = []
    for values in (before, now):
        if values is None:
            counted.append(None)
        else:
            counted.append(Counters(values))
    assert profiler._tokens_per_step(*counted) == tokens_per_step


@pytest.mark.parametrize(
    ("counts", "token_s"),
    [
        pytest.param(range(2, 200), 0.01, id="a token a chunk"),
        pytest.param([*range(30, 60), *range(60, 200, 2)], 0.005, id="two tokens a chunk"),
        pytest.param(range(2, 90), None, id="the answer ends"),
        pytest.param([None] * 200, None, id="no usage"),
    ],
)
def test_a_token_is_timed_after_those_that_settle(counts, token_s, monkeypatch):
    clock = Clock()
    monkeypatch.setattr(profiler.time, "perf_counter", lambda: clock.now)
    answer = chunks(counts, clock)
    assert profiler._time_of_a_token(answer, 32) == (token_s and pytest.approx(token_s))
    if token_s is not None:
        assert next(answer)["usage"]["completion_tokens"] <= 64 + 32 + 2
