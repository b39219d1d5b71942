"""What a server stores or feeds in fewer bits than the checkpoint has, by name. `rounding` has what
each name means."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from sm121.core.errors import UsageError

_DENSE = ("mxfp4-ceil", "mxfp4-even", "mxfp4-floor", "fp8-channel")
CHOICES: Mapping[str, tuple[str, ...]] = {
    "qkv": _DENSE,
    "o": _DENSE,
    "lm_head": _DENSE,
    "kv": ("fp8", "fp8-cut"),
    "experts": ("mxfp8", "mxfp8-identity"),
}
#: Formats of a dense layer that round its inputs as well.
ROUND_INPUTS = ("fp8-channel",)
#: The name of a server that rounds nothing beyond the checkpoint.
CHECKPOINT = "checkpoint"


@dataclass(frozen=True)
class Rounding:
    """A way to compute. A format that is None is the checkpoint's own."""

    #: The dtype of the arithmetic: ``exact``, ``float32`` or ``bf16``.
    dtype: str = "exact"
    qkv: str | None = None
    o: str | None = None
    lm_head: str | None = None
    kv: str | None = None
    experts: str | None = None

    @classmethod
    def parse(cls, text: str, origin: str = "--rounding") -> "Rounding":
        """The formats of a list such as ``qkv=mxfp4-ceil,o=mxfp4-ceil,kv=fp8``, in exact
        arithmetic; ``checkpoint`` for none. Raises UsageError: it says what is possible."""
        chosen: dict[str, str] = {}
        for part in [] if text == CHECKPOINT else text.split(","):
            key, _, value = part.strip().partition("=")
            if value not in CHOICES.get(key, ()) or key in chosen:
                possible = "; ".join(f"{k}={'|'.join(v)}" for k, v in CHOICES.items())
                raise UsageError(
                    f"{origin} {part.strip()!r}: expected {CHECKPOINT!r} or a list of {possible}"
                )
            chosen[key] = value
        return cls(**chosen)

    @property
    def formats(self) -> str:
        """The list that `parse` reads."""
        chosen = {key: getattr(self, key) for key in CHOICES}
        return ",".join(f"{k}={v}" for k, v in chosen.items() if v is not None) or CHECKPOINT

    @property
    def name(self) -> str:
        """What tells this way from every other."""
        return f"{self.dtype}: {self.formats}"

    def computed_in(self, dtype: str) -> "Rounding":
        """The same formats in another arithmetic."""
        return replace(self, dtype=dtype)

    @property
    def others(self) -> dict[str, "Rounding"]:
        """What a server with a mistake may compute instead, by what it says of one part: that part
        as in the checkpoint, or with another rule of the same format."""
        chosen = {key: getattr(self, key) for key in CHOICES}
        return {
            f"{key}={value or CHECKPOINT}": self._with(key, value)
            for key, name in chosen.items()
            if name is not None
            for value in (None, *CHOICES[key])
            if value != name and (value or name).partition("-")[0] == name.partition("-")[0]
        }

    def _with(self, part: str, value: str | None) -> "Rounding":
        change: dict[str, Any] = {part: value}
        return replace(self, **change)

    @property
    def of_activations(self) -> bool:
        """Whether it rounds what is computed, and not weights alone."""
        return bool(self.kv or self.experts or {self.qkv, self.o, self.lm_head} & {*ROUND_INPUTS})


EXACT = Rounding()
BF16 = Rounding("bf16")
W4A8 = Rounding("bf16", experts="mxfp8")
