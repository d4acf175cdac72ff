"""The index of blocks against a slow reference, and against the fake engine's blocks by real messages."""

import asyncio
import random
from collections.abc import Hashable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from engine.config import FakeConfig
from engine.fake.engine import FakeEngine
from engine.replicas.publisher.publisher import Publisher, PublisherConfig
from engine.replicas.routing.events import CacheEvent, ClearedEvent, RemovedEvent, StoredEvent
from engine.replicas.routing.index import PrefixIndex
from engine.replicas.routing.subscriber import EventCounts, Subscriber
from tests.support.disaggregated import all_of, request

SIZE = 2
Path = tuple[tuple[str, str], tuple[int, ...]]
"""A block: its namespace, and all tokens up to its end."""


class SlowIndex:
    """Remembers whole prefixes."""

    def __init__(self) -> None:
        self.paths: dict[int, dict[Hashable, Path]] = {}

    def apply(self, replica: int, event: CacheEvent) -> None:
        blocks = self.paths.setdefault(replica, {})
        match event:
            case StoredEvent():
                if event.parent is None:
                    path: Path = (event.namespace, ())
                elif event.parent in blocks:
                    path = blocks[event.parent]
                else:
                    return
                for place, block_hash in enumerate(event.hashes):
                    path = (path[0], path[1] + event.tokens[place * SIZE : (place + 1) * SIZE])
                    blocks[block_hash] = path
            case RemovedEvent(hashes):
                for block_hash in hashes:
                    blocks.pop(block_hash, None)
            case ClearedEvent():
                blocks.clear()

    def overlaps(self, tokens: list[int], namespace: tuple[str, str]) -> dict[int, int]:
        found = {}
        for replica, blocks in self.paths.items():
            length, paths = 0, set(blocks.values())
            while length + SIZE <= len(tokens) and (namespace, tuple(tokens[: length + SIZE])) in paths:
                length += SIZE
            if length:
                found[replica] = length
        return found


HASHES, TOKENS = st.integers(0, 12), st.integers(0, 1)
NAMESPACES = st.sampled_from([("", ""), ("salt", ""), ("", "lora")])


@st.composite
def stored_events(draw: st.DrawFn) -> StoredEvent:
    hashes = tuple(draw(st.lists(HASHES, min_size=1, max_size=3, unique=True)))
    tokens = tuple(draw(st.lists(TOKENS, min_size=SIZE * len(hashes), max_size=SIZE * len(hashes))))
    return StoredEvent(hashes, draw(st.none() | HASHES), tokens, SIZE, draw(NAMESPACES))


EVENTS = stored_events() | st.builds(RemovedEvent, st.lists(HASHES, max_size=4).map(tuple)) | st.just(ClearedEvent())


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 3), EVENTS), max_size=30),
    st.lists(TOKENS, max_size=9),
    NAMESPACES,
    st.integers(0, 3),
)
def test_the_index_equals_a_slow_one(
    said: list[tuple[int, CacheEvent]], prompt: list[int], namespace: tuple[str, str], forgotten: int
) -> None:
    index, slow = PrefixIndex(), SlowIndex()
    for replica, event in said:
        index.apply(replica, event)
        slow.apply(replica, event)
    assert index.overlaps(prompt, namespace) == slow.overlaps(prompt, namespace)
    assert {replica: index.blocks(replica) for replica in slow.paths} == {
        replica: len(blocks) for replica, blocks in slow.paths.items()
    }
    index.remove(forgotten)
    slow.paths.pop(forgotten, None)
    assert index.overlaps(prompt, namespace) == slow.overlaps(prompt, namespace)


@given(st.lists(st.tuples(st.integers(0, 1), EVENTS), max_size=30))
def test_removed_replicas_leave_nothing_in_the_index(said: list[tuple[int, CacheEvent]]) -> None:
    index = PrefixIndex()
    for replica, event in said:
        index.apply(replica, event)
    for replica in (0, 1):
        index.remove(replica)
    assert len(index) == 0
    assert index.block_sizes == set()


def test_blocks_on_lower_tiers_count_less() -> None:
    """Also those that are told by their hashes alone, when they move."""
    index, prompt = PrefixIndex(), [7] * 8 * SIZE
    for replica in range(3):
        index.apply(replica, StoredEvent(tuple(range(8)), None, tuple(prompt), SIZE))
    for replica, medium in ((1, "CPU_PINNED"), (2, "DISK")):
        tier = (0, medium)
        assert index.apply(replica, StoredEvent((4, 5, 6, 7), None, (), SIZE, tier=tier)) == 0
        assert index.overlaps(prompt)[replica] == 8 * SIZE, "the device has them too"
        index.apply(replica, RemovedEvent((4, 5, 6, 7)))
    assert index.overlaps(prompt) == {0: 8 * SIZE, 1: 7 * SIZE, 2: 5 * SIZE}
    index.apply(2, StoredEvent((4, 5), None, (), SIZE, tier=(0, "CPU")))
    assert index.overlaps(prompt)[2] == 6 * SIZE, "the faster tier counts"
    index.apply(2, RemovedEvent((4, 5), (0, "CPU")))
    index.apply(2, StoredEvent((4, 5, 6, 7), 3, tuple(prompt[: 4 * SIZE]), SIZE))
    assert index.overlaps(prompt)[2] == 8 * SIZE
    index.apply(1, RemovedEvent((5,), (0, "CPU_PINNED")))
    assert index.overlaps(prompt)[1] == 5 * SIZE, "a quarter of two tokens is none"
    assert index.apply(1, StoredEvent((99,), None, (), SIZE, tier=(0, "DISK"))) == 1, "nobody said what it holds"
    index.apply(1, ClearedEvent())
    for replica in range(3):
        index.remove(replica)
    assert len(index) == 0


