"""A build that no longer does what a check needs, which a run called not run (17)."""

import itertools
import json
import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from unittest.mock import Mock

from loopback import JsonHandler, serving
from scripted_answers import scripted
from scripted_sampler import Json, sampling
from test_measuring_traps import opened

from false_greens import Case, Outcome, Place
from sm121.answers import equivalence, prompts
from sm121.api import client, sampled
from sm121.api.speculation import Speculation
from sm121.client.completions import Asker, Request
from sm121.core import level_settings, unmet, verdict
from sm121.core.server import Endpoint, Server
from sm121.engines import capabilities
from sm121.measure.cells import MeasuredCell
from sm121.measure.metrics.streams import StreamsRate

Step = Callable[[Place], Outcome]
ITEM = "17 What a build no longer does is no check that could not run"
BOUND = level_settings.AgreementBound(max_abs=0.1, mean_abs=0.1, fork=0.1, source="a meta test")


def decided(ask: Callable[[], object]) -> Outcome:
    """What a run would say of a check: one that was not run reds nothing."""
    try:
        ask()
    except unmet.Unmet as failure:
        return Outcome("FAIL", str(failure))
    except verdict.NotRun as reason:
        return Outcome("PASS, not run", str(reason))
    return Outcome("PASS", "it held")


def cached(*hits: float | None) -> Step:
    """A server whose log says that its prefix cache is on, and what it counts."""

    def ask(_place: Place) -> Outcome:
        with scripted() as server:
            asked = equivalence.Continuations(prompts.continuations(), BOUND, Asker(server))
            counts = iter(hits)
            return decided(
                lambda: asked.equal_from_the_prefix_cache(lambda: next(counts), is_on=True)
            )

    return ask


def again(cost: float = 0.0, change: Callable[[Json], None] | None = None) -> Step:
    """A server that counts hits of its prefix cache: one costs such a share of the prefill, and
    changes the answer so. Without a change the time is asked for, else the answer."""

    def ask(_place: Place) -> Outcome:
        cache, counts = set[str](), itertools.count(0.0, 65_536.0)

        def serve(body: Json, _together: bool, answered: Json) -> None:
            key = json.dumps([body["prompt"], body.get("cache_salt")])
            time.sleep((cost if key in cache else 1.0) * len(body["prompt"]) * 3e-4)
            if key in cache and change is not None:
                change(answered)
            cache.add(key)

        with scripted(serve) as server:
            asked = equivalence.Continuations(prompts.continuations(), BOUND, Asker(server))
            check = asked.equal_from_the_prefix_cache if change else asked.hits_save_time
            return decided(lambda: check(lambda: next(counts)))

    return ask


def other(tokens: int) -> Callable[[Json], None]:
    """The second of the likeliest tokens comes in so many places, as if it were the likeliest."""

    def apply(answered: Json) -> None:
        for n, ((best, log), (second, less), third) in enumerate(answered["places"][:tokens]):
            answered["places"][n] = [(second, log), (best, less), third]
            answered["ids"][n] = second
        answered["text"] = bytes(answered["ids"]).decode()

    return apply


def unsure(answered: Json) -> None:
    """The first token is less likely than cold."""
    answered["places"][0] = [(token, log - 0.3) for token, log in answered["places"][0]]


def streams(count: int, places: int) -> Step:
    """Streams at a server that was asked to run as many, and has places for so many."""

    def ask(place: Place) -> Outcome:
        url = place.timed_server("--rate", "400", "--slots", str(places)).base_url
        with opened(url, place.tmp_path / f"streams-{places}") as server:
            server.slots_sure = True
            cell = MeasuredCell(server, 0, concurrency=count).gather(2)
            return decided(lambda: StreamsRate().of(cell))

    return ask


def drafts(method: str, step: int) -> Step:
    """A server that was started with a drafter, and counts so many drafts at each look."""

    class Handler(JsonHandler):
        looks = 0

        def do_GET(self) -> None:
            type(self).looks += step
            names = ("drafts", "draft_tokens", "accepted_tokens")
            lines = (f"vllm:spec_decode_num_{name}_total {self.looks}" for name in names)
            self.say("\n".join(lines) + "\n")

    def ask(_place: Place) -> Outcome:
        with serving(Handler) as url:
            server = Server(Endpoint(url, "k", "m"), True, "vllm", "0.32.0", None, None, None)
            asker = Mock(ids=lambda _answer: (1, 2))
            speculation = Speculation(
                server, asker, prompts.continuations(), BOUND, method,
                capabilities.of("vllm", "0.32.0"),
            )  # fmt: skip
            return decided(lambda: speculation.drafted)

    return ask


