"""Time to the first text that a user sees: for a model that reasons first, not the first token."""

from __future__ import annotations

from collections.abc import Sequence

from sm121.client.timed import chat
from sm121.measure import metrics
from sm121.measure.cells import Target
from sm121.measure.measurement import Measurement
from sm121.measure.validity import Findings


def measure(target: Target, questions: Sequence[str], *, rounds: int, tokens: int) -> Measurement:
    """Ask each question in turn, streaming, until the first text of the final channel.

    The questions are real ones, since random tokens are not answered; so their prefix may come from
    a cache, which is nothing beside the reasoning.
    """
    findings = Findings(list(target.invalid), list(target.unproven))
    samples, waited = [], []
    for number in range(rounds):
        request = chat(target.endpoint.served_name, questions[number % len(questions)], tokens)
        target.show(f"time to the first visible text: {number + 1}/{rounds}")
        answer = target.sender.run([request], patience=target.patience).answers[0]
        seen = metrics.visible_ms(answer)
        if not answer.ok:
            findings.against("request_failed", str(answer.error))
        elif seen is None:
            findings.against(
                "no_visible_text",
                f"{len(answer.chunks)} events within {tokens} tokens, none with content",
            )
        samples.append(seen if answer.ok and seen is not None else metrics.NEVER)
        waited.append(sum(chunk.text and not chunk.visible for chunk in answer.chunks))
    return Measurement(
        name="ttft_visible_p50",
        unit="ms",
        samples=samples,
        higher_is_better=False,
        quantile=0.5,
        invalid=findings.invalid,
        unproven=findings.unproven,
        extra={"reasoning_chunks": waited, "cold": False},
    )
