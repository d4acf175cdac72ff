"""Encodes media: the processor runs in a few threads, and the tower takes small images of equal shape together. Large
files take turns while they are decoded, and each is answered as soon as it is done."""

import io
import logging
import wave
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import islice, repeat
from pathlib import Path
from queue import SimpleQueue
from threading import Lock
from typing import TypeAlias

import torch
from PIL import Image

from engine.checkpoints.facts import read_model_facts
from engine.config import EncoderConfig
from engine.embedded.models.transformers_models import load_config
from engine.embedded.threads import compute_threads
from engine.embedded.vision.kept import KeptRows
from engine.embedded.vision.processing import ImageProcessing
from engine.embedded.vision.tower import Tower
from engine.embedded.vision.videos import Prepared
from engine.embedded.whisper.tower import AudioProcessing, AudioTower
from engine.encoder import EncoderInfo
from engine.errors import EngineError, EngineFailure
from engine.kit.time_slices import SlicedWork, TimeSlices
from engine.media import EncodedMedia, MediaInput, RemoteRows
from engine.transfer.shared_bytes import readable, shared_or_copied

_THREADS = min(16, max(4, compute_threads() // 2))
_LARGE_AT_ONCE = min(16, max(1, compute_threads() // 2))
"""Large files that are decoded at the same moment, each of which keeps a core busy for seconds."""
_LARGE_OPEN = max(8, 2 * _LARGE_AT_ONCE)
"""Large files that take turns."""
_GPU_IMAGES = 8
"""Images that the tower computes together on a GPU. A CPU gains nothing by waiting for several."""
_CALL_VALUES = 32 << 20
"""Maximum pixel values, three per pixel, in one call of the tower, unless a single image has more."""

Outcome: TypeAlias = EncodedMedia | EngineError

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Large:
    """A large file for the tower."""

    work: SlicedWork
    result: Prepared | RemoteRows | EngineError


class BatchEncoder:
    """The processor and the tower of one model, tried out. Raises EngineFailure."""

    def __init__(self, config: EncoderConfig) -> None:
        if objection := read_model_facts(Path(config.model)).no_media:
            raise EngineFailure(objection)
        _, facts = load_config(config.model)
        assert facts.image_tokens is not None
        self.processing: ImageProcessing | AudioProcessing
        self.tower: Tower | AudioTower
        videos = ""
        if audio := facts.family.audio:
            self.tower = AudioTower(config)
            self.processing = AudioProcessing(config, audio, self.tower.encoder.positions)
        else:
            self.processing = ImageProcessing(config, facts)
            self.tower = Tower(config)
            videos = self.processing.videos.placeholder
        self.together = 1 if self.tower.device.type == "cpu" else _GPU_IMAGES
        self.open = _LARGE_OPEN
        self._small_threads, self._large_threads = ThreadPoolExecutor(_THREADS), ThreadPoolExecutor(_LARGE_OPEN)
        self._small_slices, self._large_slices = TimeSlices(_THREADS), TimeSlices(_LARGE_AT_ONCE)
        self._decoded: SimpleQueue[_Large] = SimpleQueue()
        self._computing = Lock()
        self.info = EncoderInfo(
            fingerprint=self.tower.fingerprint(self.processing.description),
            placeholder=self.processing.placeholder,
            image_token_id=facts.image_tokens.token_id,
            video_placeholder=videos,
            video_token_id=facts.video_token_id,
            hidden_size=self.tower.hidden_size,
            dtype=self.tower.dtype_name,
            audio=audio is not None,
        )
        self._try_out(config.model)

    def encode(self, images: Sequence[MediaInput]) -> Iterator[list[tuple[int, Outcome]]]:
        """Yield the outcome of each image, with its index, as soon as it is known. Raises as `embed` does."""
        return self.embed(self.prepare(images))

    def prepare(
        self, images: Sequence[MediaInput], going_on: Sequence[Callable[[], bool]] | None = None
    ) -> Iterator[Prepared | RemoteRows | EngineError]:
        """Begin the work before the tower, in other threads. Callable from any thread.

        `going_on` tells of each image whether somebody still waits for it.
        """
        return self._small_threads.map(self._prepare_small, images, going_on or repeat(lambda: True))

    def embed(self, images: Iterator[Prepared | RemoteRows | EngineError]) -> Iterator[list[tuple[int, Outcome]]]:
        """Yield the outcome of each image, with its index, as soon as it is known.

        Raises torch.AcceleratorError if the device no longer works for this process.
        """
        prepared = enumerate(images)
        while some := list(islice(prepared, self.together)):
            if refused := [(index, image) for index, image in some if isinstance(image, EngineError)]:
                yield [*refused]
            if kept := [(index, self._copied(rows)) for index, rows in some if isinstance(rows, RemoteRows)]:
                yield [*kept]
            for call in _calls({index: image for index, image in some if isinstance(image, Prepared)}):
                yield self._embed(call)

    def begin_large(self, number: int, file: MediaInput, going_on: Callable[[], bool]) -> None:
        """Begin with a large file, in threads of their own, in turns with the others. Callable from any thread."""
        self._large_threads.submit(self._prepare_large, file, self._large_slices.begin(number, going_on))

    def embed_large(self) -> Iterator[tuple[int, Outcome]]:
        """Yield number and outcome of each large file as soon as it is known, without end.

        Files wait for the tower with the memory that they have been given. Raises as `embed` does.
        """
        while True:
            large = self._decoded.get()
            large.work.leave()
            with large.work.elsewhere():
                outcome = self._outcome(large.result)
            large.work.end()
            yield large.work.number, outcome

    def longest(self) -> tuple[int, float] | None:
        """Return number and seconds of the large file that has been computed on for longest; None without one."""
        return self._large_slices.longest()

    def release(self, rows: RemoteRows) -> None:
        """End the lease of embeddings that stayed here. Callable from any thread."""
        if (kept := self._kept) is not None:
            kept.release(rows)

    @property
    def _kept(self) -> KeptRows | None:
        return self.tower.kept if isinstance(self.tower, Tower) else None

    def _copied(self, rows: RemoteRows) -> Outcome:
        """Return embeddings that stayed here, and nothing else of their file."""
        with self._computing:
            found = None if (kept := self._kept) is None else kept.copied(rows)
        if found is None:
            return EngineFailure("the embeddings have been given up")
        count = len(found) // (self.tower.hidden_size * self.tower.dtype.itemsize)
        return EncodedMedia(text="", rows=count, dtype=self.tower.dtype_name, data=shared_or_copied(found.numpy().data))

    def _outcome(self, prepared: Prepared | RemoteRows | EngineError) -> Outcome:
        if isinstance(prepared, EngineError):
            return prepared
        if isinstance(prepared, RemoteRows):
            return self._copied(prepared)
        ((_, outcome),) = self._embed({0: prepared})
        return outcome

    def _prepare_small(self, image: MediaInput, going_on: Callable[[], bool]) -> Prepared | RemoteRows | EngineError:
        with self._small_slices.begin(going_on=going_on) as work:
            return self._prepare(image, work)

    def _prepare_large(self, file: MediaInput, work: SlicedWork) -> None:
        work.start()
        result = self._prepare(file, work)
        work.stop()
        self._decoded.put(_Large(work, result))

    def _prepare(self, image: MediaInput, work: SlicedWork) -> Prepared | RemoteRows | EngineError:
        if not work():
            return EngineFailure("nobody waits for the image any more")
        try:
            if image.kept is not None:
                return image.kept
            prepared = self.processing.prepare(image, work)
            return replace(prepared, stay=True) if image.stay else prepared
        except EngineError as error:
            return error
        except Exception:  # a bug, which must not fail the other images
            log.exception("an image could not be prepared")
            return EngineFailure("internal error of the encoder")

    def _embed(self, images: dict[int, Prepared]) -> list[tuple[int, Outcome]]:
        try:
            with self._computing:
                data = self.tower.encode([*images.values()])
        except EngineError as error:
            return [(index, error) for index in images]
        except torch.AcceleratorError:
            raise
        except Exception:  # likewise
            log.exception("images could not be encoded")
            return [(index, EngineFailure("internal error of the encoder")) for index in images]
        return [
            (
                index,
                EncodedMedia(
                    text=image.text,
                    rows=image.rows,
                    data=b"" if isinstance(rows, RemoteRows) else rows,
                    remote=rows if isinstance(rows, RemoteRows) else None,
                    dtype=self.tower.dtype_name,
                    grid=image.grid,
                    interval=image.interval,
                ),
            )
            for (index, image), rows in zip(images.items(), data, strict=True)
        ]

    def _try_out(self, folder: str) -> None:
        """Encode one file: a model that cannot encode fails now, and the first file is no slower than others. Raises
        EngineFailure, also for embeddings that are not finite."""
        file, what = io.BytesIO(), "audio" if self.info.audio else "images"
        if self.info.audio:
            with wave.open(file, "wb") as silence:
                silence.setparams((1, 2, 16_000, 0, "NONE", ""))
                silence.writeframes(bytes(16_000))
        else:
            Image.new("RGB", (64, 64), "red").save(file, "PNG")
        (((_, outcome),),) = self.encode([MediaInput(file.getvalue(), kind="audio" if self.info.audio else "image")])
        if isinstance(outcome, EngineError):
            raise EngineFailure(f"the model in {folder} cannot encode {what}: {outcome}")
        data = readable(outcome.data)
        values = torch.frombuffer(bytearray(data), dtype=self.tower.dtype)
        if not values.isfinite().all():
            raise EngineFailure(
                f"the tower for {what} in {folder} computes embeddings that are not finite in {self.tower.dtype}: its "
                "weights or its config.json are wrong, or another DTYPE is needed"
            )


def _calls(images: dict[int, Prepared]) -> Iterator[dict[int, Prepared]]:
    """Group images of equal shapes, as many at a time as fit a call of the tower."""
    groups: dict[object, list[int]] = {}
    for index, image in images.items():
        groups.setdefault(tuple((name, tensor.shape) for name, tensor in image.tensors.items()), []).append(index)
    for group in groups.values():
        size = max(1, _CALL_VALUES // sum(tensor.numel() for tensor in images[group[0]].tensors.values()))
        for start in range(0, len(group), size):
            yield {index: images[index] for index in group[start : start + size]}
