"""The queue in front of the engine, held against FakeEngine."""

import asyncio
import itertools
import time
from collections.abc import AsyncIterator

import msgspec
import pytest

from engine.admission import AdmissionEngine
from engine.config import FakeConfig
from engine.errors import EngineNotReady, InvalidRequest, QueueFull, QueueTimeout
from engine.fake.engine import FakeEngine
from engine.media import MediaFiles, MediaInput, MediaSpan, MediaSpans
from engine.types import Delta, GenerateRequest, SamplingParams
from tests.support.waiting import until

_ids = itertools.count()
SEATS = 2


def request_for(
    priority: int = 0,
    max_tokens: int = 10,
    prompt: tuple[int, ...] = (5, 6, 7),
    group: str = "",
    group_size: int = 1,
) -> GenerateRequest:
    sampling = SamplingParams(max_tokens=max_tokens)
    return GenerateRequest(
        request_id=str(next(_ids)),
        prompt_token_ids=prompt,
        sampling=sampling,
        priority=priority,
        group=group,
        group_size=group_size,
    )


async def admission_of(
    max_queue_size: int = 100,
    queue_timeout: float = 10.0,
    token_delay: float = 0.001,
    seats: int = SEATS,
    max_waiting_bytes: int = 1 << 30,
) -> AdmissionEngine:
    fake = FakeEngine(FakeConfig(max_num_seqs=seats, token_delay=token_delay))
    admission = AdmissionEngine(fake, max_queue_size, queue_timeout, max_waiting_bytes)
    await admission.start()
    return admission


@pytest.fixture
async def admission() -> AsyncIterator[AdmissionEngine]:
    admission = await admission_of()
    yield admission
    await admission.close()


async def collect(deltas: AsyncIterator[Delta]) -> list[Delta]:
    return [delta async for delta in deltas]


async def most_active(admission: AdmissionEngine) -> int:
    """Most sequences that were ever inside, until the engine closes."""
    return max([stats.num_active_requests + stats.num_queued_requests async for stats in admission.stats()])


async def test_no_more_inside_than_seats_and_all_get_their_turn() -> None:
    admission = await admission_of()
    watching = asyncio.create_task(most_active(admission))
    running = [asyncio.create_task(collect(admission.generate(request_for()))) for _ in range(20)]
    await asyncio.sleep(0.005)
    assert 0 < admission.waiting <= 20 - SEATS
    results = await asyncio.gather(*running)
    assert all(deltas[-1].finish_reason == "length" for deltas in results)
    assert admission.waiting == 0
    await admission.close()
    assert await watching == SEATS


async def test_a_full_queue_refuses_at_once() -> None:
    admission = await admission_of(max_queue_size=1)
    streams = [admission.generate(request_for()) for _ in range(SEATS + 1)]
    with pytest.raises(QueueFull):
        await anext(admission.generate(request_for()))
    assert admission.waiting == 1
    await asyncio.gather(*map(collect, streams))
    await collect(admission.generate(request_for()))
    await admission.close()


async def test_images_that_wait_are_bounded_by_their_bytes() -> None:
    admission = await admission_of(max_waiting_bytes=10_000)
    image = MediaSpan(key="0" * 64, start=0, length=1, rows=1, dtype="float32", data=bytes(4_000))
    seen, raw = (
        {"media": MediaSpans((image,))},
        {"media": MediaFiles("", (MediaInput(bytes(3_000)), MediaInput(bytes(1_000))))},
    )
    running = [asyncio.create_task(collect(admission.generate(request_for()))) for _ in range(SEATS)]
    waiting = [
        asyncio.create_task(collect(admission.generate(msgspec.structs.replace(request_for(), **more))))
        for more in (seen, raw)
    ]
    await asyncio.sleep(0)
    for more in (seen, raw):
        with pytest.raises(QueueFull, match="8000 bytes"):
            await collect(admission.generate(msgspec.structs.replace(request_for(), **more)))
    assert (await collect(admission.generate(request_for())))[-1].finish_reason == "length", (
        "a request without images may wait"
    )
    waiting.pop().cancel()
    assert (await asyncio.gather(*running, *waiting))[-1][-1].finish_reason == "length"
    assert (await collect(admission.generate(msgspec.structs.replace(request_for(), **seen))))[
        -1
    ].finish_reason == "length"
    await admission.close()


