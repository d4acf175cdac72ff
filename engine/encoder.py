"""The seam for encoders: media in, embeddings out. An encoder is a process here, other replicas, or TensorRT-LLM's."""

from collections.abc import Sequence
from typing import Protocol, TypeAlias

import msgspec

from engine.media import EncodedMedia, Encoding, MediaInput, RemoteRows

Encoded: TypeAlias = list[EncodedMedia] | Encoding
"""One `EncodedMedia` for each file, in order; or all media of a prompt together, from an encoder that needs the
prompt."""


class EncoderInfo(msgspec.Struct, frozen=True, kw_only=True):
    """Facts of an encoder that prompts depend on. Encoders with equal fingerprints make equal embeddings.

    TensorRT-LLM's encoder leaves all fields empty: the backend expands its prompts.
    """

    fingerprint: str = ""
    """32 hex digits of a BLAKE3 hash over the vision weights (sampled), the processor's configuration and its
    options."""
    placeholder: str = ""
    """Text that the chat template writes for one image, to be replaced by `EncodedMedia.text`."""
    image_token_id: int = -1
    """The token whose embeddings are replaced."""
    video_placeholder: str = ""
    """The same for one video. Empty for a model whose templates know no videos: a video is then shown as several
    images."""
    video_token_id: int = -1
    """The token whose embeddings are replaced by those of videos."""
    audio: bool = False
    """Whether the encoder takes audio; else it takes images and videos."""
    hidden_size: int = 0
    """Hidden size of the language model."""
    dtype: str = ""
    """Type of the embeddings."""

    @property
    def needs_prompt(self) -> bool:
        """Whether `encode` takes all media of a prompt together with its text, and returns an `Encoding`."""
        return not self.placeholder


class Encoder(Protocol):
    """One model's encoder of media. Everything runs on the event loop that called `start`; no call blocks it.

    Life: `start` once, then any number of concurrent `encode`, then `close` once; `close` is safe before and after a
    failed start.
    """

    @property
    def info(self) -> EncoderInfo:
        """Facts fixed at start. Raises EngineNotReady before."""
        ...

    @property
    def healthy(self) -> bool:
        """Whether a call of `encode` made now would be accepted. Cheap."""
        ...

    async def start(self) -> None:
        """Load the model. Raises EngineFailure, with nothing left running, if that is impossible."""
        ...

    async def encode(self, media: Sequence[MediaInput], prompt: str = "") -> Encoded:
        """Encode media, in order.

        `prompt`, for an encoder that needs it, is the text that the chat template renders, with a placeholder for each
        of them and the model's special tokens.

        Raises InvalidRequest (param `image` or `audio`) for files that cannot be decoded or exceed the limits,
        EngineUnavailable and EngineFailure. Cancelling aborts.
        """
        ...

    def release(self, rows: RemoteRows, *, lost: bool = False) -> None:
        """Give up embeddings that stayed with the encoder, because they have been read, or were `lost`: an engine could
        not read them. Idempotent; does nothing for an encoder with which none stay."""
        ...

    async def close(self) -> None:
        """Abort running work and free everything."""
        ...
