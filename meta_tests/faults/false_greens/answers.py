"""Item 11: answers within a tolerance that are incomplete, or belong to another request."""

import functools
from collections.abc import Callable

from meta_tests.fakes.scripted_answers import Break, Json, answer, scripted, write_tokenizer
from meta_tests.two_steps import in_two_steps
from sm121.answers import equivalence, golden
from sm121.answers.prompts import continuations
from sm121.client.completions import Asker
from sm121.core.level_settings import AgreementBound, GoldenBound
from sm121.core.server import Server
from sm121.core.verdict import NotRun

from . import Case, Kit, Outcome

ITEM = "11 Answers within a tolerance"
#: As in a GB10's profile, two right continuations are accepted.
BOUND = AgreementBound(max_abs=0.5, mean_abs=0.1, fork=0.25, source="as sm121-gpt-oss-120b")
GOLDEN = GoldenBound(**{**BOUND.model_dump(), "mean_divergence": 0.02, "top1_at_least": 0.5})
_OTHER = b"A prompt of somebody else: "


@in_two_steps
def _in_a_batch(_body: Json, together: bool, reply: Json, change: Callable[[Json], None]) -> None:
    """Change the answers of requests that run at the same time."""
    if together:
        change(reply)


@in_two_steps
def _always(_body: Json, _together: bool, reply: Json, change: Callable[[Json], None]) -> None:
    change(reply)


def _cut(reply: Json) -> None:
    ids = reply["ids"][:1]
    reply.update(ids=ids, places=reply["places"][:1], text=bytes(ids).decode())


def _others_ids_and_text(reply: Json) -> None:
    other = answer(_OTHER, len(reply["ids"]), together=True)
    reply.update(ids=other["ids"], text=other["text"])


def _fork(reply: Json) -> int | None:
    """Return the position at which two tokens are equally likely for the first time."""
    return next((n for n, p in enumerate(reply["places"]) if p[0][1] - p[1][1] < 0.1), None)


def _others_text(reply: Json) -> None:
    """Replace the text of an answer by another request's text if two tokens are equally likely
    somewhere in the answer.

    The token ids are not replaced.

    The ids and texts of other requests are known."""
    if _fork(reply) is not None:
        reply["text"] = answer(_OTHER, len(reply["ids"]), together=True)["text"]


def _shifted(reply: Json) -> None:
    reply["ids"] = [*reply["ids"][1:], reply["ids"][0]]


def _usage_of_more(reply: Json) -> None:
    reply["usage"] = len(reply["ids"]) + 1


def _ended_early(reply: Json) -> None:
    reply["finish"] = "stop"


def _others_rest(reply: Json) -> None:
    """After the first position with two right continuations, continue with another request's
    answer, where no further request can check it."""
    fork = _fork(reply)
    reply["hides_prompt"] = True
    if fork is not None and fork + 1 < len(reply["ids"]):
        rest = answer(_OTHER, len(reply["ids"]) - fork - 1, together=False)
        reply["ids"][fork + 1 :] = rest["ids"]
        reply["places"][fork + 1 :] = rest["places"]
        reply["text"] = bytes(reply["ids"]).decode()


def _others_rest_without_prompts(_body: Json, together: bool, reply: Json) -> None:
    reply["hides_prompt"] = True
    if together:
        _others_rest(reply)


def _second_best(reply: Json) -> None:
    """Always choose the second-best token. This is not greedy, but always gives the same answer."""
    likeliest = reply["places"][-1]
    likeliest[0], likeliest[1] = likeliest[1], likeliest[0]
    reply["ids"][-1] = likeliest[0][0]
    reply["text"] = bytes(reply["ids"]).decode()


@in_two_steps
def _in_a_long_answer(
    _body: Json, _together: bool, reply: Json, change: Callable[[Json, int], None]
) -> None:
    """Change an answer only after its sixth token."""
    for number in range(6, len(reply["ids"])):
        change(reply, number)


def _drifts(reply: Json, n: int) -> None:
    """Add an error to each decode step, so that the errors accumulate."""
    reply["places"][n] = [(t, value - 0.15 * (n - 5)) for t, value in reply["places"][n]]


