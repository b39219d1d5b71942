"""Measure how far answers differ by rounding alone, and derive the tolerance for golden files.

If a prompt is sent in a batch instead of alone, the kernels add numbers in another order, as the
kernels of another build would. The difference of the two answers is therefore the noise of the
server's arithmetic.
"""

from sm121.answers import agreement, golden
from sm121.answers.agreement import Positions
from sm121.answers.golden_comparison import GoldenComparison
from sm121.answers.prompts import Prompt, PromptSet
from sm121.api.client import together
from sm121.client.completions import Asker
from sm121.core.level_settings import AgreementBound, GoldenBound

#: The largest accepted difference, as a multiple of the server's spread. A divergence grows with
#: the square of the difference. Kernels of equal precision changed the answers of two small models
#: by up to 1.6 times their spread. A projection of one layer that was scaled by 1.1 changed them by
#: at least 3.4 times their spread (docs/another-model.md).
_ALLOWANCE = 2.5
#: The rounding errors of float32: the smallest bounds, of `cpu-tiny-gpt-oss`.
_FLOAT32_MAX = 1e-3
_FLOAT32_MEAN = 1e-4
_FLOAT32_DIVERGENCE = 1e-5
#: A tolerance in nats that no difference exceeds, so that every difference is measured.
_ANY = 1e6


def measure(asker: Asker, prompts: PromptSet, fork: float) -> GoldenComparison:
    """Compare the answers to prompts that are sent alone with the answers in one batch.

    Args:
        asker: The client of the server.
        prompts: The prompt set.
        fork: The difference in nats up to which two tokens count as equally likely.

    Raises:
        NotRun: The engine sends no log-probabilities.
        Refused: The server does not answer.
    """

    def positions(prompt: Prompt) -> Positions:
        return asker.positions(golden.ask(asker, prompt.text, prompt.tokens))

    alone = [positions(prompt) for prompt in prompts.prompts]
    batch = together(positions, prompts.prompts, at_once=len(prompts.prompts))
    bound = AgreementBound(max_abs=_ANY, mean_abs=_ANY, fork=fork, source="any difference")
    agreements = {}
    for prompt, one, other in zip(prompts.prompts, alone, batch, strict=True):
        agreements[prompt.name] = agreement.compare_runs(one, other, bound)
    return GoldenComparison(agreements, ())


def bound_of(spread: GoldenComparison, base: GoldenBound, date: str) -> GoldenBound | None:
    """Return the tolerance for golden files that follows from a measured spread.

    It is never above the tolerance of the shipped profile.

    Args:
        spread: The result of `measure`.
        base: The bound of the shipped profile.
        date: The day of the measurement, in ISO 8601.

    Returns:
        The bound. None if the spread shows nothing about another kernel: both answers are equal to
        the last bit, or differ by more than rounding.
    """
    largest = spread.worst.error
    differs = any(agreed.disagreement is not None for agreed in spread.agreements.values())
    if largest == 0 or differs:
        return None
    mean = max(agreed.mean_abs for agreed in spread.agreements.values())
    divergence = spread.mean_divergence
    return base.model_copy(
        update={
            "max_abs": _bound(_ALLOWANCE * largest, _FLOAT32_MAX, base.max_abs),
            "mean_abs": _bound(_ALLOWANCE * mean, _FLOAT32_MEAN, base.mean_abs),
            "mean_divergence": _bound(
                _ALLOWANCE**2 * divergence, _FLOAT32_DIVERGENCE, base.mean_divergence
            ),
            "source": f"{_ALLOWANCE} times the difference between answers alone and in a batch, as "
            f"measured on {date}: {largest:.2g} nats, mean KL {divergence:.2g}",
        }
    )


def _bound(value: float, least: float, most: float) -> float:
    """Clamp a value to the range from `least` to `most`, and round it to two significant digits."""
    return float(f"{min(max(value, least), most):.2g}")
