"""Compare a cell's answers with the oracle."""

import json
from pathlib import Path

from sm121.answers import log_probabilities, oracle_making, oracle_tolerance, served_rounding
from sm121.client.completions import Asker
from sm121.core.server import Server
from sm121.run.run import Run


def agrees(run: Run, server: Server, oracles: Path) -> str:
    """Compare a server with the oracle that uses the same rounding as the server's kernel path.

    Args:
        run: The run.
        server: The server.
        oracles: The folder with the oracle's results, which are computed on first use.

    Returns:
        The rounding and the differences, as text.

    Raises:
        AssertionError: The differences are too large, or a part of the model is rounded otherwise.
        NotRun: The checkpoint or the rounding of the server is unknown.
    """
    checkpoint = oracle_tolerance.checkpoint_of(server)
    config = json.loads((checkpoint / "config.json").read_bytes())
    path = run.paths.of(server)
    rounding = served_rounding.served_rounding(server, run.profile, path, config)
    file = oracle_making.kept_or_made(checkpoint, rounding, oracles)
    reference = oracle_tolerance.reference_for(file, server, run.profile)
    asker = Asker(server)
    roundings = log_probabilities.roundings_are_absent(asker, reference)
    prompts = log_probabilities.prompts_agree(asker, reference)
    return "; ".join([rounding.formats, roundings, prompts])
