"""What a report says of an A/B comparison: how it ended, its plot, what was compared."""

from dataclasses import dataclass, replace

from sm121.core import templates
from sm121.regression.ab import AbFile
from sm121.regression.change import trade
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
        outcomes = self.file.outcomes
        sides = ({o.metric: o.a for o in outcomes}, {o.metric: o.b for o in outcomes})
        return templates.rendered(
            "ab_headline.j2",
            file=self.file,
            trade=trade(*sides),
            decisive=_DECISIVE,
            path_words=words,
            words=metric_names.words,
        )

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
    def path(self) -> list[Row]:
        """What ran, by the evidence of the sides' logs."""
        one, two = self.file.path("A"), self.file.path("B")
        return [
            rows.of_path(part, one.get(part), two.get(part))
            for part in dict.fromkeys((*_DECISIVE, *one, *two))
            if part in _DECISIVE or (one.get(part), two.get(part)) != (None, None)
        ]
