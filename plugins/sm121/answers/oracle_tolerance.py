"""The oracle with which a server is compared, and the tolerance of the log-probabilities."""

import importlib.util
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from sm121.answers import oracle_texts
from sm121.answers.oracle_file import OracleFile
from sm121.core import engine_arguments
from sm121.core.level_settings import LogProbabilityTolerance
from sm121.core.model_folder import folder_of
from sm121.core.profile import Profile
from sm121.core.server import Server
from sm121.core.unmet import Fact
from sm121.core.verdict import NotRun

_Bound = TypeVar("_Bound")

#: A token with a log-probability above this counts as likely.
_LIKELY = math.log(0.5)


class _Margins(NamedTuple):
    """The factors between the oracle's own rounding errors and the tolerance of a server.

    The tolerance is the difference between the oracle with and without the engine's rounding,
    multiplied by a margin. The margin is needed because another order of the same roundings gives
    other errors; the largest error varies most.
    """

    mean: float
    #: For the mean over likely tokens.
    likely_mean: float
    largest: float


#: The margins for all fixed prompts. The mean error of correct engines, relative to the oracle's,
#: was 0.77 (vLLM 0.32 on the CPU, canary), 0.94 (the same with gpt-oss's width), and 0.87 (vLLM
#: 0.24, Marlin, the full shape of gpt-oss-120b); of likely tokens 1.0. The largest error was 2.6
#: (generated tokens).
_OF_ALL_PROMPTS = _Margins(mean=1.25, likely_mean=1.5, largest=3.0)
#: The margins for some prompts, whose means vary more: vLLM reached 1.21 with one prompt, and the
#: oracle with independent rounding errors 1.40 (docs/tables/synthetic.md).
_OF_SOME_PROMPTS = _Margins(mean=2.0, likely_mean=2.0, largest=4.0)
#: If rounding causes a larger mean difference than this, in nats, it would hide mistakes. With the
#: shape of gpt-oss-120b, it causes 0.04 (BF16) and 0.055 (W4A8).
_TOO_COARSE = 0.2


@dataclass(frozen=True)
class LogProbabilityDifference:
    """|server - oracle| in nats, over the tokens of a prompt. Position 0 is the second token."""

    max_abs: float
    mean_abs: float
    #: The position of the largest difference.
    worst_position: int
    #: The largest difference over tokens to which the oracle gives a probability above 0.5; 0 if
    #: there are none.
    likely_max_abs: float
    likely_mean_abs: float

    def beyond(self, tolerance: LogProbabilityTolerance, *, means: bool = True) -> list[Fact]:
        """Return the bounds of a tolerance that this difference exceeds.

        Args:
            tolerance: The tolerance.
            means: Whether to also compare the means.

        Returns:
            A fact for each exceeded bound.
        """
        mean = tolerance.mean_abs if means else None
        likely_mean = tolerance.likely_mean_abs if means else None
        limits = (
            ("largest difference", self.max_abs, tolerance.max_abs),
            ("mean difference", self.mean_abs, mean),
            ("largest difference of likely tokens", self.likely_max_abs, tolerance.likely_max_abs),
            ("mean difference of likely tokens", self.likely_mean_abs, likely_mean),
        )
        facts = []
        for name, error, limit in limits:
            if limit is not None and not error <= limit:  # true for NaN, too
                facts.append(Fact(f"{name} at most", value=error, limit=limit, unit="nats"))
        return facts


def compare(observed: Sequence[float], expected: Sequence[float]) -> LogProbabilityDifference:
    """Compare the log-probabilities of the same tokens.

    Args:
        observed: The log-probabilities of the server.
        expected: The log-probabilities of the oracle.

    Returns:
        The difference. A value that is not finite counts as an infinite difference.
    """
    errors = []
    likely = []
    for mine, right in zip(observed, expected, strict=True):
        error = abs(mine - right)
        if not math.isfinite(error):
            error = math.inf
        errors.append(error)
        if right > _LIKELY:
            likely.append(error)
    likely = likely or [0.0]
    worst = max(range(len(errors)), key=errors.__getitem__)
    return LogProbabilityDifference(
        max_abs=errors[worst],
        mean_abs=math.fsum(errors) / len(errors),
        worst_position=worst + 1,
        likely_max_abs=max(likely),
        likely_mean_abs=math.fsum(likely) / len(likely),
    )


@dataclass(frozen=True)
class OracleReference:
    """The oracle's log-probabilities, and the tolerance of an engine."""

    file: OracleFile
    dtype: str
    tolerance: LogProbabilityTolerance
    #: The rounding of the engine's arithmetic; None if the oracle does not model its dtype.
    rounding: str | None


