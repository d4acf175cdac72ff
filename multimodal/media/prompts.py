"""Prompts with media: encoded and expanded here for engines that take embeddings, or left to the backend."""

import asyncio
import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property

from blake3 import blake3
from msgspec.structs import replace

from engine import trace
from engine.encoder import Encoder
from engine.errors import EngineError, InvalidRequest, QueueFull
from engine.kit.tasks import all_of, cancel
from engine.kit.work import NATIVE
from engine.media import (
    ANY_FRAMES,
    Detail,
    EncodedMedia,
    Encoding,
    FrameSampling,
    MediaFiles,
    MediaInput,
    MediaKind,
    MediaSpan,
    MediaSpans,
    PromptMedia,
    RemoteRows,
)
from multimodal.errors import RequestError
from multimodal.media.cache import EmbeddingCache
from multimodal.media.embeddings import Embeddings
from multimodal.media.inflight import InFlight
from multimodal.media.limits import MAX_AUDIOS, MAX_REQUEST_PIXELS, MAX_VIDEOS
from multimodal.media.loader import MediaLoader
from multimodal.request import MediaRef
from multimodal.text.control import ControlTokens
from multimodal.text.prompts import Prompt, Tokenise
from multimodal.text.tokenizer import Tokenizer

MAX_WAITING = 1 << 30
"""Bytes of files that may wait to be encoded. Further files are refused, like requests when too many wait for the
engine."""

_SMALL_FILE = 1 << 16
"""Bytes up to which a file is hashed on the event loop."""

log = logging.getLogger(__name__)

Keyed = tuple[str, EncodedMedia]
"""Encoded media and the key that names them in caches."""


