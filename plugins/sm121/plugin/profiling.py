"""Fixture for the kernel level: the kernels of some decode steps, by the engine's profiler."""

from __future__ import annotations

import pytest

from sm121.core.server import Server
from sm121.evidence.kernel_profile import KernelProfile
from sm121.run import decode_profile as decode
from sm121.session import target
from sm121.session.session import Session


@pytest.fixture
def decode_profile(conformance: Session, server: Server) -> KernelProfile:
    """Kernels of some decode steps of the server under test; table and trace are in the report."""
    mode = target.profiler_mode(conformance.settings, conformance.profile)
    return decode.take(conformance, server, mode=mode, nsys=conformance.settings.nsys)
