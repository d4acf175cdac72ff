"""A stand-in for a GPU, for tests of transfers."""

import pytest

from tests.support.fake_cuda import REPLACED


@pytest.fixture
def fake_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    for module, name, value in REPLACED:
        monkeypatch.setattr(module, name, value)
