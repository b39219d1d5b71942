"""What a person sees while something is measured."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import median

#: A line for people: what is measured, how far it is, how long it will take.
Show = Callable[[str], None]


@dataclass
class Progress:
    """Rounds done of those that are wanted, with the value so far and the time left."""

    show: Show
    what: str
    unit: str
    wanted: int
    _started: float = field(default_factory=time.monotonic)

    def note(self, text: str) -> None:
        """Something else than a round."""
        self.show(f"{self.what}: {text}")

    def rounds(self, done: int, samples: list[float]) -> None:
        """So many rounds are done, with these values."""
        spent = time.monotonic() - self._started
        left = spent / done * max(self.wanted - done, 0) if done else 0.0
        shown = sorted(samples)
        text = f"{done}/{self.wanted} rounds"
        if shown:
            text += f", {median(shown):.4g} {self.unit} [{shown[0]:.4g}, {shown[-1]:.4g}]"
        self.show(f"{self.what}: {text}, about {left:.0f} s left")
