"""The process that encodes images, `python -m engine.embedded.vision.worker`: it decodes files and runs the model's
processor and vision tower.

Standard input is a socket to the parent, in both directions (`messages.py`). The process ends when the parent closes
it, even in the middle of a batch. SIGTERM, SIGINT and SIGHUP are ignored: a service manager sends them to the parent
too, which still drains.
"""

import gc
import logging
import os
import queue
import signal
import socket
import threading
import warnings
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import TYPE_CHECKING, NoReturn
from weakref import WeakValueDictionary

import msgspec
from msgspec.structs import replace

from engine.embedded.vision.messages import LANES, Answer, Batch, EncoderReady, GivenUp, Options, Release
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

    Batches = queue.SimpleQueue[Iterator[Prepared | RemoteRows | EngineError]]

log = logging.getLogger(__name__)


class _Awaited:
    """Whether somebody waits for a file; it lives as long as the file's decoding."""

    still = True

    def __call__(self) -> bool:
        return self.still


def main() -> NoReturn:
    """Read in this thread and compute in others, one for each lane, so that the end of the socket ends the process at
    once, and the next batch is prepared while one is computed.
    """
    for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(signum, signal.SIG_IGN)
    os.dup2(2, 1)
    channel = socket.socket(fileno=0)
    try:
        options = msgspec.msgpack.decode(_receive_message(channel), type=Options)
        loaded: Future[BatchEncoder] = Future()
        lanes: list[Batches] = [queue.SimpleQueue() for _ in range(LANES)]
        threading.Thread(target=_serve, args=(options, channel, loaded, lanes), daemon=True).start()
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
            lanes[message.lane].put(loaded.result().prepare(media, message.lane, waiters))
    except (EOFError, ConnectionError):
        os._exit(0)


def _serve(options: Options, channel: socket.socket, loaded: "Future[BatchEncoder]", lanes: "list[Batches]") -> None:
    logs.configure(options.logs)
    warnings.filterwarnings("ignore", module=r"PIL\.")  # about oddities in users' files
    sending = threading.Lock()

    def load() -> None:
        gc.disable()  # imports make a million objects that stay
        from engine.embedded.vision.batches import BatchEncoder  # noqa: PLC0415 - slow to import, in this thread

        gc.enable()
        encoder = BatchEncoder(options.config)
        loaded.set_result(encoder)
        channel.sendall(packed(EncoderReady(encoder.info, encoder.together)))

    def encode(lane: int) -> None:
        while True:
            for outcomes in loaded.result().embed(lanes[lane].get(), lane):
                with sending:
                    _send(channel, lane, dict(outcomes))

    _until_failure(channel, load)
    for lane in range(1, LANES):
        threading.Thread(target=_until_failure, args=(channel, partial(encode, lane)), daemon=True).start()
    _until_failure(channel, partial(encode, 0))


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
