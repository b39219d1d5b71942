"""The server's log-probabilities against the oracle's."""

import functools
import importlib.util
import itertools
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from sm121.answers import oracle_file
from sm121.answers.oracle_file import GENERATED, OracleFile, Scored, prompts
from sm121.client.completions import Asker, Position, Request, id_of, name_of
from sm121.core import engine_arguments
from sm121.core.level_settings import LogProbabilityTolerance
from sm121.core.model_folder import folder_of
from sm121.core.profile import Profile
from sm121.core.server import Server
from sm121.core.unmet import Fact, Unmet, of, require
from sm121.core.verdict import Inapplicable, NotRun

_Bound = TypeVar("_Bound")

_LIKELY = math.log(0.5)

#: What an honest engine may differ from the oracle, in what the oracle differs from itself when it
#: rounds as that engine does: another order of the same roundings gives other errors, and the
#: largest of them varies most. Seen of the mean: 0.77 (vLLM 0.32 on the CPU, the canary), 0.94
#: (the same at gpt-oss's width), 0.87 (vLLM 0.24, Marlin, the whole of gpt-oss-120b's shape); of
#: the mean of likely tokens up to 1.0, of the largest up to 2.6 (generated tokens).
_MARGIN_OF_MEAN, _MARGIN_OF_LIKELY_MEAN, _MARGIN_OF_LARGEST = 1.25, 1.5, 3.0
#: The same for the mean over tokens that are generated: they are few.
_MARGIN_OF_GENERATED = 1.5

#: Mean nats above which rounding hides mistakes: at gpt-oss-120b's shape 0.04 (BF16), 0.055 (W4A8).
_TOO_COARSE = 0.2

#: Nats that say nothing, in the weight of a token.
_LITTLE = 0.01

#: How sure it must be that rounding alone does not look like half of a small mistake. Errors of
#: neighbours are alike: an honest vLLM at gpt-oss's width had a share of six standard deviations.
_SIGMAS = 6.0

#: The share of another rounding that is none, of an engine that does not round its arithmetic.
_ANY_SHARE = 0.1


@dataclass(frozen=True)
class Difference:
    """|server - oracle| in nats over the tokens of a prompt; position 0 is the second token."""

    max_abs: float
    mean_abs: float
    worst_position: int
    #: Over the tokens that the oracle holds for more likely than not; 0 without any.
    likely_max_abs: float
    likely_mean_abs: float

    def beyond(self, tolerance: LogProbabilityTolerance, *, means: bool = True) -> list[Fact]:
        """What is above the tolerance; without the means if they are not to be held."""
        mean, likely_mean = tolerance.mean_abs, tolerance.likely_mean_abs
        pairs = [
            ("largest difference", self.max_abs, tolerance.max_abs),
            ("mean difference", self.mean_abs, mean if means else None),
            ("largest of likely tokens", self.likely_max_abs, tolerance.likely_max_abs),
            ("mean of likely tokens", self.likely_mean_abs, likely_mean if means else None),
        ]
        return [
            Fact(f"{name} at most", value=error, limit=bound, unit="nats")
            for name, error, bound in pairs
            if bound is not None and not error <= bound
        ]


@dataclass(frozen=True)
class OracleReference:
    """What the oracle says, and how exact the engine is meant to be."""

    file: OracleFile
    dtype: str
    tolerance: LogProbabilityTolerance
    #: The rounding that the engine is meant to have; None: of that dtype there is no model.
    rounding: str | None


def checkpoint_of(server: Server, intact: Path | None = None) -> Path:
    """The checkpoint that the oracle computes from. `intact`: the checkpoint that the server is
    meant to serve (``--reference``); without it, what a managed server was started with. Raises
    NotRun: it is not known, or cannot be read here."""
    configuration = server.configuration
    if configuration is None and intact is None:
        raise NotRun(
            "the oracle needs the checkpoint of the server, and this one is attached: name it, or "
            "the file that `sm121 golden` made of it, with --reference PATH (and the dtype with "
            "--configuration NAME)"
        )
    if importlib.util.find_spec("torch") is None or importlib.util.find_spec("safetensors") is None:
        raise NotRun("the oracle needs torch and safetensors in the suite's environment")
    if intact is not None:
        return intact
    assert configuration is not None
    folder = folder_of(configuration.model, os.environ | dict(configuration.environment))
    if folder is None:
        raise NotRun(
            f"the oracle needs the checkpoint as a folder, {configuration.model} is none here; "
            "--reference takes one, or the file that `sm121 golden` made of it"
        )
    return folder


