"""The encoder's process: death, hangs, shutdown and cancellation, while the event loop stays responsive."""

import asyncio
import io
import json
import os
import signal
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import pytest_asyncio
from PIL import Image

from engine.config import EncoderConfig
from engine.embedded.vision.encoder import EmbeddedEncoder
from engine.embedded.vision.messages import Busy
from engine.embedded.vision.process import EncoderProcess
from engine.encoder import Encoder
from engine.errors import EngineDied, EngineError, EngineFailure, EngineNotReady, InvalidRequest
from engine.kit.work import begin_request
from engine.media import EncodedMedia, MediaInput
from tests.support.videos import frames_of, video_of
from tests.support.vision_models import build_llava, image_bytes
from tests.support.waiting import slowness

ROOT = Path(__file__).resolve().parents[4]
GOOD = MediaInput(image_bytes())
Received = tuple[int, dict[int, EncodedMedia | EngineError]] | Busy | None
pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_llava(tmp_path_factory.mktemp("llava"))


@pytest.fixture(scope="module")
def long_video() -> MediaInput:
    """3600 frames, which take seconds to make, too."""
    return MediaInput(video_of(frames_of(60, 320, 240) * 60, "mp4", 100), kind="video")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def encoder(folder: Path) -> AsyncIterator[EmbeddedEncoder]:
    """One encoder for all tests, since a process takes seconds to start.

    Closed while it has much to do, it leaves nothing behind.
    """
    seconds = 3.0 * slowness()
    encoder = EmbeddedEncoder(EncoderConfig(model=str(folder), dtype="float32", threads=1, timeout_seconds=seconds))
    await encoder.start()
    yield encoder
    await until_healthy(encoder)
    task = asyncio.create_task(encoder.encode([MediaInput(image_bytes(2000, 2000))] * 40))
    await asyncio.sleep(0.1)
    pid, started = encoder.pid, time.monotonic()
    await encoder.close()
    assert pid is not None and not psutil.pid_exists(pid) and time.monotonic() - started < 5 * slowness()
    with pytest.raises(EngineNotReady):
        await task
    with pytest.raises(EngineNotReady):
        await encoder.encode([GOOD])
    assert not encoder.healthy


async def until_healthy(encoder: EmbeddedEncoder) -> None:
    async with asyncio.timeout(60):
        while not encoder.healthy:  # noqa: ASYNC110 - it says so nowhere else
            await asyncio.sleep(0.05)


async def test_images_in_order_and_refusals(encoder: EmbeddedEncoder) -> None:
    seam: Encoder = encoder
    assert seam.healthy and seam.info.placeholder == "<image>" and seam.info.hidden_size == 64
    images = [MediaInput(image_bytes(seed=seed)) for seed in range(20)]
    many = await seam.encode(images)
    assert [one.data for one in many] == [(await seam.encode([image]))[0].data for image in images]
    assert len({one.data for one in many}) == 20
    assert all(
        (one.text, one.rows, len(one.data), one.dtype) == ("<image>" * 16, 16, 16 * 64 * 4, "float32") for one in many
    )
    assert await seam.encode([]) == []
    with pytest.raises(InvalidRequest, match="cannot be read") as caught:
        await seam.encode([GOOD, MediaInput(b"no image"), GOOD])
    assert caught.value.param == "image"
    assert len(await seam.encode([GOOD])) == 1