@dataclass(eq=False)
class EncodedPrompts:
    """Encodes media and inserts them into prompts, for engines that take embeddings. A cache in front of the encoder
    has each file encoded once.
    """

    encoder: Encoder
    loader: MediaLoader
    cache: EmbeddingCache
    tokenizer: Tokenizer
    control: ControlTokens
    max_images: int
    max_pixels: int = MAX_REQUEST_PIXELS
    max_videos: int = MAX_VIDEOS
    max_audios: int = MAX_AUDIOS
    stay: bool = False
    """Whether embeddings of prompts may stay with encode replicas, where the engine reads them."""
    _encoding: InFlight[tuple[str, bool], EncodedMedia] = field(default_factory=InFlight, init=False)
    _waiting: int = field(default=0, init=False)
    _lost: set[str] = field(default_factory=set, init=False)
    """Keys of media whose embeddings could not be read there: they come here the next time."""
    _copies: dict[str, asyncio.Task[None]] = field(default_factory=dict, init=False)

    async def prompt(self, text: str, refs: Sequence[MediaRef], tokenise: Tokenise, choices: int) -> Prompt:
        return await self._prompt(text, refs, tokenise, stay=self.stay)

    def release(self, media: PromptMedia | None, *, lost: bool = False) -> None:
        """Give up a prompt's embeddings that stayed with encode replicas; those that were `lost` come here the next
        time."""
        for span in media.spans if isinstance(media, MediaSpans) else ():
            self._release(span.key, span.remote, lost=lost)

    def _release(self, key: str, rows: RemoteRows | None, *, lost: bool = False) -> None:
        if rows is None:
            return
        found = self.cache.peek(key)
        if lost:
            self.cache.drop(key)
            self._lost.add(key)
        elif found is not None and found.remote == rows:
            if key not in self._copies:
                self._copies[key] = asyncio.create_task(self._copy(key, found, rows))
            return
        self.encoder.release(rows, lost=lost)

    async def _copy(self, key: str, encoded: EncodedMedia, rows: RemoteRows) -> None:
        """Bring embeddings here for the cache: the replica that has them may leave."""
        try:
            found = await self.encoder.encode([MediaInput(b"", kept=rows)])
            assert isinstance(found, list), "encoded without a prompt"
            self.cache.put(key, replace(encoded, data=found[0].data, remote=None))
        except EngineError as error:
            log.debug("no copy of an image's embeddings: %s", error)
        finally:
            del self._copies[key]
            self.encoder.release(rows)

    async def load(self, refs: Sequence[MediaRef]) -> list[Keyed]:
        """Return the files encoded, in order, with their embeddings."""
        return await self._load_all(refs, stay=False)

    async def _prompt(self, text: str, refs: Sequence[MediaRef], tokenise: Tokenise, *, stay: bool) -> Prompt:
        media = await self._load_all(refs, stay=stay)
        with self._released_on_error(media):
            ids = await tokenise(self._expanded(text, media, refs))
            return Prompt(ids, MediaSpans(self._spans(ids, media, [ref.kind for ref in refs])))

    async def _load_all(self, refs: Sequence[MediaRef], *, stay: bool) -> list[Keyed]:
        _check_count(refs, {"image": self.max_images, "video": self.max_videos, "audio": self.max_audios})
        self._check_kinds(refs)
        budget = _Pixels(self.max_pixels)
        loaded: list[Keyed] = []

        async def load(ref: MediaRef) -> Keyed:
            loaded.append(keyed := await self._load(ref, budget, stay=stay))
            return keyed

        with self._released_on_error(loaded):
            return await all_of(map(load, refs))

    @contextmanager
    def _released_on_error(self, media: Sequence[Keyed]) -> Iterator[None]:
        """Release what stayed with encode replicas if the block fails: the request is refused, or its client left."""
        try:
            yield
        except BaseException:
            for key, encoded in media:
                self._release(key, encoded.remote)
            raise

    def placed(self, ids: Sequence[int], media: Sequence[Keyed]) -> Prompt:
        """Return the prompt for token ids with a placeholder for each of the media. Raises RequestError."""
        placeholder = self.tokenizer.encode(self.encoder.info.placeholder)
        places = _places(ids, placeholder)
        if len(places) != len(media):
            text = f"The prompt has {len(places)} placeholders of images, for {len(media)} images."
            raise RequestError(text, "messages", "unsupported_content")
        found: list[int] = []
        end = 0
        for place, (_, encoded) in zip(places, media, strict=True):
            found += [*ids[end:place], *self.tokenizer.encode(encoded.text)]
            end = place + len(placeholder)
        found += ids[end:]
        return Prompt(found, MediaSpans(self._spans(found, media, ["image"] * len(media))))

    async def tokens(self, text: str, refs: Sequence[MediaRef], tokenise: Tokenise) -> list[int]:
        return (await self._prompt(text, refs, tokenise, stay=False)).ids

    async def aclose(self) -> None:
        await cancel(self._copies.values())
        await self.loader.aclose()

    @property
    def kinds(self) -> Sequence[MediaKind]:
        if self.encoder.info.audio:
            return ("audio",) if self.max_audios else ()
        most: dict[MediaKind, int] = {"image": self.max_images, "video": self.max_videos}
        return [kind for kind in most if most[kind]]

    @property
    def video_part(self) -> str:
        return "video" if self.encoder.info.video_placeholder else "image"

    @cached_property
    def _image_token(self) -> str:
        return self.tokenizer.decode([self.encoder.info.image_token_id])

    def _check_kinds(self, refs: Sequence[MediaRef]) -> None:
        """Raise RequestError for a kind of media that the model does not take."""
        takes = "audio" if self.encoder.info.audio else "images"
        for ref in refs:
            if (ref.kind == "audio") != self.encoder.info.audio:
                raise RequestError(
                    f"This model takes text and {takes}, no {ref.kind}.", ref.param, "unsupported_content"
                )

    async def _load(self, ref: MediaRef, budget: "_Pixels", *, stay: bool) -> Keyed:
        """Fetch a file, and return its encoding from the cache or the encoder."""
        loaded = await _fetched(self.loader, ref, budget)
        file = loaded.file if isinstance(loaded, Embeddings) else loaded.data
        key = await _key(file, self.encoder.info.fingerprint, ref)
        stay = stay and key not in self._lost
        if (known := self.cache.get(key)) is not None and (stay or known.remote is None):
            return key, known
        if isinstance(loaded, Embeddings):
            return key, self._given(loaded)
        media = replace(loaded, detail=ref.detail, sampling=ref.sampling, stay=stay)
        try:
            with trace.span("encode"):
                return key, await self._encoding.do((key, stay), lambda: self._encode(key, media))
        except InvalidRequest as error:
            raise RequestError(str(error), ref.param, f"invalid_{ref.kind}") from error

    async def _encode(self, key: str, media: MediaInput) -> EncodedMedia:
        size = len(media.data)
        if self._waiting and self._waiting + size > MAX_WAITING:
            raise QueueFull("too many files wait to be encoded already")
        self._waiting += size
        try:
            found = await self.encoder.encode([media])
        finally:
            self._waiting -= size
        assert isinstance(found, list), "encoded without its prompt"
        (encoded,) = found
        self.cache.put(key, encoded)
        if encoded.remote is None:
            self._lost.discard(key)
        return encoded

    def _given(self, embeddings: Embeddings) -> EncodedMedia:
        """Return embeddings from the request. The prompt gets an image token for each row."""
        text = self.encoder.info.placeholder.replace(self._image_token, self._image_token * embeddings.rows)
        return EncodedMedia(
            text=text, rows=embeddings.rows, dtype=embeddings.dtype, data=embeddings.data, grid=embeddings.grid
        )

    def _placeholder(self, ref: MediaRef) -> str:
        """Return the template's placeholder for a file, with marks."""
        info = self.encoder.info
        return self.control.mark((ref.kind == "video" and info.video_placeholder) or info.placeholder)

    def _expanded(self, text: str, media: Sequence[Keyed], refs: Sequence[MediaRef]) -> str:
        """Replace every placeholder of the template by the text of its medium."""
        wanted = [self._placeholder(ref) for ref in refs]
        parts = re.split("|".join(sorted(map(re.escape, {*wanted}))), text)
        found = re.findall("|".join(sorted(map(re.escape, {*wanted}))), text)
        if found != wanted:
            raise RequestError(
                f"The chat template does not show every {refs[0].kind} of these messages.",
                "messages",
                "unsupported_content",
            )
        mark = self.control.mark
        return parts[0] + "".join(
            mark(encoded.text) + part for (_, encoded), part in zip(media, parts[1:], strict=True)
        )

    def _spans(self, ids: Sequence[int], media: Sequence[Keyed], kinds: Sequence[MediaKind]) -> tuple[MediaSpan, ...]:
        """Find the media in the tokens of the expanded prompt: each from its first token of an image or video to its
        last."""
        tokens = {self.encoder.info.image_token_id, self.encoder.info.video_token_id}
        places = [position for position, token_id in enumerate(ids) if token_id in tokens]
        if len(places) != sum(encoded.rows for _, encoded in media):
            raise RequestError(
                f"The {kinds[0]}s are not whole in the prompt: it cannot be truncated.", "truncate_prompt_tokens"
            )
        spans: list[MediaSpan] = []
        row = 0
        for (key, encoded), kind in zip(media, kinds, strict=True):
            start = places[row]
            row += encoded.rows
            spans.append(
                MediaSpan(
                    key=key,
                    start=start,
                    length=places[row - 1] - start + 1,
                    rows=encoded.rows,
                    dtype=encoded.dtype,
                    data=encoded.data,
                    remote=encoded.remote,
                    grid=encoded.grid,
                    interval=encoded.interval,
                    kind=kind,
                )
            )
        return tuple(spans)


