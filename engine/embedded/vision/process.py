"""The parent's side of the process that encodes images: starts it, sends batches, receives answers, ends it."""

import asyncio
import signal
import socket
from asyncio.subprocess import Process
from collections.abc import Sequence
from typing import Self

import msgspec
from msgspec.structs import replace

from engine.embedded.vision.messages import Answer, Batch, Busy, EncoderReady, GivenUp, Options, Release
from engine.encoder import EncoderInfo
from engine.errors import EngineError, EngineFailure
from engine.media import EncodedMedia, MediaInput, RemoteRows, detach_media
from engine.process import wire
from engine.process.command import kill, module_command
from engine.transfer.shared_bytes import Data, SharedBytes, crowded
from protocol.frames import packed, receive_payload

_STOP_SECONDS = 5.0
"""Time the process may take to end once its socket is closed."""


class EncoderProcess:
    """A started process.

    It ends with this one, however that ends. Call `send` and `drop` one at a time, and `receive` likewise.
    """

    def __init__(self, process: Process, channel: socket.socket) -> None:
        self.process = process
        self.together = 1
        """Images that the tower computes together, but for large ones."""
        self.open = 1
        """Large files that take turns."""
        self._channel = channel

    @classmethod
    async def start(cls, options: Options) -> tuple[Self, EncoderInfo]:
        """Start a process and wait until it is ready.

        Raises EngineFailure, with nothing left running, if it does not start.
        """
        try:
            ours, theirs = socket.socketpair()
        except OSError as error:
            raise EngineFailure(f"the encoder process cannot be talked to: {error}") from error
        ours.setblocking(False)
        try:
            process = await asyncio.create_subprocess_exec(
                *module_command("engine.embedded.vision.worker"), stdin=theirs.fileno(), start_new_session=True,
            )  # fmt: skip
        except OSError as error:
            ours.close()
            raise EngineFailure(f"the encoder process cannot be spawned: {error}") from error
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        self = cls(process, ours)
        try:
            return self, await self._greet(options)
        except BaseException:
            await self.stop()
            raise

    async def send(self, lane: int, media: Sequence[MediaInput], numbers: Sequence[int]) -> bool:
        """Send files, whose results `receive` will return; return False if the process has gone."""
        try:
            bare, files = detach_media(media)
            await self._write(packed(Batch(lane, bare, [*numbers], [*map(len, files)])))
            for file in files:
                await self._write(file)
        except ConnectionError:
            return False
        return True

    async def drop(self, numbers: Sequence[int]) -> bool:
        """Say that nobody waits for some of the files any more; return False if the process has gone."""
        try:
            await self._write(packed(GivenUp([*numbers])))
        except ConnectionError:
            return False
        return True

    async def release(self, rows: RemoteRows) -> bool:
        """Give up embeddings that stayed in the process; return False if it has gone. Counts as a `send`."""
        try:
            await self._write(packed(Release(rows)))
        except ConnectionError:
            return False
        return True

    async def receive(self) -> tuple[int, dict[int, EncodedMedia | EngineError]] | Busy | None:
        """Return a lane and outcomes of files of one of its batches, by number, or a sign of life of the large files;
        None if the process has gone."""
        try:
            answer = msgspec.msgpack.decode(await receive_payload(self._read), type=Answer | Busy)
            if isinstance(answer, Busy):
                return answer
            sizes = zip(answer.encoded, answer.sizes, strict=True)
            data: dict[int, Data] = {
                index: await self._read(size) for index, size in sizes if index not in answer.shared
            }
            if answer.shared:
                data |= zip(answer.shared, await self._shared(len(answer.shared)), strict=False)
        except (EOFError, ConnectionError):
            return None
        failed = {index: wire.error_of(error) for index, error in answer.failed.items()}
        encoded = {index: _with_data(media, data.get(index)) for index, media in answer.encoded.items()}
        return answer.lane, failed | encoded

    def kill(self) -> None:
        kill(self.process)

    async def stop(self) -> str:
        """End the process, if it still runs, and return how it ended."""
        self._channel.close()
        try:
            async with asyncio.timeout(_STOP_SECONDS):
                code = await self.process.wait()
        except TimeoutError:
            self.kill()
            code = await self.process.wait()
        return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"

    async def _greet(self, options: Options) -> EncoderInfo:
        try:
            await self._write(packed(options))
            reply: EncoderReady | wire.Failed = msgspec.msgpack.decode(
                await receive_payload(self._read), type=EncoderReady | wire.Failed
            )
        except (EOFError, ConnectionError) as error:
            raise EngineFailure(f"the encoder process failed to start ({await self.stop()})") from error
        if isinstance(reply, wire.Failed):
            raise wire.error_of(reply)
        self.together, self.open = reply.together, reply.open
        return reply.info

    async def _write(self, data: bytes) -> None:
        await asyncio.get_running_loop().sock_sendall(self._channel, data)

    async def _read(self, size: int) -> bytes:
        """Read `size` bytes. Raises EOFError."""
        data = bytearray(size)
        view = memoryview(data)
        while view:
            count = await asyncio.get_running_loop().sock_recv_into(self._channel, view)
            if not count:
                raise EOFError
            view = view[count:]
        return bytes(data)

    async def _shared(self, count: int) -> list[Data]:
        """Receive up to this many descriptors of shared memory; only the first ones if this process may open no more.

        Raises EOFError.
        """
        while True:
            try:
                byte, fds, _, _ = socket.recv_fds(self._channel, 1, count, socket.MSG_CMSG_CLOEXEC)
            except BlockingIOError:
                await _until_readable(self._channel)
                continue
            if not byte:
                raise EOFError
            return [memory.copy() if crowded() else memory for memory in map(SharedBytes, fds)]


def _with_data(media: EncodedMedia, data: Data | None) -> EncodedMedia | EngineError:
    if data is None:
        return EngineFailure("the server has too many files open to take the embeddings of an image")
    return replace(media, data=data)


async def _until_readable(channel: socket.socket) -> None:
    loop, readable = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(channel, readable.set)
    try:
        await readable.wait()
    finally:
        loop.remove_reader(channel)
