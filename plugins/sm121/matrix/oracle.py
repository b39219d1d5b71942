"""A cell's answers against the oracle."""

import json
from pathlib import Path

from sm121.answers import (
    log_probabilities,
    oracle_making,
    oracle_tolerance,
    served_rounding,
)
from sm121.client.completions import Asker
from sm121.core.server import Server
from sm121.run.harness import Harness


def agrees(harness: Harness, server: Server, oracles: Path) -> str:
    """The server computes what the oracle says that rounds as its path shows, and each part is
    rounded so; says how far it is off. `oracles`: folder where what the oracle said is kept. Raises
    AssertionError: it does not, as `log_probabilities` says; NotRun: its checkpoint, or what it
    rounds, does not show."""
    checkpoint = oracle_tolerance.checkpoint_of(server)
    config = json.loads((checkpoint / "config.json").read_bytes())
    path = harness.kernel_path(server)
    rounding = served_rounding.served_rounding(server, harness.profile, path, config)
    file = oracle_making.kept_or_made(checkpoint, rounding, oracles)
    reference = oracle_tolerance.reference_for(file, server, harness.profile)
    asker = Asker(server)
    checks = (log_probabilities.roundings_are_absent, log_probabilities.prompts_agree)
    return "; ".join([rounding.formats, *(check(asker, reference) for check in checks)])
