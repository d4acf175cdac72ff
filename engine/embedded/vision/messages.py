"""What the encoder and its process say to each other over a socket pair: a length, msgpack of that length, then bytes that it announces.

Images and small embeddings travel behind the message and not in it, so that neither side copies them to pack them; larger ones are
`SharedBytes`, whose descriptors come behind all else, with one byte.
"""

import msgspec

from engine.config import EncoderConfig
from engine.encoder import Detail, Dtype, EncoderInfo
from engine.process.wire import Failed


class Options(msgspec.Struct, frozen=True):
    """The first message to the process, answered by Welcome or Failed."""

    config: EncoderConfig
    log_level: str


class Batch(msgspec.Struct, frozen=True):
    """Images to encode, each named in one of the Answers that come, before those to the next batch. Their files follow, in order."""

    images: list[tuple[Detail, int]]
    """The detail and the size in bytes of each."""


class Welcome(msgspec.Struct, frozen=True, array_like=True, tag=0):
    info: EncoderInfo


class Encoded(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """An `EncodedImage` whose data, `size` bytes, follow, or the descriptor for them."""

    text: str
    rows: int
    dtype: Dtype
    grid: tuple[int, int, int]
    size: int
    shared: bool


Result = Encoded | Failed


class Answer(msgspec.Struct, frozen=True):
    """Of images of a batch, by their indices in it. Their embeddings follow in this order, then the descriptors, if there are any."""

    results: dict[int, Result]
