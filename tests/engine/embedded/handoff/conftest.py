"""Fixtures for tests of handoffs."""

import pytest


@pytest.fixture(params=["off", "on"])
def overlap(request: pytest.FixtureRequest) -> str:
    setting: str = request.param
    return setting
