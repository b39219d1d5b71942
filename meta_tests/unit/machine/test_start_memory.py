"""The forecast of a start's memory, computed from headers, agrees with published starts and
refusals."""

import json
import subprocess
import sys
import tomllib
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import sm121.fixtures

from meta_tests.fakes import checkpoints
from meta_tests.folders import DATA, ROOT
from sm121.checkpoint import inspection, kv_cache
from sm121.core import profile
from sm121.core.errors import Sm121Error
from sm121.evidence.kernel_path import KernelPath
from sm121.machine import roofline, start_memory
from sm121.machine.start_arguments import StartArguments
from sm121.machine.start_memory import MachineMemory, MemoryForecast

PUBLISHED = tomllib.loads((DATA / "published-starts.toml").read_text("utf-8"))
GIB = 1 << 30
#: Published numbers have two decimals. For 0.34 GiB, this is an error of up to 1.5 %.
ROUNDED_GIB = 0.005
START = StartArguments(
    utilisation=0.7,
    length=131072,
    kv_bits=8.0,
    batched=8192,
    block=16,
    parallel=1,
    drafts=False,
)
GB10 = MachineMemory(total=119.7, available=115.0, free=114.0, cached=1.0)


def by_source(kind):
    return [pytest.param(row, id=f"{row['source']}: {row['model']}") for row in PUBLISHED[kind]]


def config_of(row):
    if isinstance(row["config"], str):
        folder = Path(sm121.fixtures.__file__).parent / "models"
        return json.loads((folder / f"{row['config']}.json").read_text("utf-8"))
    return row["config"]


@pytest.mark.parametrize("row", by_source("cache"))
def test_a_cache_holds_the_published_tokens(row):
    kv = kv_cache.kv_cache_of(config_of(row))
    bits = row.get("kv_bits", 16)
    size = kv.request_size(row["length"], bits, batched=8192, block=row.get("block", 16))
    request_gib = size / row.get("parallel", 1) / GIB
    within = 0.01 + ROUNDED_GIB / row["gib"]
    concurrency = row["gib"] / request_gib
    if "concurrency" in row:
        assert concurrency == pytest.approx(row["concurrency"], rel=within)
    else:
        assert concurrency * row["length"] == pytest.approx(row["tokens"], rel=within)


def weights_of(row, gpt_oss):
    """Return the size of the weights in GiB: parameters times bytes, or the weights of a
    configuration."""
    if "weights" in row:
        return row["weights"] / row.get("parallel", 1) / GIB
    served = None
    if row["configuration"]:
        own = profile.load("sm121-gpt-oss-120b").judging(row["configuration"], row["build"])
        arguments = (*own.engine.arguments, *own.configurations[row["configuration"]].arguments)
        required = own.path_of(row["configuration"])
        served = roofline.served(gpt_oss.config, arguments, required, KernelPath())
    return start_memory.loaded(gpt_oss, served, drafts=False) / GIB


@pytest.mark.parametrize("row", by_source("start"))
def test_a_start_leaves_what_was_published(row, gpt_oss):
    """The free memory after a start is forecast within 5 % of the start's memory, except for two
    small GPUs."""
    memory = MachineMemory(row["total_gib"], row["total_gib"], row["total_gib"], 0.0)
    start = replace(START, utilisation=row["utilisation"])
    forecast = MemoryForecast(start, memory, weights_of(row, gpt_oss), None)
    error = forecast.usual_kv_cache - row["kv_gib"]
    assert abs(error) <= row.get("share", 0.05) * forecast.requested
    low, high = forecast.least_kv_cache, forecast.kv_cache(start_memory.overhead().least)
    assert low <= row["kv_gib"] <= high
    assert forecast.weights == pytest.approx(row["loaded_gib"], rel=0.02)


@pytest.mark.parametrize("row", [*by_source("held_out"), *by_source("current")])
def test_a_start_with_which_the_usual_value_was_not_chosen(row):
    """The page has the errors of starts that were not used to choose the usual value.

    The errors of the other starts are smaller."""
    total = row["total_gib"]
    start = replace(START, utilisation=row["utilisation"], parallel=row.get("parallel", 1))
    memory = MachineMemory(total, total, total, 0.0)
    forecast = MemoryForecast(start, memory, row["loaded_gib"], None)
    error = abs(forecast.usual_kv_cache - row["kv_gib"]) / forecast.requested
    assert row["share"] - 0.01 < error <= row["share"]
    low, high = forecast.least_kv_cache, forecast.kv_cache(start_memory.overhead().least)
    assert (low <= row["kv_gib"] <= high) == ("outside" not in row)


