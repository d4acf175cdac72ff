"""Sleep and wake around a backend: the treatment of requests, and concurrent orders."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Collection, Sequence
from contextlib import aclosing, asynccontextmanager

import pytest

from engine.base import DeltaStream
from engine.config import FakeConfig, SleepConfig, Tag
from engine.create import create_engine
from engine.errors import EngineAsleep, EngineFailure, EngineNotReady, EngineWoken, NotSupported
from engine.fake.encoder import FakeEncoder
from engine.fake.engine import FakeEngine
from engine.kv_events import Removed, Stored
from engine.media import EncodedMedia, MediaInput
from engine.process.child import EngineProcess
from engine.process.client import EngineClient
from engine.sleep import SleepingEncoder, SleepingEngine, SleepOrder, SleepState
from engine.types import CANARY_SALT, Delta
from tests.support.engine_cases import BLOCK, collect, generate, prompt_of, request_for, tokens_of
from tests.support.waiting import until

WAIT, ABORT = SleepOrder(mode="wait"), SleepOrder(mode="abort")
PROMPT = prompt_of(40)
OPERATED = SleepConfig()
"""Nothing but orders put the engine to sleep."""


@asynccontextmanager
async def engine_of(
    sleep: SleepConfig = OPERATED, delay: float = 0.0, **options: int
) -> AsyncIterator[tuple[SleepingEngine, FakeEngine]]:
    engine = create_engine(FakeConfig(sleep=sleep, token_delay=delay, block_size=BLOCK, **options))
    assert isinstance(engine, SleepingEngine)
    backend = engine.inner
    assert isinstance(backend, FakeEngine)
    await engine.start()
    try:
        yield engine, backend
    finally:
        await engine.close()


async def begun(engine: SleepingEngine, max_tokens: int = 1000) -> DeltaStream:
    """A request that runs, and has given a token."""
    stream = engine.generate(request_for(prompt_of(BLOCK), max_tokens=max_tokens))
    await anext(stream)
    return stream


async def test_without_the_configuration_nothing_is_in_between() -> None:
    assert isinstance(create_engine(FakeConfig()), FakeEngine)


async def test_tokens_are_the_same_before_and_after() -> None:
    async with engine_of() as (engine, backend):
        before = tokens_of(await generate(engine, request_for(PROMPT, max_tokens=30)))
        for level in (1, 2):
            state = await engine.sleep(SleepOrder(level))  # type: ignore[arg-type]
            assert (state.phase, state.level, state.released) == ("asleep", level, ("weights", "kv_cache"))
            assert backend.released == {"weights", "kv_cache"} and engine.healthy
            with pytest.raises(EngineAsleep, match="level"):
                await collect(engine.generate(request_for(prompt_of(5))))
            state = await engine.wake_up()
            assert (state.phase, state.level, backend.released) == ("awake", 0, set())
            assert tokens_of(await generate(engine, request_for(PROMPT, max_tokens=30))) == before


async def test_events_say_that_the_blocks_are_gone() -> None:
    async with engine_of() as (engine, _):
        await generate(engine, request_for(prompt_of(3 * BLOCK), max_tokens=1))
        await engine.sleep(ABORT)
        await engine.wake_up()
        await generate(engine, request_for(prompt_of(1), max_tokens=1))
        seen = []
        async with aclosing(engine.kv_events()) as batches:
            async for batch in batches:
                seen += [event.data for event in batch]
                break
    stored = {block.block_hash for data in seen if isinstance(data, Stored) for block in data.blocks}
    removed = {key for data in seen if isinstance(data, Removed) for key in data.block_hashes}
    assert stored <= removed


async def test_wait_lets_running_requests_finish() -> None:
    async with engine_of(delay=0.001) as (engine, backend):
        stream = await begun(engine, max_tokens=40)
        falling = asyncio.create_task(engine.sleep(WAIT))
        await until(lambda: engine.state.phase == "falling_asleep")
        # What queued for a place in another process is finished, too.
        late = asyncio.create_task(generate(engine, request_for(prompt_of(4), max_tokens=3)))
        assert not backend.released
        assert tokens_of(await collect(stream))
        assert len(tokens_of(await late)) == 3
        assert (await falling).phase == "asleep" and backend.released


async def test_abort_ends_running_requests_with_an_error() -> None:
    async with engine_of(delay=0.001) as (engine, backend):
        stream = await begun(engine)
        await engine.sleep(ABORT)
        assert backend.released
        with pytest.raises(EngineAsleep, match="while the request ran"):
            await collect(stream)


async def test_abort_hurries_a_sleep_that_waits() -> None:
    async with engine_of(delay=0.001) as (engine, _):
        stream = await begun(engine, max_tokens=10_000)
        waiting = asyncio.create_task(engine.sleep(WAIT))
        await until(lambda: engine.state.phase == "falling_asleep")
        await engine.sleep(ABORT)
        assert (await waiting).phase == "asleep"
        with pytest.raises(EngineAsleep):
            await collect(stream)


async def test_waking_gives_up_a_sleep_that_waits() -> None:
    async with engine_of(delay=0.001) as (engine, backend):
        stream = await begun(engine, max_tokens=200)
        waiting = asyncio.create_task(engine.sleep(WAIT))
        await until(lambda: engine.state.phase == "falling_asleep")
        assert (await engine.wake_up()).phase == "awake"
        with pytest.raises(EngineWoken):
            await waiting
        assert not backend.released
        assert tokens_of(await collect(stream))


async def test_orders_that_change_nothing_and_orders_at_once() -> None:
    async with engine_of() as (engine, backend):
        assert (await engine.wake_up()).phase == "awake"
        await engine.sleep(ABORT)
        assert (await engine.sleep(ABORT)).level == 1
        assert (await engine.sleep(SleepOrder(2))).level == 2
        assert (await engine.sleep(ABORT)).level == 2
        orders = [engine.sleep(SleepOrder(2)), engine.wake_up(), engine.wake_up(), engine.sleep(WAIT), engine.wake_up()]
        done = await asyncio.gather(*orders, return_exceptions=True)
        assert all(isinstance(one, SleepState | EngineWoken) for one in done), done
        assert engine.state.phase == "awake" and not backend.released
        assert await generate(engine, request_for(prompt_of(4)))


async def test_parts_are_released_and_resumed() -> None:
    async with engine_of() as (engine, backend):
        await engine.sleep(SleepOrder(2, tags=("kv_cache",)))
        assert backend.released == {"kv_cache"}
        await engine.sleep(SleepOrder(1, tags=("weights",)))
        assert backend.released == {"kv_cache", "weights"}
        state = await engine.wake_up(("weights",))
        assert (state.phase, state.released, backend.released) == ("asleep", ("kv_cache",), {"kv_cache"})
        with pytest.raises(EngineAsleep):
            await collect(engine.generate(request_for(prompt_of(4))))
        assert (await engine.wake_up(("kv_cache",))).phase == "awake"


async def test_an_order_outlives_its_caller() -> None:
    async with engine_of(delay=0.001) as (engine, backend):
        stream = await begun(engine, max_tokens=30)
        caller = asyncio.create_task(engine.sleep(WAIT))
        await until(lambda: engine.state.phase == "falling_asleep")
        caller.cancel()
        await collect(stream)
        await until(lambda: backend.released)


async def test_closing_ends_what_waits() -> None:
    async with engine_of(delay=0.001) as (engine, _):
        stream = await begun(engine, max_tokens=10_000)
        waiting = asyncio.create_task(engine.sleep(WAIT))
        await until(lambda: engine.state.phase == "falling_asleep")
        await engine.close()
        with pytest.raises(EngineNotReady, match="closing"):
            await waiting
        with pytest.raises(EngineNotReady):
            await collect(stream)
        for late in (engine.sleep(WAIT), engine.wake_up()):
            with pytest.raises(EngineNotReady, match="closing"):
                await late
    async with engine_of(SleepConfig(idle_seconds=0.01)) as (engine, backend):
        await until(lambda: backend.released)


async def test_an_idle_engine_sleeps_and_a_request_wakes_it() -> None:
    async with engine_of(SleepConfig(idle_seconds=0.05, idle_level=2), delay=0.001) as (engine, backend):
        tokens = tokens_of(await generate(engine, request_for(PROMPT, max_tokens=100)))  # longer than idle
        await until(lambda: backend.released)
        state = engine.state
        assert (state.level, state.obstacle) == (2, "")
        answers = await asyncio.gather(*(generate(engine, request_for(PROMPT, max_tokens=100)) for _ in "ab"))
        assert [tokens_of(answer) for answer in answers] == [tokens, tokens]
        await until(lambda: backend.released)  # and again


async def test_a_canary_keeps_no_engine_awake_and_wakes_none() -> None:
    canary = request_for(prompt_of(1), max_tokens=10_000, cache_salt=CANARY_SALT)
    async with engine_of(SleepConfig(idle_seconds=0.01), delay=0.001) as (engine, backend):
        running = engine.generate(canary)
        await until(lambda: engine.state.phase == "falling_asleep")
        assert backend.running and not backend.released, "it waits for the canary that runs"
        with pytest.raises(EngineAsleep):
            await collect(engine.generate(canary))  # and for no other
        await running.aclose()
        await until(lambda: backend.released)
        with pytest.raises(EngineAsleep):
            await collect(engine.generate(canary))
        assert backend.released


async def test_an_operators_sleep_is_not_ended_by_requests() -> None:
    async with engine_of(SleepConfig(idle_seconds=0.05)) as (engine, backend):
        await until(lambda: backend.released)
        await engine.sleep(ABORT)
        assert engine.state.obstacle
        with pytest.raises(EngineAsleep):
            await collect(engine.generate(request_for(prompt_of(4))))
        assert backend.released
        await engine.wake_up()


async def test_a_client_that_leaves_while_the_engine_wakes() -> None:
    async with engine_of(SleepConfig(idle_seconds=0.02)) as (engine, backend):
        await until(lambda: backend.released)
        stream = engine.generate(request_for(prompt_of(4), max_tokens=1000))
        await stream.aclose()
        await until(lambda: engine.state.phase == "awake")
        assert not backend.running
        assert await generate(engine, request_for(prompt_of(4), max_tokens=2))


class Faulty(FakeEngine):
    """Fails as often as it is told to."""

    releases_to_fail = resumes_to_fail = 0
    error: type[Exception] = EngineFailure
    obstacle = ""

    def sleep_obstacle(self, level: int) -> str:
        return self.obstacle

    async def release_memory(self, tags: Collection[Tag], level: int) -> None:
        if self.releases_to_fail:
            self.releases_to_fail -= 1
            raise self.error("no release")
        await super().release_memory(tags, level)

    async def resume_memory(self, tags: Collection[Tag]) -> None:
        if self.resumes_to_fail:
            self.resumes_to_fail -= 1
            raise self.error("no weights")
        await super().resume_memory(tags)


class Gated(FakeEngine):
    """Releases and restores memory when the test lets it."""

    def __init__(self, config: FakeConfig) -> None:
        super().__init__(config)
        self.gate = asyncio.Event()

    async def release_memory(self, tags: Collection[Tag], level: int) -> None:
        await self.gate.wait()
        await super().release_memory(tags, level)

    async def resume_memory(self, tags: Collection[Tag]) -> None:
        await self.gate.wait()
        await super().resume_memory(tags)


async def test_a_request_that_comes_while_a_part_is_woken_wakes_the_rest() -> None:
    backend = Gated(FakeConfig())
    backend.gate.set()
    engine = SleepingEngine(backend, SleepConfig(idle_seconds=0.02))
    await engine.start()
    await until(lambda: engine.state.phase == "asleep")
    backend.gate.clear()
    part = asyncio.create_task(engine.wake_up(("weights",)))
    await until(lambda: engine.state.phase == "waking")
    request = asyncio.create_task(generate(engine, request_for(prompt_of(4), max_tokens=2)))
    await asyncio.sleep(0)
    backend.gate.set()
    await part
    assert len(tokens_of(await asyncio.wait_for(request, 20))) == 2
    await engine.close()


async def test_each_of_two_wake_up_calls_cancels_the_sleep_before_it() -> None:
    backend = Gated(FakeConfig(token_delay=0.001))
    engine = SleepingEngine(backend, SleepConfig(idle_seconds=0.02))
    await engine.start()
    await until(lambda: engine.state.phase == "falling_asleep")
    stream = engine.generate(request_for(prompt_of(4), max_tokens=10_000))  # wakes the engine, and runs on
    calls = []
    for call in (engine.sleep(WAIT), engine.wake_up()):
        calls.append(asyncio.create_task(call))
        await asyncio.sleep(0)
    await asyncio.sleep(0)
    backend.gate.set()
    with pytest.raises(EngineWoken):
        await calls[0]
    assert (await calls[1]).phase == "awake"
    await stream.aclose()
    await engine.close()


@pytest.mark.parametrize("error", [EngineFailure, ZeroDivisionError], ids=["failure", "bug"])
async def test_failures_leave_a_state_that_can_be_left(error: type[Exception]) -> None:
    backend = Faulty(FakeConfig())
    backend.error = error
    engine = SleepingEngine(backend, SleepConfig())
    await engine.start()
    backend.releases_to_fail = 1
    with pytest.raises(error, match="no release"):
        await engine.sleep(ABORT)
    assert engine.state.phase == "awake" and await generate(engine, request_for(prompt_of(4)))
    await engine.sleep(ABORT)
    backend.resumes_to_fail = 1
    with pytest.raises(error, match="no weights"):
        await engine.wake_up()
    assert engine.state.phase == "asleep"
    await engine.wake_up()
    backend.releases_to_fail = backend.resumes_to_fail = 1
    with pytest.raises(error, match="no weights"):
        await engine.sleep(ABORT)
    assert engine.state.phase == "asleep"
    await engine.wake_up()
    assert await generate(engine, request_for(prompt_of(4)))
    await engine.close()


async def test_waking_on_demand_that_fails_says_so() -> None:
    backend = Faulty(FakeConfig())
    engine = SleepingEngine(backend, SleepConfig(idle_seconds=0.02))
    await engine.start()
    await until(lambda: backend.released)
    for error, reason in ((EngineFailure, "no weights"), (ZeroDivisionError, "cannot wake: ZeroDivisionError")):
        backend.error = error
        backend.resumes_to_fail = 1
        with pytest.raises(EngineFailure, match=reason):
            await collect(engine.generate(request_for(prompt_of(4))))
    assert await generate(engine, request_for(prompt_of(4)))
    await engine.close()


async def test_a_backend_that_cannot_is_not_disturbed() -> None:
    backend = Faulty(FakeConfig(token_delay=0.001))
    backend.obstacle = "It has no memory."
    engine = SleepingEngine(backend, SleepConfig())
    await engine.start()
    stream = await begun(engine, max_tokens=20)
    with pytest.raises(NotSupported, match="no memory"):
        await engine.sleep(ABORT)
    assert tokens_of(await collect(stream))
    await engine.close()
    again = Faulty(FakeConfig())
    again.obstacle = "It has no memory."
    with pytest.raises(EngineFailure, match="SLEEP_AFTER_IDLE_SECONDS=5 cannot be kept: It has no memory"):
        await SleepingEngine(again, SleepConfig(idle_seconds=5)).start()
    assert not again.healthy


@pytest.mark.slow
async def test_clients_of_a_hosted_engine_see_its_sleep_and_a_new_host_is_awake() -> None:
    process = EngineProcess(FakeConfig(sleep=SleepConfig(), token_delay=0.002))
    await process.start()
    clients = [EngineClient(process.address, process.wait_failed) for _ in "ab"]
    seen: list[list[str]] = [[], []]

    async def follow(client: EngineClient, phases: list[str]) -> None:
        async for state in client.sleep_states():
            phases.append(state.phase)

    for client in clients:
        await client.start()
    following = [asyncio.create_task(follow(*pair)) for pair in zip(clients, seen, strict=True)]
    stream = clients[1].generate(request_for(prompt_of(BLOCK), max_tokens=10_000))
    await anext(stream)
    await clients[0].sleep(ABORT)
    with pytest.raises(EngineAsleep, match="while the request ran"):
        await collect(stream)
    await until(lambda: all(phases[-1:] == ["asleep"] for phases in seen))
    with pytest.raises(EngineAsleep):
        await collect(clients[1].generate(request_for(prompt_of(4))))
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    await until(lambda: all(phases[-1:] == ["awake"] for phases in seen), 60)
    answer: list[Delta] = await generate(clients[1], request_for(prompt_of(4), max_tokens=3))
    assert len(tokens_of(answer)) == 3
    for client in clients:
        await client.close()
    await asyncio.gather(*following)
    await process.close()


IMAGE = MediaInput(b"\x89PNG\r\n\x1a\nimage")


async def test_an_encoder_sleeps_as_an_engine_does() -> None:
    backend = FakeEncoder(0.01)
    encoder = SleepingEncoder(backend, OPERATED)
    emptied: list[int] = []
    encoder.caches.append(lambda: emptied.append(1))
    await encoder.start()
    before = await encoder.encode([IMAGE])
    running = asyncio.create_task(encoder.encode([IMAGE]))
    await asyncio.sleep(0)
    assert (await encoder.sleep(WAIT)).phase == "asleep"
    assert await running == before and not backend.healthy and emptied == [1]
    with pytest.raises(EngineAsleep, match="asleep"):
        await encoder.encode([IMAGE])
    await encoder.wake_up()
    assert await encoder.encode([IMAGE]) == before
    running = asyncio.create_task(encoder.encode([IMAGE] * 1000))
    await asyncio.sleep(0)
    await encoder.sleep(SleepOrder(mode="abort", tags=("weights",)))
    with pytest.raises(EngineAsleep, match="while the request ran"):
        await running
    assert emptied == [1] and encoder.healthy
    await encoder.close()


class CountingEncoder(FakeEncoder):
    begun = 0

    async def encode(self, media: Sequence[MediaInput], prompt: str = "") -> list[EncodedMedia]:
        self.begun += 1
        return await super().encode(media, prompt)


async def test_an_engine_closes_while_it_falls_asleep_by_itself() -> None:
    canary = request_for(prompt_of(1), max_tokens=10_000, cache_salt=CANARY_SALT)
    async with engine_of(SleepConfig(idle_seconds=0.01), delay=0.001) as (engine, _):
        running = engine.generate(canary)
        await until(lambda: engine.state.phase == "falling_asleep")
        closing = asyncio.create_task(engine.close())
        await until(closing.done)
        await running.aclose()


async def test_images_wake_an_encoder_that_fell_asleep_by_itself() -> None:
    backend = CountingEncoder(0.001)
    encoder = SleepingEncoder(backend, SleepConfig(idle_seconds=0.01))
    await encoder.start()
    for _ in range(2):
        await until(lambda: encoder.state.phase == "asleep")
        found = await asyncio.gather(*(encoder.encode([IMAGE]) for _ in range(3)))
        assert len(found) == 3
    image = asyncio.create_task(encoder.encode([IMAGE] * 10_000))
    await until(lambda: backend.begun == 7)
    canary = asyncio.create_task(encoder.encode([IMAGE] * 10_000, counts=False))
    await until(lambda: backend.begun == 8)
    image.cancel()
    await until(lambda: encoder.state.phase == "falling_asleep")
    assert not canary.done()
    with pytest.raises(EngineAsleep):
        await encoder.encode([IMAGE], counts=False)  # another canary
    canary.cancel()
    await until(lambda: encoder.state.phase == "asleep")
    with pytest.raises(EngineAsleep):
        await encoder.encode([IMAGE], counts=False)
    waiting = asyncio.create_task(encoder.encode([IMAGE]))
    waiting.cancel()
    await asyncio.wait({waiting})
    await encoder.close()
    with pytest.raises(EngineNotReady):
        await encoder.encode([IMAGE])