async def test_no_queue_at_all() -> None:
    admission = await admission_of(max_queue_size=0)
    streams = [admission.generate(request_for()) for _ in range(SEATS)]
    with pytest.raises(QueueFull):
        await anext(admission.generate(request_for()))
    await asyncio.gather(*map(collect, streams))
    await admission.close()


async def test_waiting_too_long_is_an_error_and_leaves_the_queue() -> None:
    admission = await admission_of(queue_timeout=0.05)
    streams = [admission.generate(request_for(max_tokens=10_000)) for _ in range(SEATS)]
    with pytest.raises(QueueTimeout):
        await anext(admission.generate(request_for()))
    assert admission.waiting == 0
    for stream in streams:
        await stream.aclose()
    assert len(await collect(admission.generate(request_for()))) > 0
    await admission.close()


async def test_waiting_for_siblings_takes_no_time_limit() -> None:
    """A request with more choices than the engine has seats is answered, however long each of them takes."""
    admission = await admission_of(queue_timeout=0.02)
    began = time.monotonic()
    streams = [admission.generate(request_for(max_tokens=30, group="large")) for _ in range(4 * SEATS)]
    answers = await asyncio.gather(*map(collect, streams))
    assert time.monotonic() - began > 3 * 0.02, "the last of them waited longer than the limit"
    assert all(deltas[-1].finish_reason == "length" for deltas in answers)
    await admission.close()


async def test_a_group_of_which_none_has_begun_waits_within_the_limit() -> None:
    admission = await admission_of(queue_timeout=0.05)
    seats = [admission.generate(request_for(max_tokens=10_000, group="first")) for _ in range(SEATS)]
    second = [admission.generate(request_for(group="second")) for _ in range(3)]
    for stream in second:
        with pytest.raises(QueueTimeout):
            await anext(stream)
    assert admission.waiting == 0
    for stream in seats:
        await stream.aclose()
    await asyncio.sleep(0)
    third = [admission.generate(request_for(group="first")) for _ in range(SEATS + 1)]
    assert all(deltas[-1].finish_reason == "length" for deltas in await asyncio.gather(*map(collect, third)))
    await admission.close()


async def test_a_large_group_lets_others_in_between(admission: AdmissionEngine) -> None:
    order: list[str] = []

    async def run(group: str) -> None:
        await collect(admission.generate(request_for(max_tokens=20, group=group)))
        order.append(group)

    tasks = [asyncio.create_task(run("large")) for _ in range(4 * SEATS)]
    await asyncio.sleep(0)
    tasks.append(asyncio.create_task(run("small")))
    await asyncio.gather(*tasks)
    assert order.index("small") <= 2 * SEATS, "it waited for seats, not for the whole group"


async def test_a_group_larger_than_the_engine_leaves_a_quarter_of_the_seats() -> None:
    admission = await admission_of(seats=8)
    large = [admission.generate(request_for(max_tokens=10_000, group="large", group_size=9)) for _ in range(9)]
    assert admission.waiting == 3
    others = [admission.generate(request_for(max_tokens=10_000)) for _ in range(2)]
    assert admission.waiting == 3, "others find a seat at once"
    other = admission.generate(request_for(max_tokens=1))
    await large[0].aclose()
    assert (await collect(other))[-1].finish_reason == "length", "it comes before siblings that have waited longer"
    await asyncio.sleep(0)  # the tasks begin
    assert admission.waiting == 2
    await others[0].aclose()
    await large[1].aclose()
    await until(lambda: admission.waiting == 1)
    third = admission.generate(request_for(max_tokens=1))
    assert admission.waiting == 1, "the place of the first that left stays free for others"
    for stream in (*large, *others, third):
        await stream.aclose()
    assert admission.waiting == 0
    await admission.close()


async def test_a_group_that_fits_has_all_seats() -> None:
    admission = await admission_of(seats=8)
    streams = [admission.generate(request_for(group="fits", group_size=8)) for _ in range(8)]
    assert admission.waiting == 0
    assert all(deltas[-1].finish_reason == "length" for deltas in await asyncio.gather(*map(collect, streams)))
    await admission.close()


