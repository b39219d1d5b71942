"""A scripted engine that samples wrongly only under load fails, and a correct one passes.

The checks use a crowd's samples."""

from itertools import count

import numpy as np
import pytest

from meta_tests.fakes import scripted_sampler
from sm121.api import client, sampled
from sm121.client import jobs, load
from sm121.core.server import Endpoint
from sm121.engines import capabilities
from sm121.stress.crowded_samples import CrowdedSamples
from sm121.stress.shapes import Shapes

ENDPOINT = Endpoint("", "", "m")
VLLM = capabilities.capabilities_of("vllm", "0.32.0")
#: Each fault changes a request while this many other requests run. In a crowd, 13 requests are
#: before the samples, and one is between two samples.
FAULTS = {
    "temperature 1": (16, lambda body: body | {"temperature": 1.0}),
    "greedy": (16, lambda body: body | {"temperature": 0.0}),
    "top_p ignored": (16, lambda body: body | {"top_p": 1.0}),
    "a tighter top_p": (16, lambda body: body | {"top_p": body["top_p"] / 2}),
    "seed ignored": (12, lambda body: body | {"seed": None}),
    "one seed for all": (12, lambda body: body | {"seed": 12_345}),
}


def noticed(fault: str, run: int) -> list[str]:
    """Return the findings about a run's crowd."""
    generator = np.random.default_rng(run)

    def answer(body):
        return scripted_sampler.answer({"max_tokens": 16} | body, generator)

    class Scripted(client.Api):
        def complete(self, prompt, **options):
            return answer({"prompt": prompt, "model": "m"} | options)

    def outcome(number, job, change=lambda body: body):
        first, *others = load._parse_choices(job, answer(change(job.body)))
        return jobs.JobOutcome(number, job, status=200, answer=first, others=tuple(others))

    shapes = Shapes(model="m", prompts=[], ask=None, salted=True, log_probabilities=True)
    sampler = sampled.Sampler(Scripted(ENDPOINT, VLLM), run)
    samples = CrowdedSamples(sampler, shapes)
    least, change = FAULTS.get(fault, (1000, None))
    numbered = zip(count(13, 2), samples.jobs(), strict=False)
    crowd = []
    for n, job in numbered:
        crowd.append(outcome(n, job, *([change] if n >= least else [])))
    assert len(crowd) == 24
    return [str(fault) for fault in samples.faults(crowd)]


@pytest.mark.parametrize(
    "fault",
    [
        "temperature 1",
        pytest.param("greedy", marks=pytest.mark.slow),
        pytest.param("top_p ignored", marks=pytest.mark.slow),
        pytest.param("a tighter top_p", marks=pytest.mark.slow),
        "seed ignored",
        pytest.param("one seed for all", marks=pytest.mark.slow),
    ],
)
def test_wrong_samples_under_load_only_are_noticed(fault):
    assert sum(bool(noticed(fault, run)) for run in range(20)) >= 19


@pytest.mark.parametrize("runs", [20, pytest.param(1000, marks=pytest.mark.slow("the same"))])
def test_a_right_crowd_is_not_called_wrong(runs):
    assert [run for run in range(runs) if noticed("", run)] == []
