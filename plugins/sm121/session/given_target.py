"""Reads the options about the target: architecture, profile, configuration and model."""

from dataclasses import dataclass
from pathlib import Path

from sm121.core import architecture, profile
from sm121.core.errors import UsageError
from sm121.core.options import Option
from sm121.core.profile import Profile
from sm121.session import given_files


@dataclass(frozen=True)
class GivenTarget:
    """The target that the options name; a field is None if its option was not given."""

    arch: str | None = None
    #: Architectures that ``-m`` names.
    marked: tuple[str, ...] = ()
    profile: Profile | None = None
    #: The configuration of the profile to judge.
    configuration: str | None = None
    #: The checkpoint of a server that the suite starts.
    model: str | None = None
    served_name: str | None = None


def read_options(option: Option, marked: tuple[str, ...], base_url: str | None) -> GivenTarget:
    """Read the options.

    Args:
        option: A function that returns the value of an option.
        marked: Architectures that ``-m`` names.
        base_url: The URL of the attached server; None if the suite starts one.

    Raises:
        UsageError: The architecture, the profile or the checkpoint does not exist.
    """
    return GivenTarget(
        arch=arch(option),
        marked=marked,
        profile=named_profile(option),
        configuration=option("--configuration"),
        model=model(option, base_url),
        served_name=_served_name(option, base_url),
    )


def arch(option: Option) -> str | None:
    """Return the architecture that ``--arch`` names; None without it.

    Args:
        option: A function that returns the value of an option.

    Raises:
        UsageError: The architecture does not exist.
    """
    name = option("--arch")
    if name is None:
        return None
    return architecture.parse(name)


def named_profile(option: Option) -> Profile | None:
    """Return the profile that ``--profile`` names; None without it.

    Args:
        option: A function that returns the value of an option.

    Raises:
        UsageError: The profile does not exist, or is not valid.
    """
    name = option("--profile")
    if not name:
        return None
    return profile.load(name)


def model(option: Option, base_url: str | None) -> str | None:
    """Return the checkpoint that ``--model`` names for a server that the suite starts.

    Args:
        option: A function that returns the value of an option.
        base_url: The URL of the attached server; None if the suite starts one.

    Returns:
        A path or a hub id; None without one, or for an attached server.

    Raises:
        UsageError: The value is neither a checkpoint nor a hub id.
    """
    given: str | None = option("--model")
    if base_url or given is None:
        return None
    place = Path(given)
    if place.is_file() and place.suffix == ".gguf":
        return given
    if place.exists():
        if not given_files.is_checkpoint(place):
            raise UsageError(f"--model {given}: expected a checkpoint folder with config.json")
        return given
    if given.count("/") != 1 or given.startswith(("/", ".", "~")):
        raise UsageError(
            f"--model {given}: expected an existing checkpoint folder or a hub id (owner/name)"
        )
    return given


def _served_name(option: Option, base_url: str | None) -> str | None:
    """Return the model's name on the server. For an attached server, ``--model`` is an alias."""
    name: str | None = option("--served-model-name")
    if not name and base_url:
        name = option("--model")
    return name or None
