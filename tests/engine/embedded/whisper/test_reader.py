"""The process that reads audio files: it may crash or hang without an effect on other files."""

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable

import numpy as np
import pytest
import pytest_asyncio

from engine.embedded.whisper import reader
from engine.embedded.whisper.reader import AudioFile, HostedReader, ReaderConfig, SpeechReader
from engine.errors import EngineDied, InvalidRequest
from engine.kit.log_mel import Recording, log_mel
from tests.routers.test_transcriptions import wav
from tests.support.waiting import until
from tests.support.whisper_models import speech

CONFIG = ReaderConfig(bins=80, frames=200, max_seconds=10, timeout_seconds=60)


@pytest_asyncio.fixture
async def hosted() -> AsyncIterator[HostedReader]:
    hosted = HostedReader(CONFIG)
    await hosted.start()
    yield hosted
    await hosted.close()


async def test_features_come_from_a_process_that_is_replaced_when_it_dies(hosted: HostedReader) -> None:
    recording = await hosted.read(wav(2.5))
    assert (recording.seconds, recording.frames) == (2.5, 250)
    found = np.frombuffer(recording.data, np.float32).reshape(80, 250)
    np.testing.assert_allclose(found, log_mel(speech(2.5), 80), atol=0.05)  # a file has 16 bits
    pid = hosted.process.pid
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    waiting = asyncio.create_task(hosted.read(wav(1.0)))
    await asyncio.sleep(0)
    os.kill(pid, signal.SIGKILL)
    assert (await waiting).frames == 100
    assert hosted.process.pid != pid
    with pytest.raises(InvalidRequest, match="cannot be read"):
        await hosted.read(b"ID3 and nothing else")


async def test_a_file_that_ends_the_process_twice_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = 0

    async def call(self: HostedReader, method: str, file: AudioFile) -> Recording:
        nonlocal asked
        asked += 1
        raise EngineDied("the audio reader process was lost while the request ran")

    monkeypatch.setattr(HostedReader, "call", call)
    with pytest.raises(InvalidRequest, match="cannot be decoded"):
        await HostedReader(CONFIG).read(b"")
    assert asked == 2


async def test_files_read_beside_a_fatal_one_are_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    running: list[asyncio.Future[None]] = []

    async def call(self: HostedReader, method: str, file: AudioFile) -> Recording:
        """Read a file; a bad one ends the process with all its files."""
        died = asyncio.get_running_loop().create_future()
        running.append(died)
        for _ in range(5):
            await asyncio.sleep(0)
        if file.data == b"bad":
            for each in running:
                each.set_exception(EngineDied("the audio reader process was lost while the request ran"))
            running.clear()
        if died in running:
            running.remove(died)
            return Recording(1.0, 100, 80, bytes(file.data))
        await died
        raise AssertionError("it has died")

    monkeypatch.setattr(HostedReader, "call", call)
    hosted = HostedReader(CONFIG)
    found = await asyncio.gather(*map(hosted.read, (b"bad", b"good", b"fine")), return_exceptions=True)
    assert isinstance(found[0], InvalidRequest)
    assert [each.data for each in found[1:] if isinstance(each, Recording)] == [b"good", b"fine"]
    assert (await hosted.read(b"next")).data == b"next"


async def test_a_recording_may_be_as_long_as_a_message(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader, "MAX_MESSAGE_BYTES", 4 * 80 * 300 + 2000)
    here = SpeechReader(CONFIG)
    assert (await here.read(AudioFile(wav(2.5)))).frames == 250
    with pytest.raises(InvalidRequest, match="longer than 3 seconds"):
        await here.read(AudioFile(wav(3.5)))
    await here.close()


@pytest.mark.parametrize(("name", "result"), [("claimed_seconds", 1.0), ("decode_audio", np.zeros(16000, np.float32))])
async def test_a_file_that_takes_too_long_makes_the_process_unhealthy(
    monkeypatch: pytest.MonkeyPatch, name: str, result: float | np.ndarray
) -> None:
    """The host ends an unhealthy service."""
    release = threading.Event()

    def hang(*_: object) -> float | np.ndarray:
        release.wait()
        return result

    monkeypatch.setattr(reader, name, hang)
    here = SpeechReader(ReaderConfig(bins=80, frames=200, max_seconds=10, timeout_seconds=0))
    assert here.healthy
    reading = asyncio.create_task(here.read(AudioFile(wav(1.0))))
    try:
        await until(lambda: not here.healthy)
    finally:
        release.set()
    assert (await reading).frames == 100
    assert here.healthy
    await here.close()


async def test_reading_ends_for_a_client_that_has_left(monkeypatch: pytest.MonkeyPatch) -> None:
    begun, ended = threading.Event(), threading.Event()

    def decode(data: bytes, max_seconds: float, going_on: Callable[[], bool]) -> np.ndarray:
        begun.set()
        while going_on():
            time.sleep(0.001)
        ended.set()
        return speech(1.0)

    monkeypatch.setattr(reader, "decode_audio", decode)
    here = SpeechReader(CONFIG)
    reading = asyncio.create_task(here.read(AudioFile(wav(1.0))))
    await until(begun.is_set)
    reading.cancel()
    await until(ended.is_set)
    await here.close()


async def test_long_recordings_wait_for_memory_and_short_ones_pass_them(monkeypatch: pytest.MonkeyPatch) -> None:
    running: list[bytes] = []
    release = threading.Event()

    def decode(data: bytes, *_: object) -> np.ndarray:
        running.append(data)
        if data == b"long":
            release.wait()
        return speech(1.0)

    monkeypatch.setattr(reader, "decode_audio", decode)
    monkeypatch.setattr(reader, "claimed_seconds", lambda data: 7000.0 if data == b"long" else 1.0)
    here = SpeechReader(ReaderConfig(bins=80, frames=200, max_seconds=7200, timeout_seconds=60))
    long = [asyncio.create_task(here.read(AudioFile(b"long"))) for _ in range(6)]
    await until(lambda: bool(running))
    await here.read(AudioFile(b"short"))
    assert running == [b"long", b"short"]
    release.set()
    assert [recording.frames for recording in await asyncio.gather(*long)] == [100] * 6
    await here.close()


def test_the_reader_does_not_import_torch() -> None:
    code = "import sys, engine.embedded.whisper.reader; sys.exit('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)})
    assert done.returncode == 0
