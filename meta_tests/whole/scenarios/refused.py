"""A test to which the server returns an error status, and one that fails without the server."""

import os

import pytest

pytestmark = [pytest.mark.correctness, pytest.mark.applies_to("cpu", "gpu")]


def test_is_refused(client):
    client.get("/no/such/page", cast_to=object)


def test_holds():
    if os.environ.get("SM121_META_BROKEN"):
        raise RuntimeError("the driver is gone")
