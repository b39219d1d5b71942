"""Item 17: a build that lost a capability which a check needs, so that the check is NOT_RUN."""

import contextlib
import itertools
import json
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from unittest.mock import Mock

from meta_tests.fakes.loopback import JsonHandler, serving
from meta_tests.fakes.scripted_answers import scripted
from meta_tests.fakes.scripted_sampler import Json, sampling
from meta_tests.faults.false_greens import Case, Kit, Outcome
from meta_tests.faults.test_measuring_traps import opened
from meta_tests.two_steps import in_two_steps
from sm121.answers import equivalence, expected_samples, prompts
from sm121.api import client, sampled
from sm121.api.speculation import Speculation
from sm121.client.completions import Asker, Request
from sm121.core import level_settings, unmet, verdict
from sm121.core.server import Endpoint, Server
from sm121.engines import capabilities
from sm121.measure.cells import MeasuredCell
from sm121.measure.metrics.streams import StreamsRate

#: The value that stands for a missing counter.
VANISHED = None
BOUND = level_settings.AgreementBound(max_abs=0.1, mean_abs=0.1, fork=0.1, source="a meta test")


def decided(ask: Callable[[], object]) -> Outcome:
    """Return the verdict that a run gives to a check.

    A check that did not run cannot make a run fail."""
    try:
        ask()
    except unmet.Unmet as failure:
        return Outcome("FAIL", str(failure))
    except verdict.NotRun as reason:
        return Outcome("PASS, not run", str(reason))
    return Outcome("PASS", "it held")


@in_two_steps
def cached(_kit: Kit, *hits: float | None) -> Outcome:
    """Judge a server whose log reports a prefix cache, by the counters of this cache."""
    with scripted() as server:
        texts = equivalence.Continuations(prompts.continuations(), BOUND, Asker(server))
        counts = iter(hits)
        return decided(lambda: texts.equal_from_the_prefix_cache(lambda: next(counts), is_on=True))


@in_two_steps
def again(_kit: Kit, cost: float = 0.0, change: Callable[[Json], None] | None = None) -> Outcome:
    """Judge a server that counts hits of its prefix cache.

    A hit costs the given share of the prefill, and changes the answer in the given way. Without a
    change, the time is judged, otherwise the answer."""
    cache = set[str]()
    counts = itertools.count(0.0, 65_536.0)

    def serve(body: Json, _together: bool, answered: Json) -> None:
        key = json.dumps([body["prompt"], body.get("cache_salt")])
        time.sleep((cost if key in cache else 1.0) * len(body["prompt"]) * 3e-4)
        if key in cache and change is not None:
            change(answered)
        cache.add(key)

    with scripted(serve) as server:
        texts = equivalence.Continuations(prompts.continuations(), BOUND, Asker(server))
        check = texts.equal_from_the_prefix_cache if change else texts.hits_save_time
        return decided(lambda: check(lambda: next(counts)))


@in_two_steps
def other(answered: Json, tokens: int) -> None:
    """Choose the second likeliest token at the given number of positions, and report it as the
    likeliest."""
    for n, ((best, log), (second, less), third) in enumerate(answered["places"][:tokens]):
        answered["places"][n] = [(second, log), (best, less), third]
        answered["ids"][n] = second
    answered["text"] = bytes(answered["ids"]).decode()


def same(_answered: Json) -> None: ...


def unsure(answered: Json) -> None:
    """Make the first token less likely than it is without the cache."""
    answered["places"][0] = [(token, log - 0.3) for token, log in answered["places"][0]]


@in_two_steps
def streams(kit: Kit, count: int, slots: int) -> Outcome:
    """Send as many concurrent streams as a server was configured for, although the server runs
    fewer at a time."""
    url = kit.timed_server("--rate", "400", "--slots", str(slots)).base_url
    with opened(url, kit.tmp_path / f"streams-{slots}") as server:
        server.slots_sure = True
        cell = MeasuredCell(server, 0, concurrency=count).gather(2)
        return decided(lambda: StreamsRate().of(cell))


