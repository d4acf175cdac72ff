"""Checks of prompts that all engines with a model share."""

import re
from typing import NamedTuple

from engine.errors import ContextOverflow, InvalidRequest
from engine.media import ITEM_BYTES, MediaSpan, Unexpanded
from engine.types import GenerateRequest

_PARAM = "prompt"
_KEY = re.compile(r"[0-9a-f]{64}")


class ImageTokens(NamedTuple):
    """Tokens whose embeddings are replaced by those of images and videos."""

    token_id: int
    hidden_size: int
    merge: int = 0
    """Patches per side for each token, if positions depend on the grid (mRoPE); otherwise 0."""
    video_token_id: int = -1
    """The token of videos, for models that have one of their own."""

    def of(self, span: MediaSpan) -> int:
        """Return the token whose embeddings are replaced in a span."""
        return self.video_token_id if span.kind == "video" and self.video_token_id >= 0 else self.token_id


def output_here(request: GenerateRequest) -> int:
    """Return the maximum number of output tokens that this engine computes: one if the request is `prefill_only`."""
    most = request.sampling.max_tokens
    return min(1, most) if request.prefill_only else most


def check_prompt(request: GenerateRequest, vocab_size: int, capacity: int) -> None:
    """Check a request's prompt and image spans.

    Raises InvalidRequest for a malformed prompt, and ContextOverflow if prompt and output together exceed `capacity`
    tokens.
    """
    prompt, output = request.prompt_token_ids, output_here(request)
    if not prompt:
        raise InvalidRequest("the prompt is empty", _PARAM)
    if len(prompt) + output > capacity:
        raise ContextOverflow(f"{len(prompt)} prompt tokens and {output} output tokens exceed the {capacity} that fit")
    if not 0 <= min(prompt) <= max(prompt) < vocab_size:
        raise InvalidRequest(f"prompt token ids must be from 0 to {vocab_size - 1}", _PARAM)
    _check_spans(request)


def check_embeddings(request: GenerateRequest, takes: ImageTokens | None) -> None:
    """Check that the model takes the media of a prompt that has passed `check_prompt`. Raises InvalidRequest."""
    if isinstance(request.media, Unexpanded):
        raise InvalidRequest("this engine takes images as embeddings alone", _PARAM)
    if not request.spans:
        return
    if takes is None:
        raise InvalidRequest("this model takes no images", _PARAM)
    last = -2
    for number, image in enumerate(request.spans):
        span = request.prompt_token_ids[image.start : image.start + image.length]
        token_id = takes.of(image)
        if span.count(token_id) != image.rows:
            raise InvalidRequest(
                f"image {number} has {image.rows} rows for {span.count(token_id)} image tokens", _PARAM
            )
        size = image.rows * takes.hidden_size * ITEM_BYTES[image.dtype]
        found = len(image.data) if image.remote is None else image.remote.size
        if found != size and (found or image.remote is not None):
            raise InvalidRequest(f"image {number} has {found} bytes of embeddings; its rows have {size}", _PARAM)
        if takes.merge:
            first = span.index(token_id)
            if image.start + first == last + 1 or span[first : first + image.rows].count(token_id) != image.rows:
                raise InvalidRequest(
                    f"the tokens of image {number} must be together, and apart from those of other images", _PARAM
                )
            _check_grid(number, image, takes.merge)
            last = image.start + first + image.rows - 1


def _check_spans(request: GenerateRequest) -> None:
    end = 0
    for number, image in enumerate(request.spans):
        if image.start < end or image.length < 1 or image.start + image.length > len(request.prompt_token_ids):
            raise InvalidRequest(
                f"the span of image {number} must lie within the prompt and behind the image before it", _PARAM
            )
        end = image.start + image.length
        if not 1 <= image.rows <= image.length:
            raise InvalidRequest(
                f"image {number} must have a row at least, and no more than its span has tokens", _PARAM
            )
        if not _KEY.fullmatch(image.key):
            raise InvalidRequest(f"the key of image {number} must be 64 hex digits", _PARAM)
        if image.dtype not in ITEM_BYTES:
            raise InvalidRequest(f"the type of image {number} must be one of {', '.join(ITEM_BYTES)}", _PARAM)
        if not image.data and image.remote is None and request.handoff is None:
            raise InvalidRequest(f"image {number} has no embeddings", _PARAM)


def _check_grid(number: int, image: MediaSpan, merge: int) -> None:
    time, height, width = image.grid
    if (
        min(image.grid) < 1
        or not 0 <= image.interval < 1 << 16
        or height % merge
        or width % merge
        or time * height * width != image.rows * merge**2
    ):
        raise InvalidRequest(
            f"the grid of image {number}, {time}x{height}x{width} patches, does not make {image.rows} rows", _PARAM
        )
