"""Encodes batches of media: the processor runs in a few threads, the tower takes images of equal shape together."""

import io
import logging
import wave
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import islice, repeat
from pathlib import Path
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
from engine.media import EncodedMedia, MediaInput, RemoteRows
from engine.transfer.shared_bytes import readable, shared_or_copied

_THREADS = min(16, max(4, compute_threads() // 2))
_LARGE_THREADS = min(16, max(1, compute_threads() // 2))
"""Threads for large images, each of which keeps a core busy for seconds."""
_GPU_IMAGES = 8
"""Images that the tower computes together on a GPU. A CPU gains nothing by waiting for several."""
_CALL_VALUES = 32 << 20
"""Maximum pixel values, three per pixel, in one call of the tower, unless a single image has more."""

Outcome: TypeAlias = EncodedMedia | EngineError

log = logging.getLogger(__name__)


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
        self._pools = [ThreadPoolExecutor(_THREADS), ThreadPoolExecutor(_LARGE_THREADS)]
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
        self, images: Sequence[MediaInput], lane: int = 0, going_on: Sequence[Callable[[], bool]] | None = None
    ) -> Iterator[Prepared | RemoteRows | EngineError]:
        """Begin the work before the tower, in other threads, which the lanes do not share. Callable from any thread.

        `going_on` tells of each image whether somebody still waits for it.
        """
        return self._pools[lane].map(self._prepare, images, going_on or repeat(lambda: True))

    def embed(
        self, images: Iterator[Prepared | RemoteRows | EngineError], lane: int = 0
    ) -> Iterator[list[tuple[int, Outcome]]]:
        """Yield the outcome of each image, with its index, as soon as it is known. Callable from several threads.

        Large images and videos are computed one by one: none waits for another to be decoded. Raises
        torch.AcceleratorError if the device no longer works for this process.
        """
        prepared = enumerate(images)
        while some := list(islice(prepared, 1 if lane else self.together)):
            if refused := [(index, image) for index, image in some if isinstance(image, EngineError)]:
                yield [*refused]
            if kept := [(index, self._copied(rows)) for index, rows in some if isinstance(rows, RemoteRows)]:
                yield [*kept]
            for call in _calls({index: image for index, image in some if isinstance(image, Prepared)}):
                yield self._embed(call)

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

    def _prepare(self, image: MediaInput, going_on: Callable[[], bool]) -> Prepared | RemoteRows | EngineError:
        if not going_on():
            return EngineFailure("nobody waits for the image any more")
        try:
            if image.kept is not None:
                return image.kept
            prepared = self.processing.prepare(image, going_on)
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
