"""Parts of a worker that need Dynamo's package but no graph."""

import asyncio
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("dynamo.llm", reason="ai-dynamo-runtime is not installed (constraints-dev.txt, Linux)")

from dynamo.llm.exceptions import EngineShutdown, HttpError, InvalidArgument, Unknown

from engine.errors import ContextOverflow, EngineDied, EngineError, EngineFailure, EngineNotReady, QueueFull
from engine.kv_events import Created, KvEvent, Removed, Stored, StoredBlock, UniqueToken
from routers.dynamo.convert import CANCELLED
from routers.dynamo.encode_worker import EncodeWorker
from routers.dynamo.engine_worker import _EventRank
from routers.dynamo.worker import reasoning_parser, tool_parser, translated
from routers.state import ReplicaState
from tests.routers.dynamo.test_handoffs import StandInContext
from tests.support.waiting import slowness


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (ContextOverflow("too long"), InvalidArgument),
        (QueueFull("full"), HttpError),
        (EngineNotReady("starting"), EngineShutdown),
        (EngineDied("died"), EngineShutdown),
        (EngineFailure("bug"), Unknown),
    ],
)
def test_errors_become_dynamos(error: EngineError, expected: type[Exception]) -> None:
    found = translated(error)
    assert type(found) is expected and str(error) in str(found)
    assert getattr(found, "code", 503) == 503


def test_the_frontend_parses_as_we_do_if_it_can() -> None:
    assert tool_parser("auto", "hermes") == "hermes"
    assert tool_parser("auto", "a family that Dynamo lacks") == ""
    assert (tool_parser("", "hermes"), tool_parser("mistral", "hermes")) == ("", "mistral")
    assert reasoning_parser("auto", "qwen3") == "qwen3"
    with pytest.raises(EngineFailure, match="no parser of reasoning named hermes; it has basic"):
        reasoning_parser("hermes", "")


class Publisher:
    """Stands in for Dynamo's `KvEventPublisher`, which needs a graph."""

    def __init__(self) -> None:
        self.batches: list[list[dict[str, object]]] = []

    def publish_batch(self, events: list[dict[str, object]]) -> None:
        self.batches.append(events)


def block(key: int, level: int = 0) -> StoredBlock:
    return StoredBlock(key, (UniqueToken(1), UniqueToken(2)), cache_level=level)


def test_events_tell_what_is_on_the_device() -> None:
    publisher = Publisher()
    rank = _EventRank(publisher, 2)  # type: ignore[arg-type]

    def told(*data: object, first: int = 0) -> list[dict[str, object]]:
        for number, each in enumerate(data, first):
            rank.add(KvEvent(number, each, 64))  # type: ignore[arg-type]
        before = len(publisher.batches)
        rank.send()
        return [event for batch in publisher.batches[before:] for event in batch]

    stored = {"type": "stored", "token_ids": [1, 2, 1, 2], "num_block_tokens": [2, 2], "block_hashes": [7, 8]}
    created = Created((4,))
    assert told(created, Stored(None, (block(7), block(8)))) == [{**stored, "parent_hash": None}]
    salted = told(Stored(8, (block((1 << 64) - 1),), cache_salt="s"), first=2)
    assert [(event["block_hashes"], event["cache_salt"]) for event in salted] == [([-1], "s")]
    assert told(Removed((8, 99)), first=3) == [{"type": "removed", "block_hashes": [8]}]
    assert told(Stored(None, (block(5, level=1),)), first=4) == [], "on the host"
    again = told(created, Stored(None, (block(3),)))
    assert {*again[0]["block_hashes"]} == {7, -1}, "a new engine has none of the old one's blocks"  # type: ignore[misc]
    assert again[1]["block_hashes"] == [3]


async def test_images_of_a_request_that_is_stopped_are_not_encoded_further() -> None:
    begun, ended = asyncio.Event(), asyncio.Event()

    class Images:
        async def load(self, refs: object) -> list[Any]:
            begun.set()
            try:
                return await asyncio.get_running_loop().create_future()
            finally:
                ended.set()

    parts: dict[str, Any] = {"service": SimpleNamespace(healthy=True, counting=lambda _: nullcontext())}
    parts |= {"graph": None, "replica": ReplicaState(model_name="m"), "card": None, "images": Images(), "offered": None}
    worker = EncodeWorker(**parts, seconds=60, drain_seconds=0)
    context: Any = StandInContext()
    asking = asyncio.ensure_future(anext(worker._generate({"token_ids": [1]}, context)))
    async with asyncio.timeout(20 * slowness()):
        await begun.wait()
        context.stop_generating()
        assert await asking == CANCELLED
        await ended.wait()
