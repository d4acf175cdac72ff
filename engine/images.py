"""Where the images of a prompt are, in the terms of its tokens."""

from collections.abc import Sequence

from msgspec.structs import replace

from engine.errors import InvalidRequest
from engine.types import GenerateRequest, Image


def overlapping(images: Sequence[Image], start: int, end: int) -> list[tuple[str, int]]:
    """Keys of the images whose spans reach into the tokens from `start` to `end`, in order, and how far into each span `start` is: negative
    for one that begins later. Besides the tokens, this is what their keys and values depend on.
    """
    return [(image.key, start - image.start) for image in images if image.start < end and start < image.start + image.length]


def mm_keys(overlaps: Sequence[tuple[str, int]]) -> tuple[dict[str, int | str], ...]:
    """`overlapping` as KV events say it: of each image its key, and the first of its tokens that the block has."""
    return tuple({"type": "mm_key", "hash": key, "start_offset": max(0, offset)} for key, offset in overlaps)


def without_data(images: Sequence[Image]) -> tuple[Image, ...]:
    """The images for a replica that reads the keys and values of their tokens, and needs no embeddings."""
    return tuple(replace(image, data=b"") for image in images)


def check_spans(request: GenerateRequest) -> None:
    """Raises InvalidRequest for spans that are not in the prompt, or not in order, or have more image tokens than tokens."""
    end = 0
    for image in request.images:
        if not (end <= image.start and 0 < image.rows <= image.length and image.start + image.length <= len(request.prompt_token_ids)):
            raise InvalidRequest("the images' spans must lie in the prompt, in order, and must not overlap", "prompt")
        end = image.start + image.length
