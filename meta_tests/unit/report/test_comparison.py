"""Results of several runs and tools are shown in one table, each with its way of counting
tokens."""

import copy
import csv
import io
import json

import pytest

from meta_tests.fakes import past_runs
from meta_tests.folders import DATA
from sm121.cli import main
from sm121.core.errors import UsageError
from sm121.report import comparison
from sm121.run import verdict_file
from sm121.run.fingerprint import Fingerprint

#: The documents' numbers for llama.cpp, in the format of llama-bench -o json.
LLAMA_BENCH = (DATA / "llama-bench.json").read_text("utf-8")
LLAMA_BENCHY = (DATA / "llama-benchy.json").read_text("utf-8")


def verdict(**metrics) -> dict:
    return {
        **copy.deepcopy(
            {
                "schema_version": 1,
                "verdict": "PASS",
                "arch": "sm121",
                "profile": "sm121-gpt-oss-120b",
                "started": "2026-11-20T08:00:00+00:00",
                "box": {"state": "QUALIFIED"},
                "engine": {
                    "name": "vllm",
                    "version": "0.33.0",
                    "managed": True,
                    "model": "openai/gpt-oss-120b",
                    "path": {"attention": "FLASHINFER", "moe": "CUTLASS"},
                },
            }
        ),
        "metrics": metrics,
    }


def metric(value, **fields) -> dict:
    return {"value": value, "unit": "tok/s", "ci_low": value - 0.2, "ci_high": value + 0.2,
            "rounds": 10, "clock": "token_ids", "verdict": "PASS", **fields}  # fmt: skip


OURS = verdict(**{
    "tg32@d0": metric(59.36), "pp2048@d0": metric(4573.0), "tg32@d4096": metric(58.0),
    "pp2048@d4096": metric(9000.0, verdict="INVALID"),
    "ttft_p50": metric(447.0, unit="ms"), "tg32_c2@d0": metric(90.0), "ab:tg32@d0": metric(1.1),
})  # fmt: skip


@pytest.fixture
def files(tmp_path):
    """A file of each of the three kinds, and an early file of the suite."""
    lines = "\n".join(json.dumps(item) for item in json.loads(LLAMA_BENCH))
    early = OURS | {"schema_version": 0, "metrics": {"tg32@d0": {"value": 29.1, "unit": "tok/s"}}}
    (tmp_path / "vllm").mkdir()
    for name, text in {
        "vllm/verdict.json": json.dumps(OURS),
        "llama-cpp.json": LLAMA_BENCH,
        "llama-cpp.jsonl": f"{lines}\n",
        "benchy.json": LLAMA_BENCHY,
        "early.json": json.dumps(early),
    }.items():
        (tmp_path / name).write_text(text)
    return tmp_path


def table_of(capsys, *arguments: object) -> str:
    """Return the output of a comparison."""
    assert main(["compare", *map(str, arguments)]) == 0
    return capsys.readouterr().out


def test_the_documents_table(files, capsys):
    llama = f"llama.cpp={files / 'llama-cpp.json'}"
    out = table_of(capsys, files / "vllm", llama, files / "benchy.json")
    first = next(line for line in out.splitlines() if line.startswith("| Depth"))
    assert first == (
        "| Depth | vllm pp2048 | llama.cpp pp2048 | benchy pp2048 | vllm tg32 | llama.cpp tg32 | "
        "benchy tg32 | vllm tg128 | llama.cpp tg128 | benchy tg128 |"
    )
    for row in (
        "| d0 | 4573 | 2450 | **4664** | **59.36** | 57.85 | 33.55 | - | - | 33.10 |",
        "| d4096 | 9000 (INVALID) | 2294 | **4664** | **58.00** | 54.81 | 32.63 |",
        "| tg32 @ d4096 | llama.cpp | 54.81 ± 0.30 | tok/s | 5 | in-process | - |",
        "| tg32 | vllm | 59.36 [59.16, 59.56] | tok/s | 10 | token_ids | measured |",
        "| tg32_c2 | vllm | 90.00",
        "| tg32_c2 | benchy | 60.00",
        "| attention | FLASHINFER |",
        "box QUALIFIED",
        "The runs counted tokens in different ways: in-process, llama-benchy",
    ):
        assert row in out, row
    assert "99.00" not in out, "the prefix of a depth is not the prompt at that depth"
    assert "ab:" not in out


def test_csv_has_every_row_and_its_clock(files, tmp_path):
    target = tmp_path / "out.csv"
    sources = [str(files / "llama-cpp.jsonl"), str(files / "vllm" / "verdict.json")]
    assert main(["compare", *sources, "--format", "csv", "--output", str(target)]) == 0
    rows = list(csv.DictReader(io.StringIO(target.read_text())))
    assert len(rows) == 4 + 6
    assert rows[3]["test"] == "tg32 @ d4096" and rows[3]["value"] == "54.81"
    assert {row["clock"] for row in rows} == {"in-process", "token_ids"}
    assert {row["run"] for row in rows} == {"llama-cpp", "vllm"}


def test_a_file_that_llama_benchy_wrote():
    """A file that llama-benchy wrote is read, and its rate of 300 tok/s is shown.

    In this file, the prefix at a depth is a separate run."""
    source = comparison.read_results(DATA / "llama-benchy-0.4.0.json")
    assert source.tool == "llama-benchy 0.4.0" and source.model == "gpt-oss-120b"
    for name, rate in (("tg32@d0", 300), ("tg32@d1024", 300), ("tg32_c2@d0", 600)):
        assert source.row(name).report.value == pytest.approx(rate, rel=0.01)
    assert source.row("pp512@d0").report.rounds == 3 and source.row("pp512@d0").report.clock


