"""What a run judges."""

from dataclasses import dataclass, field

from sm121.core.profile import Profile
from sm121.engines.installed import Installed


@dataclass(frozen=True)
class Target:
    """What a run judges. ``obstacle`` says why it cannot run here; None when it can."""

    arch: str
    #: As it judges: a managed engine's release is known, an attached one's when it is probed.
    profile: Profile | None
    obstacle: str | None
    engine: Installed = field(default_factory=Installed)
