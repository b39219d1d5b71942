"""The values that the lines of one server have proven so far while the log is read."""

import re
from dataclasses import dataclass, field

from sm121.evidence import log_message
from sm121.evidence.failure import FailureReader
from sm121.evidence.log_message import LogLine
from sm121.evidence.signatures import Signature

#: Signature fields that may have several values, and the list of the path that gets the values.
LISTS = {
    "unknown_env": "unknown_env",
    "weights": "weights",
    "channels": "channels",
    "rerouted": "rerouted",
    "fallback": "fallbacks",
    "silent_fallback": "silent_fallbacks",
}
#: The maximum length of a list, because a log may contain any number of entries.
LIST_LIMIT = 200
#: The fact after which lines may be about the draft model of speculative decoding.
_DRAFTER_LOADS = "drafter_loads"
#: The fields that are not read from the lines after that fact.
_OF_TARGET_ONLY = frozenset({"attention", "attention_decode", "moe", "native_fp4"})
#: A line belongs to an older run if its time is earlier than the current run's first line by a
#: number of minutes in this range. Smaller differences may occur within a run, larger ones at the
#: turn of a year.
_ANOTHER_RUN = range(2, 180 * 24 * 60)
#: The number of days in a year before each month.
_DAYS_BEFORE = (0, 31, 59, 90, 120, 151, 181, 212, 243, 273, 304, 334)
#: A line that nsys prints after the server has ended.
_PROFILER_SPEAKS = re.compile(r"^\[\d/\d\] Executing '\w+' stats report")


@dataclass(slots=True)
class ProvenValue:
    """A value that a line proves.

    Attributes:
        value: The value.
        strength: The strength of its signature.
        line: The line.
        needs: The facts that the log must also state, so that the value counts.
        others: Other values that equally strong lines prove, with these lines.
    """

    value: str | bool
    strength: int
    line: str
    needs: tuple[str, ...]
    others: dict[str, str] = field(default_factory=dict)


@dataclass(slots=True)
class ServerState:
    """The values that one run of a server has proven so far.

    Attributes:
        failures: The failures of the run.
        facts: The ids of the facts that the log states.
        candidates: The possible values of each field.
        lists: For each list of the path (`LISTS`), its values with their lines.
        opened: Whether the opening line of this run was read.
        began: The number of the physical line with which this run begins.
        since: The time of this run's first line with a time (`LogLine.stamp`).
        stale: Whether the current line belongs to an older run. This happens if the log file was
            not truncated before this run.
        ended: The number of the line at which `stale` last became true.
    """

    failures: FailureReader = field(default_factory=FailureReader)
    facts: set[str] = field(default_factory=set)
    candidates: dict[str, list[ProvenValue]] = field(default_factory=dict)
    lists: dict[str, dict[str, str]] = field(
        default_factory=lambda: {name: {} for name in LISTS.values()}
    )
    opened: bool = False
    began: int = 0
    since: str | None = None
    stale: bool = False
    ended: int = 0

    def note_age(self, line: LogLine) -> None:
        """Set `stale` at a line of an earlier run, and clear it at the next line of this run.

        Args:
            line: The line.
        """
        was_stale = self.stale
        if line.stamp is not None:
            self.since = self.since or line.stamp
            self.stale = minute_of_year(self.since) - minute_of_year(line.stamp) in _ANOTHER_RUN
        elif _PROFILER_SPEAKS.match(line.text):
            self.stale = True
        if self.stale and not was_stale:
            self.ended = line.number

    def take(self, signature: Signature, line: LogLine) -> None:
        """Keep the value that a signature reads from a line, if it matches.

        Args:
            signature: The signature.
            line: The line.
        """
        match = signature.search(line)
        if match is None:
            return
        value = signature.read(match)
        if value is None:
            return
        excerpt = log_message.cut(line.text, around=match.start())
        if signature.field == "fact":
            self.facts.add(signature.id)
        elif signature.field in LISTS:
            self._add_to_list(LISTS[signature.field], str(value), excerpt)
        else:
            self._add_candidate(signature, value, excerpt)

    def _add_to_list(self, name: str, value: str, excerpt: str) -> None:
        if name == "silent_fallbacks" and _DRAFTER_LOADS in self.facts:
            return  # the engine may have made this choice for the draft model
        values = self.lists[name]
        if len(values) < LIST_LIMIT:
            values.setdefault(" ".join(value.split()), excerpt)

    def _add_candidate(self, signature: Signature, value: str | bool, excerpt: str) -> None:
        is_of_target = signature.field in _OF_TARGET_ONLY
        if is_of_target and _DRAFTER_LOADS in self.facts and not signature.drafter:
            return  # this may be the backend of the draft model
        candidates = self.candidates.setdefault(signature.field, [])
        for candidate in candidates:
            if candidate.strength == signature.strength and candidate.needs == signature.needs:
                # If several lines are equally strong, the first one determines the value.
                if candidate.value != value and len(candidate.others) < LIST_LIMIT:
                    candidate.others.setdefault(str(value), excerpt)
                return
        candidates.append(ProvenValue(value, signature.strength, excerpt, signature.needs))

    def resolve(self) -> dict[str, ProvenValue]:
        """Return the strongest value of each field.

        A value counts only if the log also states the facts that its signature needs.
        """
        resolved: dict[str, ProvenValue] = {}
        for name, candidates in self.candidates.items():
            possible = [item for item in candidates if self.facts.issuperset(item.needs)]
            if possible:
                resolved[name] = max(possible, key=lambda item: item.strength)
        return resolved


def minute_of_year(stamp: str) -> int:
    """Return the minutes from the beginning of the year to a time.

    Args:
        stamp: The time, for example ``02-24 19:04:56``.
    """
    month, day, hour, minute, _ = map(int, re.findall(r"\d+", stamp))
    return ((_DAYS_BEFORE[(month - 1) % 12] + day) * 24 + hour) * 60 + minute
