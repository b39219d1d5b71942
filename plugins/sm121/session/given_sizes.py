"""The sizes of the profile that options replace: ``--pp``, ``--requests``, ``--crowd``."""

from collections.abc import Sequence
from dataclasses import dataclass

from sm121.core.errors import OptionError
from sm121.core.profile import Profile
from sm121.core.profile_fields import Gate, Sourced

#: The units of gates that apply only to the profile's own prompt length.
_OF_A_PROMPT = ("tok/s", "ms")


@dataclass(frozen=True)
class GivenSizes:
    """Sizes that replace those of the profile; a field is None if its option was not given."""

    #: The length of the measured prompt in tokens.
    prompt_tokens: int | None = None
    #: The number of requests in the load of the stress level.
    requests: int | None = None
    #: The number of requests of the stress load that run at the same time.
    crowd: int | None = None

    def of(self, chosen: Profile) -> Profile:
        """Return the profile with these sizes.

        With another prompt length, the gates on rates and times are left out, because they apply to
        the prompt of the profile.

        Args:
            chosen: The profile.

        Raises:
            OptionError: The number of concurrent requests exceeds the number of requests.
        """
        update: dict[str, object] = {}
        if self.prompt_tokens not in (None, chosen.performance.prompt_tokens):
            performance = chosen.performance
            update["performance"] = performance.model_copy(
                update={
                    "prompt_tokens": self.prompt_tokens,
                    "gates": _without_rates(performance.gates),
                }
            )
            configurations = {}
            for name, configuration in chosen.configurations.items():
                gates = _without_rates(configuration.gates)
                configurations[name] = configuration.model_copy(update={"gates": gates})
            update["configurations"] = configurations
        loads = {}
        for name, value in (("load_requests", self.requests), ("load_concurrency", self.crowd)):
            if value is not None:
                loads[name] = Sourced(value=value, source="--requests, --crowd")
        stress = chosen.stress.model_copy(update=loads)
        requests = stress.load_requests.value
        if self.crowd is not None and self.crowd > requests:
            raise OptionError(
                "--crowd", f"{self.crowd}: expected at most the {requests:g} requests of the load"
            )
        if self.requests is not None and stress.load_concurrency.value > requests:
            loads["load_concurrency"] = Sourced(value=requests, source="--requests")
            stress = chosen.stress.model_copy(update=loads)
        if loads:
            update["stress"] = stress
        return chosen.model_copy(update=update) if update else chosen

    def deviations(self, judged: Profile) -> list[str]:
        """Return the effects of the options on the verdict, as texts for the last line of a run.

        Args:
            judged: The profile with these sizes.
        """
        lines = []
        has_rates = any(gate.unit in _OF_A_PROMPT for gate in judged.performance.gates)
        if self.prompt_tokens is not None and not has_rates:
            lines.append(f"--pp {self.prompt_tokens}: the gates on rates and times are left out")
        if self.requests is not None or self.crowd is not None:
            stress = judged.stress
            lines.append(
                f"--requests, --crowd: the load was {stress.load_requests.value:g} requests, "
                f"{stress.load_concurrency.value:g} at the same time"
            )
        return lines


def _without_rates(gates: Sequence[Gate]) -> tuple[Gate, ...]:
    return tuple(gate for gate in gates if gate.unit not in _OF_A_PROMPT)
