"""Conversion of audio files into features, in a process of its own: decoders of files from strangers may hang or crash.

It imports neither torch nor transformers. A file whose decoding takes too long ends the process, and so may a damaged
one; the process is restarted. The files that were read at the same time are read again, one by one, each of them once
more: only the file at fault is refused.
"""

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import msgspec
import numpy as np

from engine.checkpoints.whisper import FRAMES_PER_SECOND
from engine.errors import EngineDied, EngineNotReady, InvalidRequest
from engine.kit.audio_file import claimed_seconds, decode_audio
from engine.kit.log_mel import HOP, SAMPLE_RATE, Recording, log_mel
from engine.kit.time_slices import Room, TimeSlices
from engine.kit.work import Turns
from engine.process.child import ServiceProcess
from engine.process.client import ServiceClient
from engine.process.service import Interface, Method
from engine.process.wire import MAX_MESSAGE_BYTES
from engine.transfer.shared_bytes import Data, readable

_AT_ONCE = 4
"""Files that are read at the same moment."""
_ASKED = 16
"""Files of an API process that the process has at the same time, in turns: short ones do not wait for long ones."""
_MAX_BYTES = 1 << 30
"""Memory of the files of an API process that are being read, and of the samples and features of long ones."""
_LONG_SECONDS = 600.0
_BYTES_PER_SECOND = 150_000
"""Memory that a second of sound takes while it is read: its samples, twice, and features."""
_PAUSE = 0.1
_OVERHEAD = 1 << 10
"""Bytes of a message in addition to the features."""
_MIN_SECONDS = 0.1


class ReaderConfig(msgspec.Struct, frozen=True, kw_only=True):
    bins: int
    """Mel bins of the model's features."""
    frames: int
    """Frames of the model's window: shorter recordings are filled up with silence."""
    max_seconds: float
    """Longest recording."""
    timeout_seconds: float
    """Seconds that decoding a file may take before the process is replaced."""

    @property
    def longest(self) -> float:
        """Seconds of the longest recording: its features travel in one message."""
        return min(self.max_seconds, (MAX_MESSAGE_BYTES - _OVERHEAD) // (4 * self.bins * FRAMES_PER_SECOND))


class ReaderInfo(msgspec.Struct, frozen=True):
    """Facts of the service, of which there are none."""


class AudioFile(msgspec.Struct, frozen=True):
    data: Data = b""


class SpeechReader:
    """The service in the process."""

    def __init__(self, config: ReaderConfig) -> None:
        self._config = config
        self._threads = ThreadPoolExecutor(_ASKED)
        self._slices = TimeSlices(_AT_ONCE)
        short = int(_LONG_SECONDS * _BYTES_PER_SECOND)
        self._room = Room(_MAX_BYTES, small=short, reserve=_AT_ONCE * short)
        """Recordings wait here for memory; short ones pass long ones."""

    @property
    def info(self) -> ReaderInfo:
        return ReaderInfo()

    @property
    def healthy(self) -> bool:
        """False once a file takes too long: a thread cannot be stopped."""
        longest = self._slices.longest()
        return longest is None or longest[1] < self._config.timeout_seconds

    async def start(self) -> None:
        """Do nothing: there is nothing to load."""

    async def read(self, file: AudioFile) -> Recording:
        """Decode a file into features. Raises InvalidRequest."""
        left = threading.Event()
        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads, self._read, file, left)
        finally:
            left.set()

    async def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _read(self, file: AudioFile, left: threading.Event) -> Recording:
        config = self._config
        with self._slices.begin(going_on=lambda: not left.is_set()) as work:
            claimed = min(claimed_seconds(bytes(readable(file.data))), config.longest)
            work.hold(self._room, int(claimed * _BYTES_PER_SECOND))
            samples = decode_audio(bytes(readable(file.data)), config.longest, work)
            seconds = len(samples) / SAMPLE_RATE
            if seconds < _MIN_SECONDS:
                raise InvalidRequest(f"the audio is shorter than {_MIN_SECONDS:g} seconds", "audio")
            frames = len(samples) // HOP
            if frames < config.frames:
                samples = np.pad(samples, (0, config.frames * HOP - len(samples)))
            return Recording(seconds, frames, config.bins, log_mel(samples, config.bins).tobytes())


READER: Interface[ReaderConfig, SpeechReader] = Interface(
    name="engine.embedded.whisper.reader:READER",
    noun="audio reader",
    config=ReaderConfig,
    create=SpeechReader,
    info=ReaderInfo,
    methods={
        "read": Method(
            AudioFile,
            Recording,
            lambda reader, file: reader.read(file),
            lambda file: (AudioFile(), [file.data]),
            lambda _, parts: AudioFile(*parts),
            too_large="the audio file is too large",
            parameter="audio",
        )
    },
    topics={},
)


class HostedReader(ServiceClient[ReaderInfo]):
    """The reader of an API process, with a process of its own."""

    def __init__(self, config: ReaderConfig) -> None:
        self.process = ServiceProcess(READER, config)
        self._turns = Turns(_ASKED, 1, _MAX_BYTES)
        self._suspects = 0
        """Files that were being read when the process ended."""
        self._cleared = asyncio.Event()
        """Set while there are no suspects."""
        self._cleared.set()
        self._alone = asyncio.Lock()
        super().__init__(READER, self.process.address, self.process.wait_failed)

    async def start(self) -> None:
        try:
            await self.process.start()
            await super().start()
        except BaseException:  # cancellation included
            await self.close()
            raise

    async def read(self, data: bytes) -> Recording:
        """Read a file. Raises InvalidRequest for a file that cannot be read, or is too long."""
        file = AudioFile(data)
        async with self._turns.place(len(data)):
            try:
                return await self._read(file)
            except EngineDied:
                with self._suspected():
                    return await self._read_alone(file)

    @contextmanager
    def _suspected(self) -> Iterator[None]:
        self._suspects += 1
        self._cleared.clear()
        try:
            yield
        finally:
            self._suspects -= 1
            if not self._suspects:
                self._cleared.set()

    async def _read_alone(self, file: AudioFile) -> Recording:
        async with self._alone:
            try:
                return await self._read(file, suspected=True)
            except EngineDied as error:
                raise InvalidRequest("the audio cannot be decoded", "audio") from error

    async def _read(self, file: AudioFile, *, suspected: bool = False) -> Recording:
        while True:
            if not suspected:
                await self._cleared.wait()
            try:
                recording: Recording = await self.call("read", file)
                return recording
            except EngineNotReady:  # it is being restarted
                await asyncio.sleep(_PAUSE)

    async def close(self) -> None:
        await super().close()
        await self.process.close()
