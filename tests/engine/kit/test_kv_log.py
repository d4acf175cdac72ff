"""Late consumers of KV-cache events get the current state, and without consumers no events accumulate."""

import asyncio
import random
from collections.abc import Sequence

from engine.config import FakeConfig
from engine.create import create_engine
from engine.kit.kv_log import KvEventLog
from engine.kv_events import Cleared, Created, EventDiff, KvEvent, Removed, Stored, Updated
from engine.media import MediaSpan
from engine.replicas.publisher.convert import Converter
from engine.replicas.publisher.messages import AllBlocksCleared
from tests.support.publisher import BLOCK, Books, block, generate, stored

WINDOW = 512


async def told(log: KvEventLog) -> list[KvEvent]:
    """The initial events of a new consumer."""
    log.close()
    return [event async for batch in log.batches() for event in batch]


def log_of(*events: KvEvent) -> KvEventLog:
    log = KvEventLog()
    for event in events:
        log.put(event)
    return log


async def test_a_late_consumer_learns_on_which_tier_a_block_is() -> None:
    log = log_of(stored(0, 1), stored(1, 2), KvEvent(2, Updated(1, EventDiff(2, 0)), WINDOW))
    log.put(KvEvent(3, Updated(2, None, EventDiff(1, 0)), WINDOW))
    data = [event.data for event in await told(log)]
    levels = {one.block_hash: one.cache_level for stored in data if isinstance(stored, Stored) for one in stored.blocks}
    assert levels == {1: 2, 2: 0}


def chains(events: Sequence[KvEvent]) -> list[tuple[int | None, int]]:
    return [
        (event.data.parent_hash, block.block_hash)
        for event in events
        if isinstance(event.data, Stored)
        for block in event.data.blocks
    ]


async def test_a_late_consumer_gets_the_cached_blocks_and_then_every_event() -> None:
    events = [
        KvEvent(0, Created((9,)), WINDOW),
        stored(1, 1, 2, 3),
        stored(2, 4, parent=2),
        KvEvent(3, Removed((3,)), WINDOW),
    ]
    log = log_of(*events)
    batches = log.batches()
    first = await anext(batches)
    assert first[0] == KvEvent(0, Created((9,)), WINDOW)
    assert chains(first) == [(None, 1), (1, 2), (2, 4)]
    log.put(stored(4, 5, parent=4))
    assert [event.event_id for event in first + await anext(batches)] == [0, 1, 2, 3, 4]
    await batches.aclose()


async def test_initial_events_repeat_the_media_keys_and_salt_of_blocks() -> None:
    keys = ({"type": "mm_key", "hash": "a" * 64, "start_offset": 0},)
    data = Stored(7, (block(8, (5, 6, 7, 8), mm_keys=keys),), "salt")
    events = await told(log_of(KvEvent(0, data, WINDOW)))
    assert [event.data for event in events] == [Created(()), data]


async def test_parents_come_before_children_that_are_older() -> None:
    log = log_of(KvEvent(0, Created((9,)), WINDOW), stored(1, 1, 2, 3), KvEvent(2, Removed((1,)), WINDOW), stored(3, 1))
    assert chains(await told(log)) == [(None, 1), (1, 2), (2, 3)]


async def test_windows_and_ranks_have_books_of_their_own() -> None:
    log = log_of(
        *(KvEvent(i, Created((9,)), window, 0) for i, window in enumerate((WINDOW, 64))),
        stored(2, 1, rank=0),
        stored(3, 1, window=64, rank=0),
        KvEvent(4, Removed((1,)), 64, 0),
        KvEvent(0, Created((9,)), WINDOW, 1),
        stored(1, 2, rank=1),
        KvEvent(2, Cleared(), WINDOW, 1),
    )
    events = await told(log)
    assert [(event.attention_dp_rank, event.window_size, type(event.data), event.event_id) for event in events] == [
        (0, WINDOW, Created, 2),
        (0, 64, Created, 3),
        (0, WINDOW, Stored, 4),
        (1, WINDOW, Created, 2),
    ]


async def test_a_consumer_that_missed_events_starts_from_the_current_state() -> None:
    """A converter that has missed events starts again from the state of the cache. It reports that all is cleared, then
    the stored blocks, and counts no gap.
    """
    converter, log = Converter(BLOCK), log_of(KvEvent(0, Created((9,)), WINDOW), stored(1, 1))
    batches = log.batches()
    heard = await anext(batches)
    await batches.aclose()
    for event_id in range(2, 50):
        log.put(stored(event_id, event_id))
    said = [said for event in heard + await told(log) for said in converter.convert(event)]
    assert [type(event) for event in said].count(AllBlocksCleared) == 2
    assert isinstance(said[2], AllBlocksCleared)
    assert len(said) == 3 + 49
    assert converter.lost == 0


async def test_events_do_not_accumulate_without_consumers() -> None:
    engine = create_engine(FakeConfig(num_blocks=64, block_size=BLOCK, context_length=128))
    await engine.start()
    draw, images = random.Random(0), list[MediaSpan]()
    for start in range(0, 400, 40):
        await asyncio.gather(
            *(generate(engine, str(start + i), draw.choices(range(3, 300), k=60), 5, images=images) for i in range(40))
        )
    log = engine.events  # type: ignore[attr-defined]
    assert not log.consumers
    books, converter = Books(), Converter(BLOCK)
    await engine.close()
    async for batch in engine.kv_events():
        for event in batch:
            for said in converter.convert(event):
                if not isinstance(said, AllBlocksCleared):
                    books.hashes |= set(said.block_hashes)
    assert 40 < len(books.hashes) <= 64
