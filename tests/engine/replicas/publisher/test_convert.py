"""Conversion of KV-cache events to the wire format, byte by byte."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from engine.kv_events import Cleared, Created, EventDiff, KvEvent, Removed, Stored, Updated
from engine.replicas.publisher.convert import Converter
from engine.replicas.publisher.messages import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    EventBatch,
    WireEvent,
    decode,
    encode,
    signed,
)
from engine.replicas.routing import events as router
from tests.support.publisher import BLOCK, block, stored

CREATED = KvEvent(0, Created((8, 0)), 512)


def converted(*events: KvEvent) -> list[WireEvent]:
    """The messages for an event, after the first message of a new engine."""
    converter = Converter(BLOCK)
    said = [one for event in (CREATED, *events) for one in converter.convert(event)]
    assert said[0] == AllBlocksCleared()
    return said[1:]


def test_the_bytes_of_a_message() -> None:
    """Put together by hand from the MessagePack specification."""
    events: list[WireEvent] = [
        BlockStored([1, -5], None, [7, 8, 300, 70000], 2),
        BlockRemoved([1 << 40]),
        AllBlocksCleared(),
    ]
    expected = (
        b"\x93"  # array of 3
        b"\xcb\x3f\xf8\x00\x00\x00\x00\x00\x00"  # float64 1.5
        b"\x93"  # array of 3 events
        b"\x85"  # map of 5
        b"\xa4type\xabBlockStored"
        b"\xacblock_hashes\x92\x01\xfb"
        b"\xb1parent_block_hash\xc0"
        b"\xa9token_ids\x94\x07\x08\xcd\x01\x2c\xce\x00\x01\x11\x70"
        b"\xaablock_size\x02"
        b"\x82\xa4type\xacBlockRemoved\xacblock_hashes\x91\xcf\x00\x00\x01\x00\x00\x00\x00\x00"
        b"\x81\xa4type\xb0AllBlocksCleared"
        b"\x03"  # rank
    )
    payload = encode(EventBatch(1.5, events, 3))
    assert payload == expected
    assert decode(payload) == EventBatch(1.5, events, 3)


def test_media_keys_and_salts_of_blocks_are_published() -> None:
    keys = (
        {"type": "mm_key", "hash": "ff" * 32, "start_offset": 0},
        {"type": "mm_key", "hash": "0a" * 32, "start_offset": 3},
    )
    (said,) = converted(KvEvent(1, Stored(7, (block(1), block(2, mm_keys=keys)), "tenant"), 512))
    assert msgspec.msgpack.decode(encode(said)) == {
        "type": "BlockStored",
        "block_hashes": [1, 2],
        "parent_block_hash": 7,
        "token_ids": [1, 2, 3, 4, 1, 2, 3, 4],
        "block_size": BLOCK,
        "cache_salt": "tenant",
        "block_mm_infos": [
            None,
            {"mm_objects": [{"mm_hash": (1 << 64) - 1, "offsets": []}, {"mm_hash": 0x0A0A0A0A0A0A0A0A, "offsets": []}]},
        ],
        "extra_keys": [None, ["ff" * 32, "0a" * 32]],
    }


def test_the_salt_is_published_as_by_vllm_and_read_by_our_router() -> None:
    """In `extra_keys` of a sequence's first block alone, and only for those who do not read `cache_salt`."""
    salted = [*converted(KvEvent(1, Stored(None, (block(1), block(2)), "tenant"), 512))]
    (first,) = [event for event in salted if isinstance(event, BlockStored)]
    assert first.extra_keys == [["tenant"], None]
    payload = encode(EventBatch(0.0, [first]))
    (read,) = router.decode(payload)
    assert isinstance(read, router.StoredEvent) and read.namespace == ("tenant", "") and read.media == ()
    plain = [*converted(KvEvent(1, Stored(None, (block(1),), ""), 512))]
    assert all(event.extra_keys is None for event in plain if isinstance(event, BlockStored))


def test_an_image_named_by_its_user_has_a_hash_too() -> None:
    def mm_hash(name: str) -> int:
        (said,) = converted(KvEvent(1, Stored(None, (block(1, mm_keys=({"hash": name, "start_offset": 0},)),)), 512))
        assert isinstance(said, BlockStored)
        assert said.block_mm_infos is not None
        assert said.block_mm_infos[0] is not None
        return said.block_mm_infos[0].mm_objects[0].mm_hash

    assert mm_hash("my cat") == mm_hash("my cat") != mm_hash("my dog")


@pytest.mark.parametrize(
    ("unsigned", "expected"),
    [(0, 0), (5, 5), ((1 << 63) - 1, (1 << 63) - 1), (1 << 63, -(1 << 63)), ((1 << 64) - 1, -1)],
)
def test_hashes_are_signed(unsigned: int, expected: int) -> None:
    assert signed(unsigned) == expected


def test_parents_are_signed_too() -> None:
    (said,) = converted(stored(1, 1 << 63, parent=(1 << 64) - 2))
    assert (said.block_hashes, said.parent_block_hash) == ([-(1 << 63)], -2)  # type: ignore[attr-defined]


