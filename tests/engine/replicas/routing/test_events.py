"""Events from the wire: every form of a message, and a subscriber whose publisher loses messages and restarts."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.replicas.routing import subscriber
from engine.replicas.routing.events import SEQUENCE, CacheEvent, ClearedEvent, RemovedEvent, StoredEvent, decode
from engine.replicas.routing.subscriber import EventCounts, Subscriber
from tests.support.routing import Sender, stored


def payload(*events: Any, rank: int | None = 0) -> bytes:
    return msgspec.msgpack.encode([1.5, list(events), rank])


@pytest.mark.parametrize(
    ("event", "expected"),
    [
        (stored([5, 6], 4, [1, 2, 3, 4]), StoredEvent((5, 6), 4, (1, 2, 3, 4), 2)),
        (["BlockStored", [5, 6], 4, [1, 2, 3, 4], 2], StoredEvent((5, 6), 4, (1, 2, 3, 4), 2)),
        (
            ["BlockStored", [5], None, [1, 2], 2, None, "GPU", "adapter"],
            StoredEvent((5,), None, (1, 2), 2, ("", "adapter")),
        ),
        ({**stored([5], None, [1, 2]), "cache_salt": "s"}, StoredEvent((5,), None, (1, 2), 2, ("s", ""))),
        ({**stored([5], None, [1, 2]), "medium": "CPU"}, StoredEvent((5,), None, (1, 2), 2, tier=(0, "CPU"))),
        (stored([5, 6], None, [1, 2, 3]), StoredEvent((5,), None, (1, 2), 2)),
        ({**stored([5], None, [1, 2]), "group_idx": 0}, StoredEvent((5,), None, (1, 2), 2)),
        ({"type": "BlockRemoved", "block_hashes": [-7]}, RemovedEvent((-7,))),
        (["BlockRemoved", [7], "CPU"], RemovedEvent((7,), (0, "CPU"))),
        ({"type": "AllBlocksCleared"}, ClearedEvent()),
        (["AllBlocksCleared"], ClearedEvent()),
        ({**stored([5], None, [1, 2]), "group_idx": 1}, None),
        ({**stored([5], None, [1, 2]), "locality": "REMOTE"}, None),
        ({**stored([5], None, [1, 2]), "kv_cache_spec_sliding_window": 512}, None),
        ({"type": "Ignored"}, None),
        (["SomethingNew", 1, 2], None),
    ],
)
def test_messages_are_read(event: Any, expected: Any) -> None:
    assert decode(payload(event)) == ([] if expected is None else [expected])


def test_ranks_have_blocks_of_their_own() -> None:
    assert decode(payload(["AllBlocksCleared"], ["BlockRemoved", [1]], rank=2)) == [
        ClearedEvent(2),
        RemovedEvent((1,), (2, None)),
    ]
    assert decode(payload(["AllBlocksCleared"], rank=None)) == [ClearedEvent(0)]


def test_images_are_told_apart() -> None:
    infos = [None, {"mm_objects": [{"mm_hash": 7, "offsets": [[0, 1]]}]}]
    (event,) = decode(payload({**stored([5, 6], None, [1, 2, 3, 4]), "block_mm_infos": infos}))
    assert isinstance(event, StoredEvent)
    assert event.media[0] is None
    assert event.media[1] is not None


@pytest.mark.parametrize(
    "event",
    [
        7,
        [],
        [7],
        {**stored([5], None, [1, 2]), "block_size": 0},
        {**stored([5], None, [1, 2]), "block_size": "2"},
        {**stored([5], None, [1, 2]), "token_ids": [[1, 2]]},
        {**stored([5], None, [1, 2]), "token_ids": [1 << 40, 1]},
        {**stored([5], None, [1, 2]), "parent_block_hash": "x"},
        ["BlockRemoved", 5],
        ["BlockRemoved"],
    ],
)
def test_nonsense_is_refused(event: Any) -> None:
    with pytest.raises(ValueError, match=r"must be|out of range|must have"):
        decode(payload(event))


@given(st.binary(max_size=60))
def test_any_bytes_are_read_or_refused(data: bytes) -> None:
    try:
        events = decode(data)
    except ValueError:
        return
    assert all(isinstance(event, StoredEvent | RemovedEvent | ClearedEvent) for event in events)


class Seen:
    """The events of a publisher since it began."""

    def __init__(self) -> None:
        self.events: list[CacheEvent] = []
        self.counts = EventCounts()
        self.restarts = 0

    def apply(self, event: CacheEvent) -> None:
        if event == ClearedEvent():
            self.restarts += 1
            self.events.clear()
        self.events.append(event)


@asynccontextmanager
async def following(sender: Sender, replays: bool = True) -> AsyncIterator[Seen]:
    seen = Seen()
    subscriber = Subscriber(sender.endpoint, sender.replay if replays else "", "", 0, seen.apply, seen.counts)
    task = asyncio.create_task(subscriber.run())
    try:
        yield seen
    finally:
        task.cancel()
        await asyncio.wait([task])


async def hashes_seen(seen: Seen, expected: list[int]) -> None:
    async with asyncio.timeout(20):
        while [block for event in seen.events if isinstance(event, StoredEvent) for block in event.hashes] != expected:  # noqa: ASYNC110
            await asyncio.sleep(0.01)


@pytest.fixture(params=[False, True], ids=["three frames", "four frames"])
async def sender(request: pytest.FixtureRequest) -> AsyncIterator[Sender]:
    sender = Sender(four_frames=request.param)
    yield sender
    await sender.close()


async def test_earlier_messages_are_requested_again(sender: Sender) -> None:
    for number in range(5):
        await sender.send(stored([number]))
    async with following(sender) as seen:
        await hashes_seen(seen, [0, 1, 2, 3, 4])
        await sender.subscribed()
        await sender.send(stored([5]))
        await hashes_seen(seen, [0, 1, 2, 3, 4, 5])
    assert seen.counts.replayed == 5
    assert not seen.counts.gaps


async def test_a_gap_is_closed_in_order(sender: Sender) -> None:
    async with following(sender) as seen:
        await sender.subscribed()
        await sender.send(stored([0]))
        await hashes_seen(seen, [0])
        await sender.send(stored([1]), lost=True)
        await sender.send(stored([2]), lost=True)
        await sender.send(stored([3]))
        await hashes_seen(seen, [0, 1, 2, 3])
    assert seen.counts.missed == 2


async def test_a_last_message_that_was_lost_is_noticed(sender: Sender, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subscriber, "QUIET_SECONDS", 0.1)
    async with following(sender) as seen:
        await sender.subscribed()
        await sender.send(stored([0]))
        await sender.send(stored([1]), lost=True)
        await hashes_seen(seen, [0, 1])


async def test_a_publisher_that_is_back_begins_anew() -> None:
    first = Sender()
    async with following(first) as seen:
        for number in range(3):
            await first.send(stored([number]))
        await hashes_seen(seen, [0, 1, 2])
        await first.close()
        second = Sender(port=first.port, replay_port=first.replay_port)
        for number in range(10, 14):
            await second.send(stored([number]))
        await hashes_seen(seen, [10, 11, 12, 13])
        await second.close()
    assert seen.restarts == 2


async def test_without_a_replay_it_goes_on_after_a_gap() -> None:
    sender = Sender(replays=False)
    async with following(sender, replays=False) as seen:
        await sender.subscribed()
        await sender.send(stored([0]))
        await sender.send(stored([1]), lost=True)
        await sender.send(stored([2]))
        await hashes_seen(seen, [0, 2])
        assert seen.counts.missed == 1
    await sender.close()


async def test_a_replay_that_nobody_answers_is_given_up(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    monkeypatch.setattr(subscriber, "REPLAY_SECONDS", 0.1)
    sender = Sender(replays=False)
    async with following(sender) as seen:
        await sender.subscribed()
        await asyncio.sleep(0.2)
        await sender.send(stored([0]))
        await hashes_seen(seen, [0])
    await sender.close()
    assert "missed events stay missed; not asked again for 60 s" in caplog.text


async def test_nonsense_is_counted_and_passed_over(sender: Sender) -> None:
    async with following(sender) as seen:
        await sender.subscribed()
        await sender.send(stored([0]))
        await hashes_seen(seen, [0])
        await sender.send_raw(b"only one")
        await sender.send_raw(b"", b"short", b"")
        await sender.send_raw(b"", SEQUENCE.pack(1), b"\xc1")
        sender.number = 2
        await sender.send(stored([2]))
        await hashes_seen(seen, [0, 2])
    assert seen.counts.malformed == 3
