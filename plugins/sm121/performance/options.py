"""The options that select what is measured."""

from dataclasses import dataclass

from sm121.core.option_values import numbers, whole_number
from sm121.core.options import choice, flag, option
from sm121.measure.plan import MOST_ROUNDS, Sizes


@dataclass(frozen=True)
class MeasuringOptions:
    """The options of the group "measuring".

    The server's context bounds the lengths in tokens (`sm121.plugin.performance`).
    """

    prompt_tokens: int | None = option(
        "--pp",
        whole_number(),
        metavar="N",
        help=(
            "length of the measured prompt in tokens, for example 512 (default: the profile's "
            "length). With another length than the profile's, the gates on rates and times are "
            "left out, because they apply to the profile's length"
        ),
    )
    depths: tuple[int, ...] = option(
        "--depth",
        numbers("1024"),
        default=(),
        metavar="LIST",
        help=(
            "measure additionally with these numbers of context tokens before the prompt, for "
            "example 1024,65536. To measure only with some numbers, use --depths"
        ),
    )
    only_depths: tuple[int, ...] | None = option(
        "--depths",
        numbers("0,4096"),
        metavar="LIST",
        help=(
            "measure only with these numbers of context tokens, for example 0,4096 (default: those "
            "of the plan). To add a number, use --depth. Gates at other depths are not judged, and "
            "the last line lists them"
        ),
    )
    generated_tokens: tuple[int, ...] = option(
        "--tg",
        numbers("32,128", least=2),
        default=(),
        metavar="LIST",
        help=(
            "additional numbers of generated tokens, for example 16,256 (default: only the "
            "profile's numbers)"
        ),
    )
    concurrency: tuple[int, ...] = option(
        "--concurrency",
        # The bound is the largest default of vLLM's --max-num-seqs.
        numbers("4,8", least=1, most=1024, counted="streams at the same time"),
        default=(),
        metavar="LIST",
        help=(
            "additional numbers of concurrent streams whose rates are measured, for example 3,6 "
            "(default: only the profile's numbers); --crowd sets the number for the stress level"
        ),
    )
    rounds: int | None = option(
        "--rounds",
        whole_number(MOST_ROUNDS, "rounds of each measurement"),
        metavar="N",
        help=(
            "minimum number of rounds of each measurement; a gate that cannot decide yet "
            "measures more (default: the profile's number)"
        ),
    )
    percentiles: bool = flag(
        "--percentiles",
        help=(
            "send as many requests as the gates on percentiles need: several hundred for p99 "
            "(--certify does the same)"
        ),
    )
    #: The mode of the profiler.
    kernel_trace: str = choice(
        "--kernel-trace",
        ("auto", "keep", "restart", "off"),
        help=(
            "profile some decode steps to list their kernels. keep: continue to use the server "
            "afterwards; restart: start a new server afterwards, so that no number is measured "
            "on the profiled server; off: do not profile; auto: as the profile sets it (default: "
            "auto)"
        ),
    )

    @property
    def sizes(self) -> Sizes:
        """The sizes of the measuring plan that the user requests."""
        return Sizes(
            generated_tokens=self.generated_tokens,
            only_depths=self.only_depths,
            depths=self.depths,
            concurrency=self.concurrency,
            rounds=self.rounds,
        )
