"""What ships with the suite, as the help of options names it."""

from sm121.engines import capabilities
from sm121.kernels import registry


def names() -> dict[str, str]:
    """Return the lists that stand for ``{engines}`` and ``{providers}`` in the help of options."""
    return {
        "engines": ", ".join(capabilities.shipped()),
        "providers": ", ".join(registry.NAMES),
    }
