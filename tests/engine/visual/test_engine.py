"""The queue in front of a pipeline: batches, turns, aborts and failures."""

import asyncio
import io
import threading
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace
from PIL import Image

from engine.errors import EngineFailure, EngineNotReady, InvalidRequest, QueueFull
from engine.fake.visual import FakePipeline
from engine.visual.base import Picture, Show, Tick
from engine.visual.engine import QueuedVisualEngine
from engine.visual.files import encode
from engine.visual.types import VisualConfig, VisualRequest, VisualStats
from tests.support.waiting import slowness, until

CONFIG = VisualConfig(backend="fake", model="fake", max_batch=4, max_queue=8)


def asked(prompt: str = "a red circle", *seeds: int, **fields: Any) -> VisualRequest:
    size = {"width": 16, "height": 16, "steps": 2}
    return VisualRequest(**{**size, **fields}, request_id="r", prompt=prompt, seeds=seeds or (1,))


class Recording(FakePipeline):
    """Notes the batches. With `held` set, a batch waits after its first step until `go` is set."""

    def __init__(self, config: VisualConfig = CONFIG) -> None:
        super().__init__(config)
        self.batches: list[list[tuple[str, int]]] = []
        self.held = False
        self.stepping = threading.Event()
        self.go = threading.Event()
        self.steps = 0

    def generate(self, batch: Sequence[Picture], tick: Tick, show: Show = lambda _: None) -> list[Any]:
        self.batches.append([(picture.request.prompt, picture.seed) for picture in batch])

        def noted(step: int, steps: int) -> None:
            self.steps += 1
            self.stepping.set()
            if self.held:
                self.go.wait(60)
            tick(step, steps)

        return super().generate(batch, noted, show)


@pytest.fixture
def pipeline() -> Iterator[Recording]:
    pipeline = Recording()
    yield pipeline
    pipeline.go.set()


@asynccontextmanager
async def running(pipeline: FakePipeline, config: VisualConfig = CONFIG) -> AsyncIterator[QueuedVisualEngine]:
    engine = QueuedVisualEngine(config, pipeline)
    await engine.start()
    try:
        yield engine
    finally:
        await engine.close()


async def files(engine: Any, request: VisualRequest) -> list[bytes]:
    deltas = [delta async for delta in engine.generate(request) if delta.stage == "file"]
    assert deltas[-1].last
    return [delta.data for delta in sorted(deltas, key=lambda delta: delta.index)]


async def figures(engine: Any) -> VisualStats:
    return await anext(aiter(engine.stats()))


async def stepping(pipeline: Recording) -> None:
    """A batch is being computed."""
    assert await asyncio.to_thread(pipeline.stepping.wait, 20 * slowness())


async def test_equal_requests_are_computed_together_and_others_apart(pipeline: Recording) -> None:
    pipeline.held = True
    async with running(pipeline) as engine:
        first = asyncio.create_task(files(engine, asked("first")))
        await stepping(pipeline)
        rest = [
            asyncio.create_task(files(engine, request))
            for request in (asked("a", 1, 2), asked("b"), asked("large", width=32), asked("c", guidance=2.0))
        ]
        await asyncio.sleep(0)
        pipeline.go.set()
        await asyncio.gather(first, *rest)
    assert pipeline.batches == [[("first", 1)], [("a", 1), ("b", 1), ("a", 2)], [("large", 1)], [("c", 1)]]


async def test_a_picture_is_the_same_in_any_batch(pipeline: Recording) -> None:
    async with running(pipeline) as engine:
        alone = await files(engine, asked("a", 7))
        together = await files(engine, asked("a", 5, 6, 7, 8, 9))
    assert together[2] == alone[0]
    assert len(set(together)) == 5
    assert [len(batch) for batch in pipeline.batches] == [1, 4, 1]


