"""The process that encodes images, `python -m engine.embedded.vision.worker`: decoding, the model's processor and its vision tower.

Standard input is a socket to the parent, in both directions (`messages.py`). The process ends when the parent closes it, even in the
middle of a batch. SIGTERM and SIGINT do nothing: a service manager's go to the parent too, which still drains.
"""

import logging
import os
import queue
import signal
import socket
import threading
import warnings
from concurrent.futures import Future
from typing import TYPE_CHECKING, NoReturn

import msgspec

from engine.embedded.vision.messages import Answer, Batch, Encoded, Options, Result, Welcome
from engine.encoder import EncodedImage, ImageInput
from engine.errors import EngineError, EngineFailure
from engine.process import wire
from engine.transfer.shared_bytes import SharedBytes
from protocol.frames import packed, read_payload

if TYPE_CHECKING:
    from collections.abc import Iterator

    from engine.embedded.vision.batches import BatchEncoder
    from engine.embedded.vision.processing import Prepared

    Batches = queue.SimpleQueue[Iterator[Prepared | EngineError]]

log = logging.getLogger(__name__)


def main() -> NoReturn:
    """Read in this thread, compute in another, so that the end of the socket ends the process at once, and that the next batch is prepared
    while one is computed.
    """
    for signum in (signal.SIGTERM, signal.SIGINT):
        signal.signal(signum, signal.SIG_IGN)
    os.dup2(2, 1)
    channel = socket.socket(fileno=0)
    try:
        options = msgspec.msgpack.decode(_receive_message(channel), type=Options)
        loaded: Future[BatchEncoder] = Future()
        batches: Batches = queue.SimpleQueue()
        threading.Thread(target=_serve, args=(options, channel, loaded, batches), daemon=True).start()
        while True:
            batch = msgspec.msgpack.decode(_receive_message(channel), type=Batch)
            images = [ImageInput(_receive(channel, size), detail) for detail, size in batch.images]
            batches.put(loaded.result().prepare(images))
    except (EOFError, ConnectionError):
        os._exit(0)


def _serve(options: Options, channel: socket.socket, loaded: "Future[BatchEncoder]", batches: "Batches") -> None:
    logging.basicConfig(level=options.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    warnings.filterwarnings("ignore", module=r"PIL\.")  # of what is odd in users' files
    try:
        from engine.embedded.vision.batches import BatchEncoder  # noqa: PLC0415 - slow to import, in this thread

        encoder = BatchEncoder(options.config)
        loaded.set_result(encoder)
        channel.sendall(packed(Welcome(encoder.info)))
        while True:
            for outcomes in encoder.embed(batches.get()):
                _send(channel, dict(outcomes))
    except EngineFailure as error:
        channel.sendall(packed(wire.failed(0, error)))
    except ConnectionError:
        pass  # the parent has gone
    except BaseException:
        log.exception("the encoder process has failed")
    finally:
        os._exit(1)  # without this thread the process is of no use


def _send(channel: socket.socket, outcomes: "dict[int, EncodedImage | EngineError]") -> None:
    channel.sendall(packed(Answer({index: _result(outcome) for index, outcome in outcomes.items()})))
    data = [outcome.data for outcome in outcomes.values() if isinstance(outcome, EncodedImage)]
    for inline in data:
        if not isinstance(inline, SharedBytes):
            channel.sendall(inline)
    if shared := [memory.fd for memory in data if isinstance(memory, SharedBytes)]:
        socket.send_fds(channel, [b"\0"], shared)


def _result(outcome: EncodedImage | EngineError) -> Result:
    if isinstance(outcome, EngineError):
        return wire.failed(0, outcome)
    return Encoded(
        outcome.text,
        outcome.rows,
        outcome.dtype,
        outcome.grid,
        len(outcome.data),
        isinstance(outcome.data, SharedBytes),
    )


def _receive_message(channel: socket.socket) -> bytes:
    return read_payload(lambda size: _receive(channel, size))


def _receive(channel: socket.socket, size: int) -> bytes:
    """Raises EOFError."""
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
