"""What can be wrong under load, each with who to ask (``fixtures/stress/faults.toml``). The class
of a crash bundle comes from here where the server's own log has no cause."""

from dataclasses import dataclass

from sm121.core import data_file, errors


class FaultKinds(data_file.DataTable):
    """The whole file."""

    gravest: tuple[str, ...]
    owners: dict[str, str]


_KINDS = data_file.load("stress/faults.toml", FaultKinds)
#: Who to ask, or what to look at, by the kind of fault.
OWNERS = _KINDS.owners


@dataclass(frozen=True)
class Fault:
    """One thing that is wrong."""

    kind: str
    text: str

    def __post_init__(self) -> None:
        if self.kind not in OWNERS:
            raise ValueError(f"expected a kind of fault, got {self.kind!r}")

    def __str__(self) -> str:
        return f"{self.kind}: {self.text}"


class UnderLoad(errors.Sm121Error, AssertionError):
    """The server did not stand a load. ``faults``: the gravest kinds first, then in order."""

    def __init__(self, load: str, faults: list[Fault], count: int) -> None:
        self.what = load
        gravest = _KINDS.gravest
        self.faults = faults = sorted(
            faults, key=lambda f: gravest.index(f.kind) if f.kind in gravest else len(gravest)
        )
        listed = "; ".join(str(fault) for fault in faults[:3])
        more = f" (and {len(faults) - 3} more)" if len(faults) > 3 else ""
        of = f" of {count} requests" if count else ""
        super().__init__(f"{load}: required no fault, seen {len(faults)}{of}: {listed}{more}")

    @property
    def kind(self) -> str:
        """The class of all of it."""
        return self.faults[0].kind