async def test_a_request_for_many_pictures_does_not_hold_up_others(pipeline: Recording) -> None:
    pipeline.held = True
    async with running(pipeline) as engine:
        many = asyncio.create_task(files(engine, asked("many", *range(8))))
        await stepping(pipeline)
        one = asyncio.create_task(files(engine, asked("one", width=32)))
        await asyncio.sleep(0)
        pipeline.go.set()
        await asyncio.gather(one, many)
    assert [batch[0][0] for batch in pipeline.batches] == ["many", "one", "many"]


async def test_progress_grows_to_the_end(pipeline: Recording) -> None:
    async with running(pipeline) as engine:
        deltas = [delta async for delta in engine.generate(asked("a red", *range(6)))]
    progress = [delta.progress for delta in deltas]
    assert progress == sorted(progress) or deltas[-1].progress == 100
    assert {delta.stage for delta in deltas} == {"generating", "postprocessing", "file"}
    assert [delta.last for delta in deltas].count(True) == 1
    assert deltas[-1].prompt_tokens == 2


async def test_closing_ends_the_computation_before_the_next_step(pipeline: Recording) -> None:
    pipeline.held = True
    async with running(pipeline) as engine:
        stream = engine.generate(asked("a", 1, 2, steps=1000))
        await stepping(pipeline)
        stream.close()
        pipeline.go.set()
        assert await files(engine, asked("b"))
        assert pipeline.steps < 10
        assert (await figures(engine)).aborted == 2


async def test_a_batch_goes_on_for_those_who_stay(pipeline: Recording) -> None:
    pipeline.held = True
    async with running(pipeline) as engine:
        first = asyncio.create_task(files(engine, asked("first")))
        await stepping(pipeline)
        leaving, staying = engine.generate(asked("leaving")), asyncio.create_task(files(engine, asked("staying")))
        await asyncio.sleep(0)
        pipeline.stepping.clear()
        pipeline.held = False
        pipeline.go.set()
        await first
        leaving.close()
        assert await staying


async def test_a_cancelled_reader_aborts(pipeline: Recording) -> None:
    pipeline.held = True
    async with running(pipeline) as engine:
        reader = asyncio.create_task(files(engine, asked(steps=1000)))
        await stepping(pipeline)
        reader.cancel()
        pipeline.go.set()
        with pytest.raises(asyncio.CancelledError):
            await reader
        await until(lambda: pipeline.steps < 1000)
        assert await files(engine, asked("b"))


async def test_more_than_may_wait_are_refused(pipeline: Recording) -> None:
    pipeline.held = True
    async with running(pipeline) as engine:
        first = asyncio.create_task(files(engine, asked("first")))
        await stepping(pipeline)
        second = asyncio.create_task(files(engine, asked("second", *range(8))))
        await asyncio.sleep(0)
        with pytest.raises(QueueFull):
            await files(engine, asked("third"))
        pipeline.go.set()
        await asyncio.gather(first, second)
        assert await files(engine, asked("third", *range(9))), "an empty queue takes any one request"


@pytest.mark.parametrize(("prompt", "error"), [("fail", EngineFailure), ("refuse", InvalidRequest)])
async def test_a_failure_is_of_the_request_that_caused_it(
    pipeline: Recording, prompt: str, error: type[Exception]
) -> None:
    pipeline.held = True
    async with running(pipeline) as engine:
        first = asyncio.create_task(files(engine, asked("first")))
        await stepping(pipeline)
        bad, good = (asyncio.create_task(files(engine, asked(name, 1, 2))) for name in (prompt, "good"))
        await asyncio.sleep(0)
        pipeline.go.set()
        await first
        with pytest.raises(error):
            await bad
        assert len(await good) == 2
        now = await figures(engine)
        assert (now.waiting, now.running, now.failed, now.images) == (0, 0, 1, 3)


async def test_a_bug_of_the_pipeline_fails_one_request(pipeline: Recording, caplog: pytest.LogCaptureFixture) -> None:
    class Wrong(Recording):
        def generate(self, batch: Sequence[Picture], tick: Tick, show: Show = lambda _: None) -> list[Any]:
            raise ZeroDivisionError

    async with running(Wrong()) as engine:
        with pytest.raises(EngineFailure, match="ZeroDivisionError"):
            await files(engine, asked())
        assert engine.healthy
    assert "failed" in caplog.text