def test_the_page_has_the_errors_of_the_starts_that_were_held_out():
    rows = PUBLISHED["held_out"]
    sources = {row["source"] for row in PUBLISHED["start"]}
    assert len(rows) == 13 and not sources & {row["source"] for row in rows}
    text = " ".join((ROOT / "docs/tables/start-memory.md").read_text("utf-8").split())
    small = sum(row["share"] <= 0.05 for row in rows)
    largest = max(row["share"] for row in rows if "outside" not in row)
    assert f"at most 5 % of the requested memory in {small} starts" in text
    assert f"at most {largest:.0%}".replace("%", " %") in text


def test_the_page_has_the_errors_of_the_starts_of_the_current_engine():
    rows = PUBLISHED["current"]
    assert not {row["source"] for row in PUBLISHED["start"]} & {row["source"] for row in rows}
    text = " ".join((ROOT / "docs/tables/start-memory.md").read_text("utf-8").split())
    small = sum(row["share"] <= 0.05 for row in rows)
    of_a_gb10 = [row for row in rows if "GB10" in row["model"]]
    alone = []
    for row in rows:
        if "parallel" not in row and row["total_gib"] * row["utilisation"] >= 10.0:
            alone.append(row)
    assert f"{len(rows)} published starts of vLLM from 0.10.2 on, {len(of_a_gb10)} of them" in text
    assert f"at most 5 % in {small} starts" in text
    assert f"all {len(alone)} starts on one GPU that request at least 10 GiB" in text
    assert max(row["share"] for row in alone) <= 0.05


@pytest.mark.parametrize(
    "row", [pytest.param(row, id=row["source"]) for row in PUBLISHED["loaded"]]
)
def test_padding_and_requantising_change_what_is_loaded(row, gpt_oss):
    assert weights_of(row, gpt_oss) == pytest.approx(row["gib"], rel=0.01)


def test_ten_published_starts_are_within_five_percent():
    assert sum("share" not in row for row in PUBLISHED["start"]) == 10


@pytest.mark.parametrize(
    "row", [pytest.param(row, id=row["source"]) for row in PUBLISHED["refused"]]
)
def test_a_start_that_was_refused_would_not_fit(row):
    available = row["available_gib"]
    forecast = MemoryForecast(
        replace(START, utilisation=row["utilisation"]),
        MachineMemory(row["total_gib"], available, available, 0.0, ("VLLM::EngineCore (pid 7)",)),
        20.0,
        1.0,
    )
    (finding,) = forecast.findings()
    assert finding.severity == "error" and "VLLM::EngineCore (pid 7)" in finding.message
    fitting = float(finding.remedy.removeprefix("lower --gpu-memory-utilization to "))
    assert fitting * row["total_gib"] <= available
    assert replace(forecast, start=replace(START, utilisation=fitting)).findings() == []


@pytest.fixture(scope="module")
def gpt_oss(tmp_path_factory):
    folder = tmp_path_factory.mktemp("gpt-oss")
    return inspection.of_folder(checkpoints.load("openai/gpt-oss-120b").write(folder))


def test_a_healthy_start_has_no_finding(gpt_oss):
    arguments = ["--gpu-memory-utilization", "0.7", "--max-model-len", "131072"]
    start = StartArguments.of([*arguments, "--kv-cache-dtype", "fp8"], gpt_oss)
    assert start == START
    forecast = start_memory.forecast(gpt_oss, start, GB10)
    assert forecast.findings() == []
    (line,) = start_memory.lines(forecast)
    assert line == (
        "memory: weights 60.8 GiB (file headers); --gpu-memory-utilization 0.7 takes 83.8 of "
        "119.7 GiB; left for the KV cache: 17.0 to 22.7 GiB, about 1,167,841 tokens in requests "
        "of 131,072"
    )


