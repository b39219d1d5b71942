"""Count the drafts of a cell's requests with the server's counters."""

from collections.abc import Mapping
from dataclasses import dataclass, field

_COUNTERS = ("drafts", "draft_tokens", "accepted_tokens")


@dataclass
class DraftCounts:
    """The numbers of drafts, draft tokens and accepted tokens for each fixed text."""

    #: The counts for each text. The keys are the names of the texts; the empty name stands for all
    #: requests.
    by_text: dict[str, dict[str, float]] = field(default_factory=dict)

    def add(self, text: str, delta: Mapping[str, float]) -> None:
        """Add changes of the server's counters.

        Args:
            text: The name of the requests' text; empty for all requests.
            delta: The changes of the server's counters. Missing counters count as 0.
        """
        total = self.by_text.setdefault(text, {})
        for name in _COUNTERS:
            total[name] = total.get(name, 0.0) + delta.get(name, 0.0)

    def speculation(self, text: str = "") -> dict[str, float]:
        """Return the acceptance rate and the mean accepted length.

        Args:
            text: The name of a text; empty for all requests.

        Returns:
            ``acceptance_rate`` is the fraction of draft tokens that were accepted.
            ``mean_accepted_length`` is the number of tokens per step, including the model's own
            token. Empty if there were no drafts.
        """
        counts = self.by_text.get(text, {})
        drafts = counts.get("drafts", 0.0)
        proposed = counts.get("draft_tokens", 0.0)
        accepted = counts.get("accepted_tokens", 0.0)
        if not drafts or not proposed:
            return {}
        return {
            "acceptance_rate": accepted / proposed,
            "mean_accepted_length": 1.0 + accepted / drafts,
        }
