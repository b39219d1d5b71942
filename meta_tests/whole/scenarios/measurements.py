"""Measurements from a file (SM121_META_SAMPLES), recorded as benchmarks;
unit/plugin/test_benchmarks.py starts it. An entry is a list of samples, or {"samples": ..., "and":
field, ...}. {"waits": true} waits to be interrupted, and {"not_run": WHY} is NOT_RUN with this
reason."""

import json
import os
import time
from dataclasses import replace

import pytest

from sm121.core.verdict import NotRun
from sm121.measure.measurement import Invalidity, Measurement

pytestmark = [pytest.mark.performance, pytest.mark.applies_to("cpu", "gpu")]

GIVEN = json.loads(os.environ["SM121_META_SAMPLES"])


@pytest.mark.parametrize("name", list(GIVEN))
def test_metric(record_metric, name):
    row = GIVEN[name] if isinstance(GIVEN[name], dict) else {"samples": GIVEN[name]}
    if row.get("waits"):
        time.sleep(600)
    if row.get("not_run"):
        raise NotRun(row["not_run"])
    rate = name.startswith(("tg", "pp"))
    fields = {
        "unit": "tok/s" if rate else "s" if name.endswith("_s") else "ms",
        "higher_is_better": rate,
        "clock": "token_ids" if rate else None,
        **row,
    }
    later = fields.pop("later", [])
    fields["invalid"] = [Invalidity(**given) for given in fields.get("invalid", [])]
    first = Measurement(name=name, **fields)
    looks = []

    def more(rounds):
        looks.append(rounds)
        samples = (first.samples + later)[:rounds]
        return replace(first, samples=samples)

    bound = len(first.samples) + len(later)
    record_metric(first, more if later else None, maximum_rounds=bound)