@pytest.mark.parametrize("seats", [1, 2, 3])
async def test_a_large_group_is_served_by_few_seats(seats: int) -> None:
    admission = await admission_of(seats=seats)
    streams = [admission.generate(request_for(group="large", group_size=7)) for _ in range(7)]
    assert all(deltas[-1].finish_reason == "length" for deltas in await asyncio.gather(*map(collect, streams)))
    await admission.close()


async def test_the_urgent_come_first_then_the_early(admission: AdmissionEngine) -> None:
    seats = [admission.generate(request_for(max_tokens=10_000)) for _ in range(SEATS)]
    order: list[str] = []

    async def run(name: str, priority: int) -> None:
        async for delta in admission.generate(request_for(priority, max_tokens=1)):
            assert delta.finish_reason == "length"
            order.append(name)

    tasks = []
    for name, priority in (("late", 1), ("first", 0), ("second", 0), ("urgent", -1)):
        tasks.append(asyncio.create_task(run(name, priority)))
        await asyncio.sleep(0)
    await seats[0].aclose()
    await asyncio.gather(*tasks)
    assert order == ["urgent", "first", "second", "late"]
    await seats[1].aclose()


async def test_the_wait_is_reported(admission: AdmissionEngine) -> None:
    seats = [admission.generate(request_for(max_tokens=10_000)) for _ in range(SEATS)]
    began = time.monotonic()
    waiting = asyncio.create_task(collect(admission.generate(request_for())))
    await asyncio.sleep(0.1)
    await seats[0].aclose()
    first = (await waiting)[0]
    assert first.prompt is not None
    assert 0.1 <= first.prompt.queue_seconds <= time.monotonic() - began
    await seats[1].aclose()


@pytest.mark.parametrize("how", ["cancel", "close"])
async def test_a_cancelled_request_leaves_the_queue(admission: AdmissionEngine, how: str) -> None:
    seats = [admission.generate(request_for(max_tokens=10_000)) for _ in range(SEATS)]
    leaving = admission.generate(request_for())
    staying = asyncio.create_task(collect(admission.generate(request_for())))
    waiting = asyncio.create_task(collect(leaving))
    await asyncio.sleep(0)  # the tasks begin
    assert admission.waiting == 2
    if how == "cancel":
        waiting.cancel()
        await asyncio.wait([waiting])
        assert waiting.cancelled()
    else:
        await leaving.aclose()
        assert await waiting == []
    assert admission.waiting == 1
    await seats[0].aclose()
    assert (await staying)[-1].finish_reason == "length"
    await seats[1].aclose()


async def test_a_seat_is_free_when_the_engine_is_done_though_nobody_reads(admission: AdmissionEngine) -> None:
    unread = [admission.generate(request_for()) for _ in range(SEATS)]
    assert len(await asyncio.wait_for(collect(admission.generate(request_for())), 20)) > 0
    assert [(await collect(stream))[-1].finish_reason for stream in unread] == ["length"] * SEATS


async def test_errors_and_aborts_free_their_seats(admission: AdmissionEngine) -> None:
    for _ in range(3 * SEATS):
        with pytest.raises(InvalidRequest):
            await anext(admission.generate(request_for(prompt=())))
        stream = admission.generate(request_for(max_tokens=10_000))
        await anext(stream)
        await stream.aclose()
    assert len(await asyncio.wait_for(collect(admission.generate(request_for())), 20)) > 0


async def test_cancelled_in_the_turn_that_admits_it_leaks_no_seat(admission: AdmissionEngine) -> None:
    for _ in range(10):
        seats = [admission.generate(request_for(max_tokens=10_000)) for _ in range(SEATS)]
        waiting = asyncio.create_task(collect(admission.generate(request_for(max_tokens=10_000))))
        await asyncio.sleep(0)
        await seats[0].aclose()
        while admission.waiting:  # noqa: ASYNC110 - the turn in which the seat changes hands is what is sought
            await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.wait([waiting])
        await seats[1].aclose()
        await asyncio.sleep(0)
    assert len(await asyncio.wait_for(collect(admission.generate(request_for())), 20)) > 0


async def test_closing_ends_those_that_wait() -> None:
    admission = await admission_of()
    streams = [admission.generate(request_for(max_tokens=10_000)) for _ in range(SEATS + 3)]
    await admission.close()
    for stream in streams:
        with pytest.raises(EngineNotReady):
            await collect(stream)
    assert admission.waiting == 0