def test_blocks_without_a_known_parent_are_left_out() -> None:
    index = PrefixIndex()
    assert index.apply(0, StoredEvent((2, 3), 1, (1, 2, 3, 4), SIZE)) == 2
    assert index.overlaps([1, 2, 3, 4]) == {}
    assert index.apply(0, StoredEvent((4,), 3, (5, 6), SIZE)) == 1


def test_hashes_are_the_same_signed_and_unsigned() -> None:
    index = PrefixIndex()
    index.apply(0, StoredEvent(((1 << 64) - 5,), None, (1, 2), SIZE))
    index.apply(0, StoredEvent((7,), -5, (3, 4), SIZE))
    assert index.overlaps([1, 2, 3, 4, 5]) == {0: 4}
    index.apply(0, RemovedEvent((-5,)))
    assert index.overlaps([1, 2, 3, 4, 5]) == {}
    index.apply(0, StoredEvent((-5,), None, (1, 2), SIZE))
    assert index.overlaps([1, 2, 3, 4, 5]) == {0: 4}


def test_tiers_and_ranks_are_kept_apart() -> None:
    index = PrefixIndex()
    index.apply(0, StoredEvent((1,), None, (1, 2), SIZE))
    index.apply(0, StoredEvent((1,), None, (1, 2), SIZE, tier=(0, "CPU")))
    index.apply(0, StoredEvent((1,), None, (1, 2), SIZE, tier=(1, None)))
    index.apply(0, RemovedEvent((1,)))
    assert index.overlaps([1, 2]) == {0: 2}
    index.apply(0, ClearedEvent(0))
    assert index.overlaps([1, 2]) == {0: 2}
    index.apply(0, ClearedEvent(1))
    assert index.overlaps([1, 2]) == {}


def test_blocks_with_images_are_no_blocks_of_text() -> None:
    index = PrefixIndex()
    index.apply(0, StoredEvent((1, 2), None, (1, 2, 3, 4), SIZE, media=(None, b"image")))
    assert index.overlaps([1, 2, 3, 4]) == {0: 2}


def test_its_memory_is_bounded() -> None:
    index = PrefixIndex(max_blocks=16)
    for block in range(1000):
        index.apply(0, StoredEvent((block,), None, (block, block), SIZE))
    assert index.blocks(0) <= 16
    assert len(index) <= 16
    assert index.overlaps([999, 999]) == {0: 2}
    assert index.overlaps([1, 1]) == {}


@pytest.mark.parametrize("seed", [1, 2])
async def test_the_index_agrees_with_the_engine_after_many_requests(seed: int) -> None:
    """Prompts with shared starts, far more than the blocks can hold; then every prefix is asked of both."""
    rng = random.Random(seed)
    config = FakeConfig(block_size=4, num_blocks=60, max_num_seqs=8, context_length=256)
    engine = FakeEngine(config)
    await engine.start()
    publisher = Publisher(engine, PublisherConfig(endpoint="tcp://127.0.0.1:0", replay_endpoint="tcp://127.0.0.1:0"))
    publisher.start()
    channel = publisher.zmq.channels[0]
    index = PrefixIndex()
    unattached: list[int] = []

    def apply(event: CacheEvent) -> None:
        unattached.append(index.apply(3, event))

    subscriber = Subscriber(channel.endpoint, channel.replay_endpoint, "", 0, apply, EventCounts())
    following = asyncio.create_task(subscriber.run())
    try:
        prompts = await _ask(engine, rng)
        for number, (prompt, salt) in enumerate(prompts[-60:]):
            await _settled(publisher, subscriber)
            wanted = replace(request(f"again{number}", (*prompt, 3), max_tokens=1), cache_salt=salt)
            foretold = index.overlaps(prompt, (salt, "")).get(3, 0)
            report = (await all_of(engine, wanted))[0].prompt
            assert report is not None
            assert report.cached_tokens == foretold
        assert not any(unattached)
    finally:
        following.cancel()
        await asyncio.wait([following])
        await publisher.close()
        await engine.close()


async def _ask(engine: FakeEngine, rng: random.Random) -> list[tuple[tuple[int, ...], str]]:
    """400 requests one after the other; returns their prompts and salts."""
    prompts = []
    for number in range(400):
        start = [rng.randrange(3) + 3 for _ in range(8 * rng.randrange(4))]
        prompts.append(
            (tuple(start + [rng.randrange(3, 500) for _ in range(rng.randrange(1, 40))]), rng.choice(["", "", "salt"]))
        )
        wanted = request(f"r{number}", prompts[-1][0], max_tokens=rng.randrange(1, 12))
        await all_of(engine, replace(wanted, cache_salt=prompts[-1][1]))
    return prompts


async def _settled(publisher: Publisher, subscriber: Subscriber) -> None:
    """Return when no events have come for a moment, and all that were published have arrived."""
    published = -1
    async with asyncio.timeout(10):
        while published != publisher.ranks[0].messages or subscriber.expected < published:
            published = publisher.ranks[0].messages
            await asyncio.sleep(0.02)
