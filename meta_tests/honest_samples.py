"""How often the sampling tests call a right server wrong, and how small an error they notice.
`python meta_tests/honest_samples.py NAME [--rounds 20]` starts vLLM on the CPU with the canary's
configuration NAME; what vLLM itself does wrong with speculation is fixed in it (see
`in_vllm/speculation_saboteur.py`). With `--base-url URL --key KEY` a running server is asked, and
NAME describes it. With `--power` an engine by script is wrong by less and less. Each call writes
its rows of docs/tables/honest-samples.md."""

import argparse
import contextlib
import functools
import itertools
import secrets
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import scripted_sampler
import test_samples
from model_faults import PROFILE, ROOT, SabotagedServer

from sm121.answers import prompts
from sm121.api import client, sampled
from sm121.api.speculation import Speculation
from sm121.checkpoint import canary
from sm121.client.completions import Asker
from sm121.core.server import Endpoint, Server
from sm121.core.unmet import Unmet
from sm121.core.verdict import NotRun
from sm121.engines import capabilities
from sm121.engines.detection import detect
from sm121.measure import counters

PAGE = ROOT / "docs" / "tables" / "honest-samples.md"
ERRORS, RUNS, HONEST = (0.1, 0.075, 0.05, 0.025), 100, 400
#: Of the page's two tables, what is between their heads and their rows.
ROUNDS, POWER = "|---|---|---:|---|---|---:|", "|---|---:|---:|---:|---:|---:|"


def failures(server: Server, seed: int) -> list[str]:
    """What the tests of a round say that do not pass."""
    can, texts = detect(server), []
    if can.version is None:
        sys.exit(f"{server.endpoint.base_url}: expected a running vLLM, and none answers")
    sampler = sampled.Sampler(client.Api(server.endpoint, can), seed)
    checks = [functools.partial(test_samples.hold, t, sampler) for t in test_samples.TESTS]
    if counters.drafted(server.endpoint) is not None:
        bound, texts_of = PROFILE.correctness.agreement, prompts.continuations()
        drafts = Speculation(server, Asker(server), texts_of, bound, "", can)
        checks.append(drafts.samples_follow_the_target)
    for test, check in zip([*test_samples.TESTS, "drafted tokens"], checks, strict=False):
        try:
            check()
        except (Unmet, NotRun) as fact:
            kind = "NotRun" if isinstance(fact, NotRun) else "Unmet"
            texts.append(f"{kind}: {test}: {' '.join(f'{fact}'.split())}")
    return texts


@contextlib.contextmanager
def started(configuration: str) -> Iterator[Server]:
    """A server with the canary on this machine's CPU."""
    checkpoint = canary.build(ROOT / ".cache" / "canary" / "bf16", "bf16")
    drafts = "--speculative-config" in PROFILE.configurations[configuration].arguments
    saboteur = f"{'speculation' if drafts else 'model'}_saboteur.Saboteur"
    with (
        tempfile.TemporaryDirectory() as folder,
        SabotagedServer(checkpoint, Path(folder), configuration, None, saboteur, drafts) as running,
    ):
        yield running.server


def row_of_rounds(name: str, server: Server, most: int, minutes: float) -> tuple[str, bool]:
    """Ask for the rounds; a row of the page, and whether all are green."""
    began, seconds, red, texts = time.monotonic(), list[float](), 0, set[str]()
    while len(seconds) < most and time.monotonic() - began < 60 * minutes:
        begin, seed = time.monotonic(), secrets.randbits(32)
        failed = failures(server, seed)
        seconds.append(time.monotonic() - begin)
        red += any(text.startswith("Unmet") for text in failed)
        texts |= {*failed}
        print(f"round {len(seconds)}, seed {seed}, {seconds[-1]:.0f} s: {failed}", flush=True)
    cells = ["; ".join(t for t in sorted(texts) if t.startswith(k)) for k in ("Unmet", "NotRun")]
    wrong, unasked = (cell.replace("|", "\\|") or "nothing" for cell in cells)
    return (
        f"| {name} | vLLM {detect(server).identity} | {len(seconds) - red} of {len(seconds)} | "
        f"{wrong} | {unasked} | {statistics.median(seconds):.0f} |"
    ), not red


