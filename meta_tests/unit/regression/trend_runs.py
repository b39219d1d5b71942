"""Stored runs with their metrics, and a run that is compared with them."""

from dataclasses import replace

import numpy as np

from meta_tests.fakes import past_runs
from sm121.core import level_settings
from sm121.core.verdict import Verdict
from sm121.regression import trend as regression
from sm121.regression.change import Change
from sm121.run.stored_run import StoredMetric, StoredRun

LIMITS = level_settings.Regression(metrics={"startup_s": 0.2})

CONTEXT = {
    "machine": {"cpu_model": "c", "gpu": "NVIDIA GB10"},
    "profile": "sm121-gpt-oss-120b",
    "configuration": "cutlass",
    "model": "openai/gpt-oss-120b",
    "plan": {"prompt_tokens": 2048, "depths": [0]},
    "path": {"attention": "FLASHINFER", "moe": "CUTLASS"},
}

CONTEXT["machine"]["attached_to"] = None


def metric(name: str, samples, **fields) -> StoredMetric:
    rate = name.startswith(("tg", "pp"))
    unit = "tok/s" if rate else "ms"
    value = float(np.median(samples))
    return replace(StoredMetric(name, unit, rate, None, tuple(samples), value), **fields)


def run(number: int, *metrics: StoredMetric, **context) -> StoredRun:
    return past_runs.stored_run(f"{number:04}_x.json", *metrics, **{**CONTEXT, **context})


def rounds(level: float, seed: int, *, noise: float = 0.003, boot: float = 0.005, count: int = 7):
    generator = np.random.default_rng(seed)
    level *= 1 + boot * generator.standard_normal()
    return level * (1 + noise * generator.standard_normal(count))


def changed(now: StoredMetric, *earlier: StoredMetric) -> Change:
    (change,) = regression.compare(
        {now.name: now}, [run(*one) for one in enumerate(earlier)], LIMITS
    )
    return change


def verdicts(now: StoredMetric, *earlier: StoredMetric) -> Verdict:
    return changed(now, *earlier).verdict


def stored(**changes) -> dict:
    return {
        **{
            "sm121": 1,
            "metric": "tg32@d0",
            "unit": "tok/s",
            "higher_is_better": True,
            "samples": (60.0, 60.1),
            "value": 60.05,
            "verdict": "PASS",
            "run": "PASS",
        },
        "quantile": None,
        **CONTEXT,
        **changes,
    }
