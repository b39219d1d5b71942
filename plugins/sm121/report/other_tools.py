"""The result files of llama-benchy, sparkrun and llama-bench, as sources of a comparison."""

import csv
import io
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from sm121.core.errors import UsageError
from sm121.report.source import ComparedRow, Source
from sm121.run.verdict_file import MetricReport

#: The key of the YAML that sparkrun writes.
SPARKRUN_KEY = "sparkrun_benchmark"
#: The first columns of llama-benchy's CSV.
BENCHY_CSV_COLUMNS = "model,test_name,"
#: The name of a test in llama-benchy's CSV: ``pp2048 @ d4096 (c2)``.
_BENCHY_CSV_TEST = re.compile(
    r"(?P<kind>(?:pp|tg)\d+)(?: @ d(?P<depth>\d+))?(?: \(c(?P<streams>\d+)\))?"
)
#: llama-benchy counts tokens in one of two ways, and does not store in which one. The rates of the
#: two ways differ by 1.6 % and more.
_BENCHY_CLOCK = "llama-benchy (token ids or evenly spread usage)"
_BENCH_NOTE = "the engine's own loop: no server, no network, no sampling"


def read_llama_benchy(name: str, data: dict[str, Any]) -> Source:
    """Return the results of llama-benchy's JSON (eugr/llama-benchy, ``results.py``).

    Args:
        name: The name of the source.
        data: The content of the file.

    Raises:
        KeyError, TypeError, ValueError: The file lacks a value, or has an unreadable one.
    """
    rows: dict[str, ComparedRow] = {}
    for run in data["benchmarks"]:
        if run.get("is_context_prefill_phase"):
            continue  # the rate of the prefix itself, not of the prompt at that depth
        depth = int(run["context_size"])
        streams = int(run["concurrency"])
        # llama-benchy measures pp again for each response size. Use the first measurement.
        prefill = _rate_name(f"pp{run['prompt_size']}", streams, depth)
        if run["prompt_size"] and run.get("pp_throughput"):
            rows.setdefault(prefill, _benchy_row(prefill, "tok/s", run["pp_throughput"]))
        decode = _rate_name(f"tg{run['response_size']}", streams, depth)
        if run["response_size"] and run.get("tg_throughput"):
            rows.setdefault(decode, _benchy_row(decode, "tok/s", run["tg_throughput"]))
        if run.get("e2e_ttft") and depth == 0:
            rows.setdefault("ttft_p50", _benchy_row("ttft_p50", "ms", run["e2e_ttft"]))
    return Source(
        name=name,
        engine="unknown",
        model=str(data["model"]),
        tool=f"llama-benchy {data.get('version', '')}".strip(),
        rows=tuple(rows.values()),
        notes=tuple(_benchy_notes(data)),
        started=str(data.get("timestamp", "")),
    )


def _benchy_notes(data: dict[str, Any]) -> list[str]:
    notes = []
    if "latency_mode" in data:  # sparkrun merges files of several calls, and omits the mode
        latency = f"{data['latency_ms']:.3g} ms"
        notes.append(
            f"latency mode {data['latency_mode']}, {latency} subtracted from the time of pp"
        )
    if data.get("prefix_caching_enabled"):
        notes.append("prefix caching was on, so pp at a depth found its context in the cache")
    return notes


def read_llama_benchy_csv(name: str, text: str) -> Source:
    """Return the results of llama-benchy's CSV.

    Args:
        name: The name of the source.
        text: The content of the file.

    Raises:
        KeyError, IndexError, ValueError: The file lacks a column or a row, or a number is
            unreadable.
    """
    lines = list(csv.DictReader(io.StringIO(text)))
    rows: dict[str, ComparedRow] = {}
    for line in lines:
        match = _BENCHY_CSV_TEST.fullmatch(line["test_name"])
        if match is None:
            continue  # the rate of the prefix itself, as above
        depth = int(match["depth"] or 0)
        streams = int(match["streams"] or 1)
        rate = _rate_name(match["kind"], streams, depth)
        if line["t_s_mean"]:
            rows.setdefault(rate, _benchy_row(rate, "tok/s", _csv_item(line, "t_s")))
        if depth == 0 and streams == 1 and line["e2e_ttft_mean"]:
            first_token = _benchy_row("ttft_p50", "ms", _csv_item(line, "e2e_ttft"))
            rows.setdefault("ttft_p50", first_token)
    return Source(
        name=name,
        engine="unknown",
        model=lines[0]["model"],
        tool="llama-benchy",
        rows=tuple(rows.values()),
    )


