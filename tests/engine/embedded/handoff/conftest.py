"""Fixtures for tests of handoffs."""

from collections.abc import Iterator

import pytest

from tests.support.loaded_models import loaded_once


@pytest.fixture(params=["off", "on"])
def overlap(request: pytest.FixtureRequest) -> str:
    setting: str = request.param
    return setting


@pytest.fixture(scope="module", autouse=True)
def few_models() -> Iterator[None]:
    """The two cores of a pair never share one."""
    with loaded_once(copies=2):
        yield
