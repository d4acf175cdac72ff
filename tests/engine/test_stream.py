"""The mailbox between an engine and its consumer."""

import asyncio
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.base import MOST_MERGED, DeltaStream, EventFeed, Latest, merge
from engine.types import Delta, Logprob, PromptReport


class Aborts:
    """Counts the calls of `on_abort`."""

    count = 0

    def __call__(self) -> None:
        self.count += 1


LAST = Delta((9,), finish_reason="stop", stop_reason=9)


async def test_deltas_that_pile_up_arrive_as_one() -> None:
    stream = DeltaStream(Aborts())
    stream.put(Delta((1,), prompt=PromptReport(cached_tokens=3)))
    stream.put(Delta((2,)))
    assert await anext(stream) == Delta((1, 2), prompt=PromptReport(cached_tokens=3))
    stream.put(LAST)
    assert await anext(stream) == LAST
    assert [delta async for delta in stream] == []


async def test_a_consumer_that_waits_is_woken() -> None:
    stream = DeltaStream(Aborts())
    waiting = asyncio.create_task(anext(stream))
    await asyncio.sleep(0)
    stream.put(Delta((1,)))
    assert await waiting == Delta((1,))


async def test_an_error_comes_after_the_deltas_before_it_and_once() -> None:
    aborts = Aborts()
    stream = DeltaStream(aborts)
    stream.put(Delta((1,)))
    stream.fail(ValueError("broken"))
    assert await anext(stream) == Delta((1,))
    with pytest.raises(ValueError, match="broken"):
        await anext(stream)
    assert [delta async for delta in stream] == []
    await stream.aclose()
    assert aborts.count == 0


async def test_closing_aborts_once_and_drops_the_rest() -> None:
    aborts = Aborts()
    stream = DeltaStream(aborts)
    stream.put(Delta((1,)))
    await stream.aclose()
    await stream.aclose()
    stream.put(LAST)
    stream.fail(ValueError())
    assert aborts.count == 1
    assert [delta async for delta in stream] == []


async def test_closing_after_the_end_aborts_nothing() -> None:
    aborts = Aborts()
    stream = DeltaStream(aborts)
    stream.put(LAST)
    await stream.aclose()
    assert aborts.count == 0


async def test_breaking_out_and_closing_aborts() -> None:
    aborts = Aborts()
    stream = DeltaStream(aborts)
    stream.put(Delta((1,)))
    async for _ in stream:
        break
    assert aborts.count == 0
    await stream.aclose()
    assert aborts.count == 1


@pytest.mark.parametrize("woken", [False, True])
async def test_cancelling_the_consumer_aborts(woken: bool) -> None:
    aborts = Aborts()
    stream = DeltaStream(aborts)
    waiting = asyncio.create_task(anext(stream))
    await asyncio.sleep(0)
    if woken:
        stream.put(Delta((1,)))
    waiting.cancel()
    await asyncio.wait([waiting])
    assert waiting.cancelled()
    assert aborts.count == 1


async def test_closing_from_elsewhere_ends_the_wait() -> None:
    stream = DeltaStream(Aborts())

    async def consume() -> list[Delta]:
        return [delta async for delta in stream]

    waiting = asyncio.create_task(consume())
    await asyncio.sleep(0)
    await stream.aclose()
    assert await waiting == []


@pytest.mark.parametrize("end", ["finish", "fail", "close", "failed"])
async def test_done_is_called_once_however_the_stream_ends(end: str) -> None:
    done: list[Any] = []
    stream = DeltaStream.failed(ValueError()) if end == "failed" else DeltaStream(Aborts())
    stream.when_done(lambda: done.append(end))
    if end == "finish":
        stream.put(LAST)
    elif end == "fail":
        stream.fail(ValueError())
    elif end == "close":
        await stream.aclose()
    await stream.aclose()
    await asyncio.sleep(0)
    assert done == [end]


async def test_done_is_called_before_the_consumer_knows() -> None:
    """One that did not wait, too: what it asks for next may need what the end has freed."""
    stream, done = DeltaStream(Aborts()), []
    stream.when_done(lambda: done.append("done"))
    stream.put(LAST)
    assert [delta async for delta in stream] == [LAST] and done == ["done"]


@given(st.lists(st.lists(st.integers(0, 99), max_size=4), min_size=1), st.booleans())
def test_merging_keeps_everything(parts: list[list[int]], logprobs: bool) -> None:
    deltas = [
        Delta(tuple(part), tuple((Logprob(token, -1.0, 1),) for token in part) if logprobs else ()) for part in parts
    ]
    merged = merge([*deltas, LAST])
    tokens = [token for part in parts for token in part]
    assert merged.token_ids == (*tokens, 9)
    assert [entry[0].token_id for entry in merged.logprobs] == (tokens if logprobs else [])
    assert (merged.finish_reason, merged.stop_reason) == ("stop", 9)


async def test_a_long_backlog_comes_in_parts_between_which_others_run_and_the_consumer_can_be_cancelled() -> None:
    stream = DeltaStream(aborts := Aborts())
    for token in range(10 * MOST_MERGED):
        stream.put(Delta((token,)))
    read: list[Delta] = []
    begun = asyncio.Event()

    async def consume() -> None:
        async for delta in stream:
            read.append(delta)
            begun.set()

    consumer = asyncio.create_task(consume())
    await begun.wait()
    consumer.cancel()
    await asyncio.wait([consumer])
    tokens = [token for delta in read for token in delta.token_ids]
    assert tokens == list(range(len(tokens))) and len(tokens) < 10 * MOST_MERGED
    assert max(len(delta.token_ids) for delta in read) == MOST_MERGED
    assert consumer.cancelled() and aborts.count == 1


async def test_latest_skips_to_the_newest_and_ends() -> None:
    latest: Latest[int] = Latest()
    seen = latest.values()
    latest.publish(1)
    assert await anext(seen) == 1
    latest.publish(2)
    latest.publish(3)
    assert await anext(seen) == 3
    waiting = asyncio.ensure_future(anext(seen))
    await asyncio.sleep(0)
    latest.publish(4)
    assert await waiting == 4
    latest.close()
    assert [value async for value in seen] == []
    assert [value async for value in latest.values()] == [4]


async def test_a_feed_keeps_the_newest_for_a_slow_consumer_and_nothing_for_none() -> None:
    feed: EventFeed[int] = EventFeed(limit=3)
    feed.put(-1)
    batches, others = feed.batches(), feed.batches()
    waiting = [asyncio.ensure_future(anext(batches)), asyncio.ensure_future(anext(others))]
    await asyncio.sleep(0)
    feed.put(0)
    assert await asyncio.gather(*waiting) == [[0], [0]]
    await others.aclose()
    for event in range(1, 6):
        feed.put(event)
    assert await anext(batches) == [3, 4, 5]
    feed.put(6)
    feed.close()
    assert [batch async for batch in batches] == [[6]]
    assert not feed.consumers
