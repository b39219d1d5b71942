"""The names of the formats to which a server rounds, in addition to the checkpoint's formats.

`rounding` has the rounding function for each name.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from sm121.core.errors import UsageError

_DENSE = ("mxfp4-ceil", "mxfp4-even", "mxfp4-floor", "fp8-channel")
#: The possible formats of each part.
CHOICES: Mapping[str, tuple[str, ...]] = {
    "qkv": _DENSE,
    "o": _DENSE,
    "lm_head": _DENSE,
    "kv": ("fp8", "fp8-cut"),
    "experts": ("mxfp8", "mxfp8-identity"),
}
#: The formats of a dense layer that also round the layer's inputs.
ROUND_INPUTS = ("fp8-channel",)
#: The name for a server that does not round more than the checkpoint.
CHECKPOINT = "checkpoint"


@dataclass(frozen=True)
class Rounding:
    """The formats and the arithmetic of a server. None stands for the checkpoint's own format."""

    #: The dtype of the arithmetic: ``exact``, ``float32`` or ``bf16``.
    dtype: str = "exact"
    #: The format of the weights of the query, key and value projections.
    qkv: str | None = None
    #: The format of the weight of the output projection.
    o: str | None = None
    lm_head: str | None = None
    #: The format of the KV cache.
    kv: str | None = None
    #: The format of the inputs of the experts' matrices.
    experts: str | None = None

    @classmethod
    def parse(cls, text: str, origin: str = "--rounding") -> "Rounding":
        """Parse a list of formats, in exact arithmetic.

        Args:
            text: A list, for example ``qkv=mxfp4-ceil,o=mxfp4-ceil,kv=fp8``; ``checkpoint`` for
                none.
            origin: The option, for the message.

        Raises:
            UsageError: A part or a format is unknown, or a part is listed twice.
        """
        chosen: dict[str, str] = {}
        entries = [] if text == CHECKPOINT else text.split(",")
        for entry in entries:
            part, _, value = entry.strip().partition("=")
            if value not in CHOICES.get(part, ()) or part in chosen:
                possible = "; ".join(f"{k}={'|'.join(v)}" for k, v in CHOICES.items())
                raise UsageError(
                    f"{origin} {entry.strip()!r}: expected {CHECKPOINT!r} or a list of {possible}"
                )
            chosen[part] = value
        return cls(**chosen)

    @property
    def _chosen(self) -> dict[str, str]:
        """The parts whose format differs from the checkpoint's, with their formats."""
        chosen = {}
        for part in CHOICES:
            value = getattr(self, part)
            if value is not None:
                chosen[part] = value
        return chosen

    @property
    def formats(self) -> str:
        """The list of formats, in the syntax of `parse`."""
        return ",".join(f"{part}={value}" for part, value in self._chosen.items()) or CHECKPOINT

    @property
    def parts_by_base(self) -> dict[str, list[str]]:
        """The rounded parts, by the base of their format: ``mxfp4`` for ``mxfp4-ceil``."""
        parts: dict[str, list[str]] = {}
        for part, value in self._chosen.items():
            parts.setdefault(_base(value), []).append(part)
        return parts

    @property
    def name(self) -> str:
        """A unique name of the rounding."""
        return f"{self.dtype}: {self.formats}"

    def computed_in(self, dtype: str) -> "Rounding":
        """Return the same formats with another dtype of the arithmetic.

        Args:
            dtype: ``exact``, ``float32`` or ``bf16``.
        """
        return replace(self, dtype=dtype)

    @property
    def with_one_mistake(self) -> dict[str, "Rounding"]:
        """Roundings that differ from this one by one mistake each; the keys describe the mistakes.

        A mistake is one part that stays in the checkpoint's format, or that is rounded by another
        rule of the same format.
        """
        others = {}
        for part, value in self._chosen.items():
            others[f"{part}={CHECKPOINT}"] = self._with(part, None)
            for other in CHOICES[part]:
                if other != value and _base(other) == _base(value):
                    others[f"{part}={other}"] = self._with(part, other)
        return others

    def _with(self, part: str, value: str | None) -> "Rounding":
        change: dict[str, Any] = {part: value}
        return replace(self, **change)

    @property
    def of_activations(self) -> bool:
        """Whether the server rounds activations, and not only weights."""
        if self.kv or self.experts:
            return True
        return any(value in ROUND_INPUTS for value in (self.qkv, self.o, self.lm_head))


def _base(value: str) -> str:
    """Return a format without its rule, for example "mxfp4" for "mxfp4-ceil"."""
    return value.partition("-")[0]


#: The checkpoint in exact arithmetic.
EXACT = Rounding()
#: The checkpoint in BF16.
BF16 = Rounding("bf16")
#: BF16 with MXFP8 inputs of the experts.
W4A8 = Rounding("bf16", experts="mxfp8")