def _csv_item(line: dict[str, str], column: str) -> dict[str, str]:
    return {"mean": line[f"{column}_mean"], "std": line[f"{column}_std"]}


def _rate_name(kind: str, streams: int, depth: int) -> str:
    """Return this suite's name of a rate, for example ``tg32_c4@d0``."""
    suffix = f"_c{streams}" if streams > 1 else ""
    return f"{kind}{suffix}@d{depth}"


def _benchy_row(metric: str, unit: str, item: dict[str, Any]) -> ComparedRow:
    report = MetricReport(
        value=float(item["mean"]),
        unit=unit,
        rounds=len(item.get("values") or []),
        clock=_BENCHY_CLOCK,
    )
    return ComparedRow(metric, report, deviation=float(item["std"]))


def read_sparkrun(name: str, text: str) -> Source:
    """Return the results that ``sparkrun benchmark`` writes: a recipe, and llama-benchy's JSON.

    The format is that of ``export_results`` in spark-arena/sparkrun,
    src/sparkrun/benchmarking/base.py.

    Args:
        name: The name of the source.
        text: The content of the file, YAML.

    Raises:
        UsageError: PyYAML is not installed, or the text is no YAML.
        KeyError, TypeError: The file lacks a value.
    """
    try:
        import yaml  # type: ignore[import-untyped]

        data = yaml.safe_load(text)[SPARKRUN_KEY]
    except ModuleNotFoundError as error:
        raise UsageError(f"{name}: YAML needs PyYAML: pip install pyyaml") from error
    except yaml.YAMLError as error:
        raise UsageError(f"{name}: not valid YAML: {' '.join(str(error).split())}") from error
    recipe = data["recipe"]
    engine = " ".join(str(recipe[key]) for key in ("runtime", "container") if recipe.get(key))
    source = read_llama_benchy(name, data["results"]["json"])
    notes = (*source.notes, f"recipe {recipe.get('qualified_name') or recipe['name']}")
    return replace(source, engine=engine, notes=notes, started=str(data["timestamp"]))


def read_llama_bench(name: str, data: Sequence[dict[str, Any]]) -> Source:
    """Return the results of llama-bench's JSON (``-o json`` or ``-o jsonl``).

    Args:
        name: The name of the source.
        data: The tests in the file; at least one.

    Raises:
        KeyError, TypeError, ValueError: A test lacks a value, or has an unreadable one.
    """
    rows = []
    for test in data:
        metric = _bench_metric(
            int(test["n_prompt"]), int(test["n_gen"]), int(test.get("n_depth", 0))
        )
        report = MetricReport(
            value=float(test["avg_ts"]),
            unit="tok/s",
            clock="in-process",
            rounds=len(test.get("samples_ts") or []),
        )
        rows.append(ComparedRow(metric, report, deviation=float(test.get("stddev_ts", 0.0))))
    first = data[0]
    return Source(
        name=name,
        engine=f"llama.cpp {first.get('build_commit', '')}".strip(),
        model=str(first.get("model_type") or first.get("model_filename") or ""),
        tool="llama-bench",
        rows=tuple(rows),
        notes=(_BENCH_NOTE,),
    )


def _bench_metric(prompt: int, generated: int, depth: int) -> str:
    if prompt and generated:
        # Llama-bench -pg measures one rate for prompt and answer.
        return f"pp{prompt}+tg{generated}@d{depth}"
    if prompt:
        return f"pp{prompt}@d{depth}"
    return f"tg{generated}@d{depth}"
