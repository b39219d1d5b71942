"""Write a profile for the model that a server serves, with the evidence for each value."""

import ast
import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from sm121.answers.golden_comparison import GoldenComparison
from sm121.clock.measuring import Number, Result
from sm121.core import profile, templates
from sm121.core.data_file import DataTable
from sm121.core.level_settings import GoldenBound
from sm121.core.printable import printable
from sm121.core.profile import Profile
from sm121.core.server import Server
from sm121.measure.metrics.times import TimeToFirstToken
from sm121.session import answer_spread
from sm121.session.known_answers import KnownAnswers
from sm121.session.served_facts import ServedFacts

#: A gate is a tenth worse than the measured value.
_ALLOWANCE = 0.1
#: The fields of a kernel path that a profile can require.
_PATH_FIELDS = ("attention", "attention_decode", "moe", "kv_layout", "kv_cache_dtype", "dtype",
    "quantization", "speculative", "cuda_graphs", "prefix_caching", "context")  # fmt: skip
#: Arguments in a log that a profile must not repeat: addresses, names and secrets.
_LEFT_OUT = re.compile(
    r"model|model_tag|host|port|served_model_name"
    r"|.*(?:key|ssl|uds|secret|password|credential).*|(?:.*_)?token"
)
#: The tables that depend on the machine and not on the model. They are in the shipped profile.
_OF_THE_MACHINE = ("stress", "box", "regression", "test_timeout_s")
#: Lengths of the context before a measured prompt, in tokens.
_DEPTHS = (512, 4096, 16384, 32768)
#: The maximum time for the prefill of a context of such a length, in seconds.
_LONGEST_PREFILL_S = 20.0
_NO_ORACLE = "no oracle for this architecture"