@pytest.mark.parametrize(
    ("start", "memory", "severity", "remedy"),
    [
        pytest.param(
            replace(START, utilisation=0.5),
            GB10,
            "error",
            "raise --gpu-memory-utilization to 0.55",
            id="weights do not fit into the share",
        ),
        pytest.param(
            replace(START, utilisation=0.9),
            replace(GB10, total=62.0, available=61.0, free=61.0),
            "error",
            "take a checkpoint with fewer bits, or several machines",
            id="weights do not fit at all",
        ),
        pytest.param(
            replace(START, utilisation=0.54, kv_bits=16.0),
            GB10,
            "error",
            "take --kv-cache-dtype fp8, or raise --gpu-memory-utilization to 0.57",
            id="the context does not fit",
        ),
        pytest.param(
            replace(START, utilisation=0.57, kv_bits=16.0),
            GB10,
            "warning",
            "lower --max-model-len to 34227, or take --kv-cache-dtype fp8, or raise "
            "--gpu-memory-utilization to 0.6",
            id="the context may not fit",
        ),
        pytest.param(
            START,
            replace(GB10, available=70.0, free=70.0),
            "error",
            "lower --gpu-memory-utilization to 0.58",
            id="others hold memory",
        ),
        pytest.param(
            START,
            replace(GB10, available=30.0, free=30.0),
            "error",
            "stop other processes that use memory: this start needs about 64.9 GiB",
            id="others hold too much",
        ),
        pytest.param(
            START,
            replace(GB10, free=50.0, cached=60.0),
            "note",
            "sync; echo 3 | sudo tee /proc/sys/vm/drop_caches",
            id="page cache",
        ),
    ],
)
def test_a_start_that_does_not_fit_names_the_argument_to_change(
    start, memory, severity, remedy, gpt_oss
):
    (finding,) = start_memory.forecast(gpt_oss, start, memory).findings()
    assert (finding.severity, finding.remedy) == (severity, remedy), finding


@pytest.mark.parametrize(
    ("length", "kv_bits", "utilisation", "remedy"),
    [
        pytest.param(
            1010000,
            16.0,
            0.16,
            "raise --gpu-memory-utilization to 0.73 and take --kv-cache-dtype fp8",
            id="an FP8 cache alone does not fit",
        ),
        pytest.param(
            8192,
            8.0,
            0.16,
            "raise --gpu-memory-utilization to 0.19",
            id="only the usual overhead leaves room",
        ),
        pytest.param(
            1010000,
            16.0,
            0.1,
            "raise --gpu-memory-utilization to 0.73 and take --kv-cache-dtype fp8",
            id="the weights do not fit",
        ),
        pytest.param(
            2020000,
            16.0,
            0.1,
            "raise --gpu-memory-utilization to 0.95 and lower --max-model-len to 673262",
            id="the weights fit into a larger share, and the context fits into none",
        ),
        pytest.param(
            2020000,
            16.0,
            0.16,
            "raise --gpu-memory-utilization to 0.95 and lower --max-model-len to 673262",
            id="the context fits into no share",
        ),
    ],
)
def test_the_remedy_suffices(length, kv_bits, utilisation, remedy, tmp_path):
    found = inspection.of_folder(checkpoints.load("Qwen/Qwen3-8B").write(tmp_path))
    start = replace(START, length=length, kv_bits=kv_bits, utilisation=utilisation)
    idle = replace(GB10, free=GB10.total, available=GB10.total)
    (finding,) = start_memory.forecast(found, start, idle).findings()
    assert finding.remedy == remedy, finding
    changed = {}
    for part in finding.remedy.split(" and "):
        words = part.removeprefix("take ").replace(" to ", " ").split()[-2:]
        changed[words[0]] = words[1]
    share = float(changed["--gpu-memory-utilization"])
    shorter = int(changed.get("--max-model-len", length))
    bits = 8.0 if "--kv-cache-dtype" in changed else kv_bits
    start = replace(start, utilisation=share, length=shorter, kv_bits=bits)
    assert not any(
        each.severity == "error" for each in start_memory.forecast(found, start, idle).findings()
    )


def test_the_length_that_is_named_fits(gpt_oss):
    start = replace(START, utilisation=0.57, kv_bits=16.0)
    forecast = start_memory.forecast(gpt_oss, start, GB10)
    (finding,) = forecast.findings()
    length = int(finding.remedy.split()[3].rstrip(","))
    shorter = start_memory.forecast(gpt_oss, replace(start, length=length - 16), GB10)
    assert shorter.findings() == []