async def test_large_images_are_in_memory_few_at_a_time(
    encoder: EmbeddedEncoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(encoder, "_timeout", 60.0)
    file = io.BytesIO()
    Image.new("RGBA", (6800, 6800), (200, 10, 10, 128)).save(file, "PNG", compress_level=1)
    before = restart_peak(encoder)
    await encoder.encode([MediaInput(file.getvalue() + bytes([index])) for index in range(3)])
    assert memory(encoder, "VmHWM") - before < 1000 << 10, "four copies of one of 185 MB, not of each image"
    assert memory(encoder, "VmRSS") - before < 150 << 10, "which are given back"


def restart_peak(encoder: EmbeddedEncoder) -> int:
    """What the process has now, from which its peak is counted."""
    Path(f"/proc/{encoder.pid}/clear_refs").write_text("5")
    return memory(encoder, "VmRSS")


def memory(encoder: EmbeddedEncoder, name: str) -> int:
    """Of its process, in KiB."""
    (line,) = [line for line in Path(f"/proc/{encoder.pid}/status").read_text().splitlines() if line.startswith(name)]
    return int(line.split()[1])


async def test_the_loop_does_not_feel_it(encoder: EmbeddedEncoder) -> None:
    images = [MediaInput(image_bytes(1600, 1200, seed, "JPEG")) for seed in range(20)]
    for _attempt in range(3):  # what else runs on the machine may hold this process up
        encoding = asyncio.create_task(encoder.encode(images))
        lags: list[float] = []
        while not encoding.done():
            started = time.perf_counter()
            await asyncio.sleep(0.002)
            lags.append(time.perf_counter() - started - 0.002)
        results: list[EncodedMedia] = await encoding
        assert len(results) == 20 and len(lags) > 50
        if sorted(lags)[int(0.99 * len(lags))] < 0.02 * slowness():
            return
    pytest.fail(f"the loop stood still for {max(lags):.3f} s")


async def test_cancelled_images_are_skipped(encoder: EmbeddedEncoder) -> None:
    slow = MediaInput(image_bytes(2000, 2000))
    started = time.monotonic()
    await encoder.encode([slow] * 4)
    seconds = (time.monotonic() - started) / 4
    task = asyncio.create_task(encoder.encode([slow] * 200))
    await asyncio.sleep(0.1)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    started = time.monotonic()
    await encoder.encode([GOOD])
    assert time.monotonic() - started < 60 * seconds  # two batches of 8 were under way, 184 images were not


async def test_decoding_ends_for_a_client_that_has_left(
    encoder: EmbeddedEncoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    await until_healthy(encoder)
    video = video_of(frames_of(1) * 6000, "mp4", 100)
    answers: asyncio.Queue[Received] = asyncio.Queue()
    sent = asyncio.Event()
    receive, send = EncoderProcess.receive, EncoderProcess.send

    async def watched_receive(self: EncoderProcess) -> Received:
        if not isinstance(answer := await receive(self), Busy):
            answers.put_nowait(answer)
        return answer

    async def watched_send(self: EncoderProcess, *batch: Any) -> bool:
        done = await send(self, *batch)
        sent.set()
        return done

    monkeypatch.setattr(EncoderProcess, "receive", watched_receive)
    await encoder.encode([GOOD])  # the answers after this one are watched
    while not answers.empty():
        answers.get_nowait()
    monkeypatch.setattr(EncoderProcess, "send", watched_send)
    encoding = asyncio.create_task(encoder.encode([MediaInput(video, kind="video")]))
    await sent.wait()
    encoding.cancel()
    answer = await answers.get()
    assert isinstance(answer, tuple) and "nobody waits for the video" in str(*answer[1].values())


async def test_death_is_followed_by_a_restart_and_costs_nothing(encoder: EmbeddedEncoder) -> None:
    fingerprint, pid = encoder.info.fingerprint, encoder.pid
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    tasks = [asyncio.create_task(encoder.encode([GOOD] * 8)) for _ in range(4)]
    await asyncio.sleep(0.1)
    os.kill(pid, signal.SIGKILL)
    async with asyncio.timeout(20):
        while encoder.healthy:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    with pytest.raises(EngineNotReady):
        await encoder.encode([GOOD])
    assert [len(images) for images in await asyncio.gather(*tasks)] == [8] * 4
    assert encoder.pid != pid and encoder.info.fingerprint == fingerprint


async def test_an_image_that_kills_the_process_fails_alone(encoder: EmbeddedEncoder) -> None:
    """The process is killed each time it has begun with the first image, which takes a while."""
    pids = set[int]()
    fatal = asyncio.create_task(encoder.encode([MediaInput(image_bytes(2000, 2000))]))
    others: list[asyncio.Task[list[EncodedMedia]]] = []
    while not fatal.done():
        if encoder.pid is not None and encoder.pid not in pids:
            os.kill(encoder.pid, signal.SIGSTOP)
            others += [asyncio.create_task(encoder.encode([GOOD, GOOD])) for _ in range(3)]
            await asyncio.sleep(0.1)
            os.kill(encoder.pid, signal.SIGKILL)
            pids.add(encoder.pid)
        await asyncio.sleep(0.002)
    assert isinstance(fatal.exception(), EngineDied)
    assert "whenever it had the image" in str(fatal.exception())
    assert len(pids) == 2
    assert [len(images) for images in await asyncio.gather(*others)] == [2] * 6


async def test_a_hanging_image_fails_alone(encoder: EmbeddedEncoder) -> None:
    pid = encoder.pid
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    hanging = asyncio.create_task(encoder.encode([GOOD]))
    await asyncio.sleep(0.1)
    others = [asyncio.create_task(encoder.encode([GOOD, GOOD])) for _ in range(6)]
    with pytest.raises(EngineFailure, match=r"longer than \d.* seconds"):
        await hanging
    assert not psutil.pid_exists(pid)
    assert [len(images) for images in await asyncio.gather(*others)] == [2] * 6


async def test_images_of_a_hanging_batch_are_retried_one_by_one(encoder: EmbeddedEncoder) -> None:
    pid = encoder.pid
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    images = await encoder.encode([GOOD] * 5)
    assert len(images) == 5 and encoder.pid != pid


async def test_a_failed_start_says_why_and_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "gemma3", "vision_config": {}}')
    encoder = EmbeddedEncoder(EncoderConfig(model=str(tmp_path)))
    before = {child.pid for child in psutil.Process().children()}
    with pytest.raises(EngineNotReady):
        _ = encoder.info
    with pytest.raises(EngineFailure, match="both directions"):
        await encoder.start()
    assert {child.pid for child in psutil.Process().children()} == before
    await encoder.close()


async def test_the_process_ends_with_its_parent(folder: Path) -> None:
    code = (
        "import asyncio, sys\n"
        "from engine.config import EncoderConfig\nfrom engine.embedded.vision.encoder import EmbeddedEncoder\n"
        "async def main():\n"
        "    encoder = EmbeddedEncoder(EncoderConfig(model=sys.argv[1], threads=1))\n"
        "    await encoder.start()\n    print(encoder.pid, flush=True)\n    await asyncio.sleep(60)\n"
        "asyncio.run(main())\n"
    )
    pipe = asyncio.subprocess.PIPE
    parent = await asyncio.create_subprocess_exec(sys.executable, "-c", code, str(folder), cwd=ROOT, stdout=pipe)
    assert parent.stdout is not None
    child = psutil.Process(int(await parent.stdout.readline()))
    parent.kill()
    await parent.communicate()
    child.wait(10)


async def test_small_images_pass_large_ones_and_requests_take_turns(encoder: EmbeddedEncoder) -> None:
    """A request with many images, large ones and small ones, does not delay one small image of another."""
    await until_healthy(encoder)
    done: list[str] = []

    async def encode(name: str, image: MediaInput) -> None:
        await encoder.encode([image])
        done.append(name)

    async def flood() -> None:
        begin_request()
        large = [MediaInput(image_bytes(2000, 2000, seed), pixels=4_000_000) for seed in range(12)]
        small = [MediaInput(image_bytes(600, 600, seed), pixels=360_000) for seed in range(40)]
        async with asyncio.TaskGroup() as group:
            for name, images in (("large", large), ("small", small)):
                for image in images:
                    group.create_task(encode(name, image))

    flooding = asyncio.create_task(flood())
    while not done:  # noqa: ASYNC110 - it says so nowhere else
        await asyncio.sleep(0.001)
    before = len(done)
    await encode("other", MediaInput(image_bytes(), pixels=1))
    passed = done[before:]
    await flooding
    assert passed.count("large") <= 6 and passed.count("small") <= 10, passed


async def test_a_short_video_does_not_wait_for_long_ones(encoder: EmbeddedEncoder, long_video: MediaInput) -> None:
    await until_healthy(encoder)
    short = MediaInput(video_of(frames_of(60, 320, 240), "mp4", 100), kind="video")
    await encoder.encode([short])
    done: list[str] = []

    async def encode(name: str, video: MediaInput) -> None:
        begin_request()
        await encoder.encode([video])
        done.append(name)

    async with asyncio.TaskGroup() as group:
        for _ in range(3):
            group.create_task(encode("long", long_video))
        await asyncio.sleep(0)  # they are asked for first
        group.create_task(encode("short", short))
    assert "short" in done[:2], "on a busy machine it may need a second turn"


async def test_a_large_file_that_hangs_is_named_and_fails_alone(
    encoder: EmbeddedEncoder, long_video: MediaInput, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its process says that it has computed on the file for too long; others are answered in the meantime."""
    await until_healthy(encoder)
    receive, pid = EncoderProcess.receive, encoder.pid
    told: list[int] = []

    async def busy(self: EncoderProcess) -> Received:
        answer = await receive(self)
        if isinstance(answer, Busy) and not told:
            told.append(answer.number)
            return Busy(answer.number, 1e9)
        return answer

    monkeypatch.setattr(EncoderProcess, "receive", busy)
    await encoder.encode([GOOD])  # the answers after this one are watched
    videos = [asyncio.create_task(encoder.encode([long_video])) for _ in range(3)]
    ends = await asyncio.gather(*videos, return_exceptions=True)
    (failed,) = [end for end in ends if isinstance(end, BaseException)]
    assert "took longer than" in str(failed) and encoder.pid != pid


async def test_weights_are_released_with_the_process_and_loaded_again(encoder: EmbeddedEncoder, folder: Path) -> None:
    await until_healthy(encoder)
    before, pid = await encoder.encode([GOOD]), encoder.pid
    assert pid is not None
    settings = folder / "preprocessor_config.json"
    text = settings.read_text()
    await encoder.release_weights()
    assert not encoder.healthy and not psutil.pid_exists(pid)
    try:
        settings.write_text(json.dumps(json.loads(text) | {"image_mean": [0.1, 0.1, 0.1]}))
        with pytest.raises(EngineFailure, match="others than"):
            await encoder.resume_weights()
        assert not encoder.healthy
    finally:
        settings.write_text(text)
    await encoder.resume_weights()
    assert await encoder.encode([GOOD]) == before and encoder.pid not in (None, pid)