def reference_for(file: OracleFile, server: Server, profile: Profile) -> OracleReference:
    """How the server is compared with what an oracle says that rounds as the server does. A profile
    states the tolerance of float32. That of BF16 is computed: what the oracle differs from itself
    when its arithmetic is in BF16; so is that of float32 where float32 decides to which of a few
    values something is rounded. Raises NotRun: there is no tolerance for the dtype of the
    server."""
    dtype = dtype_of(server, profile)
    formats = "" if file.rounding == "checkpoint" else f", {file.rounding}"
    if dtype in ("auto", "bfloat16"):
        tolerance = computed_tolerance(file, "bf16")
        return OracleReference(file, f"{dtype}, bf16{formats}", tolerance, "bf16")
    table = profile.correctness.log_probability_tolerance
    tolerance = bound_for(table, server, profile, "log_probability_tolerance")
    if dtype == "float32" and dtype in file.rounded:
        tolerance = _wider(tolerance, computed_tolerance(file, dtype))
    return OracleReference(file, f"{dtype}{formats}", tolerance, None)


def _wider(
    stated: LogProbabilityTolerance, computed: LogProbabilityTolerance
) -> LogProbabilityTolerance:
    """What both allow together, the computed one twice: it is of few places."""
    return LogProbabilityTolerance(
        max_abs=stated.max_abs + 2 * computed.max_abs,
        mean_abs=stated.mean_abs + 2 * computed.mean_abs,
        source=f"{stated.source}; and twice: {computed.source}",
    )


def computed_tolerance(file: OracleFile, rounding: str) -> LogProbabilityTolerance:
    """What an engine with this rounding may differ from the oracle over the fixed prompts. Raises
    NotRun: it may differ by so much that a wrong engine would pass."""
    exact, rounded = (
        [value for name in file.rounded[rounding] for value in of(name)]
        for of in (lambda name: file.prompts[name].following, file.rounded[rounding].__getitem__)
    )
    difference = compare(rounded, exact)
    if not difference.mean_abs <= _TOO_COARSE:
        raise NotRun(
            f"rounding as {rounding} moves this checkpoint's log-probabilities by "
            f"{difference.mean_abs:.2g} nats on average; above {_TOO_COARSE:g} a wrong engine "
            "cannot be told from a right one"
        )
    return LogProbabilityTolerance(
        max_abs=_MARGIN_OF_LARGEST * difference.max_abs,
        mean_abs=_MARGIN_OF_MEAN * difference.mean_abs,
        likely_max_abs=_MARGIN_OF_LARGEST * difference.likely_max_abs or None,
        likely_mean_abs=_MARGIN_OF_LIKELY_MEAN * difference.likely_mean_abs or None,
        source=f"the oracle itself, rounding as {rounding}: {difference.max_abs:.3g} at worst "
        f"and {difference.mean_abs:.3g} on average; times {_MARGIN_OF_LARGEST:g} and "
        f"{_MARGIN_OF_MEAN:g} ({_MARGIN_OF_LIKELY_MEAN:g} for the mean of likely tokens)",
    )


def bound_for(table: Mapping[Any, _Bound], server: Server, profile: Profile, name: str) -> _Bound:
    """The entry of a table of the profile, ``correctness.NAME``, for the dtype of the server.
    Raises NotRun: it has none."""
    dtype = dtype_of(server, profile)
    bound = {str(key): value for key, value in table.items()}.get(dtype)
    if bound is None:
        dtypes = ", ".join(table) or "none"
        raise NotRun(
            f"profile {profile.name} has no correctness.{name} for dtype {dtype} (it has: {dtypes})"
        )
    return bound


def dtype_of(server: Server, profile: Profile) -> str:
    """The dtype that the engine was started with; of an attached one, that of the profile's
    configuration under test."""
    return engine_arguments.read(profile.arguments_of(server.configuration)).get("dtype", "auto")