def test_a_drafter_counts_only_with_speculation(tmp_path):
    public = checkpoints.load("deepseek-ai/DeepSeek-R1").with_layers(4).with_experts(4)
    found = inspection.of_folder(public.write(tmp_path))
    draft = '{"method": "mtp", "num_speculative_tokens": 1}'
    without = StartArguments.of(["--max-model-len", "1024"], found)
    speculating = StartArguments.of(
        ["--max-model-len", "1024", "--speculative-config", draft], found
    )
    more = start_memory.forecast(found, speculating, GB10).weights
    less = start_memory.forecast(found, without, GB10).weights
    assert (more - less) * GIB == pytest.approx(found.drafter)


@pytest.mark.parametrize(
    ("text", "length"),
    [("32768", 32768), ("32k", 32000), ("32K", 32768), ("25.6k", 25600), ("1M", 1 << 20)],
)
def test_a_length_may_have_a_unit(text, length, gpt_oss):
    arguments = ["--max-model-len", text, "--max-num-batched-tokens", "16k"]
    start = StartArguments.of(arguments, gpt_oss)
    assert (start.length, start.batched) == (length, 16000)


@pytest.mark.parametrize("text", ["auto", "-1"])
def test_a_length_that_fits_has_no_tokens_in_the_forecast(text, gpt_oss):
    """If vLLM takes the longest context that fits, the forecast contains no number of tokens."""
    start = StartArguments.of(["--max-model-len", text], gpt_oss)
    idle = replace(GB10, free=GB10.total, available=GB10.total)
    (line,) = start_memory.lines(start_memory.forecast(gpt_oss, start, idle))
    assert line.startswith("memory: weights 60.8 GiB") and "tokens" not in line


@pytest.mark.parametrize(
    "arguments",
    [
        "--gpu-memory-utilization much",
        "--gpu-memory-utilization nan",
        "--gpu-memory-utilization 1.5",
        "--gpu-memory-utilization -1",
        "--tensor-parallel-size 0",
        "-tp 0",
        "--block-size 0",
        "--max-model-len 0",
        "--max-model-len 1.5K",
        "--max-model-len",
        "--max-num-batched-tokens many",
    ],
)
def test_an_argument_that_vllm_refuses_has_no_forecast(arguments, gpt_oss):
    with pytest.raises(Sm121Error, match=r"expected a .*number above 0"):
        StartArguments.of(arguments.split(), gpt_oss)


@pytest.mark.parametrize(
    "arguments",
    [
        "--kv-cache-memory-bytes 1G",
        "--cpu-offload-gb 8",
        "--pipeline-parallel-size 2",
        "-pp 2",
        "--data-parallel-size 2",
        "--enable-lora",
        "--kv-cache-dtype unheard_of",
    ],
)
def test_an_option_with_an_unknown_effect_is_named(arguments, gpt_oss):
    with pytest.raises(Sm121Error, match="unknown") as refused:
        StartArguments.of(arguments.split(), gpt_oss)
    assert arguments.split()[-1].lstrip("-") in f"{refused.value}"


def test_options_without_an_effect_have_a_forecast(gpt_oss):
    arguments = (
        "--cpu-offload-gb 0 --pipeline-parallel-size 1 --data-parallel-size 1 --enforce-eager"
    )
    assert StartArguments.of(arguments.split(), gpt_oss) == StartArguments.of([], gpt_oss)


def test_weights_and_cache_are_divided_by_the_short_option_too(gpt_oss):
    assert StartArguments.of(["-tp", "2"], gpt_oss).parallel == 2


@pytest.mark.parametrize("option", ["--quantization", "-q"])
def test_quantising_while_loading_is_not_forecast(option, gpt_oss, tmp_path):
    """Quantising while loading is not forecast for a checkpoint that is quantised already, because
    it can only be served in its own format."""
    StartArguments.of([option, "mxfp4"], gpt_oss)
    plain = inspection.of_folder(checkpoints.load("Qwen/Qwen3-8B").write(tmp_path))
    with pytest.raises(Sm121Error, match=f"{option} fp8 on the memory is unknown"):
        StartArguments.of([option, "fp8"], plain)


def test_an_orphan_of_an_earlier_server_is_named(monkeypatch):
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as orphan:
        of_run = {"abc": [psutil.Process(orphan.pid)]}
        monkeypatch.setattr(start_memory.dead_runs, "of_dead_runs", lambda: of_run)
        holders = MachineMemory.read().holders
        orphan.communicate(b"\n")
    assert any(f"(pid {orphan.pid}), an orphan of run abc" in holder for holder in holders)
