"""The process that encodes images, `python -m engine.embedded.vision.worker`: it decodes files and runs the model's
processor and vision tower.

Standard input is a socket to the parent, in both directions (`messages.py`). The process ends when the parent closes
it, even in the middle of a batch. SIGTERM, SIGINT and SIGHUP are ignored: a service manager sends them to the parent
too, which still drains.
"""

import ctypes
import gc
import logging
import os
import queue
import signal
import socket
import threading
import time
import warnings
from collections.abc import Callable
from concurrent.futures import Future
from typing import TYPE_CHECKING, NoReturn
from weakref import WeakValueDictionary

import msgspec
from msgspec.structs import replace

from engine.embedded.vision.messages import LARGE, SMALL, Answer, Batch, Busy, EncoderReady, GivenUp, Options, Release
from engine.errors import EngineError, EngineFailure
from engine.kit import logs
from engine.media import EncodedMedia, RemoteRows, attach_media
from engine.process import wire
from engine.transfer.shared_bytes import SharedBytes
from protocol.frames import packed, read_payload

if TYPE_CHECKING:
    from collections.abc import Iterator

    from engine.embedded.vision.batches import BatchEncoder
    from engine.embedded.vision.videos import Prepared

    Batches = queue.SimpleQueue[tuple[list[int], Iterator[Prepared | RemoteRows | EngineError]]]

log = logging.getLogger(__name__)
_BUSY_SECONDS = 1.0
_M_MMAP_THRESHOLD = -3
_OWN_PAGES = 4 << 20
"""Bytes from which on an allocation is given back to the system as soon as it is freed."""


class _Awaited:
    """Whether somebody waits for a file; it lives as long as the file's decoding."""

    still = True

    def __call__(self) -> bool:
        return self.still


def main() -> NoReturn:
    """Read in this thread and compute in others, so that the end of the socket ends the process at once, and the next
    batch is prepared while one is computed.
    """
    for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(signum, signal.SIG_IGN)
    os.dup2(2, 1)
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:  # musl has none
        mallopt(_M_MMAP_THRESHOLD, _OWN_PAGES)  # else the arena of each thread keeps the frames of its largest video
    channel = socket.socket(fileno=0)
    try:
        options = msgspec.msgpack.decode(_receive_message(channel), type=Options)
        loaded: Future[BatchEncoder] = Future()
        batches: Batches = queue.SimpleQueue()
        threading.Thread(target=_serve, args=(options, channel, loaded, batches), daemon=True).start()
        wanted: WeakValueDictionary[int, _Awaited] = WeakValueDictionary()
        while True:
            message = msgspec.msgpack.decode(_receive_message(channel), type=Batch | GivenUp | Release)
            if isinstance(message, GivenUp):
                for number in message.numbers:
                    if (one := wanted.get(number)) is not None:
                        one.still = False
                continue
            if isinstance(message, Release):
                loaded.result().release(message.rows)
                continue
            media = attach_media(message.media, [_receive(channel, size) for size in message.sizes])
            waiters = [_Awaited() for _ in media]
            wanted.update(zip(message.numbers, waiters, strict=True))
            encoder = loaded.result()
            if message.lane == LARGE:
                for number, file, waiter in zip(message.numbers, media, waiters, strict=True):
                    encoder.begin_large(number, file, waiter)
            else:
                batches.put((message.numbers, encoder.prepare(media, waiters)))
    except (EOFError, ConnectionError):
        os._exit(0)


def _serve(options: Options, channel: socket.socket, loaded: "Future[BatchEncoder]", batches: "Batches") -> None:
    logs.configure(options.logs)
    warnings.filterwarnings("ignore", module=r"PIL\.")  # about oddities in users' files
    sending = threading.Lock()

    def load() -> None:
        gc.disable()  # imports make a million objects that stay
        from engine.embedded.vision.batches import BatchEncoder  # noqa: PLC0415 - slow to import, in this thread

        gc.enable()
        encoder = BatchEncoder(options.config)
        loaded.set_result(encoder)
        channel.sendall(packed(EncoderReady(encoder.info, encoder.together, encoder.open)))

    def encode_small() -> None:
        while True:
            numbers, images = batches.get()
            for outcomes in loaded.result().embed(images):
                with sending:
                    _send(channel, SMALL, {numbers[index]: outcome for index, outcome in outcomes})

    def encode_large() -> None:
        for number, outcome in loaded.result().embed_large():
            with sending:
                _send(channel, LARGE, {number: outcome})

    def tell() -> None:
        while True:
            time.sleep(min(_BUSY_SECONDS, options.config.timeout_seconds / 4))
            if (longest := loaded.result().longest()) is not None:
                with sending:
                    channel.sendall(packed(Busy(*longest)))

    _until_failure(channel, load)
    for work in (encode_large, tell):
        threading.Thread(target=_until_failure, args=(channel, work), daemon=True).start()
    _until_failure(channel, encode_small)


def _until_failure(channel: socket.socket, work: Callable[[], None]) -> None:
    """Do the work of a thread, without which the process is useless."""
    try:
        work()
        return
    except EngineFailure as error:
        channel.sendall(packed(wire.failed(0, error)))
    except ConnectionError:
        pass  # the parent has gone
    except BaseException:
        log.exception("the encoder process has failed")
    os._exit(1)


def _send(channel: socket.socket, lane: int, outcomes: "dict[int, EncodedMedia | EngineError]") -> None:
    encoded = {index: outcome for index, outcome in outcomes.items() if isinstance(outcome, EncodedMedia)}
    shared = {index: media.data.fd for index, media in encoded.items() if isinstance(media.data, SharedBytes)}
    answer = Answer(
        lane=lane,
        encoded={index: replace(media, data=b"") for index, media in encoded.items()},
        sizes=[len(media.data) for media in encoded.values()],
        shared=[*shared],
        failed={
            index: wire.failed(0, outcome) for index, outcome in outcomes.items() if isinstance(outcome, EngineError)
        },
    )
    channel.sendall(packed(answer))
    for media in encoded.values():
        if not isinstance(media.data, SharedBytes):
            channel.sendall(media.data)
    if shared:
        socket.send_fds(channel, [b"\0"], [*shared.values()])


def _receive_message(channel: socket.socket) -> bytes:
    return read_payload(lambda size: _receive(channel, size))


def _receive(channel: socket.socket, size: int) -> bytes:
    """Receive `size` bytes. Raises EOFError."""
    data = bytearray(size)
    view = memoryview(data)
    while view:
        count = channel.recv_into(view)
        if not count:
            raise EOFError
        view = view[count:]
    return bytes(data)


if __name__ == "__main__":
    main()
