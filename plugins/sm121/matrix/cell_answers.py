"""Check the answers of a cell: against known answers, and with concurrent requests."""

import itertools
from pathlib import Path

from sm121.answers import agreement, exam, golden, oracle_tolerance, sanity
from sm121.answers.golden import GoldenFile
from sm121.answers.prompts import PromptSet
from sm121.client.completions import Asker, Request
from sm121.core.level_settings import GoldenBound
from sm121.core.profile import Profile
from sm121.core.server import Server

#: The minimum number of tokens that a request for a known answer allows.
_FEWEST_TOKENS = 4


def find_wrong_answer(asker: Asker, exam_name: str) -> str | None:
    """Send the completions of an exam.

    Args:
        asker: Sends the requests.
        exam_name: The exam, as the profile names it.

    Returns:
        The first wrong or garbled answer, or None.
    """
    for case in exam.load(exam_name).completions:
        tokens = max(_FEWEST_TOKENS, len(case.begins))
        answer = asker.ask(Request(case.prompt, tokens, top=0))
        if not answer.text.startswith(case.begins):
            return f"{case.prompt!r}: expected {case.begins!r} first, got {answer.text!r}"
        signs = sanity.signs(answer.text, answer.ids)
        if signs:
            return f"{case.prompt!r}: {signs[0]}"
    return None


def record_baseline(
    server: Server, prompts: PromptSet, profile: Profile, directory: Path
) -> GoldenFile:
    """Record the answers of the baseline, and write them to ``baseline.golden.json``.

    Args:
        server: The server of the baseline.
        prompts: The prompts.
        profile: The profile, for the dtype.
        directory: The folder of the file, which is created if it does not exist.
    """
    recorded = golden.record(
        Asker(server),
        prompts,
        model=golden.Identity(served_name=server.endpoint.served_name),
        dtype=oracle_tolerance.dtype_of(server, profile),
        engine=server.engine,
        engine_version=server.version,
        configuration="baseline",
        environment={},
    )
    directory.mkdir(parents=True, exist_ok=True)
    golden.save(recorded, directory / "baseline.golden.json")
    return recorded


def find_disagreement(
    asker: Asker, baseline: GoldenFile, prompts: PromptSet, *, count: int, bound: GoldenBound
) -> str | None:
    """Send concurrent requests, and compare each answer with the baseline's.

    Args:
        asker: Sends the requests.
        baseline: The answers of the baseline to the prompts.
        prompts: The prompts, which are repeated if there are more requests.
        count: The number of requests.
        bound: The bounds on the differences.

    Returns:
        The first difference beyond the bounds, or None.
    """
    expected = {answer.name: answer for answer in baseline.answers}
    sent = list(itertools.islice(itertools.cycle(prompts.prompts), count))
    requests = []
    for number, prompt in enumerate(sent):
        requests.append(Request(prompt.text, prompt.tokens, salt=f"stress-{number}"))
    answers = asker.ask_together(requests)
    for prompt, answer in zip(sent, answers, strict=True):
        judged = agreement.compare_runs(
            expected[prompt.name].positions,
            asker.positions(answer),
            bound,
            golden.continuation(asker, answer.prompt_ids, prompt.tokens),
        )
        if judged.disagreement is not None:
            return f"{count} at the same time: {prompt.name!r}: {judged.disagreement}"
    return None