def judged(job: tuple[str, float, int]) -> tuple[int, list[int]]:
    """How many of some runs call the engine by script wrong, and the prompts of each run; by the
    test, the factor of its parameter, and the runs."""
    test, factor, runs = job
    name, generator, sent = _parameter(test), np.random.default_rng(), list[int]()

    class Scripted(client.Api):
        def complete(self, prompt: str | list[str], **options: Any) -> dict[str, Any]:
            body = {"prompt": prompt, "model": "m", "max_tokens": 16, "temperature": 0.0} | options
            if name == "top_k" and body.get(name, -1) > 0:
                body[name] += (factor > 1) - (factor < 1)
            elif name != "top_k" and name in options:
                body[name] *= factor
            sent.append(len(prompt))
            return scripted_sampler.answer(body, generator)

    wrong, prompt_counts = 0, list[int]()
    for _ in range(runs):
        sent.clear()
        api = Scripted(Endpoint("", "", "m"), capabilities.of("vllm", "0.32.0"))
        try:
            test_samples.hold(test, sampled.Sampler(api, secrets.randbits(32)))
        except (Unmet, NotRun) as fact:
            wrong += isinstance(fact, Unmet)
        prompt_counts.append(sum(sent))
    return wrong, prompt_counts


def rows_of_power() -> Iterator[str]:
    """A row for each parameter with a number."""
    with ProcessPoolExecutor() as pool:
        for test in (test for test in test_samples.TESTS if "allowed" not in test):
            errors = ERRORS[:1] if "top_k" in test else ERRORS
            jobs = [(test, 1.0, HONEST // 10)] * 10
            jobs += [(test, factor, RUNS) for e in errors for factor in (1 + e, 1 - e)]
            wrong, counts = zip(*pool.map(judged, jobs), strict=True)
            pairs = [*zip(errors, wrong[10::2], wrong[11::2], strict=True)]
            sure = [*itertools.takewhile(lambda pair: min(pair[1:]) >= 0.99 * RUNS, pairs)]
            smallest = f"{sure[-1][0]:.1%}" if sure else "none"
            cells = ["one" if "top_k" in test and sure else smallest]
            cells += [f"{wrong[10]} of {RUNS}", f"{wrong[11]} of {RUNS}"]
            cells += [f"{sum(wrong[:10])} of {HONEST}"]
            cells += [f"{statistics.median(itertools.chain(*counts[:10])):.0f}"]
            yield f"| `{_parameter(test)}` | {' | '.join(cells)} |"


def _parameter(test: str) -> str:
    return test.partition("[")[2].rstrip("]") or "temperature"


def main() -> int:
    """Ask for the rounds, or for the power; exit status 1 where a round is red."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", nargs="?", default="float32")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--minutes", type=float, default=600.0, help="no round begins after these")
    parser.add_argument("--base-url")
    parser.add_argument("--key", default="none")
    parser.add_argument("--power", action="store_true")
    parser.add_argument("--output", type=Path, default=PAGE)
    options = parser.parse_args()
    rows, green, separator = [], True, POWER if options.power else ROUNDS
    if options.power:
        rows += rows_of_power()
    else:
        address = f"{options.base_url}".rstrip("/")
        endpoint = Endpoint(address, options.key, PROFILE.model.served_name)
        running = Server(endpoint, False, "vllm", None, None, None, None)
        context = contextlib.nullcontext(running) if options.base_url else started(options.name)
        with context as server:
            row, green = row_of_rounds(options.name, server, options.rounds, options.minutes)
            rows.append(row)
    replaced = {row.split(" | ")[0] for row in rows}
    lines = PAGE.read_text("utf-8").splitlines()
    lines = [line for line in lines if line.split(" | ")[0] not in replaced]
    begin = lines.index(separator) + 1
    lines[begin:begin] = rows
    options.output.write_text("".join(f"{line}\n" for line in lines), "utf-8")
    return int(not green)


if __name__ == "__main__":
    sys.exit(main())
