"""KV-cache events over ZMQ: frames, replay, ranks, and what happens when nobody listens or too slowly."""

import asyncio
import itertools
import random
import time
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

import msgspec
import psutil
import pytest
import zmq
import zmq.asyncio

from engine.config import FakeConfig
from engine.create import create_engine
from engine.errors import EngineFailure
from engine.fake.engine import FakeEngine
from engine.kv_events import Created, KvEvent, Removed
from engine.replicas.publisher.messages import signed
from engine.replicas.publisher.zmq_sink import ZmqChannel, of_rank
from tests.support.publisher import ANYWHERE, BLOCK, Books, followers, generate, publishing, replayed, stored


@pytest.fixture
async def engine() -> AsyncIterator[Any]:
    fake = create_engine(FakeConfig(num_blocks=64, block_size=BLOCK, context_length=128))
    await fake.start()
    yield fake
    await fake.close()


class Source(FakeEngine):
    """A fake engine whose events are the test's."""

    def __init__(self, ranks: int = 1) -> None:
        super().__init__(FakeConfig(block_size=BLOCK))
        self.queue: asyncio.Queue[list[KvEvent]] = asyncio.Queue()
        self._ranks = ranks

    @property
    def info(self) -> Any:
        return msgspec.structs.replace(super().info, data_parallel_size=self._ranks)

    async def kv_events(self) -> AsyncGenerator[list[KvEvent], None]:
        while True:
            yield await self.queue.get()


async def settled(condition: Any, seconds: float = 20.0) -> None:
    async with asyncio.timeout(seconds):
        while not condition():  # noqa: ASYNC110 - what is waited for has no event
            await asyncio.sleep(0.005)


async def test_a_message_has_three_frames(engine: Any) -> None:
    async with publishing(engine, topic="kv") as publisher:
        with zmq.asyncio.Context.instance().socket(zmq.SUB) as subscriber:
            subscriber.setsockopt(zmq.SUBSCRIBE, b"kv")
            subscriber.connect(publisher.zmq.channels[0].endpoint)
            names = itertools.count()
            while not await subscriber.poll(50):  # until the subscription has arrived
                await generate(engine, f"{next(names)}", [next(names) + 100] * BLOCK)
            first = publisher.ranks[0].messages
            await generate(engine, "a", range(10, 19), max_tokens=4)
            number = b""
            while number != first.to_bytes(8, "big"):
                topic, number, payload = await asyncio.wait_for(subscriber.recv_multipart(), 20)
            assert topic == b"kv"
            seconds, events, rank = msgspec.msgpack.decode(payload)
            assert seconds == pytest.approx(time.time(), abs=60)
            assert rank == 0
            assert events[0]["token_ids"] == [*range(10, 18)]
            assert events[0]["parent_block_hash"] is None
            *_, payload = await asyncio.wait_for(subscriber.recv_multipart(), 20)
            (event,) = msgspec.msgpack.decode(payload)[1]
            # Completed while decoding: the prompt's last token and the first ones of the output.
            assert event["token_ids"] == [18, 10, 11, 12]
            assert event["parent_block_hash"] == events[0]["block_hashes"][-1]


async def test_followers_that_join_late_or_miss_messages_catch_up(engine: Any) -> None:
    async with publishing(engine) as publisher, followers(publisher) as (early,):
        for number in range(20):
            await generate(engine, str(number), [number + 10] * 9)
        await early.follow()
        async with followers(publisher) as (late,):
            names = itertools.count()
            while not late.payloads:  # until the subscription has arrived
                await generate(engine, f"more{next(names)}", [next(names) + 100] * 9)
                await late.follow(0.05)
            assert late.payloads.keys() == set(range(publisher.ranks[0].messages))
            del late.payloads[5], late.payloads[publisher.ranks[0].messages - 1]  # as if they had been missed
            assert await late.catch_up(5) == publisher.ranks[0].messages - 5
            assert len(late.payloads) == publisher.ranks[0].messages
        await early.follow()
        assert early.payloads == late.payloads
        assert publisher.zmq.channels[0].replayed > 20


