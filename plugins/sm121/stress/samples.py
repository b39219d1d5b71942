"""Samples of one token among the requests of a crowd: what is sampled wrongly only while others
run. `Sampler.far` judges them."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace

from sm121.api.client import Refused
from sm121.api.sampled import Case, Sampler, Samples
from sm121.client.load import Job, JobOutcome
from sm121.core.verdict import NotRun
from sm121.stress.fault import Fault
from sm121.stress.shapes import Shapes

#: Begins the name of such a request; and so many of each kind are in a crowd.
NAME, _REQUESTS = "samples with", 8


@dataclass
class CrowdedSamples:
    """The samples for the crowds of one server."""

    sampler: Sampler
    shapes: Shapes
    #: Why there are none.
    lacking: str = ""

    def jobs(self) -> list[Job]:
        """The requests for a crowd, of all kinds in turn; none where the engine cannot do it."""
        made = []
        for number in range(_REQUESTS):
            for kind, (texts, options, _) in self._cases.items():
                body = {"prompt": texts, **self.sampler.body(options)}
                job = self.shapes.other("/v1/completions", body, 1)
                made.append(replace(job, name=f"{NAME} {kind} {number + 1}"))
        return made

    def faults(self, outcomes: Sequence[JobOutcome]) -> list[Fault]:
        """What is wrong with those that were answered."""
        faults, samples = list[Fault](), dict[str, Samples]()
        for outcome in outcomes:
            answers = (outcome.answer, *outcome.others)
            drawn = [self.sampler.sample(each.positions or ()) if each else () for each in answers]
            if all(len(positions) == 1 for positions in drawn):
                samples.setdefault(outcome.job.name.split()[2], []).extend(drawn)
            else:
                required = "required a token and its log-probability in each answer"
                where = f"request {outcome.number} ({outcome.job.name})"
                faults.append(Fault("bad_stream", f"{where}: {required}"))
        facts = [fact for kind, drawn in samples.items() for fact in self._cases[kind][2](drawn)]
        return faults + [Fault("corrupted_answer", f"{fact}") for fact in facts]

    @functools.cached_property
    def _cases(self) -> dict[str, Case]:
        try:
            return self.sampler.far()
        except (NotRun, Refused) as reason:
            self.lacking = f"{reason}"
            return {}