def test_the_walk_stops_at_a_block_that_is_not_full() -> None:
    said = converted(
        KvEvent(1, Stored(None, (block(1), block(2, (1, 2)), block(3))), 512),
        KvEvent(2, Stored(None, (block(4, (9,)),)), 512),
        KvEvent(3, Removed((2, 3, 4)), 512),
        KvEvent(4, Removed((1, 2)), 512),
    )
    assert said == [BlockStored([1], None, [1, 2, 3, 4], BLOCK), BlockRemoved([1, 2])]


def test_a_block_that_became_full_is_told_and_removed() -> None:
    said = converted(KvEvent(1, Stored(None, (block(1, (1,)),)), 512), stored(2, 1), KvEvent(3, Removed((1,)), 512))
    assert [type(one) for one in said] == [BlockStored, BlockRemoved]


def test_only_the_widest_window_is_told() -> None:
    converter = Converter(BLOCK)
    events = [KvEvent(0, Created((8,)), 128), KvEvent(1, Created((8,)), 512), KvEvent(2, Created((8,)), 256)]
    events += [stored(3, 1, window=128), stored(4, 1), KvEvent(5, Removed((1,)), 128), stored(6, 2, window=256)]
    said = [one for event in events for one in converter.convert(event)]
    assert said == [AllBlocksCleared(), BlockStored([1], None, [1, 2, 3, 4], BLOCK)]


def moved(event_id: int, block_hash: int, new: int, old: int) -> KvEvent:
    return KvEvent(event_id, Updated(block_hash, EventDiff(new, old)), 512)


def test_priorities_are_not_told_and_clearing_is() -> None:
    priority = KvEvent(2, Updated(1, None, EventDiff(1, 0)), 512)
    said = converted(stored(1, 1), priority, KvEvent(3, Cleared(), 512))
    assert [type(one) for one in said] == [BlockStored, AllBlocksCleared]


def test_a_block_that_moves_is_told_by_its_hash_and_medium() -> None:
    """As vLLM's connectors tell it: without tokens, stored at the new medium before it is removed from the old one."""
    said = converted(stored(1, 1), moved(2, 1, 1, 0), moved(3, 1, 2, 1), KvEvent(4, Removed((1,)), 512))
    assert said[1:] == [
        BlockStored([1], None, [], BLOCK, medium="CPU_PINNED"),
        BlockRemoved([1]),
        BlockStored([1], None, [], BLOCK, medium="DISK"),
        BlockRemoved([1], "CPU_PINNED"),
        BlockRemoved([1], "DISK"),
    ]


def test_a_block_that_comes_back_to_the_device_is_told_whole() -> None:
    said = converted(stored(1, 1), moved(2, 1, 1, 0), stored(3, 1), KvEvent(4, Removed((1,)), 512))
    assert said[3:] == [said[0], BlockRemoved([1], "CPU_PINNED"), BlockRemoved([1])]


def test_blocks_of_one_event_are_told_by_medium() -> None:
    blocks = tuple(replace(block(number), cache_level=level) for number, level in ((1, 0), (2, 0), (3, 2)))
    said = converted(KvEvent(1, Stored(None, blocks), 512), KvEvent(2, Removed((1, 3)), 512))
    assert [(one.block_hashes, one.parent_block_hash, one.medium) for one in said[:2]] == [
        ([1, 2], None, None),
        ([3], 2, "DISK"),
    ]
    assert said[2:] == [BlockRemoved([1]), BlockRemoved([3], "DISK")]


@pytest.mark.parametrize(
    "later",
    [
        pytest.param([CREATED, stored(1, 5)], id="from 0 again"),
        pytest.param([stored(1, 5)], id="its first events lost"),
        pytest.param([KvEvent(3, Created((8,)), 512), stored(4, 5)], id="ids that go on"),
    ],
)
def test_a_new_engine_has_nothing_of_the_one_before(later: list[KvEvent]) -> None:
    said = converted(stored(1, 1), stored(2, 2), *later)
    assert [type(one) for one in said] == [BlockStored, BlockStored, AllBlocksCleared, BlockStored]


def test_a_new_engine_may_have_a_narrower_window() -> None:
    said = converted(stored(1, 1), KvEvent(0, Created((8,)), 256), stored(1, 2, window=256))
    assert [type(one) for one in said] == [BlockStored, AllBlocksCleared, BlockStored]


def test_lost_events_are_counted_by_gaps_in_their_ids() -> None:
    converter = Converter(BLOCK)
    for event in (CREATED, stored(1, 1), stored(4, 2, window=128), stored(5, 3), stored(10, 4), CREATED, stored(1, 1)):
        list(converter.convert(event))
    assert converter.lost == 2 + 4


@given(
    st.lists(
        st.tuples(st.integers(0, (1 << 64) - 1), st.lists(st.integers(0, 1 << 31), min_size=1, max_size=BLOCK)),
        min_size=1,
    )
)
def test_told_blocks_are_full_and_come_in_order(blocks: list[tuple[int, list[int]]]) -> None:
    said = converted(KvEvent(1, Stored(None, tuple(block(*one) for one in blocks)), 512))
    full = next((index for index, (_, tokens) in enumerate(blocks) if len(tokens) < BLOCK), len(blocks))
    expected = [
        BlockStored(
            [signed(name) for name, _ in blocks[:full]], None, [t for _, ts in blocks[:full] for t in ts], BLOCK
        )
    ]
    assert said == (expected if full else [])
    assert decode(encode(EventBatch(0.0, said))).events == said
