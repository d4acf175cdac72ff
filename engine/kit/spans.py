"""Which media each block of a prompt shows: what block keys and KV events depend on besides tokens."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from engine.media import MediaSpan

MmKeys = tuple[dict[str, int | str], ...]
"""The media in a block, as KV events name them."""


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
