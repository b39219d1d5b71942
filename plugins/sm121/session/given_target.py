"""Checks the options about the target: architecture, profile, configuration and model."""

from dataclasses import replace
from pathlib import Path

from sm121.core import architecture, options
from sm121.core.errors import UsageError
from sm121.core.model_folder import is_checkpoint
from sm121.core.options import Option
from sm121.session.options import GivenTarget


def read_options(option: Option, marked: tuple[str, ...], base_url: str | None) -> GivenTarget:
    """Read the options.

    Args:
        option: A function that returns the value of an option.
        marked: Architectures that ``-m`` names.
        base_url: The URL of the attached server; None if the suite starts one.

    Raises:
        UsageError: The architecture, the profile or the checkpoint does not exist.
    """
    named_arch = arch(option)
    given = options.read(GivenTarget, option)
    return replace(
        given,
        arch=named_arch,
        marked=marked,
        model=_model(given.model, base_url),
        served_name=_served_name(given, base_url),
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


def _model(given: str | None, base_url: str | None) -> str | None:
    """Return the path or the hub id of the checkpoint for a server that the suite starts.

    It is None for an attached server. Raises UsageError if it is neither of them.
    """
    if base_url or given is None:
        return None
    place = Path(given)
    if place.is_file() and place.suffix == ".gguf":
        return given
    if place.exists():
        if not is_checkpoint(place):
            raise UsageError(f"--model {given}: expected a checkpoint folder with config.json")
        return given
    if given.count("/") != 1 or given.startswith(("/", ".", "~")):
        raise UsageError(
            f"--model {given}: expected an existing checkpoint folder or a hub id (owner/name)"
        )
    return given


def _served_name(given: GivenTarget, base_url: str | None) -> str | None:
    """Return the model's name on the server. For an attached server, ``--model`` is an alias."""
    if given.served_name is None and base_url:
        return given.model
    return given.served_name