def checkpoint_of(server: Server, intact: Path | None = None) -> Path:
    """Return the checkpoint with which the oracle computes.

    Args:
        server: The server.
        intact: The checkpoint that the server should serve (``--reference``). If None, the
            checkpoint with which the suite started the server.

    Raises:
        NotRun: The checkpoint is unknown or not on this machine, or torch or safetensors is not
            installed.
    """
    configuration = server.configuration
    if configuration is None and intact is None:
        raise NotRun(
            "the oracle needs the checkpoint of the attached server. Give the checkpoint, or "
            "the file that `sm121 golden` made of it, with --reference PATH (and the dtype with "
            "--configuration NAME)"
        )
    if importlib.util.find_spec("torch") is None or importlib.util.find_spec("safetensors") is None:
        raise NotRun("the oracle needs torch and safetensors in the suite's environment")
    if intact is not None:
        return intact
    assert configuration is not None
    folder = folder_of(configuration.model, configuration.variables, configuration.revision)
    if folder is None:
        raise NotRun(
            f"the oracle needs the checkpoint as a folder, but {configuration.model} is no folder "
            "on this machine; give --reference the folder, or the file that `sm121 golden` made "
            "of it"
        )
    return folder


def reference_for(file: OracleFile, server: Server, profile: Profile) -> OracleReference:
    """Return the oracle's file with the tolerance for a server.

    The tolerance for float32 comes from the profile. The tolerance for BF16 is computed from the
    difference between the oracle in exact arithmetic and in BF16. If the server rounds activations
    to few bits, float32 arithmetic sometimes rounds to another value than exact arithmetic. The
    effect of this is added to the profile's tolerance.

    Args:
        file: The oracle's file.
        server: The server.
        profile: The profile.

    Raises:
        NotRun: The profile has no tolerance for the dtype of the server.
    """
    dtype = dtype_of(server, profile)
    formats = "" if file.rounding == "checkpoint" else f", {file.rounding}"
    if dtype in ("auto", "bfloat16"):
        tolerance = computed_tolerance(file, "bf16")
        return OracleReference(file, f"{dtype}, bf16{formats}", tolerance, "bf16")
    table = profile.correctness.log_probability_tolerance
    tolerance = bound_for(table, server, profile, "log_probability_tolerance")
    if dtype == "float32" and dtype in file.rounded:
        tolerance = widened(tolerance, computed_tolerance(file, dtype))
    return OracleReference(file, f"{dtype}{formats}", tolerance, None)


def widened(
    stated: LogProbabilityTolerance, computed: LogProbabilityTolerance
) -> LogProbabilityTolerance:
    """Return the profile's tolerance plus twice the computed one.

    The factor is 2, because the computed tolerance is based on few positions.

    Args:
        stated: The tolerance of the profile.
        computed: The result of `computed_tolerance`.
    """
    return LogProbabilityTolerance(
        max_abs=stated.max_abs + 2 * computed.max_abs,
        mean_abs=stated.mean_abs + 2 * computed.mean_abs,
        source=f"{stated.source}; plus twice this difference: {computed.source}",
    )


def computed_tolerance(file: OracleFile, rounding: str) -> LogProbabilityTolerance:
    """Compute the tolerance for an engine with a rounding, from the prompts of a file.

    If the file has only some of the fixed prompts, the margins are larger.

    Args:
        file: The oracle's file.
        rounding: The name in `OracleFile.rounded`.

    Raises:
        NotRun: The effect of the rounding is so large that a wrong engine would pass.
    """
    exact: list[float] = []
    rounded: list[float] = []
    for name, values in file.rounded[rounding].items():
        exact += file.prompts[name].following
        rounded += values
    difference = compare(rounded, exact)
    has_all = all(name in file.prompts for name, _ in oracle_texts.prompts())
    margins = _OF_ALL_PROMPTS if has_all else _OF_SOME_PROMPTS
    if not difference.mean_abs <= _TOO_COARSE:
        raise NotRun(
            f"rounding as {rounding} moves this checkpoint's log-probabilities by "
            f"{difference.mean_abs:.2g} nats on average; above {_TOO_COARSE:g} a wrong engine "
            "cannot be distinguished from a right one"
        )
    return LogProbabilityTolerance(
        max_abs=margins.largest * difference.max_abs,
        mean_abs=margins.mean * difference.mean_abs,
        likely_max_abs=margins.largest * difference.likely_max_abs or None,
        likely_mean_abs=margins.likely_mean * difference.likely_mean_abs or None,
        source=f"the oracle itself, rounding as {rounding}: {difference.max_abs:.3g} at worst "
        f"and {difference.mean_abs:.3g} on average; times {margins.largest:g} and "
        f"{margins.mean:g} ({margins.likely_mean:g} for the mean of likely tokens)",
    )


def bound_for(table: Mapping[Any, _Bound], server: Server, profile: Profile, name: str) -> _Bound:
    """Return the entry of a profile's table for the dtype of the server.

    Args:
        table: The table, with dtypes as keys.
        server: The server.
        profile: The profile.
        name: The name of the table in ``correctness``.

    Raises:
        NotRun: The table has no entry for the dtype.
    """
    dtype = dtype_of(server, profile)
    for key, bound in table.items():
        if str(key) == dtype:
            return bound
    dtypes = ", ".join(table) or "none"
    raise NotRun(
        f"profile {profile.name} has no correctness.{name} for dtype {dtype} (it has: {dtypes})"
    )


def dtype_of(server: Server, profile: Profile) -> str:
    """Return the dtype that a server was started with.

    Args:
        server: The server.
        profile: The profile. For an attached server, the dtype is that of the profile's
            configuration under test.
    """
    arguments = engine_arguments.parse_options(profile.arguments_of(server.configuration))
    return arguments.get("dtype", "auto")
