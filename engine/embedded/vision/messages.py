"""The messages between the encoder and its process, over a socket pair, in frames (`protocol/frames.py`).

Files and small embeddings follow the message, so that neither side copies them to pack them. Larger embeddings are
`SharedBytes`: their descriptors follow all else, with one byte.
"""

import msgspec

from engine.config import EncoderConfig
from engine.encoder import EncoderInfo
from engine.kit.logs import LogOptions
from engine.media import EncodedMedia, MediaInput, RemoteRows
from engine.process.wire import Failed

SMALL, LARGE = LANES = range(2)
LARGE_PIXELS = 1 << 20
"""Number of pixels above which an image is in the lane of large ones: decoding this many takes about 15 ms."""


class Options(msgspec.Struct, frozen=True):
    """The first message to the process, answered by EncoderReady or Failed."""

    config: EncoderConfig
    logs: LogOptions


class Batch(msgspec.Struct, frozen=True, tag="batch"):
    """Files to encode, which follow in order. Answers name each of them once. Batches of small images are computed in
    order; large files take turns.
    """

    lane: int
    """Lanes do not wait for each other, except for the tower, one call at a time: 0 is for small images."""
    media: list[MediaInput]
    numbers: list[int]
    """Number of each file, for `Answer` and `GivenUp`."""
    sizes: list[int]
    """Bytes of each file."""


class GivenUp(msgspec.Struct, frozen=True, tag="given_up"):
    """Files for which nobody waits any more. Their decoding ends; answers still name them."""

    numbers: list[int]


class Release(msgspec.Struct, frozen=True, tag="release"):
    """End the lease of embeddings that have stayed in the process."""

    rows: RemoteRows


class EncoderReady(msgspec.Struct, frozen=True, array_like=True, tag=0):
    info: EncoderInfo
    together: int
    """Images that the tower computes together."""
    open: int
    """Large files that take turns."""


class Busy(msgspec.Struct, frozen=True, tag="busy"):
    """A sign of life, sent while there are large files."""

    number: int
    """Number of the large file that has been computed on for longest."""
    seconds: float
    """How long, without the turns of others."""


class Answer(msgspec.Struct, frozen=True, tag="answer"):
    """Outcomes for files of a batch, by their numbers. Embeddings follow in order, then the descriptors."""

    lane: int
    encoded: dict[int, EncodedMedia]
    """Encoded files, without their embeddings."""
    sizes: list[int]
    """Bytes of the embeddings of each."""
    shared: list[int]
    """The numbers of those whose embeddings are descriptors."""
    failed: dict[int, Failed]