def speculation(url: str, asker: Mock, method: str) -> Speculation:
    """Test a server that was started with a drafter, and is attached by its URL."""
    server = Server(Endpoint(url, "k", "m"), True, "vllm", "0.32.0", None, None, None)
    can = capabilities.capabilities_of("vllm", "0.32.0")
    texts = prompts.continuations()
    return Speculation(server, asker, texts, BOUND, method, can)


@contextlib.contextmanager
def counting(counts: Callable[[], Mapping[str, float]]) -> Iterator[str]:
    """Start a server whose metrics count drafts, and return its URL."""

    class Handler(JsonHandler):
        def do_GET(self) -> None:
            lines = (f"vllm:spec_decode_num_{name}_total {n}" for name, n in counts().items())
            self.say("\n".join(lines) + "\n")

    with serving(Handler) as url:
        yield url


@in_two_steps
def drafts(_kit: Kit, method: str, step: int) -> Outcome:
    """Judge a server with a drafter that counts the given number of drafts at each reading."""
    names = ("drafts", "draft_tokens", "accepted_tokens")
    looks = itertools.count(step, step)
    with counting(lambda: dict.fromkeys(names, next(looks))) as url:
        drafting = speculation(url, Mock(ids=lambda _answer: (1, 2)), method)
        return decided(lambda: drafting.drafted)


@in_two_steps
def accepted(_kit: Kit, *shares: float) -> Outcome:
    """Judge a server by the shares of its drafts that it accepts.

    The first share applies while one request runs, the second while two run, and so on."""
    drafted = Counter[str]()

    def answer(requests: Sequence[Request]) -> Sequence[Request]:
        for request in requests:
            hits = shares[min(len(requests), len(shares)) - 1] * request.tokens
            drafted.update(drafts=request.tokens, draft_tokens=request.tokens, accepted_tokens=hits)
        return requests

    answer([Request("", 1)])
    with counting(lambda: drafted) as url:
        asker = Mock(ids=lambda request: (1,) * request.tokens, ask_together=answer)
        asker.ask = lambda request: answer([request])[0]
        return decided(speculation(url, asker, "eagle3").drafts_are_accepted)


@in_two_steps
def samples(_kit: Kit, cut: expected_samples.Cut | bool, share: float) -> Outcome:
    """Judge a server that omits the log-probabilities of some sampled answers.

    `cut` is the number of the affected request, or False."""
    chance = random.Random(3)

    def lacking(body: Json) -> Json:
        drops = body.get("temperature", 1.0) > 0 and chance.random() < share
        return {**body, "logprobs": None} if drops else body

    with sampling(lacking, 7) as endpoint:
        draws = sampled.Sampler(
            client.Api(endpoint, capabilities.capabilities_of("vllm", "0.32.0")), 7
        )
        return decided(lambda: draws.keeps_the_cut(cut) if cut else draws.follows_the_temperature())


