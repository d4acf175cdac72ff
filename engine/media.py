"""Media of a prompt, from a checked file to a span of its tokens.

A content part of a chat names media (`multimodal/request.py: MediaRef`), the loader makes a `MediaInput` of it,
an encoder an `EncodedMedia`, and the prompt shows it as a `MediaSpan`.
"""

from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple, TypeAlias

import msgspec
from msgspec.structs import replace

from engine.transfer.base import LeaseWord, Offer
from engine.transfer.shared_bytes import Data

MediaKind = Literal["image", "video", "audio"]
Detail = Literal["auto", "low", "high"]
Dtype = Literal["float32", "bfloat16", "float16"]

ITEM_BYTES: dict[str, int] = {"float32": 4, "bfloat16": 2, "float16": 2}
"""Bytes of one value of each type of embeddings."""


class FrameSampling(msgspec.Struct, frozen=True, omit_defaults=True):
    """The frames to take of a video. If both fields are 0, the server's settings decide, or else the model's folder."""

    fps: float = 0.0
    """Frames per second of the video."""
    num_frames: int = 0
    """Number of frames, spread evenly; with `fps`, the maximum number."""


ANY_FRAMES = FrameSampling()
"""No choice: the settings of the server or the model decide."""


class RemoteRows(msgspec.Struct, frozen=True, array_like=True):
    """Embeddings that stay in the memory of the process that made them until an engine reads them there.

    Any number of engines of its host may, while its lease word is there: at least as long as the answer that brought
    this is open, and after that until the memory is needed for others.
    """

    offers: tuple[Offer, ...]
    offset: int
    size: int
    """Bytes from `offset` of the offered region 0: contiguous [rows, hidden size]."""
    lease: LeaseWord


class MediaInput(msgspec.Struct, frozen=True, omit_defaults=True):
    """The bytes of one file as they came, checked to be of its kind and within the limits, not yet decoded.

    Images are PNG, JPEG, WEBP or GIF files; videos are MP4, WebM, Matroska or AVI files; audio is WAV,
    FLAC, MP3, Ogg or Opus files.
    """

    data: bytes
    detail: Detail = "auto"
    """Resolution of an image: `low` scales it down to at most 512 pixels a side before the model's own processing; the
    others leave it as it is."""
    kind: MediaKind = "image"
    pixels: int = 0
    """Number of pixels of an image, read from its header; 0 if it has not been read."""
    sampling: FrameSampling = ANY_FRAMES
    """Frames to take of a video."""
    stay: bool = False
    """Leave the embeddings where they are made, if the encoder can and has room."""
    kept: RemoteRows | None = None
    """Instead of a file, embeddings that stayed with the encoder: they are copied, not made."""


