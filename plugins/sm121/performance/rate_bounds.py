"""The bounds of decode rates: this machine's memory bandwidth over the bytes read per token."""

import functools
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from sm121.checkpoint import canary
from sm121.core import errors
from sm121.machine import roofline, stream_bandwidth
from sm121.machine.box import Device
from sm121.machine.roofline import Ceiling, Traffic
from sm121.run.run import Run

#: Smaller buffers are not timed: their bandwidth is that of the caches.
_LEAST_BYTES = 1 << 16


class TokenCosts(NamedTuple):
    """The bytes that are read for one token.

    Attributes:
        served: The bytes of the server under test; None if its formats are not known.
        least: The smallest number of bytes over all quantisations of the model.
    """

    served: Traffic | None
    least: Traffic


@dataclass
class RateBounds:
    """The bounds of the decode rates of a run."""

    run: Run
    #: The device as it was read before the measurements; None if it is not known.
    device: Device | None = None
    #: The CPU's bandwidth in GB/s. The keys are the numbers of bytes that are read, because a small
    #: model fits into the caches.
    _by_size: dict[int, float] = field(default_factory=dict)

    def bandwidth(self, needed_bytes: float) -> float | None:
        """Return the bandwidth of reading a buffer repeatedly.

        Args:
            needed_bytes: The size of the buffer.

        Returns:
            The bandwidth in GB/s; None if it is not known.
        """
        device = self.device
        if device is None:
            return None
        best = device.bandwidth_best_gb_s
        if device.device != "cpu" or needed_bytes >= device.buffer_mib * 2**20:
            return best
        size = max(int(needed_bytes), _LEAST_BYTES)
        if size not in self._by_size:
            try:
                self._by_size[size] = stream_bandwidth.read_bandwidth(size).best_gb_s
            except errors.Sm121Error:
                return None
        return max(self._by_size[size], best)

    @functools.cached_property
    def model(self) -> dict[str, Any] | None:
        """The config.json of the served model, or of the profile's model; None without both."""
        model = self.run.profile.model.id
        twin = canary.twin_of(model)
        if twin is not None:
            model = str(canary.folder() / twin)
        return roofline.read_config(self.run.record.file.engine.model) or roofline.read_config(
            model
        )

    def costs(self, depth: int) -> TokenCosts | None:
        """Return the bytes that are read for a token.

        Args:
            depth: The number of tokens before it in the context.

        Returns:
            The bytes; None if the model is not known.
        """
        profile = self.run.profile
        path = self.run.record.file.engine.path
        started = self.run.configurations.by_name.get(profile.under_test)
        if self.model is None:
            return None
        try:
            if profile.model.reads is not None:
                stored = roofline.stored(profile.model.reads.weights, self.model, depth)
                return TokenCosts(stored, stored)
            least = roofline.traffic(self.model, depth=depth, formats=roofline.SMALLEST)
            least = roofline.spread(least, profile.nodes, self.model)
            if started is None and path.moe is None:
                return TokenCosts(None, least)
            arguments = started.arguments if started is not None else ()
            served = roofline.cost(profile, profile.under_test, depth, self.model, arguments, path)
            return TokenCosts(served, least)
        except errors.Sm121Error:
            return None

    def ceiling(self, cost: Traffic | None) -> Ceiling | None:
        """Return the bound of a decode rate.

        Args:
            cost: The bytes of a token; None if they are not known.

        Returns:
            The bound; None if the bytes or the bandwidth are not known.
        """
        if cost is None:
            return None
        gb_s = self.bandwidth(cost.total)
        if gb_s is None:
            return None
        reference = self.run.profile.box
        tolerance = reference.roofline_tolerance if reference is not None else 1.0
        return Ceiling(cost, gb_s, tolerance)