CASES = [
    Case(
        item="17 What a build no longer does is no check that could not run",
        name="no hit of a prefix cache that is on",
        fault=cached(0.0, 0.0),
        clean=cached(0.0, 64.0),
        expected="a prefix-cache hit",
    ),
    Case(
        item="17 What a build no longer does is no check that could not run",
        name="no further hit of a prefix cache that had some",
        fault=cached(64.0, 64.0),
        clean=cached(0.0, 64.0),
        expected="a prefix-cache hit",
    ),
    Case(
        item="17 What a build no longer does is no check that could not run",
        name="its counter of hits vanishes",
        fault=cached(64.0, VANISHED),
        clean=cached(0.0, 64.0),
        expected="a prefix-cache hit",
    ),
    Case(
        item="17 What a build no longer does is no check that could not run",
        name="hits that save no time",
        fault=again(1.0),
        clean=again(),
        expected="at most half of the cold time",
        slow=True,
    ),
    Case(
        item="17 What a build no longer does is no check that could not run",
        name="hits that save a third",
        fault=again(0.67),
        clean=again(),
        expected="at most half of the cold time",
        slow=True,
    ),
    Case(
        item="17 What a build no longer does is no check that could not run",
        name="hits that take longer than cold",
        fault=again(1.3),
        clean=again(),
        expected="at most half of the cold time",
        slow=True,
    ),
    Case(
        item="17 What a build no longer does is no check that could not run",
        name="another first token from the cache",
        fault=again(0.0, other(1)),
        clean=again(0.0, same),
        expected="from the cache",
        slow=True,
    ),
    Case(
        item="17 What a build no longer does is no check that could not run",
        name="another first log-probability from the cache",
        fault=again(0.0, unsure),
        clean=again(0.0, same),
        expected="from the cache",
        slow=True,
    ),
    Case(
        item="17 What a build no longer does is no check that could not run",
        name="another answer from the cache",
        fault=again(0.0, other(99)),
        clean=again(0.0, same),
        expected="from the cache",
    ),
    Case(
        item="17 What a build no longer does is no check that could not run",
        name="four streams one after another",
        fault=streams(4, 1),
        clean=streams(4, 4),
        expected="concurrent streams",
        slow=True,
    ),
    Case(
        item="17 What a build no longer does is no check that could not run",
        name="two streams one after another",
        fault=streams(2, 1),
        clean=streams(4, 4),
        expected="concurrent streams",
    ),
    Case(
        item="17 What a build no longer does is no check that could not run",
        name="two of four streams at a time",
        fault=streams(4, 2),
        clean=streams(4, 4),
        expected="concurrent streams",
        slow=True,
    ),
    Case(
        item="17 What a build no longer does is no check that could not run",
        name="an Eagle3 drafter that never drafts",
        fault=drafts("eagle3", 0),
        clean=drafts("eagle3", 40),
        expected="expected drafts",
    ),
    Case(
        item="17 What a build no longer does is no check that could not run",
        name="an MTP drafter that never drafts",
        fault=drafts("mtp", 0),
        clean=drafts("eagle3", 40),
        expected="expected drafts",
    ),
    Case(
        item="17 What a build no longer does is no check that could not run",
        name="a draft model that never drafts",
        fault=drafts("draft_model", 0),
        clean=drafts("eagle3", 40),
        expected="expected drafts",
    ),
    Case(
        item="17 What a build no longer does is no check that could not run",
        name="junk is drafted where three or more run",
        fault=accepted(0.8, 0.8, 0.0),
        clean=accepted(0.8),
        expected="answers at the same time",
    ),
    Case(
        item="17 What a build no longer does is no check that could not run",
        name="from two on one draft of four is accepted",
        fault=accepted(0.8, 0.2),
        clean=accepted(0.8),
        expected="answers at the same time",
    ),
    Case(
        item="17 What a build no longer does is no check that could not run",
        name="each further request costs a tenth",
        fault=accepted(
            0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1, 0.0, -0.1, -0.2, -0.3, -0.4, -0.5, -0.6, -0.7
        ),
        clean=accepted(0.8),
        expected="answers at the same time",
    ),
    Case(
        item="17 What a build no longer does is no check that could not run",
        name="no log-probabilities of what is sampled",
        fault=samples(False, 1.0),
        clean=samples("top_p", 0.0),
        expected="log-probabilities with each sample",
        slow=True,
    ),
    Case(
        item="17 What a build no longer does is no check that could not run",
        name="none with a cut",
        fault=samples("top_p", 1.0),
        clean=samples("top_p", 0.0),
        expected="log-probabilities with each sample",
        slow=True,
    ),
    Case(
        item="17 What a build no longer does is no check that could not run",
        name="none of one sample in three",
        fault=samples("min_p", 0.3),
        clean=samples("top_p", 0.0),
        expected="log-probabilities with each sample",
        slow=True,
    ),
]
