"""Describes the timed requests of a run for the environment record."""

from typing import Any

from sm121.core import engine_arguments
from sm121.core.configuration import ServerConfiguration
from sm121.core.profile import Profile
from sm121.core.profile_fields import FULL
from sm121.measure.plan import Plan
from sm121.performance.checks import SAMPLED
from sm121.session.settings import Settings


def describe_workload(
    settings: Settings, profile: Profile, *, tokenizer: str | None
) -> dict[str, Any]:
    """Return the sizes and the sampling of the requests that time a decode.

    They are greedy, except for the metrics of ``sampled``, which has their sampling. The plan is
    included unless it is full, because other plans leave out some metrics.

    Args:
        settings: The settings of the run.
        profile: The profile of the run.
        tokenizer: The tokenizer of the server; None: not known.
    """
    plan = settings.measuring_plan(profile)
    workload: dict[str, Any] = {
        "prompt_tokens": plan.prompt_tokens,
        "generated_tokens": list(plan.generated_tokens),
        "depths": list(plan.depths),
        "batch_size": 1,
        "concurrency": sorted({1, *plan.measuring.concurrency}),
        "warm_up_requests": plan.measuring.warm_up_requests,
        "temperature": 0.0,
        # Greedy requests use the most likely token, so no seed is sent.
        "top_p": 1.0,
        "seed": None,
        "tokenizer": tokenizer,
        "sampled": _sampled(plan),
    }
    if settings.plan != FULL:
        workload["plan"] = settings.plan
    return workload


def _sampled(plan: Plan) -> dict[str, dict[str, Any]]:
    """Return the sampling of each metric whose requests are not greedy."""
    sampled: dict[str, dict[str, Any]] = {}
    for tokens in plan.generated_tokens:
        sampled[f"tg{tokens}_sampled@d{plan.depths[0]}"] = {**SAMPLED, "seed": None}
    sampled["tg_chat"] = dict.fromkeys(("temperature", "top_p", "seed"), "default of the server")
    return sampled


def tokenizer_of(configuration: ServerConfiguration) -> str:
    """Return the tokenizer of a server that the suite starts: that of an option, or the model's.

    Args:
        configuration: The configuration of the server.
    """
    options = engine_arguments.parse_options(configuration.given)
    return options.get("tokenizer") or configuration.model
