"""Reads the options about the verdict: waivers, trusted run, certificate."""

from dataclasses import dataclass
from pathlib import Path

from sm121.core import waivers
from sm121.core.errors import UsageError
from sm121.core.options import Option
from sm121.core.waivers import Waiver
from sm121.run import stored_benchmarks
from sm121.session import trusted_runs
from sm121.session.trusted_runs import Trusted


@dataclass(frozen=True)
class GivenJudging:
    """How the run is judged."""

    waivers: tuple[Waiver, ...] = ()
    against: Trusted | None = None
    certify: bool = False


def read_options(option: Option, started_in: Path, waiver_file: Path | None) -> GivenJudging:
    """Read the options.

    Args:
        option: A function that returns the value of an option.
        started_in: The folder to which paths of options are relative.
        waiver_file: The file of ``--waivers``; None for the file that ships with the suite.

    Raises:
        UsageError: A file is not valid, or the run does not exist.
    """
    return GivenJudging(
        waivers=waivers.load(waiver_file),
        against=_against(option, started_in),
        certify=option("--certify"),
    )


def _against(option: Option, started_in: Path) -> Trusted | None:
    """Return the trusted run that ``--against`` names. It must not be in this report folder."""
    named = option("--against")
    if named is None:
        return None
    if named != trusted_runs.TRUSTED:
        run = started_in / named
        report = started_in / option("--report-dir")
        if run.resolve().is_relative_to(report.resolve()):
            raise UsageError(
                f"--against {run}: expected a run in another folder, because this run writes its "
                "report there. Choose another folder with --report-dir, or store the trusted run "
                "with `sm121 trust`"
            )
        named = str(run)
    storage = stored_benchmarks.storage_folder(option("--benchmark-storage"), started_in)
    return trusted_runs.load(named, storage)
