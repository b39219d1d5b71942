"""The binomial distribution and Student's t, implemented without scipy."""

import math

#: The evaluation of a continued fraction ends at this relative error.
_PRECISE = 1e-15
#: The maximum number of terms of a continued fraction. It needs about as many terms as the square
#: root of the sample size.
_MOST_TERMS = 100_000
#: Up to this many trials, the probabilities for a fraction of 0.5 are computed exactly.
_EXACT_UP_TO = 1000
#: A tiny number that replaces a denominator of 0.
_TINY = 1e-300


def binomial_cdf(successes: int, count: int, fraction: float) -> float:
    """Return the probability of at most a number of successes (binomial distribution).

    Args:
        successes: The number of successes.
        count: The number of trials.
        fraction: The probability of a success, 0 to 1.
    """
    if successes < 0:
        return 0.0
    if successes >= count:
        return 1.0
    if fraction == 0.5 and count <= _EXACT_UP_TO:
        ways = sum(math.comb(count, number) for number in range(successes + 1))
        return float(ways / 2**count)
    return _incomplete_beta(count - successes, successes + 1.0, 1.0 - fraction)


def student_cdf(degrees: float, value: float) -> float:
    """Return the probability that a value of Student's t distribution is below a value.

    Args:
        degrees: The degrees of freedom.
        value: The value.
    """
    beyond = 0.0
    if math.isfinite(value):
        share = degrees / (degrees + value * value)
        beyond = 0.5 * _incomplete_beta(degrees / 2.0, 0.5, share)
    return beyond if value < 0.0 else 1.0 - beyond


def _incomplete_beta(a: float, b: float, x: float) -> float:
    """Return the regularised incomplete beta function I_x(a, b) (DLMF 8.17.20 and 8.17.22)."""
    if x <= 0.0 or x >= 1.0:
        return min(max(x, 0.0), 1.0)
    if x > (a + 1.0) / (a + b + 2.0):  # The fraction for the other tail converges faster.
        return 1.0 - _incomplete_beta(b, a, 1.0 - x)
    logarithm = math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b)
    logarithm += a * math.log(x) + b * math.log1p(-x)
    return math.exp(logarithm) / a / _fraction(a, b, x)


def _fraction(a: float, b: float, x: float) -> float:
    """Return the continued fraction 1 + d1/(1 + d2/(1 + ...)), by Lentz's method."""
    value = numerator = 1.0
    denominator = 0.0
    for term in range(1, _MOST_TERMS):
        m = term // 2
        if term % 2:
            d = -(a + m) * (a + b + m) * x / ((a + term - 1.0) * (a + term))
        else:
            d = m * (b - m) * x / ((a + term - 1.0) * (a + term))
        denominator = 1.0 / _not_zero(1.0 + d * denominator)
        numerator = _not_zero(1.0 + d / numerator)
        factor = numerator * denominator
        value *= factor
        if abs(factor - 1.0) < _PRECISE:
            return value
    raise ArithmeticError(f"I_{x}({a}, {b}) has not converged after {_MOST_TERMS} terms")


def _not_zero(value: float) -> float:
    return value if value != 0.0 else _TINY