def generation_beyond(
    tolerance: LogProbabilityTolerance,
    right: Scored,
    generated: Sequence[int],
    positions: Sequence[Position],
) -> tuple[list[Fact], int]:
    """What is wrong with greedy tokens and their log-probabilities; how many places were judged.
    The chosen token may be less likely than the best by what two log-probabilities may be off. The
    oracle has gone on with its own choice, so that nothing is judged behind another one."""
    observed: list[float] = []
    expected: list[float] = []
    judged = 0
    limit = tolerance.likely_max_abs or tolerance.max_abs
    rows = zip(right.generated_places, right.generated, generated, positions, strict=False)
    for exact, best, token, position in rows:
        row = dict(zip(exact.ids, exact.values, strict=True))
        behind = exact.values[0] - row.get(token, exact.values[-1])
        if behind > 2 * limit or (token not in row and token != best):
            at_least = "" if token in row else "at least "
            less = f"{at_least}{behind:.3g} nats less likely"
            requirement = f"the most likely token {best}"
            return [Fact(requirement, f"{token}", f"token {judged}", evidence=less)], judged
        for other, value in _told(token, position):
            if other in row:
                observed.append(value)
                expected.append(row[other])
            elif value > (most := exact.values[-1] + tolerance.max_abs):
                about = f"token {judged}"
                requirement = f"of token {other} at most"
                return [Fact(requirement, "", about, value=value, limit=most, unit="nats")], judged
        judged += 1
        if token != best:
            break
    if not observed:
        return [Fact("log-probabilities")], judged
    # The least likely of the told tokens are far down: the means of prompts are not theirs.
    beyond = compare(observed, expected).beyond(tolerance, means=False)
    return of(f"{len(observed)} log-probabilities", beyond), judged


def _told(token: int, position: Position) -> Iterator[tuple[int, float]]:
    """The ids and log-probabilities that the engine tells of one place."""
    for name, value in {**position.top, name_of(token): position.log_probability}.items():
        if (token_id := id_of(name)) is not None:
            yield token_id, value


def prompts_agree(asker: Asker, reference: OracleReference) -> str:
    """The server's log-probabilities of all `prompts` are the oracle's, within the tolerance; says
    how far they are off.

    Raises:
        AssertionError: they are not; names the first prompt and token, or what all together miss.
        NotRun: the engine does not tell them."""
    observed: list[float] = []
    expected: list[float] = []
    limit = reference.tolerance.max_abs
    for name, ids in prompts():
        values = _of_prompt(asker, ids)
        right = reference.file.prompts[name].following
        error = compare(values, right)
        require(
            error.max_abs <= limit,
            "|difference| at most",
            f"at token {error.worst_position}",
            f"prompt {name} ({len(ids)} tokens, {reference.dtype})",
            value=error.max_abs,
            limit=limit,
            unit="nats",
        )
        observed += values
        expected += right
    whole, tolerance = compare(observed, expected), reference.tolerance
    if beyond := whole.beyond(tolerance):
        raise Unmet(*of(f"{len(observed)} tokens, {reference.dtype}", beyond))
    return (
        f"{len(observed)} tokens, {reference.dtype}: off by {whole.mean_abs:.2g} nats on average "
        f"({tolerance.mean_abs:.2g} allowed), {whole.max_abs:.2g} at most ({tolerance.max_abs:.2g})"
    )


def mistake_is_absent(asker: Asker, reference: OracleReference, mistake: str) -> None:
    """The server is nearer to gpt-oss than to gpt-oss with one of the `SMALL_MISTAKES`.

    Raises:
        AssertionError: It is not. A share that is neither near 0 nor near 1, beside a difference
            from the oracle beyond the tolerance, is called another mistake.
        NotRun: The engine does not return log-probabilities of a prompt, or rounding alone may
            look like half of the mistake.
    """
    pattern = Pattern.of(reference.file, mistake, reference.rounding)
    noise = pattern.noise()
    if not _SIGMAS * noise < 0.5:
        raise NotRun(
            f"{mistake} cannot be told from rounding on this checkpoint: rounding alone gives a "
            f"share of up to {_SIGMAS * noise:.2g} of it; an engine in float32 would tell"
        )
    fixed = dict(prompts())
    _, names = oracle_file.SMALL_MISTAKES[mistake]
    observed = [v for name in names for v in _of_prompt(asker, fixed[name])]
    share = pattern.share(observed)
    red = compare(observed, pattern.right).max_abs > reference.tolerance.max_abs
    other = "of another mistake" if red and not abs(share - 1) < 0.5 else ""
    requirement = "a share (0 is gpt-oss, 1 the mistake) between -0.5 and"
    require(abs(share) < 0.5, requirement, other, mistake, value=share, limit=0.5)