def test_files_of_older_schema_versions_are_read(files):
    source = comparison.read_results(files / "early.json")
    assert source.rows[0].report.value == 29.1 and source.rows[0].report.clock is None
    names = [s.name for s in comparison.distinct([source, source])]
    assert names == ["early", "early (2)"]


def test_compared_runs_show_failures_and_kernels(files, tmp_path, capsys):
    """A comparison shows the failures and the kernel paths of both runs.

    Failures are sorted by severity, and an excused failure does not count. The other run's log
    proves one value more.
    """
    other = verdict(memory_peak_gib=metric(3.0, unit="GiB", ci_low=None, ci_high=None)) | {
        "levels": {"smoke": {"verdict": "FAIL", "passed": 1}, "stress": {"verdict": "NOT_RUN"}},
        "tests": [
            {"id": f"tests/test_smoke.py::test_{name}", "level": "smoke", **fields}
            for name, fields in {
                "a": {
                    "verdict": "FAIL",
                    "severity": "courtesy",
                    "message": "expected x | got y",
                },
                "b": {"verdict": "FAIL", "severity": "blocker", "message": "garbage"},
                "c": {"verdict": "FAIL", "severity": "blocker", "waived": True},
                "d": {"verdict": "FAIL", "severity": "contract", "tolerated": "known"},
                "e": {"verdict": "PASS", "severity": "contract"},
            }.items()
        ],
    }
    other["engine"]["path"] = {"attention": "FLASH_ATTN", "kv_cache_dtype": "f16"}
    (tmp_path / "other.json").write_text(json.dumps(other))
    out = table_of(capsys, files / "vllm", tmp_path / "other.json", files / "llama-cpp.json")
    assert "| other | 1 | 0 | 1 | smoke FAIL |" in out
    assert out.index("| other | blocker | test_b | garbage |") < out.index("| test_a |")
    assert "| courtesy | test_a | expected x \\| got y |" in out
    assert "test_c" not in out and "test_d" not in out and "test_e" not in out
    assert "| attention | FLASHINFER | FLASH_ATTN |" in out
    assert "| kv_cache_dtype | - | f16 |" in out and "| memory_peak_gib | other | 3.00 |" in out


def test_runs_without_a_value_have_no_empty_table(tmp_path, capsys):
    for name in ("a.json", "b.json"):
        (tmp_path / name).write_text(json.dumps(verdict()))
    out = table_of(capsys, tmp_path / "a.json", tmp_path / "b.json")
    assert out.startswith("No run has a measured value.\n\n## Kernels"), out


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{}",
        "[]",
        "[1]",
        pytest.param("\x00", id="nothing"),
        '{"benchmarks": [], "latency_mode": 1}',
        '[{"avg_ts": "x", "n_prompt": 1, "n_gen": 0}]',
    ],
)
def test_a_file_without_a_result_is_refused_in_one_line(tmp_path, text, capsys):
    (tmp_path / "x.json").write_text(text)
    with pytest.raises(UsageError, match="expected a report directory"):
        comparison.read_results(tmp_path / "x.json")
    assert main(["compare", str(tmp_path / "x.json")]) == 4
    assert len(capsys.readouterr().err.splitlines()) == 1


ASKED = {"profile": "p1", "profile_shipped": True, "model": "m1", "provider": "torch",
         "options": {}, "machine": {"gpu": "GB10"}}  # fmt: skip


def compared(tmp_path, **changed) -> list[comparison.Source]:
    sources = []
    for name, fields in (("one", {}), ("two", changed)):
        update = {"profile": "gb10", "fingerprint": Fingerprint(**{**ASKED, **fields})}
        file = tmp_path / f"{name}.json"
        verdict_file.write(past_runs.stored_run(name).file.model_copy(update=update), file)
        sources.append(comparison.read_results(file))
    comparison.refuse_mixed(sources)
    return sources


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        pytest.param(
            {"profile": "p2", "profile_shipped": False},
            "profile's digest: p1 and p2",
            id="profile p2 profile_shipped False, profile's digest: p1",
        ),
        pytest.param(
            {"profile": "p2", "configuration": "stock"},
            "the configuration of profile gb10: none and stock",
            id="configuration with its own gates",
        ),
        pytest.param(
            {"plan": "quick"}, "plan: full and quick", id="plan quick, plan: full and quick"
        ),
        pytest.param(
            {"model": "m2"}, "model's digest: m1 and m2", id="model m2, model's digest: m1 and m2"
        ),
        pytest.param(
            {"provider": "mine:it"},
            "kernel provider: torch and mine:it",
            id="provider mine:it, kernel provider: torch and mine:it",
        ),
        pytest.param(
            {"options": {"--rounds": "2"}},
            "option --rounds: none and 2",
            id="options --rounds 2, option --rounds: none and 2",
        ),
        pytest.param(
            {"machine": {"gpu": "H200"}},
            "machine's gpu: GB10 and H200",
            id="machine gpu H200, machine's gpu: GB10 and H200",
        ),
    ],
)
def test_runs_that_were_asked_otherwise_are_refused(tmp_path, changed, named):
    with pytest.raises(UsageError, match=f"one and two differ in {named}; --mixed"):
        compared(tmp_path, **changed)


def test_arguments_and_sources_of_compared_runs_may_differ(tmp_path):
    compared(tmp_path)
    changed = {"arguments": ["--x"], "configuration": "marlin", "sources": {"vllm": "0.33 abc"}}
    assert "profile gb10" in compared(tmp_path, **changed)[0].notes
