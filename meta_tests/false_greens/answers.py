"""11: answers that a tolerance would let pass, though they are not whole or not of the request."""

import functools
from collections.abc import Callable

from scripted_answers import Break, Json, answer, scripted, write_tokenizer
from two_steps import in_two_steps

from sm121.answers import equivalence, golden
from sm121.answers.prompts import continuations
from sm121.client.completions import Asker
from sm121.core.level_settings import AgreementBound, GoldenBound
from sm121.core.server import Server
from sm121.core.verdict import NotRun

from . import Case, Outcome, Place, of_data

ITEM = "11 Answers within a tolerance"
#: As the profile of a GB10: forks are allowed.
BOUND = AgreementBound(max_abs=0.5, mean_abs=0.1, fork=0.25, source="as sm121-gpt-oss-120b")
GOLDEN = GoldenBound(**{**BOUND.model_dump(), "mean_divergence": 0.02, "top1_at_least": 0.5})
_OTHER = b"A prompt of somebody else: "


@in_two_steps
def _in_a_batch(_body: Json, together: bool, said: Json, change: Callable[[Json], None]) -> None:
    """Break the answers of requests that are under way together."""
    if together:
        change(said)


def _cut(said: Json) -> None:
    ids = said["ids"][:1]
    said.update(ids=ids, places=said["places"][:1], text=bytes(ids).decode())


def _others_ids_and_text(said: Json) -> None:
    other = answer(_OTHER, len(said["ids"]), together=True)
    said.update(ids=other["ids"], text=other["text"])


def _fork(said: Json) -> int | None:
    """Where the first two tokens are as likely as each other."""
    return next((n for n, p in enumerate(said["places"]) if p[0][1] - p[1][1] < 0.1), None)


def _others_text(said: Json) -> None:
    """Only of answers with a fork: of the others the ids are known, and so is the text."""
    if _fork(said) is not None:
        said["text"] = answer(_OTHER, len(said["ids"]), together=True)["text"]


def _shifted(said: Json) -> None:
    said["ids"] = [*said["ids"][1:], said["ids"][0]]


def _usage_of_more(said: Json) -> None:
    said["usage"] = len(said["ids"]) + 1


def _ended_early(said: Json) -> None:
    said["finish"] = "stop"


def _others_rest(said: Json) -> None:
    """After the first fork another request's answer, whose beginning nobody can ask from."""
    place = _fork(said)
    said["hides_prompt"] = True
    if place is not None and place + 1 < len(said["ids"]):
        rest = answer(_OTHER, len(said["ids"]) - place - 1, together=False)
        said["ids"][place + 1 :] = rest["ids"]
        said["places"][place + 1 :] = rest["places"]
        said["text"] = bytes(said["ids"]).decode()


def _always_cut(_body: Json, _together: bool, said: Json) -> None:
    _cut(said)


def _hides_prompt(_body: Json, _together: bool, said: Json) -> None:
    said["hides_prompt"] = True


def _others_rest_without_prompts(body: Json, together: bool, said: Json) -> None:
    _hides_prompt(body, together, said)
    if together:
        _others_rest(said)


def _second_best(_body: Json, _together: bool, said: Json) -> None:
    """Not greedy, and always the same."""
    found = said["places"][-1]
    found[0], found[1] = found[1], found[0]
    said["ids"][-1] = found[0][0]
    said["text"] = bytes(said["ids"]).decode()


@in_two_steps
def _in_a_long_answer(
    _body: Json, _together: bool, said: Json, change: Callable[[Json, int], None]
) -> None:
    """Break what is said after the sixth token of a request."""
    for place in range(6, len(said["ids"])):
        change(said, place)


def _drifts(said: Json, place: int) -> None:
    """Each step of decoding adds to the error."""
    said["places"][place] = [(t, value - 0.15 * (place - 5)) for t, value in said["places"][place]]


def _accepts_a_draft(said: Json, place: int) -> None:
    """What a drafter proposed is said, whatever the model holds for likelier."""
    first, second, third = said["places"][place]
    said["places"][place] = [(second[0], first[1]), (first[0], second[1]), third]
    said["ids"][place] = second[0]
    said["text"] = bytes(said["ids"]).decode()


def _reads_a_wrong_block(body: Json, _together: bool, said: Json) -> None:
    """A block of the prefix cache that generated tokens filled is another's."""
    if body["max_tokens"] == 1 and isinstance(body["prompt"], list) and len(body["prompt"]) > 30:
        other = answer(_OTHER, 1, together=False)
        said.update(ids=other["ids"], places=other["places"], text=other["text"])


def _judged(check: Callable[[Place, Server], None], place: Place, broken: Break | None) -> Outcome:
    write_tokenizer(place.tmp_path)
    with scripted(broken) as server:
        try:
            check(place, server)
        except AssertionError as error:
            return Outcome("FAIL", str(error))
        except NotRun as error:
            return Outcome("NOT_RUN", str(error))
    return Outcome("PASS", "")


def _asker(place: Place, server: Server) -> Asker:
    return Asker(server, checkpoint=place.tmp_path)


def _in_batches(place: Place, server: Server) -> None:
    equivalence.Continuations(continuations(), BOUND, _asker(place, server)).equal_in_a_batch()


def _token_by_token(place: Place, server: Server) -> None:
    equivalence.Continuations(continuations(), BOUND, _asker(place, server)).equal_token_by_token()


def _against_itself(place: Place, server: Server) -> None:
    """A recording, and the same server compared with it."""
    asker, prompts = _asker(place, server), continuations()
    kept = golden.record(
        asker, prompts, model=golden.Identity(served_name="canary"), dtype="auto", engine="vllm",
        engine_version="0.32.0", configuration="cutlass", environment={},
    )  # fmt: skip
    golden.compare(kept, asker, prompts, GOLDEN, {}).hold(GOLDEN)


def _case(
    name: str, broken: Break, expected: str, check: Callable[[Place, Server], None] = _in_batches,
    *, slow: bool = False,
) -> Case:  # fmt: skip
    return Case(
        ITEM, name, functools.partial(_judged, check, broken=broken),
        functools.partial(_judged, check, broken=None), expected, slow,
    )  # fmt: skip


CASES = list(of_data(__name__))