def roundings_are_absent(asker: Asker, reference: OracleReference) -> str:
    """The server rounds each part as it is meant to, and not as the checkpoint has it or by another
    rule; says which of them rounding alone may look like. Raises Inapplicable: it rounds nothing
    beyond the checkpoint; AssertionError: it rounds otherwise; names the parts and how, first what
    explains most; NotRun: the engine does not tell log-probabilities of a prompt, or rounding alone
    may look like any."""
    if not (others := reference.file.other_roundings):
        raise Inapplicable("the server rounds nothing beyond the checkpoint")
    patterns = {name: Pattern.of(reference.file, name, reference.rounding) for name in others}
    decides = reference.rounding is not None or "float32" in reference.file.rounded
    limit = 0.5 if decides else _ANY_SHARE
    if not (clear := {name: p for name, p in patterns.items() if _SIGMAS * p.noise() < limit}):
        raise NotRun(f"none of {', '.join(patterns)} can be told from rounding on this checkpoint")
    fixed = dict(prompts())
    names = oracle_file.ROUNDING_PROMPTS
    observed = [v for name in names for v in _of_prompt(asker, fixed[name])]
    shares = {name: pattern.share(observed) for name, pattern in clear.items()}
    wrong = {name: share for name, share in shares.items() if not abs(share) < limit}
    requirement = f"rounded as {reference.file.rounding}, a share of another rounding below"
    if wrong:
        raise Unmet(*(
            Fact(requirement, name, reference.dtype, value=share, limit=limit)
            for name, share in sorted(wrong.items(), key=lambda of: -of[1] ** 2 * clear[of[0]].size)
        ))  # fmt: skip
    hidden = [name for name in patterns if name not in clear]
    return f"{len(clear)} other roundings are absent; cannot be told: {', '.join(hidden) or 'none'}"


def generations_agree(
    asker: Asker,
    reference: OracleReference,
    asked: Sequence[tuple[str, Sequence[int]]] | None = None,
) -> str:
    """The tokens that the server generates after each named prompt (`prompts`), asked together, and
    their log-probabilities, are the oracle's within the tolerance; says how far they are off. Of an
    engine that rounds, all of them together are no further off on average than what rounding does
    to the same tokens at the same places allows. Raises AssertionError: they are not; NotRun: the
    engine does not tell them, or goes on with other tokens that are as likely, so that less than
    half of them could be judged."""
    asked = prompts() if asked is None else asked
    answers = asker.ask_together([Request(tuple(ids), GENERATED) for _, ids in asked])
    judged = 0
    errors: list[float] = []
    rounded: list[float] = []
    by_rounding = reference.file.rounded_places.get(reference.rounding or "", {})
    for (name, ids), answer in zip(asked, answers, strict=True):
        right = reference.file.prompts[name]
        tokens, positions = asker.ids(answer), asker.positions(answer)
        wrong, count = generation_beyond(reference.tolerance, right, tokens, positions)
        judged += count
        if wrong:
            raise Unmet(*of(f"prompt {name} ({len(ids)} tokens) and {GENERATED} more", wrong))
        of_places = zip(
            tokens[:count], positions, right.generated_places, by_rounding.get(name, ()),
            strict=False,
        )  # fmt: skip
        for token, position, exact, other in of_places:
            right_row, off = (dict(zip(row.ids, row.values, strict=True)) for row in (exact, other))
            for token_id, value in _told(token, position):
                if token_id in right_row and token_id in off:
                    errors.append(abs(value - right_row[token_id]))
                    rounded.append(abs(off[token_id] - right_row[token_id]))
    if judged < len(asked) * GENERATED / 2:
        raise NotRun(
            f"of {len(asked) * GENERATED} generated tokens {judged} could be judged: then the "
            "server went on with others, as likely within the tolerance"
        )
    if not rounded:
        return f"{judged} generated tokens, {reference.dtype}: judged each for itself"
    mean, allowed = math.fsum(errors) / len(errors), math.fsum(rounded) / len(rounded)
    allowed *= _MARGIN_OF_GENERATED
    required = f"on average, {_MARGIN_OF_GENERATED:g} times what rounding does, at most"
    all_tokens = f"{judged} generated tokens, {reference.dtype}"
    about = f"{len(errors)} log-probabilities of {all_tokens}"
    require(mean <= allowed, required, "", about, value=mean, limit=allowed, unit="nats")
    return f"{all_tokens}: off by {mean:.2g} nats on average ({allowed:.2g} allowed)"


