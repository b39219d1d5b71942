"""The report's section on an A/B comparison: its result, its plot and its kernel paths."""

from dataclasses import dataclass, replace

from sm121.core import templates
from sm121.regression.ab import AbFile
from sm121.report import forest, metric_names, rows
from sm121.report.forest import Forest
from sm121.report.rows import Row, words
from sm121.run.trade import trade

#: The parts of a kernel path that determine the speed. They are shown even if no log proves them.
_DECISIVE = ("attention", "moe")


@dataclass(frozen=True)
class AbSection:
    """The section about one comparison."""

    file: AbFile

    @property
    def headline(self) -> str:
        """The result of the comparison, and the parts of both kernel paths that no log proves."""
        outcomes = self.file.outcomes
        a = {outcome.metric: outcome.a for outcome in outcomes}
        b = {outcome.metric: outcome.b for outcome in outcomes}
        return templates.rendered(
            "ab_headline.j2",
            file=self.file,
            trade=trade(a, b),
            decisive=_DECISIVE,
            path_words=words,
            words=metric_names.words,
        )

    @property
    def forest(self) -> Forest | None:
        """The plot of all outcomes; None if there are none."""
        changes = []
        for outcome in self.file.outcomes:
            pairs = "1 pair" if outcome.pairs == 1 else f"{outcome.pairs} pairs"
            changes.append(replace(outcome, note=f"{pairs} of starts"))
        return forest.draw(changes)

    @property
    def path(self) -> list[Row]:
        """The kernel paths of both sides, as their logs show them."""
        a = self.file.path("A")
        b = self.file.path("B")
        table = []
        for part in dict.fromkeys((*_DECISIVE, *a, *b)):
            is_known = a.get(part) is not None or b.get(part) is not None
            if part in _DECISIVE or is_known:
                table.append(rows.of_path(part, a.get(part), b.get(part)))
        return table
