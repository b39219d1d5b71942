"""Check whether an attached server serves the profile's model; if not, refuse it or warn."""

from collections.abc import Mapping, Sequence

from sm121.core import profile
from sm121.core.errors import UsageError
from sm121.core.profile import Profile
from sm121.core.server import Server
from sm121.engines import served_model
from sm121.engines.attached import another_model
from sm121.evidence import kernel_path
from sm121.machine import roofline
from sm121.session.settings import Settings

#: The keys of config.json that together distinguish one model from another.
_SHAPE = ("hidden_size", "num_hidden_layers", "num_local_experts", "vocab_size")


def _names_of(server: Server) -> list[str]:
    """Return the model's names: the served name, the root in `/v1/models`, and the name in the log.

    The log is only used if it is proven to be the log of this server.
    """
    names = [server.endpoint.served_name, server.root]
    if server.log is not None and server.reader is not None:
        names.append(kernel_path.read_log(server.log, server.reader).log.model)
    return [name for name in names if name is not None]


def refuse_another(server: Server, url: str, chosen: Profile) -> None:
    """Refuse a server whose model's names or files show another model than the profile's.

    This is only called if the command line does not name the model.

    Args:
        server: The server.
        url: Its URL.
        chosen: The profile of the run.

    Raises:
        UsageError: The server has another model.
    """
    names = _names_of(server)
    expected = chosen.model.served_name
    known = {profile.load(name).model.served_name for name in profile.shipped()}
    other = served_model.contradiction(names, expected, known)
    if other is None and not any(served_model.is_named(name, expected) for name in names):
        other = _of_another_shape(names, chosen)
    if other is None:
        return
    serves = server.endpoint.served_name
    if other != serves:
        serves = f"{serves} ({other})"
    refusal = another_model(url, expected, serves)
    raise UsageError(f"{refusal}, or write a profile for it: sm121 init-profile --base-url {url}")


def _of_another_shape(names: Sequence[str], chosen: Profile) -> str | None:
    """Return the last name whose config.json shows another model than the profile's, or None."""
    own = roofline.read_config(chosen.model.id)
    if own is None:
        return None
    other = None
    for name in names:
        config = roofline.read_config(name)
        if config is not None and _shape(config) != _shape(own):
            other = name
    return other


def _shape(config: Mapping[str, object]) -> list[object]:
    return [config.get(name) for name in _SHAPE]


def name_remark(server: Server, settings: Settings, chosen: Profile) -> str | None:
    """Return the remark on the name of an attached server's model.

    Args:
        server: The server.
        settings: The settings of the run.
        chosen: The profile of the run.

    Returns:
        The remark if the server lists the model under several names, or if no name shows the
        profile's model; None if the user gave the name.
    """
    expected = chosen.model.served_name
    if settings.target.served_name is not None:
        return None
    name = server.endpoint.served_name
    is_shown = any(served_model.is_named(each, expected) for each in _names_of(server))
    option = "Give --served-model-name NAME to require a name"
    if len(server.names) > 1:
        judged = "" if is_shown else f" The model is judged as {expected}."
        return (
            f"model: the server lists one model as {', '.join(server.names)}; the requests use "
            f"{name!r}.{judged} {option}"
        )
    if is_shown:
        return None
    return (
        f"model: the only model of the server is {name!r}, and it is judged as {expected}, "
        f"although its name does not show that. {option}"
    )