def _of_prompt(asker: Asker, ids: Sequence[int]) -> list[float]:
    answer = asker.ask(Request(tuple(ids), 1, prompt_log_probabilities=True))
    return list(asker.need(answer.prompt_log_probabilities, "prompt_logprobs"))


def compare(observed: Sequence[float], expected: Sequence[float]) -> Difference:
    """The difference over tokens; a NaN or infinity anywhere is an infinite difference."""
    errors = [abs(a - b) for a, b in zip(observed, expected, strict=True)]
    errors = [error if math.isfinite(error) else math.inf for error in errors]
    likely = [e for e, value in zip(errors, expected, strict=True) if value > _LIKELY] or [0.0]
    worst = max(range(len(errors)), key=errors.__getitem__)
    return Difference(
        max_abs=errors[worst],
        mean_abs=math.fsum(errors) / len(errors),
        worst_position=worst + 1,
        likely_max_abs=max(likely),
        likely_mean_abs=math.fsum(likely) / len(likely),
    )


@dataclass(frozen=True)
class Pattern:
    """What a small mistake does to each token of its prompts, to be looked for in a server's. A
    share is that of least squares: 0 for the intact model, 1 for the mistake. Rounding has little
    in common with any one mistake, so that this tells mistakes that are smaller than the rounding.
    Tokens that rounding moves far say less than others: a token's weight is the inverse of what the
    roundings do to it, squared."""

    right: tuple[float, ...]
    mistake: tuple[float, ...]
    #: Empty where nothing rounds.
    weights: tuple[float, ...]

    @classmethod
    def of(cls, file: OracleFile, mistake: str, rounding: str | None) -> "Pattern":
        """Of a mistake, or another rounding, for an engine that rounds so."""
        wrong = {**file.mistakes, **file.other_roundings}[mistake]

        def change(values: Mapping[str, Sequence[float]]) -> tuple[float, ...]:
            return tuple(
                b - a
                for name in wrong
                for a, b in zip(file.prompts[name].following, values[name], strict=True)
            )

        weights: tuple[float, ...] = ()
        if rounding is not None:
            ways = [of for way, of in file.rounded.items() if way != "float32"]
            errors = zip(*(change(values) for values in ways), strict=True)
            # Twice the mean of their squares: one way tells less of it than two do.
            weights = tuple(
                1 / (2 / len(ways) * sum(e * e for e in each) + _LITTLE**2) for each in errors
            )
        right = tuple(value for name in wrong for value in file.prompts[name].following)
        return cls(right, change(wrong), weights)

    def _product(self, values: Iterable[float]) -> float:
        weights = self.weights or itertools.repeat(1.0)
        return math.fsum(w * m * v for w, m, v in zip(weights, self.mistake, values, strict=False))

    @functools.cached_property
    def size(self) -> float:
        """How far the mistake moves the tokens, squared, each by its weight."""
        return self._product(self.mistake)

    def share(self, observed: Sequence[float]) -> float:
        """How much of the mistake is in log-probabilities. Raises ValueError where it changes
        nothing."""
        if not self.size > 0.0:
            raise ValueError("this mistake changes nothing on these prompts")
        return self._product(b - a for a, b in zip(self.right, observed, strict=True)) / self.size

    def noise(self) -> float:
        """The standard deviation of the share that rounding alone gives; infinite where the mistake
        changes nothing."""
        if not self.size > 0.0:
            return math.inf
        return 1 / math.sqrt(self.size) if self.weights else 0.0
