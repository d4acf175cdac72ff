"""The engine's process, spawned before the server has imported its modules."""

from typing import Any

import pytest

from engine.process.child import SpareHost
from engine.process.engine_service import ENGINE
from engine.process.service import Interface
from server.process import spare
from server.settings import Settings


@pytest.fixture
def spawned(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The hints of the processes that were spawned."""
    hints: list[str] = []

    async def spawn(interface: Interface[Any, Any], hint: str) -> str:
        assert interface is ENGINE
        hints.append(hint)
        if hint == "cuda:7":
            raise OSError("no room for a process")
        return "a process"

    monkeypatch.setattr(SpareHost, "spawn", spawn)
    return hints


@pytest.mark.parametrize(
    ("settings", "hints"),
    [
        ({}, ["auto"]),
        ({"device": "cpu"}, ["cpu"]),
        ({"disaggregation_mode": "decode"}, ["auto"]),
        ({"engine": "fake"}, []),
        ({"engine": "trtllm"}, []),
        ({"engine_process": False}, []),
        ({"engine_address": "ipc:///tmp/engine"}, []),
        ({"disaggregation_mode": "router"}, []),
        ({"disaggregation_mode": "encode"}, []),
    ],
)
async def test_only_an_embedded_engine_of_our_own_is_spawned_ahead(
    spawned: list[str], settings: dict[str, Any], hints: list[str]
) -> None:
    found = await spare.spare_host(Settings(**settings))
    assert (spawned, found is not None) == (hints, bool(hints))


async def test_without_room_for_a_process_serving_says_so(spawned: list[str]) -> None:
    assert await spare.spare_host(Settings(device="cuda:7")) is None
    assert spawned == ["cuda:7"]
