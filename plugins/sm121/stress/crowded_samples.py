"""Requests for one-token samples, which are sent between the requests of a crowd.

They detect sampling that is only wrong while other requests run. The cases of `Sampler.far` judge
the samples.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace

from sm121.api.client import Refused
from sm121.api.sample_comparison import SampleCase
from sm121.api.sample_source import Samples
from sm121.api.sampled import Sampler
from sm121.client.jobs import Job, JobOutcome
from sm121.core.verdict import NotRun
from sm121.stress.checks import Fault
from sm121.stress.shapes import Shapes

#: Number of requests per kind of sample in a crowd.
_REQUESTS = 8


@dataclass(frozen=True)
class SampleJob(Job):
    """A request for one-token samples."""

    #: The case of `Sampler.far` to which the samples belong.
    case: str = ""


@dataclass
class CrowdedSamples:
    """The samples for the crowds of one server.

    Attributes:
        sampler: Makes the samples and judges them.
        shapes: Makes the requests.
        lacking: Why there are no samples; empty if there are, or if `jobs` was not called yet.
    """

    sampler: Sampler
    shapes: Shapes
    lacking: str = ""

    def jobs(self) -> list[Job]:
        """Return the requests for a crowd, all kinds in turn; empty if no kind is supported."""
        made: list[Job] = []
        for number in range(_REQUESTS):
            for kind, case in self._cases.items():
                body = {"prompt": case.texts, **self.sampler.body(case.options)}
                job = self.shapes.other("/v1/completions", body, 1)
                group = f"samples with {kind}"
                named = replace(job, name=f"{group} {number + 1}", kind=group)
                made.append(SampleJob(**vars(named), case=kind))
        return made

    def faults(self, outcomes: Sequence[JobOutcome]) -> list[Fault]:
        """Find the faults in the samples.

        Args:
            outcomes: The answered requests of `jobs`.
        """
        faults: list[Fault] = []
        samples: dict[str, Samples] = {}
        for outcome in outcomes:
            job = outcome.job
            assert isinstance(job, SampleJob)
            drawn = self._samples_of(outcome)
            if all(len(positions) == 1 for positions in drawn):
                samples.setdefault(job.case, []).extend(drawn)
            else:
                required = "expected a token and its log-probability in each answer"
                where = f"request {outcome.number} ({job.name})"
                faults.append(Fault("bad_stream", f"{where}: {required}"))
        for kind, of_kind in samples.items():
            for fact in self._cases[kind].judge(of_kind):
                faults.append(Fault("corrupted_answer", f"{fact}"))
        return faults

    def _samples_of(self, outcome: JobOutcome) -> Samples:
        """Return the sample of each choice; empty for a choice without log-probabilities."""
        samples: Samples = []
        for answer in (outcome.answer, *outcome.others):
            if answer is None:
                samples.append(())
            else:
                samples.append(self.sampler.sample(answer.positions or ()))
        return samples

    @functools.cached_property
    def _cases(self) -> dict[str, SampleCase]:
        try:
            return self.sampler.far()
        except (NotRun, Refused) as reason:
            self.lacking = f"{reason}"
            return {}