async def test_replay_begins_where_it_is_asked_to_and_with_what_is_kept() -> None:
    channel = ZmqChannel(ANYWHERE, ANYWHERE, "", capacity=10)
    try:
        assert await replayed(channel.replay_endpoint, 0) == []
        for number in range(25):
            channel.send(b"%d" % number)
        kept = [(number, b"%d" % number) for number in range(15, 25)]
        for start, expected in (
            (0, kept),
            (14, kept),
            (15, kept),
            (20, kept[5:]),
            (24, kept[9:]),
            (25, []),
            (1 << 63, []),
        ):
            assert await replayed(channel.replay_endpoint, start) == expected, start
    finally:
        channel.close()


async def test_a_follower_that_is_later_than_the_buffer_gets_the_whole_state(engine: Any) -> None:
    async with publishing(engine, buffer=10) as publisher:
        channel, books = publisher.zmq.channels[0], Books()
        await generate(engine, "hot", range(10, 50))
        for number in range(30):
            await generate(engine, str(number), [number + 100] * 5)
        await settled(lambda: channel.sequence > 30)
        assert len(await replayed(channel.replay_endpoint, channel.sequence - 5)) == 5
        assert channel.whole_from == 0, "who missed a little gets that"
        last = channel.sequence
        assert len(await replayed(channel.replay_endpoint, 0)) == 10
        await settled(lambda: channel.sequence > last)
        assert channel.whole_from == last
        await asyncio.gather(*(replayed(channel.replay_endpoint, 0) for _ in range(5)))
        await generate(engine, "more", [9] * 9)
        await settled(lambda: channel.sequence > last + 1)
        assert channel.whole_from == last, "once is enough, while that is kept"
        for _, payload in await replayed(channel.replay_endpoint, last):
            for event in msgspec.msgpack.decode(payload)[1]:
                books.apply(event)
        assert books.hashes == {signed(value) for value in engine.block_hashes}
        assert len(books.hashes) > 30
        assert publisher.failure is None


async def test_nonsense_is_not_answered() -> None:
    channel = ZmqChannel(ANYWHERE, ANYWHERE, "", capacity=10)
    channel.send(b"x")
    with zmq.asyncio.Context.instance().socket(zmq.DEALER) as dealer:
        dealer.connect(channel.replay_endpoint)
        for frames in ([b""], [b"", b"123"], [b"", b"1" * 8, b""], [b"", b"1" * 100_000]):
            await dealer.send_multipart(frames)
        assert not await dealer.poll(200)
    assert await replayed(channel.replay_endpoint, 0) == [(0, b"x")]
    channel.close()


async def test_memory_is_bounded_when_nobody_listens_or_reads() -> None:
    payload = random.Random(0).randbytes(10_000)
    channel = ZmqChannel(ANYWHERE, ANYWHERE, "", capacity=100)
    lazy, asker = (zmq.Context.instance().socket(kind) for kind in (zmq.SUB, zmq.DEALER))
    try:
        lazy.setsockopt(zmq.SUBSCRIBE, b"")
        lazy.setsockopt(zmq.RCVHWM, 1)
        asker.setsockopt(zmq.RCVHWM, 1)
        lazy.connect(channel.endpoint)
        asker.connect(channel.replay_endpoint)
        await asyncio.sleep(0.2)
        before = psutil.Process().memory_info().rss
        for number in range(30_000):
            channel.send(payload[number % 1000 :] + payload[: number % 1000])
            if number % 100 == 0:
                asker.send_multipart([b"", bytes(8)])
                await asyncio.sleep(0)
        assert psutil.Process().memory_info().rss - before < 100 << 20  # of 300 MB sent, once and again and again
    finally:
        lazy.close(linger=0)
        asker.close(linger=0)
        channel.close()


async def test_messages_are_kept_by_their_size_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.replicas.publisher.zmq_sink._KEPT_BYTES", 100)
    channel = ZmqChannel(ANYWHERE, ANYWHERE, "", capacity=10)
    for size in (40, 40, 40, 1, 1):
        channel.send(bytes(size))
    assert [number for number, _ in await replayed(channel.replay_endpoint, 0)] == [1, 2, 3, 4]
    channel.send(bytes(101))
    assert await replayed(channel.replay_endpoint, 0) == []
    channel.close()