@dataclass(frozen=True)
class Draft:
    """A profile that has not been written yet.

    Attributes:
        name: The name of the profile.
        arch: The architecture of the target.
        date: The day, in ISO 8601.
        facts: What the server shows.
        known: The questions that the server answered correctly in each round.
        measured: Its rates and times; None: they were not measured.
        arguments: The engine's arguments that the user gave; empty: the profile gets those in the
            log.
        no_rates: The reason for missing rates.
        spread: The difference between answers alone and in a batch; None: it was not measured.
        no_spread: The reason for a missing spread.
    """

    name: str
    arch: str
    date: str
    facts: ServedFacts
    known: KnownAnswers
    measured: Result | None
    arguments: Sequence[str] = ()
    no_rates: str = ""
    spread: GoldenComparison | None = None
    no_spread: str = "not measured"
    base: Profile = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "base", base_profile(self.arch, self.facts.can.engine))

    def exam(self) -> str:
        """Return the exam of the questions that the model answered, as JSONL."""
        head = {
            "exam": self.name,
            "schema_version": 1,
            "answer_tokens": self.answer_tokens,
            "source": f"questions of the suite's own exams, answered right three times on "
            f"{self.date}",
        }
        lines: list[dict[str, Any]] = [head]
        lines += [
            each.model_dump(mode="json", exclude_unset=True) for each in self.known.completions
        ]
        if self.known.facts:
            source = f"as answered on {self.date}"
            lines.append({"section": "facts", "effort": "low", "misses": 0, "source": source})
        times: Counter[str] = Counter()
        for question in self.known.facts:
            turn = question.turns[0]
            times[question.id] += 1
            number = times[question.id]
            name = question.id if number == 1 else f"{question.id}-{number}"
            row = {"user": turn.user, "right": turn.right.pattern if turn.right else ""}
            if turn.wrong is not None:
                row["wrong"] = turn.wrong.pattern
            lines.append({"id": name, "turns": [row]})
        return "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)

    def text(self, exam: str) -> str:
        """Return the profile, as TOML.

        Args:
            exam: The path of its exam.
        """
        return templates.rendered(
            "profile.toml.j2",
            draft=self,
            facts=self.facts,
            known=self.known,
            path=self.facts.path,
            exam=exam,
            no_oracle=_NO_ORACLE,
            toml=toml,
            key=_key,
            line=printable,
            has_golden_bound=self._golden_bound is not None,
            why_no_golden_bound=self._why_no_golden_bound,
            table=_table,
            unknown_path={
                name: _how_to_find(name, self.facts.server, self.base) for name in self.missing_path
            },
        )

    @property
    def answer_tokens(self) -> int:
        """The token limit of exam answers: three times the longest, at most half the context."""
        most = (self.facts.context or 8192) // 2
        return min(max(64, 3 * self.known.longest), most)

    @property
    def engine_arguments(self) -> list[str]:
        """The arguments of the engine: those given, else those that the log shows."""
        return list(self.arguments) or _arguments(self.facts.path.log.asked)

    @property
    def required_path(self) -> dict[str, Any]:
        """The values of the kernel path that the log shows, by their keys in a profile."""
        required = {}
        for name in _PATH_FIELDS:
            value = getattr(self.facts.path, name)
            if value is None:
                continue
            required[name] = [value] if isinstance(value, str) else value
        return required

    @property
    def accepted_fallbacks(self) -> dict[str, str]:
        """The fallbacks in the log that this machine's shipped profile accepts, with reasons."""
        accepted = self.base.kernel_path.accepted_fallbacks
        return {name: accepted[name] for name in self.facts.path.fallbacks if name in accepted}

    @property
    def missing_path(self) -> list[str]:
        """The values of the kernel path for which there is no evidence."""
        missing = [name for name in ("attention", "moe", "dtype") if name not in self.required_path]
        if self.facts.has_experts is False and "moe" in missing:
            missing.remove("moe")
        return missing

    @property
    def prompt_tokens(self) -> int:
        """The length in tokens of the prompts with which rates are measured."""
        return prompt_tokens(self.facts.context)

    @property
    def depths(self) -> list[int]:
        """The depths that fit into the context, and whose prompts take at most 20 seconds."""
        room = (self.facts.context or 8192) - self.prompt_tokens - 128
        rate = None
        if self.measured is not None:
            number = self.measured.numbers.get(f"pp{self.prompt_tokens}@d0")
            rate = number.value if number is not None and number.valid else None
        fitting = [0]
        for depth in _DEPTHS:
            if depth <= room and (rate is None or depth / rate <= _LONGEST_PREFILL_S):
                fitting.append(depth)
        return fitting

    @property
    def gates(self) -> list[dict[str, Any]]:
        """The gates, each a tenth worse than the measured value."""
        rows = []
        source = f"10 % below the value measured on {self.date}"
        for name, number in (self.measured.numbers if self.measured else {}).items():
            unit = number.measurement.unit
            if number.value is None or not number.valid:
                continue
            row: dict[str, Any] = {"metric": name, "unit": unit}
            if unit == "tok/s":
                row["minimum"] = float(f"{number.value * (1 - _ALLOWANCE):.4g}")
                row["source"] = source
                rows.append(row)
            elif number.metric == TimeToFirstToken.key:
                row["at_most"] = float(f"{number.value * (1 + _ALLOWANCE):.4g}")
                row["source"] = f"10 % above the value measured on {self.date}"
                rows.append(row)
        return rows

    @property
    def invalid_numbers(self) -> list[str]:
        """The measured numbers that cannot be gates, with the reasons."""
        numbers: Mapping[str, Number] = self.measured.numbers if self.measured else {}
        lines = []
        for number in numbers.values():
            if not number.valid:
                reasons = "".join(f"; {reason}" for reason in number.measurement.invalid)
                lines.append(f"{number}{reasons}")
        return lines

    @property
    def plans(self) -> dict[str, dict[str, Any]]:
        """The plans of the shipped profile, with the sizes of this one."""
        rows = {}
        for name, plan in self.base.plans.items():
            row = _values(plan)
            row["depths"] = self.depths[:2]
            row["generated_tokens"] = [32]
            row.pop("concurrency", None)
            row.pop("rounds", None)
            rows[name] = row
        return rows

    @property
    def machine_tables(self) -> dict[str, dict[str, Any]]:
        """The tables of the shipped profile that depend on the machine."""
        tables = {}
        for name in _OF_THE_MACHINE:
            value = getattr(self.base, name)
            if value is not None:
                tables[name] = _values(value)
        return tables

    def tolerances(self, key: str) -> dict[str, Any]:
        """Return the tolerances of the shipped profile by dtype, with a row for ``auto``.

        Args:
            key: ``agreement`` or ``golden``, in which a measured bound replaces the shipped one.
        """
        rows = self._shipped_tolerances(key)
        if key == "golden" and self._golden_bound is not None:
            rows[self._tolerance_row] = rows["auto"] = _values(self._golden_bound)
        return rows

    def _shipped_tolerances(self, key: str) -> dict[str, Any]:
        rows = {name: _values(row) for name, row in getattr(self.base.correctness, key).items()}
        if "auto" not in rows:
            rows["auto"] = rows.get(self._dtype, rows["bfloat16"])
        return rows

    @property
    def _dtype(self) -> str:
        return (self.facts.path.dtype or "bfloat16").removeprefix("torch.")

    @property
    def _tolerance_row(self) -> str:
        """The row of the tolerances that applies to the served dtype."""
        return self._dtype if self._dtype in self._shipped_tolerances("golden") else "auto"

    @property
    def _golden_bound(self) -> GoldenBound | None:
        """The tolerance for golden files that follows from the spread; None if none follows."""
        if self.spread is None:
            return None
        base = GoldenBound(**self._shipped_tolerances("golden")[self._tolerance_row])
        return answer_spread.bound_of(self.spread, base, self.date)

    @property
    def _why_no_golden_bound(self) -> str:
        """The reason for a missing golden bound."""
        if self.spread is None:
            return self.no_spread
        if self.spread.worst.error == 0:
            return "the answers alone and in a batch were equal to the last bit"
        return "the answers alone and in a batch differed by more than rounding"

    @property
    def fork(self) -> float:
        """The difference in nats up to which the shipped profile takes tokens as equally likely."""
        return float(self._shipped_tolerances("golden")["auto"]["fork"])


