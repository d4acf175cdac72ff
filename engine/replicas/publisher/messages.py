"""The wire format of KV-cache events in vLLM and Dynamo: msgpack of `[seconds since the epoch, [event, …], rank]`.

Each event is a map with its `type`. Hashes are signed 64-bit; consumers use them as names and hash the tokens
themselves.
"""

import msgspec


class MmObject(msgspec.Struct, frozen=True):
    """A part of an image in a block."""

    mm_hash: int
    """Unsigned 64-bit: the first 16 hex digits of the image's key."""
    offsets: tuple[tuple[int, int], ...] = ()
    """Token range of the image in the block (first token, last token + 1); empty if unknown."""


class MmInfo(msgspec.Struct, frozen=True):
    """The images in a block."""

    mm_objects: tuple[MmObject, ...]


class BlockStored(msgspec.Struct, frozen=True, tag_field="type", tag="BlockStored", omit_defaults=True):
    """Consecutive full blocks of a sequence became reusable. Fields with their defaults are left out."""

    block_hashes: list[int]
    parent_block_hash: int | None
    """Hash of the block before the first; None at the start of a sequence."""
    token_ids: list[int]
    """The tokens of all blocks, one after the other."""
    block_size: int
    cache_salt: str | None = None
    """Only requests with the same salt share these blocks."""
    block_mm_infos: list[MmInfo | None] | None = None
    """One for each block, if any of them has images."""
    extra_keys: list[list[str] | None] | None = None
    """The same for vLLM's consumers, who hash these with the tokens: for each block its images and, in the first of a
    sequence, the salt. None if no block has any."""
    medium: str | None = None
    """Location of the blocks in Dynamo's spelling: CPU_PINNED or DISK; None for the device. A block that comes to
    another medium is known already, and its event may lack tokens and parent."""


class BlockRemoved(msgspec.Struct, frozen=True, tag_field="type", tag="BlockRemoved", omit_defaults=True):
    """Blocks can no longer be reused from a medium."""

    block_hashes: list[int]
    medium: str | None = None


class AllBlocksCleared(msgspec.Struct, frozen=True, tag_field="type", tag="AllBlocksCleared"):
    """No block can be reused any more: the cache was cleared, or the engine is new."""


WireEvent = BlockStored | BlockRemoved | AllBlocksCleared


class EventBatch(msgspec.Struct, frozen=True, array_like=True):
    """A message's payload."""

    timestamp: float
    events: list[WireEvent]
    data_parallel_rank: int = 0


encode = msgspec.msgpack.Encoder().encode
decode = msgspec.msgpack.Decoder(EventBatch).decode
"""Decode a batch. Raises msgspec.MsgspecError."""


def signed(block_hash: int) -> int:
    """Convert an unsigned 64-bit hash to two's complement."""
    return block_hash - (1 << 64) if block_hash >= 1 << 63 else block_hash


def medium(level: int) -> str | None:
    """Return the medium of a cache level."""
    return None if not level else "CPU_PINNED" if level == 1 else "DISK"
