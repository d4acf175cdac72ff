"""Messages between replicas on /prefill and /encode: msgpack bodies, and answers in frames. Not a public interface.

`GET /prefill` answers with a `PrefillInfo`. `POST /prefill` takes a `PrefillRequest` and answers with frames: empty
ones while the request waits or is computed, and early handoffs, which say which KV blocks can be read already, then one
with the handoff or an error envelope. After a handoff that holds KV blocks the answer stays open and silent: it is the
lease of the blocks. The client closes it when it no longer needs them; the server ends it before they are freed.

A request's body is a length-prefixed message, then the bytes of media, whose sizes the message lists. The media are
never copied to build the body.

`/encode` does the same for media: an `EncodeInfo`, an `EncodeRequest`, and an `EncodeAnswer`
(`engine/replicas/encode_answers.py`) instead of the handoff.
"""

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import TypeVar

import msgspec

from protocol.frames import HEADER_BYTES, packed, size_of

VERSION = 5
MEDIA_TYPE = "application/vnd.msgpack"
ALIVE_SECONDS = 1.0
"""Pause between the empty frames of a server that is still computing."""
SILENCE_SECONDS = 3.0
"""Silence after which a client takes the server for stuck."""
MAX_MEDIA = 8
"""Maximum number of files in one request to /encode, unless they are those of a prompt."""
MAX_MEDIA_BYTES = 32 << 20
"""Bytes of the files in one request to /encode. A single file may have more."""
MAX_EMBEDDING_BYTES = 16 << 20
"""Average number of bytes allowed for each image of a prompt for /prefill."""


class PrefillInfo(msgspec.Struct, frozen=True):
    """Model and cache of a prefill replica. Replicas that differ in any of this cannot read each other's KV blocks."""

    version: int
    model: str
    backend: str
    dtype: str
    block_size: int
    tensor_parallel_size: int
    kv_layout: str
    """The same as in `EngineInfo`."""


class PrefillRequest(msgspec.Struct, frozen=True):
    """`request` is an engine request, decoded once version and model match; the bytes of its media follow."""

    version: int
    model: str
    request: msgspec.Raw
    sizes: list[int]


class EncodeInfo(msgspec.Struct, frozen=True):
    """Encoder of a replica. Replicas that differ in any of this cannot use each other's embeddings."""

    version: int
    model: str
    backend: str
    fingerprint: str = ""
    placeholder: str = ""
    image_token_id: int = -1
    video_placeholder: str = ""
    video_token_id: int = -1
    audio: bool = False
    hidden_size: int = 0
    dtype: str = ""
    """The same fields as in `EncoderInfo`. A backend that expands prompts and encodes by itself (TensorRT-LLM) leaves
    them empty."""


class EncodeRequest(msgspec.Struct, frozen=True):
    """`media` is a list of `MediaInput` (`engine/media.py`), decoded once version and model match; bytes follow."""

    version: int
    model: str
    media: msgspec.Raw
    sizes: list[int]
    prompt: str = ""
    """The text with a placeholder per file, for a backend that encodes a prompt's media together (TensorRT-LLM)."""
    inline: bool = False
    """Send the embeddings in the answer, whatever their size: reading them from the replica's memory has failed."""
    reader: str = ""
    """Where the replica that asks runs (`engine/transfer/process_id.py: process_domain`), if embeddings may stay with
    the encoder."""


H = TypeVar("H", PrefillRequest, EncodeRequest)


def pieces(head: PrefillRequest | EncodeRequest, parts: Sequence[bytes]) -> list[bytes]:
    """Return a body in pieces, which are not joined."""
    return [packed(head), *parts]


def head_of(body: bytes, heads: msgspec.msgpack.Decoder[H]) -> tuple[H, memoryview]:
    """Return the message at the start of a body, and the rest. Raises ValueError, msgspec's errors included."""
    if len(body) < HEADER_BYTES:
        raise ValueError("it has no length")
    size, _ = size_of(body[:HEADER_BYTES], len(body))
    end = HEADER_BYTES + size
    return heads.decode(memoryview(body)[HEADER_BYTES:end]), memoryview(body)[end:]


def parts_of(rest: memoryview, sizes: Sequence[int]) -> list[bytes]:
    """Split `rest` into parts of these sizes. Raises ValueError if the sizes do not add up to it."""
    if min(sizes, default=0) < 0 or sum(sizes) != len(rest):
        raise ValueError(f"its parts are to have {sum(sizes)} bytes, and have {len(rest)}")
    ends = list(accumulate(sizes, initial=0))
    return [bytes(rest[start:end]) for start, end in pairwise(ends)]