@dataclass(eq=False)
class BackendPrompts:
    """Loads media for backends that expand and encode by themselves (TensorRT-LLM).

    With encode replicas, `encoder` asks these; `max_encoded` is the maximum number of images of a prompt for which the
    backend can use their result, 0 is any number. The backend reports the expanded prompt's length.
    """

    loader: MediaLoader
    max_images: int
    encoder: Encoder | None
    control: ControlTokens
    max_pixels: int = MAX_REQUEST_PIXELS
    max_encoded: int = 0
    max_videos: int = MAX_VIDEOS
    max_audios: int = MAX_AUDIOS
    kinds: Sequence[MediaKind] = ("image",)
    video_part = "video"

    async def prompt(self, text: str, refs: Sequence[MediaRef], tokenise: Tokenise, choices: int) -> Prompt:
        ids = await self.tokens(text, refs, tokenise)
        text = self.control.defused(text)  # the backend tokenises it again
        budget = _Pixels(self.max_pixels)
        media = await all_of(self._load(ref, budget) for ref in refs)
        too_many = (self.max_encoded and len(media) > self.max_encoded) or any(ref.kind != "image" for ref in refs)
        if self.encoder is None or choices > 1 or too_many:  # an encoding can be read once
            return Prompt(ids, MediaFiles(text, tuple(media)))
        try:
            with trace.span("encode"):
                encoding = await self.encoder.encode(media, text)
        except InvalidRequest as error:
            raise RequestError(str(error), "messages", "invalid_image") from error
        assert isinstance(encoding, Encoding), "the backend's own"
        return Prompt(ids, encoding)

    def release(self, media: PromptMedia | None, *, lost: bool = False) -> None:
        """Do nothing: the backend moves embeddings by itself."""

    async def given(self, text: str, ids: Sequence[int], refs: Sequence[MediaRef]) -> Prompt:
        """Return the prompt of a chat that was rendered and tokenised elsewhere."""
        _check_count(refs, {"image": self.max_images, "video": self.max_videos})
        budget = _Pixels(self.max_pixels)
        return Prompt([*ids], MediaFiles(text, tuple(await all_of(self._load(ref, budget) for ref in refs))))

    async def tokens(self, text: str, refs: Sequence[MediaRef], tokenise: Tokenise) -> list[int]:
        _check_count(refs, {"image": self.max_images, "video": self.max_videos, "audio": self.max_audios})
        return await tokenise(text)

    async def aclose(self) -> None:
        await self.loader.aclose()

    async def _load(self, ref: MediaRef, budget: "_Pixels") -> MediaInput:
        loaded = await _fetched(self.loader, ref, budget)
        assert isinstance(loaded, MediaInput), "a loader without a hidden size takes no embeddings"
        return replace(loaded, detail=ref.detail, sampling=ref.sampling)


