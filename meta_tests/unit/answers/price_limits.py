"""The names of the metrics of the accuracy cost, and the limits of their increase."""

from sm121.core.level_settings import PRICES, Regression

KL, LIKELIEST, RIGHT = PRICES

LIMITS = Regression(prices={KL: 2e-4, LIKELIEST: 1.0, RIGHT: 0.05})

ALLOWING = LIMITS.model_copy(update={"price_allowed": True})