def accepted(share: Callable[[int], float]) -> Step:
    """A server that accepts such a share of its drafts while so many requests run."""
    drafted = Counter[str]()

    class Handler(JsonHandler):
        def do_GET(self) -> None:
            lines = (f"vllm:spec_decode_num_{name}_total {n}" for name, n in drafted.items())
            self.say("\n".join(lines) + "\n")

    def answer(requests: Sequence[Request]) -> Sequence[Request]:
        for request in requests:
            hits = share(len(requests)) * request.tokens
            drafted.update(drafts=request.tokens, draft_tokens=request.tokens, accepted_tokens=hits)
        return requests

    def ask(_place: Place) -> Outcome:
        answer([Request("", 1)])
        with serving(Handler) as url:
            server = Server(Endpoint(url, "k", "m"), True, "vllm", "0.32.0", None, None, None)
            asker = Mock(ids=lambda request: (1,) * request.tokens, ask_together=answer)
            asker.ask = lambda request: answer([request])[0]
            can, texts = capabilities.of("vllm", "0.32.0"), prompts.continuations()
            speculation = Speculation(server, asker, texts, BOUND, "eagle3", can)
            return decided(speculation.drafts_are_accepted)

    return ask


def samples(cut: sampled.Cut | None, share: float) -> Step:
    """A server that leaves out the log-probabilities of some sampled answers."""
    draw = random.Random(3)

    def lacking(body: Json) -> Json:
        drops = body.get("temperature", 1.0) > 0 and draw.random() < share
        return {**body, "logprobs": None} if drops else body

    def ask(_place: Place) -> Outcome:
        with sampling(lacking, 7) as endpoint:
            sampler = sampled.Sampler(client.Api(endpoint, capabilities.of("vllm", "0.32.0")), 7)
            return decided(lambda: (
                sampler.follows_the_temperature() if cut is None else sampler.keeps_the_cut(cut)
            ))  # fmt: skip

    return ask


CASES = [
    Case(ITEM, name, fault, clean, expected, slow)
    for expected, clean, slow, variants in (
        ("a hit of the prefix cache", cached(0.0, 64.0), False, {
            "no hit of a prefix cache that is on": cached(0.0, 0.0),
            "no further hit of a prefix cache that had some": cached(64.0, 64.0),
            "its counter of hits vanishes": cached(64.0, None),
        }),
        ("at most half of the time that it takes cold", again(), True, {
            "hits that save no time": again(1.0),
            "hits that save a third": again(0.67),
            "hits that take longer than cold": again(1.3),
        }),
        ("from the cache", again(change=lambda _: None), True, {
            "another first token from the cache": again(change=other(1)),
            "another first log-probability from the cache": again(change=unsure),
            "another answer from the cache": again(change=other(99)),
        }),
        ("streams side by side", streams(4, 4), True, {
            "four streams one after another": streams(4, 1),
            "two streams one after another": streams(2, 1),
            "two of four streams at a time": streams(4, 2),
        }),
        ("required: drafts", drafts("eagle3", 40), False, {
            "an Eagle3 drafter that never drafts": drafts("eagle3", 0),
            "an MTP drafter that never drafts": drafts("mtp", 0),
            "a draft model that never drafts": drafts("draft_model", 0),
        }),
        ("counts at once", accepted(lambda _n: 0.8), False, {
            "junk is drafted where three or more run": accepted(lambda n: 0.8 * (n < 3)),
            "from two on one draft of four is accepted": accepted(lambda n: 0.8 if n < 2 else 0.2),
            "each further request costs a tenth": accepted(lambda n: 0.9 - 0.1 * n),
        }),
        ("log-probabilities with each sample", samples("top_p", 0.0), True, {
            "no log-probabilities of what is sampled": samples(None, 1.0),
            "none with a cut": samples("top_p", 1.0),
            "none of one sample in three": samples("min_p", 0.3),
        }),
    )
    for name, fault in variants.items()
]  # fmt: skip