async def test_pictures_that_do_not_come_fail() -> None:
    class Short(Recording):
        def generate(self, batch: Sequence[Picture], tick: Tick, show: Show = lambda _: None) -> list[Any]:
            return super().generate(batch, tick)[1:]

    async with running(Short()) as engine, asyncio.timeout(20 * slowness()):
        with pytest.raises(EngineFailure, match="1 pictures instead of 2"):
            await files(engine, asked("a", 1, 2))


async def test_a_file_that_nobody_wants_any_more_is_no_picture(
    pipeline: Recording, monkeypatch: pytest.MonkeyPatch
) -> None:
    writing, go = threading.Event(), threading.Event()

    def held(*_: Any) -> bytes:
        writing.set()
        go.wait(60)
        return b""

    monkeypatch.setattr("engine.visual.engine.encode", held)
    async with running(pipeline) as engine:
        stream = engine.generate(asked())
        assert await asyncio.to_thread(writing.wait, 20 * slowness())
        stream.close()
        go.set()
        async with asyncio.timeout(20 * slowness()):
            async for now in engine.stats():
                if not now.encoding and (now.images or now.aborted):
                    break
        assert (now.images, now.aborted) == (0, 1)


def test_a_video_that_nobody_wants_any_more_is_short() -> None:
    av = pytest.importorskip("av")
    data = encode(np.zeros((9, 16, 16, 3), np.uint8), asked(frames=9, fps=8.0, format="webm"), lambda: False)
    with av.open(io.BytesIO(data)) as container:
        assert len(list(container.decode(video=0))) == 1


async def test_files_have_the_format_that_was_asked_for(pipeline: Recording) -> None:
    async with running(pipeline) as engine:
        for name in ("png", "webp", "jpeg"):
            (data,) = await files(engine, asked(format=name, quality=50))
            with Image.open(io.BytesIO(data)) as image:
                assert (image.format, image.size) == (name.upper(), (16, 16))


async def test_a_video_is_vp9_with_all_frames(pipeline: Recording) -> None:
    av = pytest.importorskip("av")
    async with running(pipeline) as engine:
        (data,) = await files(engine, asked(frames=5, fps=2.5, format="webm"))
    with av.open(io.BytesIO(data)) as container:
        stream = container.streams.video[0]
        assert (stream.codec.name, float(stream.average_rate)) == ("vp9", 2.5)
        assert len(list(container.decode(video=0))) == 5


async def test_closing_the_engine_ends_all_requests(pipeline: Recording) -> None:
    pipeline.held = True
    engine = QueuedVisualEngine(CONFIG, pipeline)
    await engine.start()
    computing, waiting = (
        asyncio.create_task(files(engine, asked(name, width=w))) for name, w in (("a", 16), ("b", 32))
    )
    await stepping(pipeline)
    pipeline.go.set()
    await engine.close()
    for task in (computing, waiting):
        with pytest.raises(EngineNotReady):
            await task
    with pytest.raises(EngineNotReady):
        await files(engine, asked())


async def test_a_step_that_hangs_makes_the_engine_unhealthy(pipeline: Recording) -> None:
    pipeline.held = True
    async with running(pipeline, replace(CONFIG, hang_seconds=0.01)) as engine:
        reader = asyncio.create_task(files(engine, asked(steps=1)))
        await stepping(pipeline)
        await until(lambda: not engine.healthy, 10 * slowness())
        reader.cancel()
        pipeline.go.set()


async def test_a_model_that_cannot_be_loaded_stops_the_start() -> None:
    class Missing(Recording):
        def load(self) -> Any:
            raise EngineFailure("no such folder")

    engine = QueuedVisualEngine(CONFIG, Missing())
    with pytest.raises(EngineFailure, match="no such folder"):
        await engine.start()
    await engine.close()