def prompt_tokens(context: int | None) -> int:
    """Return the length in tokens of the prompts with which rates are measured.

    Args:
        context: The length of the server's context in tokens; None if it is unknown.
    """
    length = context or 8192
    if length >= 16_384:
        return 2048
    return 512 if length >= 2048 else max(16, length // 4)


def base_profile(arch: str, served_by: str = "vllm") -> Profile:
    """Return the shipped profile whose tables about the machine are used.

    Args:
        arch: The architecture. For one without a shipped profile, it is that of the GB10.
        served_by: The engine. For one without a shipped profile, it is that of another engine.
    """
    for engine in (served_by, "vllm", "sglang", "llama-cpp"):
        for name in profile.shipped():
            if profile.load(name).arch == arch and profile.load(name).engine.name == engine:
                return profile.load(profile.for_architecture(arch, engine))
    return profile.load("sm121-gpt-oss-120b")


def _how_to_find(name: str, server: Server, base: Profile) -> str:
    """Return why a value of the kernel path is unknown, and how to find it."""
    if server.log is None:
        was_given = server.why_no_log != Server.why_no_log
        hint = "give the log of this server with --server-log FILE"
        return server.why_no_log if was_given else hint
    if name == "attention" and base.engine.speaking_worker:
        why = "vLLM on the CPU does not log it, unless the suite starts the server. Write"
    else:
        why = (
            "no line of the log shows it. Give the whole log from the start of the server on, or "
            "write"
        )
    return f"{why} what runs:"


def _values(table: Any) -> dict[str, Any]:
    """Return the keys and values of a profile's table that are in the file, without defaults."""
    if isinstance(table, DataTable):
        return dict(table.model_dump(mode="json", exclude_unset=True))
    return dict(table)


def _arguments(asked: str | None) -> list[str]:
    """Return the arguments that a log of vLLM prints as a dictionary; empty for another text."""
    try:
        given = ast.literal_eval(asked or "")
    except (ValueError, SyntaxError):
        return []
    arguments = []
    for name, value in given.items() if isinstance(given, dict) else ():
        option = f"--{name.replace('_', '-')}"
        if _LEFT_OUT.fullmatch(name) or value is None:
            continue
        if value is True:
            arguments.append(option)
        elif value is False:
            arguments.append(f"--no-{name.replace('_', '-')}")
        elif isinstance(value, (dict, list)):
            arguments += [option, json.dumps(value)]
        else:
            arguments += [option, str(value)]
    return arguments


def toml(value: Any) -> str:
    """Return a value as TOML, a table on one line.

    Args:
        value: A text, a number, a truth value, a list or a dictionary with texts as keys.
    """
    if isinstance(value, Mapping):
        rows = [f"{_key(key)} = {toml(each)}" for key, each in value.items()]
        return "{ " + ", ".join(rows) + " }" if rows else "{}"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(toml(each) for each in value) + "]"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    return repr(value)


def _table(values: Mapping[str, Any]) -> str:
    """Return the lines of a table, one key each."""
    return "".join(f"{_key(key)} = {toml(value)}\n" for key, value in values.items())


def _key(name: str) -> str:
    return name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else json.dumps(name)
