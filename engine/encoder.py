"""The second seam: images in, embeddings out. What encodes them may be a process here, another replica, or TensorRT-LLM's own encoder."""

from collections.abc import Sequence
from typing import Protocol

import msgspec

from engine.media import EncodedMedia, Encoding, MediaInput


class EncoderInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What has to be known of an encoder to write prompts for it. Encoders with equal fingerprints make equal embeddings."""

    fingerprint: str
    """32 hex digits of a BLAKE3 hash over the vision weights (sampled), the processor's configuration and its options."""
    placeholder: str
    """What the chat template writes for one image, to be replaced by `EncodedMedia.text`."""
    image_token_id: int
    """The token whose embeddings are replaced."""
    hidden_size: int
    dtype: str
    """Of the embeddings."""


class Encoder(Protocol):
    """One model's vision tower. Everything runs on the event loop that called `start`; no call blocks it.

    Life: `start` once, then any number of `encode` at once, then `close` once; `close` is safe before and after a failed start.
    """

    @property
    def info(self) -> EncoderInfo:
        """Facts fixed at start. Raises EngineNotReady before."""
        ...

    @property
    def healthy(self) -> bool:
        """Whether images given now would be encoded. Cheap."""
        ...

    async def start(self) -> None:
        """Load the tower. Raises EngineFailure, with nothing left running, if it cannot."""
        ...

    async def encode(self, images: Sequence[MediaInput]) -> list[EncodedMedia]:
        """Encode images, in order. Raises InvalidRequest (param `image`) for what cannot be decoded or is beyond the limits,
        EngineUnavailable and EngineFailure. Cancelling gives it up.
        """
        ...

    async def close(self) -> None:
        """Give up what runs and free everything."""
        ...


class PromptEncoder(Protocol):
    """What encodes all images of a prompt together, and hands them over by means of its own (TensorRT-LLM's encoder). Its life is that of
    an `Encoder`.
    """

    @property
    def healthy(self) -> bool: ...

    async def start(self) -> None: ...

    async def encode(self, prompt: str, images: Sequence[MediaInput]) -> Encoding:
        """`prompt` is text as the chat template makes it, with a placeholder for each image. Raises as `Encoder.encode` does."""
        ...

    async def close(self) -> None: ...