async def test_each_rank_has_an_endpoint_and_numbers_of_its_own() -> None:
    source = Source(ranks=2)
    await source.start()
    async with publishing(source) as publisher, followers(publisher) as (first, second):
        mixed = [KvEvent(0, Created((8,)), 512, rank) for rank in (0, 1)]
        source.queue.put_nowait([*mixed, stored(1, 1, rank=1), stored(1, 2, rank=0), stored(2, 3, rank=1)])
        source.queue.put_nowait([KvEvent(3, Removed((3,)), 512, 1)])
        await settled(lambda: [rank.messages for rank in publisher.ranks] == [1, 2])
        await first.catch_up(0)
        await second.catch_up(0)
        assert [event.get("block_hashes") for event in first.events] == [None, [2]]
        assert [event.get("block_hashes") for event in second.events] == [None, [1], [3], [3]]
        assert [msgspec.msgpack.decode(payload)[2] for payload in (first.payloads[0], second.payloads[0])] == [0, 1]
        assert list(second.payloads) == [0, 1]
    await source.close()


@pytest.mark.parametrize(
    ("endpoint", "rank", "expected"),
    [
        ("tcp://*:5557", 0, "tcp://*:5557"),
        ("tcp://*:5557", 3, "tcp://*:5560"),
        ("tcp://[::1]:5557", 1, "tcp://[::1]:5558"),
        ("tcp://127.0.0.1:0", 2, "tcp://127.0.0.1:0"),
        ("ipc:///run/kv", 0, "ipc:///run/kv"),
        ("ipc:///run/kv", 2, "ipc:///run/kv_dp2"),
    ],
)
def test_endpoints_of_ranks(endpoint: str, rank: int, expected: str) -> None:
    assert of_rank(endpoint, rank) == expected


async def test_messages_have_a_size_that_others_take() -> None:
    """256 events at most, and less than half a MiB unless one event alone is larger."""
    source = Source()
    await source.start()
    async with publishing(source) as publisher, followers(publisher) as (follower,):
        source.queue.put_nowait(
            [KvEvent(0, Created((8,)), 512), *(stored(number, number) for number in range(1, 1000))]
        )
        long = [stored(1000 + number, *range(10_000 * number + 1000, 10_000 * number + 9000)) for number in range(10)]
        source.queue.put_nowait(long)
        await settled(lambda: publisher.ranks[0].events == 1000 + len(long))
        await follower.catch_up(0)
        sizes = [len(msgspec.msgpack.decode(payload)[1]) for payload in follower.payloads.values()]
        assert sizes[:4] == [256, 256, 256, 232]
        assert sum(sizes) == 1000 + len(long)
        assert max(map(len, follower.payloads.values())) < 512 << 10
        assert publisher.ranks[0].events == sum(sizes)
        assert publisher.ranks[0].bytes == sum(map(len, follower.payloads.values()))
    await source.close()


async def test_an_address_that_is_taken_says_so(engine: Any) -> None:
    async with publishing(engine) as publisher:
        taken = publisher.zmq.channels[0].endpoint
        for name, config in (("endpoint", {"endpoint": taken}), ("replay", {"replay_endpoint": taken})):
            with pytest.raises(EngineFailure, match=f"{taken}.*in use"):
                async with publishing(engine, **config):
                    pytest.fail(name)


async def test_an_error_ends_the_publisher_and_is_kept(engine: Any) -> None:
    source = Source()
    await source.start()
    async with publishing(source) as publisher:
        assert publisher.failure is None
        source.queue.put_nowait([stored(0, 1, rank=7)])
        await settled(lambda: publisher.failure is not None)
        assert publisher.failure == "an event is of data-parallel rank 7, of 1"
    await source.close()


async def test_the_end_of_the_engine_is_no_failure() -> None:
    fake = create_engine(FakeConfig())
    await fake.start()
    async with publishing(fake) as publisher:
        await fake.close()
        await asyncio.sleep(0.05)
        assert publisher.failure is None


async def test_hashes_add_up(engine: Any) -> None:
    """A consumer that keeps hashes is never told of a block twice, nor of the removal of one that it does not have."""
    books, draw = Books(), random.Random(1)
    async with publishing(engine) as publisher, followers(publisher) as (follower,):
        await asyncio.gather(
            *(
                generate(engine, str(i), [draw.randrange(3, 6) for _ in range(draw.randrange(1, 60))], 5)
                for i in range(300)
            )
        )
        await follower.catch_up(0)
        for event in follower.events:
            books.apply(event)
    assert 0 < len(books.hashes) <= 64