def _accepts_a_draft(reply: Json, number: int) -> None:
    """Return what a drafter proposed, even if the model prefers another token."""
    first, second, third = reply["places"][number]
    reply["places"][number] = [(second[0], first[1]), (first[0], second[1]), third]
    reply["ids"][number] = second[0]
    reply["text"] = bytes(reply["ids"]).decode()


def _reads_a_wrong_block(body: Json, _together: bool, reply: Json) -> None:
    """Read a block of the prefix cache that another request filled with generated tokens."""
    if body["max_tokens"] == 1 and isinstance(body["prompt"], list) and len(body["prompt"]) > 30:
        other = answer(_OTHER, 1, together=False)
        reply.update(ids=other["ids"], places=other["places"], text=other["text"])


def _judged(check: Callable[[Kit, Server], None], kit: Kit, broken: Break | None) -> Outcome:
    write_tokenizer(kit.tmp_path)
    with scripted(broken) as server:
        try:
            check(kit, server)
        except AssertionError as error:
            return Outcome("FAIL", str(error))
        except NotRun as error:
            return Outcome("NOT_RUN", str(error))
    return Outcome("PASS", "")


def _asker(kit: Kit, server: Server) -> Asker:
    return Asker(server, checkpoint=kit.tmp_path)


def _in_batches(kit: Kit, server: Server) -> None:
    equivalence.Continuations(continuations(), BOUND, _asker(kit, server)).equal_in_a_batch()


def _token_by_token(kit: Kit, server: Server) -> None:
    equivalence.Continuations(continuations(), BOUND, _asker(kit, server)).equal_token_by_token()


def _against_itself(kit: Kit, server: Server) -> None:
    """Record the answers of a server, and compare the same server with the recording."""
    asker = _asker(kit, server)
    prompts = continuations()
    recorded = golden.record(
        asker, prompts, model=golden.Identity(served_name="canary"), dtype="auto", engine="vllm",
        engine_version="0.32.0", configuration="cutlass", environment={},
    )  # fmt: skip
    golden.compare(recorded, asker, prompts, GOLDEN, {}).hold(GOLDEN)


def _case(
    name: str, broken: Break, expected: str, check: Callable[[Kit, Server], None] = _in_batches,
    *, slow: bool = False,
) -> Case:  # fmt: skip
    return Case(
        ITEM, name, functools.partial(_judged, check, broken=broken),
        functools.partial(_judged, check, broken=None), expected, slow,
    )  # fmt: skip


CASES = [
    _case("one token of 24 in a batch", _in_a_batch(_cut), expected="got 1 ids"),
    _case(
        "the ids and the text of another request",
        _in_a_batch(_others_ids_and_text),
        expected="log-probabilities of the tokens that were generated",
    ),
    _case("the text of another request", _in_a_batch(_others_text), expected="the text of the ids"),
    _case(
        ("after a fork the answer of another request, and no prompt ids to ask again from"),
        _others_rest_without_prompts,
        expected="were not compared",
    ),
    _case(
        "log-probabilities drift with each token that is decoded",
        _in_a_long_answer(_drifts),
        expected="a token at a time",
        check=_token_by_token,
    ),
    _case(
        "drafts are accepted past the sixth token",
        _in_a_long_answer(_accepts_a_draft),
        expected="a token at a time",
        check=_token_by_token,
        slow=True,
    ),
    _case(
        "a cached block of generated tokens is another's",
        _reads_a_wrong_block,
        expected="a token at a time",
        check=_token_by_token,
        slow=True,
    ),
    _case(
        "ids shifted by one beside the right text",
        _in_a_batch(_shifted),
        expected="log-probabilities of the tokens that were generated",
        slow=True,
    ),
    _case("usage of a token more", _in_a_batch(_usage_of_more), expected="41 usage", slow=True),
    _case(
        "an early end that is none", _in_a_batch(_ended_early), expected="finish_reason", slow=True
    ),
    _case(
        "a greedy answer that is not the likeliest",
        _always(_second_best),
        expected="the likeliest",
        slow=True,
    ),
    _case(
        "a recording of cut answers agrees with itself",
        _always(_cut),
        expected="got 1 ids",
        check=_against_itself,
    ),
]
