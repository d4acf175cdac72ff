"""The bytes of a request's media, sent beside the request so that nobody copies them to pack them: in parts of their
own, or not at all where both sides can read the same memory.
"""

from collections.abc import Sequence

from msgspec.structs import replace

from engine.media import MediaFiles, MediaInput, MediaSpans
from engine.transfer.shared_bytes import Data
from engine.types import GenerateRequest


def data_of(request: GenerateRequest) -> list[Data]:
    """Return the bytes of embeddings, or of files, in order."""
    match request.media:
        case MediaSpans(spans):
            return [span.data for span in spans]
        case MediaFiles(_, files):
            return [file.data for file in files]
    return []


def detach(request: GenerateRequest) -> tuple[GenerateRequest, list[Data]]:
    """Return the request without the bytes of its media, and the bytes."""
    parts = data_of(request)
    return attach(request, [b""] * len(parts)), parts


def attach(request: GenerateRequest, parts: Sequence[Data]) -> GenerateRequest:
    """Put back together what `detach` took apart. Raises ValueError unless there is one part for each medium."""
    match request.media:
        case MediaSpans(spans):
            found = tuple(replace(span, data=data) for span, data in zip(spans, parts, strict=True))
            return replace(request, media=MediaSpans(found))
        case MediaFiles(text, files):
            return replace(request, media=MediaFiles(text, tuple(attach_media(files, parts))))
    if parts:
        raise ValueError(f"{len(parts)} parts belong to no medium")
    return request


def detach_media(media: Sequence[MediaInput]) -> tuple[list[MediaInput], list[bytes]]:
    """Return media to encode without their bytes, and the bytes."""
    return [replace(medium, data=b"") for medium in media], [medium.data for medium in media]


def attach_media(media: Sequence[MediaInput], parts: Sequence[Data]) -> list[MediaInput]:
    """Put back together what `detach_media` took apart. Raises ValueError unless there is one part for each medium."""
    return [replace(medium, data=data) for medium, data in zip(media, parts, strict=True)]
