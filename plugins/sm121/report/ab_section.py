"""What a report says of an A/B comparison: how it ended, its plot, what was compared."""

from dataclasses import dataclass, replace

from sm121.core.verdict import Verdict
from sm121.regression import priced
from sm121.regression.ab_file import AbFile
from sm121.report import forest, metric_names, rows
from sm121.report.forest import Forest
from sm121.report.rows import Row, words

#: Of a path: what a comparison of two speeds rests on. It is shown, proven or not.
_DECISIVE = ("attention", "moe")


@dataclass(frozen=True)
class AbSection:
    """The section of one comparison."""

    file: AbFile

    @property
    def headline(self) -> str:
        """How it ended, and in the same line what of the two paths nothing proves."""
        unproven = [
            f"{side}'s {' and '.join(map(words, missing))} not proven"
            for side in "AB"
            if (missing := [part for part in _DECISIVE if self.file.path(side).get(part) is None])
        ]
        return self._ending() + (f" ({'; '.join(unproven)})" if unproven else "")

    def _ending(self) -> str:
        outcomes, broken = self.file.outcomes, self.file.failures("B")
        if self.file.void:
            return f"Nothing of it counts: {self.file.void}"
        if broken:
            return f"B does not serve as A does: {broken[0]}"
        if not outcomes:
            return "A and B have no metric in common"
        by = {
            verdict: [each for each in outcomes if each.verdict is verdict] for verdict in Verdict
        }
        sides = ({o.metric: o.a for o in outcomes}, {o.metric: o.b for o in outcomes})
        trade = f"; B is {text}" if (text := priced.trade(*sides)) else ""
        if worse := by[Verdict.FAIL]:
            change = f"{metric_names.words(worse[0].metric)} {worse[0].percent} {worse[0].bounds}"
            change = f"{worse[0].text}" if worse[0].difference is not None else change.strip()
            return f"B is worse than A in {len(worse)} of {len(outcomes)} metrics: {change}{trade}"
        summary = f"B is not worse than A in {len(by[Verdict.PASS])} of {len(outcomes)} metrics"
        summary += trade
        undecided = len(outcomes) - len(by[Verdict.PASS])
        return summary + (f", {undecided} undecided" if undecided else "")

    @property
    def forest(self) -> Forest | None:
        """Every outcome; None where there is none."""
        return forest.draw(
            [
                replace(each, note=f"{each.pairs} pair{'' if each.pairs == 1 else 's'} of starts")
                for each in self.file.outcomes
            ]
        )

    @property
    def given(self) -> list[Row]:
        """What was given for the sides, and what became of it."""
        file = self.file
        return [
            Row("given", *(side or "(as it is)" for side in file.sides)),
            Row(
                "asked for", *("; ".join(file.requested(s)) or "nothing of its path" for s in "AB")
            ),
            Row("logs", *(", ".join(file.logs(side)) or "not known" for side in "AB")),
        ]

    @property
    def path(self) -> list[Row]:
        """What ran, by the evidence of the sides' logs."""
        one, two = self.file.path("A"), self.file.path("B")
        return [
            rows.of_path(part, one.get(part), two.get(part))
            for part in dict.fromkeys((*_DECISIVE, *one, *two))
            if part in _DECISIVE or (one.get(part), two.get(part)) != (None, None)
        ]
