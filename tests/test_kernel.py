"""Kernel: what ran is what was asked for.

When the kernel path contradicts what was asked for, numbers of that configuration are INVALID.
"""

from __future__ import annotations

import pytest

from sm121.evidence import requirement
from sm121.evidence.kernel_path import read_log

pytestmark = [pytest.mark.kernel, pytest.mark.applies_to("cpu", "gpu")]


def test_kernel_path_is_the_required_one(server, kernel_path, profile):
    """Attention, MoE and KV layout as the profile requires; no fallback, no unknown variable."""
    if server.log is None:
        pytest.skip("NOT_RUN: no log of the attached server; give --server-log")
    wrong = requirement.contradictions(
        profile.kernel_path, kernel_path, server.log, profile.under_test
    )
    assert not wrong, "; ".join(wrong) + f". Evidence: {server.log}"


def test_kernel_path_of_the_baseline_is_the_required_one(conformance, profile):
    """The same of the configuration that everything is compared with."""
    log = conformance.log_of(profile.baseline)
    if log is None:
        pytest.skip("NOT_RUN: the smoke level starts the baseline, and it was not started")
    wrong = requirement.contradictions(profile.kernel_path, read_log(log), log, profile.baseline)
    assert not wrong, "; ".join(wrong) + f". Evidence: {log}"