class EncodedMedia(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One medium as a prompt needs it: the text that replaces its placeholder, and embeddings for the media tokens in
    that text.
    """

    text: str
    """One placeholder as the model's processor expands it, special tokens included. Tokenised, it has `rows` media
    tokens."""
    rows: int
    dtype: Dtype
    data: Data = b""
    """The embeddings: contiguous [rows, hidden size of the language model] of `dtype`; empty while they travel
    beside this record, and if they are `remote`."""
    remote: RemoteRows | None = None
    """Location of the embeddings, if they stay there."""
    grid: tuple[int, int, int] = (0, 0, 0)
    """Patches in time, height and width, for models whose positions depend on them (mRoPE); zeros for others."""
    interval: float = 1.0
    """Positions from one patch to the next in time, for such models."""

    @property
    def size(self) -> int:
        """Bytes of the embeddings, wherever they are."""
        return len(self.data) if self.remote is None else self.remote.size


class MediaSpan(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One medium in `prompt_token_ids`. The media tokens in its span take its embeddings, in order."""

    key: str
    """64 hex digits (BLAKE3) that name what the embeddings were made of: the file's bytes, the encoder and its
    options."""
    start: int
    length: int
    """The span: from the first to the last token of the medium's expansion, other tokens between them included."""
    rows: int
    """Media tokens in the span."""
    dtype: str
    data: Data = b""
    """Contiguous [rows, hidden size] of `dtype`; empty if it is `remote`, and where the prompt's keys and values come
    from elsewhere (`handoff`)."""
    remote: RemoteRows | None = None
    """The same as in `EncodedMedia`."""
    grid: tuple[int, int, int] = (0, 0, 0)
    """The same as in `EncodedMedia`."""
    interval: float = 1.0
    """Likewise."""
    kind: MediaKind = "image"


class MediaSpans(msgspec.Struct, frozen=True, tag="spans"):
    """Encoded media of an expanded prompt, in the order of their spans, which do not overlap."""

    spans: tuple[MediaSpan, ...]


class MediaFiles(msgspec.Struct, frozen=True, tag="files"):
    """Media for a backend that expands prompts and encodes by itself (TensorRT-LLM)."""

    text: str
    """The prompt as the chat template renders it, with a placeholder for each file."""
    files: tuple[MediaInput, ...]


class Encoding(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="encoding"):
    """All media of a prompt, encoded by another replica in the backend's own terms (TensorRT-LLM).

    Valid for one request.
    """

    version: int
    backend: str
    prompt: str
    """The text that the media were encoded for, with their placeholders."""
    state: bytes
    """Location of the embeddings, in the backend's own format."""


class Speech(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="speech"):
    """A window of speech, for a model that does nothing but transcribe. Its decoder attends to it by cross-attention:
    no token of the prompt stands for it.
    """

    key: str
    """Requests with equal keys have equal features, which are encoded once."""
    data: Data = b""
    """Features of the whole window: contiguous float32 [mel bins, frames] (`engine/kit/log_mel.py`)."""
    frames: int
    """Frames that the recording has within the window; silence fills up the rest."""
    align: bool = False
    """Whether to report when the tokens of the prompt are spoken (`PromptReport.spoken`)."""


Unexpanded: TypeAlias = MediaFiles | Encoding
"""Media of a prompt that the backend expands: it gets longer than the request's token ids."""
PromptMedia: TypeAlias = MediaSpans | MediaFiles | Encoding | Speech


def kinds_of(media: PromptMedia) -> set[MediaKind]:
    """Return the kinds of a prompt's media. Only images are encoded by another replica in a backend's own terms."""
    if isinstance(media, Encoding | Speech):
        return {"image"} if isinstance(media, Encoding) else {"audio"}
    return {one.kind for one in (media.spans if isinstance(media, MediaSpans) else media.files)}


def detach_media(media: Sequence[MediaInput]) -> tuple[list[MediaInput], list[bytes]]:
    """Return media without their bytes, and the bytes, which travel beside a message and are not copied."""
    return [replace(medium, data=b"") for medium in media], [medium.data for medium in media]


def attach_media(media: Sequence[MediaInput], parts: Sequence[Data]) -> list[MediaInput]:
    """Put back together what `detach_media` took apart. Raises ValueError unless there is one part for each medium."""
    return [replace(medium, data=data) for medium, data in zip(media, parts, strict=True)]


MmKeys = tuple[dict[str, int | str], ...]
"""The media in a block, as KV events name them: block keys and KV events depend on them as well as on tokens."""


class Overlap(NamedTuple):
    """The part of a medium's span that lies in one block."""

    key: str
    offset: int
    """Position of the block's first token of the span, within the span."""
    place: int
    """Position of the same token, within the block."""


def overlaps_of(spans: Sequence[MediaSpan], start: int, size: int) -> tuple[Overlap, ...]:
    """Return where the spans of a prompt meet the block of `size` tokens from `start` on."""
    return tuple(
        Overlap(span.key, max(0, start - span.start), max(0, span.start - start))
        for span in spans
        if span.start < start + size and start < span.start + span.length
    )


def mm_keys_of(overlaps: Iterable[Overlap]) -> MmKeys:
    """TensorRT-LLM's spelling of the media in a block."""
    return tuple({"type": "mm_key", "hash": overlap.key, "start_offset": overlap.offset} for overlap in overlaps)
