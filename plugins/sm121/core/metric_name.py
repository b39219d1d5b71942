"""Names of metrics. For example, ``tg32@d4096`` is ``tg32`` after 4,096 tokens of context.

The names are keys of verdict.json. In a stored run, a metric is identified only by its name.
"""

#: The prefix of metric names in an A/B comparison.
_AB = "ab:"


def of_ab(name: str) -> str:
    """Return the name under which an A/B comparison stores a metric.

    Args:
        name: The metric's name in a normal run.
    """
    return f"{_AB}{name}"


def is_of_ab(name: str) -> bool:
    """Return whether a metric belongs to an A/B comparison.

    Args:
        name: The name of the metric.
    """
    return name.startswith(_AB)


def without_depth(name: str) -> str:
    """Return a metric's name without the depth, for example ``price_kl`` for ``price_kl@d8192``.

    Args:
        name: The name, with or without a depth.
    """
    return name.partition("@")[0]


def depth_of(name: str) -> int | None:
    """Return the depth in a metric's name, for example 4096 for ``tg32@d4096``.

    Args:
        name: The name.

    Returns:
        The depth in tokens; None if the name has none.
    """
    depth = name.partition("@d")[2]
    return int(depth) if depth else None
