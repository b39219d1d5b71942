"""Measure how often the sampling tests fail on a correct server.

`python -m meta_tests.faults.honest_samples NAME [--rounds 20]` starts vLLM on the CPU with the
canary's configuration NAME; vLLM's own faults with speculation are fixed in it (see
`in_vllm/speculation_saboteur.py`). With `--base-url URL --key KEY` it tests a running server, and
NAME describes it. Each call writes its row of docs/tables/honest-samples.md.
"""

import argparse
import contextlib
import functools
import secrets
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

from meta_tests.faults.model_faults import PROFILE, ROOT, SabotagedServer
from meta_tests.unit.answers import test_expected_samples as test_samples
from sm121.answers import prompts
from sm121.api import client, sampled, sampling
from sm121.api.speculation import Speculation
from sm121.checkpoint import canary
from sm121.client.completions import Asker
from sm121.core.server import Endpoint, Server
from sm121.core.unmet import Unmet
from sm121.core.verdict import NotRun
from sm121.engines.detection import detect
from sm121.measure import counters

PAGE = ROOT / "docs" / "tables" / "honest-samples.md"
#: The part of the page's table between its head and its rows.
SEPARATOR = "|---|---|---:|---|---|---:|"


def failures(server: Server, seed: int) -> list[str]:
    """Return the failures of one round of the sampling tests."""
    can = detect(server)
    texts = []
    if can.version is None:
        sys.exit(f"{server.endpoint.base_url}: expected a running vLLM, and none answers")
    sampler = sampled.Sampler(client.Api(server.endpoint, can), seed)
    checks = {t: functools.partial(test_samples.hold, t, sampler) for t in test_samples.TESTS}
    for name in ("temperature", "top_p", "top_k", "min_p"):
        checks[f"{name} of chats"] = functools.partial(sampler.chats_obey, name)
    for form in get_args(sampling.Form):
        obeys = sampling.form_obeys_temperature_and_top_p
        checks[form] = functools.partial(obeys, sampler.api, form)
    if counters.drafted(server.endpoint) is not None:
        bound = PROFILE.correctness.agreement
        texts_of = prompts.continuations()
        drafts = Speculation(server, Asker(server), texts_of, bound, "", can)
        checks["drafted tokens"] = drafts.samples_follow_the_target
    for test, check in checks.items():
        try:
            check()
        except (Unmet, NotRun) as fact:
            kind = "NotRun" if isinstance(fact, NotRun) else "Unmet"
            texts.append(f"{kind}: {test}: {' '.join(f'{fact}'.split())}")
    return texts


@contextlib.contextmanager
def started(configuration: str) -> Iterator[Server]:
    """Start a server with the canary on this machine's CPU."""
    checkpoint = canary.build(ROOT / ".cache" / "canary" / "bf16", "bf16")
    drafts = "--speculative-config" in PROFILE.configurations[configuration].arguments
    saboteur = f"{'speculation' if drafts else 'model'}_saboteur.Saboteur"
    with (
        tempfile.TemporaryDirectory() as folder,
        SabotagedServer(checkpoint, Path(folder), configuration, extension=saboteur) as running,
    ):
        yield running.server


def row_of_rounds(name: str, server: Server, most: int, minutes: float) -> tuple[str, bool]:
    """Run all rounds. Return a row of the page, and whether all rounds passed."""
    began = time.monotonic()
    seconds = list[float]()
    red = 0
    texts = set[str]()
    while len(seconds) < most and time.monotonic() - began < 60 * minutes:
        begin = time.monotonic()
        seed = secrets.randbits(32)
        failed = failures(server, seed)
        seconds.append(time.monotonic() - begin)
        red += any(text.startswith("Unmet") for text in failed)
        texts |= {*failed}
        print(f"round {len(seconds)}, seed {seed}, {seconds[-1]:.0f} s: {failed}", flush=True)
    cells = []
    for k in ("Unmet", "NotRun"):
        cells.append("; ".join(t for t in sorted(texts) if t.startswith(k)))
    wrong, unasked = (cell.replace("|", "\\|") or "nothing" for cell in cells)
    return (
        f"| {name} | vLLM {detect(server).identity} | {len(seconds) - red} of {len(seconds)} | "
        f"{wrong} | {unasked} | {statistics.median(seconds):.0f} |"
    ), not red


def main() -> int:
    """Run all rounds. The exit status is 1 if a round failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", nargs="?", default="float32")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--minutes", type=float, default=600.0, help="no round begins after these")
    parser.add_argument("--base-url")
    parser.add_argument("--key", default="none")
    parser.add_argument("--output", type=Path, default=PAGE)
    options = parser.parse_args()
    address = f"{options.base_url}".rstrip("/")
    endpoint = Endpoint(address, options.key, PROFILE.model.served_name)
    running = Server(endpoint, False, "vllm", None, None, None, None)
    context = contextlib.nullcontext(running) if options.base_url else started(options.name)
    with context as server:
        row, green = row_of_rounds(options.name, server, options.rounds, options.minutes)
    lines = PAGE.read_text("utf-8").splitlines()
    lines = [line for line in lines if line.split(" | ")[0] != row.split(" | ")[0]]
    lines.insert(lines.index(SEPARATOR) + 1, row)
    options.output.write_text("".join(f"{line}\n" for line in lines), "utf-8")
    return int(not green)


if __name__ == "__main__":
    sys.exit(main())
