"""The process that encodes images, `python -m engine.embedded.vision.worker`: decoding, the model's processor and its vision tower.

Standard input is a socket to the parent, in both directions (`messages.py`). The process ends when the parent closes it, even in the
middle of a batch. SIGTERM and SIGINT do nothing: a service manager's go to the parent too, which still drains.
"""

import io
import logging
import os
import queue
import signal
import socket
import threading
import warnings
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import msgspec

from engine import wire
from engine.embedded.vision.facts import vision_facts
from engine.embedded.vision.messages import HEADER, Answer, Batch, Encoded, Options, Result, Welcome, packed
from engine.encoder import EncoderInfo, ImageInput
from engine.errors import EngineError, EngineFailure

if TYPE_CHECKING:
    from engine.embedded.vision.processing import Prepared

_PREPARING_THREADS = 4
_CALL_VALUES = 32 << 20
"""Pixel values, three to a pixel, that one call of the tower takes, unless a single image has more."""

log = logging.getLogger(__name__)


def main() -> NoReturn:
    """Read in this thread, compute in another, so that the end of the socket ends the process at once."""
    for signum in (signal.SIGTERM, signal.SIGINT):
        signal.signal(signum, signal.SIG_IGN)
    os.dup2(2, 1)
    channel = socket.socket(fileno=0)
    try:
        options = msgspec.msgpack.decode(_receive_message(channel), type=Options)
        batches: queue.SimpleQueue[list[ImageInput]] = queue.SimpleQueue()
        threading.Thread(target=_serve, args=(options, channel, batches), daemon=True).start()
        while True:
            batch = msgspec.msgpack.decode(_receive_message(channel), type=Batch)
            batches.put([ImageInput(_receive(channel, size), detail) for detail, size in batch.images])
    except (EOFError, ConnectionError):
        os._exit(0)


def _serve(options: Options, channel: socket.socket, batches: queue.SimpleQueue[list[ImageInput]]) -> None:
    logging.basicConfig(level=options.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    warnings.filterwarnings("ignore", module=r"PIL\.")  # of what is odd in users' files
    try:
        worker = Worker(options)
        channel.sendall(packed(Welcome(worker.info)))
        while True:
            results, embeddings = worker.encode(batches.get())
            channel.sendall(packed(Answer(results)))
            for data in embeddings:
                channel.sendall(data)
    except EngineFailure as error:
        channel.sendall(packed(wire.failed(0, error)))
    except ConnectionError:
        pass  # the parent has gone
    except BaseException:
        log.exception("the encoder process has failed")
    finally:
        os._exit(1)  # without this thread the process is of no use


class Worker:
    """The processor and the tower of one model. Raises EngineFailure."""

    def __init__(self, options: Options) -> None:
        facts = vision_facts(Path(options.config.model))
        from engine.embedded.vision.processing import ImageProcessing  # noqa: PLC0415 - slow to import, in this thread
        from engine.embedded.vision.tower import Tower  # noqa: PLC0415

        self._processing = ImageProcessing(options.config, facts)
        self._tower = Tower(options.config)
        self._pool = ThreadPoolExecutor(_PREPARING_THREADS)
        self.info = EncoderInfo(
            fingerprint=self._tower.fingerprint(self._processing.description),
            placeholder=self._processing.placeholder,
            image_token_id=facts.image_token_id,
            hidden_size=self._tower.hidden_size,
            dtype=self._tower.dtype_name,
        )
        self._try_out()

    def encode(self, images: Sequence[ImageInput]) -> tuple[list[Result], list[bytes]]:
        """A result for each image, and the embeddings of those that are encoded."""
        prepared = list(self._pool.map(self._prepare, images))
        outcomes: list[bytes | EngineError] = [image if isinstance(image, EngineError) else b"" for image in prepared]
        ready = {index: image for index, image in enumerate(prepared) if not isinstance(image, EngineError)}
        for call in _calls(ready):
            for index, outcome in zip(call, self._embed([ready[index] for index in call]), strict=True):
                outcomes[index] = outcome
        results = [
            wire.failed(0, outcome) if isinstance(outcome, EngineError) else self._encoded(ready[index], outcome)
            for index, outcome in enumerate(outcomes)
        ]
        return results, [outcome for outcome in outcomes if not isinstance(outcome, EngineError)]

    def _encoded(self, image: "Prepared", data: bytes) -> Encoded:
        return Encoded(image.text, image.rows, self._tower.dtype_name, image.grid, len(data))

    def _prepare(self, image: ImageInput) -> "Prepared | EngineError":
        try:
            return self._processing.prepare(image)
        except EngineError as error:
            return error
        except Exception:  # a bug, which must not take the other images with it
            log.exception("an image could not be prepared")
            return EngineFailure("internal error of the encoder")

    def _embed(self, images: list["Prepared"]) -> Sequence[bytes | EngineError]:
        from engine.embedded.vision.tower import as_bytes  # noqa: PLC0415

        try:
            return [as_bytes(embeddings) for embeddings in self._tower.encode(images)]
        except EngineError as error:
            return [error] * len(images)
        except Exception:  # likewise
            log.exception("images could not be encoded")
            return [EngineFailure("internal error of the encoder")] * len(images)

    def _try_out(self) -> None:
        """What cannot work shall fail now; and the first image shall not be slower than others."""
        from PIL import Image  # noqa: PLC0415

        file = io.BytesIO()
        Image.new("RGB", (64, 64), "red").save(file, "PNG")
        (result,), _ = self.encode([ImageInput(file.getvalue())])
        if isinstance(result, wire.Failed):
            raise EngineFailure(f"the model cannot encode images: {result.message}")


def _calls(images: "dict[int, Prepared]") -> Iterator[list[int]]:
    """The images by equal shapes, as many at a time as fit the tower's calls."""
    groups: dict[object, list[int]] = {}
    for index, image in images.items():
        groups.setdefault(tuple((name, tensor.shape) for name, tensor in image.tensors.items()), []).append(index)
    for group in groups.values():
        size = max(1, _CALL_VALUES // images[group[0]].tensors["pixel_values"].numel())
        yield from (group[start : start + size] for start in range(0, len(group), size))


def _receive_message(channel: socket.socket) -> bytes:
    return _receive(channel, HEADER.unpack(_receive(channel, HEADER.size))[0])


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
