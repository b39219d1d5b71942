"""The options for the target of a run, and for the part of the suite to run."""

from dataclasses import dataclass
from pathlib import Path

from sm121.core import profile
from sm121.core.option_values import PATH, checked_by
from sm121.core.options import flag, option
from sm121.core.profile import Profile


@dataclass(frozen=True)
class GivenTarget:
    """The target that the options name; a field is None if its option was not given.

    `sm121.session.given_target` reads the options, and checks `model` and `served_name` with
    ``--base-url``.
    """

    #: The value of ``--arch``, an option of `pytest_gpu_arch`.
    arch: str | None = None
    #: Architectures that ``-m`` names.
    marked: tuple[str, ...] = ()
    profile: Profile | None = option(
        "--profile",
        checked_by(profile.load, wrong=("no-such-profile", "no-such-folder/profile.toml")),
        metavar="NAME|PATH",
        help="profile with the requirements and gates of the target (default: by architecture)",
    )
    #: The configuration of the profile to judge.
    configuration: str | None = option(
        "--configuration",
        metavar="NAME",
        help=(
            "configuration of the profile that the run tests (default: the first one in the "
            "profile's list fastest that the build supports, or else the profile's under_test)"
        ),
    )
    #: The checkpoint of a server that the suite starts.
    model: str | None = option(
        "--model",
        metavar="PATH|ID",
        help=(
            "checkpoint to serve (default: the profile's); with --base-url: the model's name on "
            "the server"
        ),
    )
    served_name: str | None = option(
        "--served-model-name",
        metavar="NAME",
        help=(
            "name of the model on the server (default: the profile's; with --base-url: the only "
            "model of the server)"
        ),
    )
    waiver_file: Path | None = option(
        "--waivers",
        PATH,
        metavar="PATH",
        help="file with waivers: known failures that do not count until a date (default: none)",
    )


@dataclass(frozen=True)
class PlanOptions:
    """The options that select the checks to run. The hooks of pytest read them as well."""

    plan: str | None = option(
        "--plan",
        metavar="quick|merge|full",
        help=(
            "test plan to run: quick, merge, full, or another plan of the profile (default: "
            "quick; but full if a path, -k or -m names levels or tests, with --certify, and with "
            "--shard)"
        ),
    )
    slow: bool = flag(
        "--slow",
        help=(
            "also run the tests that take minutes each, such as compiling FlashInfer's modules "
            "with nvcc"
        ),
    )
    certify: bool = flag(
        "--certify",
        help=(
            "make a certificate: the run fails if a required check is skipped, deselected or not "
            "proven"
        ),
    )


@dataclass(frozen=True)
class PartOptions:
    """The options that divide a run, or continue one. The hooks of pytest read them as well."""

    shard: str | None = option(
        "--shard",
        metavar="I/N",
        help=(
            "run part I of N parts of the tests; all tests of one server configuration are in "
            "the same part. `sm121 merge DIR...` merges the reports of the parts"
        ),
    )
    resume: bool = flag(
        "--resume",
        help=(
            "continue the killed or interrupted run in --report-dir, without its finished checks "
            "of the kernel and correctness levels and its finished cells of the matrix"
        ),
    )