class _Pixels:
    """The total pixels of the images of one request. A single image has another limit."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._images = 0
        self._spent = 0

    def spend(self, pixels: int) -> None:
        """Raise RequestError if an image of this many pixels exceeds the limit."""
        self._images += 1
        self._spent += pixels
        if self._images > 1 and self._spent > self._most:
            raise RequestError(
                f"The images have {self._spent} pixels or more; those of a request may have {self._most} in all.",
                "messages",
                "too_many_pixels",
            )


def _check_count(refs: Sequence[MediaRef], most: Mapping[MediaKind, int]) -> None:
    """Raise RequestError if a request has more files of a kind than it may have."""
    for kind, count in most.items():
        if sum(ref.kind == kind for ref in refs) > count:
            raise RequestError(f"The messages may have {count} {kind}s at most.", "messages", f"too_many_{kind}s")


def _places(ids: Sequence[int], placeholder: Sequence[int]) -> list[int]:
    """Return where a placeholder begins in token ids; places do not overlap."""
    size, places = len(placeholder), list[int]()
    for place, token_id in enumerate(ids):
        follows = not places or place >= places[-1] + size
        if token_id == placeholder[0] and follows and [*ids[place : place + size]] == placeholder:
            places.append(place)
    return places


async def _fetched(loader: MediaLoader, ref: MediaRef, budget: _Pixels) -> MediaInput | Embeddings:
    with trace.span("fetch"):
        loaded = await loader.load(ref.url, ref.param, ref.kind)
    if isinstance(loaded, MediaInput):
        budget.spend(loaded.pixels)
    return loaded


async def _key(file: bytes, fingerprint: str, ref: MediaRef) -> str:
    def work() -> str:
        return media_key(file, fingerprint, ref.kind, ref.detail, ref.sampling)

    return work() if len(file) <= _SMALL_FILE else await NATIVE.run(work)


def media_key(
    file: bytes,
    fingerprint: str,
    kind: MediaKind = "image",
    detail: Detail = "auto",
    sampling: FrameSampling = ANY_FRAMES,
) -> str:
    """Return 64 hex digits that identify the encoding of a file by the encoder with `fingerprint`, equal for equal
    files and options.

    Hashing takes about a millisecond for a few megabytes: call it off the event loop.
    """
    how = detail if sampling == ANY_FRAMES else f"{sampling.fps} {sampling.num_frames}"
    return blake3(b"\0".join((blake3(file).digest(), *map(str.encode, (fingerprint, kind, how))))).hexdigest()
