"""Where a prompt's images are, block by block: what their blocks' keys and KV events depend on besides tokens."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from engine.types import GenerateRequest, Image

MmKeys = tuple[dict[str, int | str], ...]
"""What KV events say of the images in a block."""


class Overlap(NamedTuple):
    """An image's span where it meets a block."""

    key: str
    offset: int
    """Of the block's first token in the span, within the span."""
    place: int
    """Of the same token, within the block."""


def overlaps_of(images: Sequence[Image], start: int, size: int) -> tuple[Overlap, ...]:
    """Where the spans of a prompt's images meet the block of `size` tokens from `start` on."""
    return tuple(
        Overlap(image.key, max(0, start - image.start), max(0, image.start - start))
        for image in images
        if image.start < start + size and start < image.start + image.length
    )


def mm_keys_of(overlaps: Iterable[Overlap]) -> MmKeys:
    return tuple({"type": "mm_key", "hash": overlap.key, "start_offset": overlap.offset} for overlap in overlaps)


def expands(request: GenerateRequest) -> bool:
    """Whether the backend replaces placeholders by images, so that the prompt becomes longer than the request's."""
    return request.handoff is None and (request.media is not None or request.encoding is not None)
