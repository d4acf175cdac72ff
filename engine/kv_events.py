"""KV-cache events, in the shapes that TensorRT-LLM 1.2 gives them (`KVCacheEventSerializer`).

On the wire each is `{"event_id", "data", "window_size", "attention_dp_rank"?}`, and `data` is tagged by `type`. Block
hashes are unsigned 64-bit. A block is stored under its parent: the parent's hash is part of its own, so a chain names a
whole prefix.
"""

import msgspec


class UniqueToken(msgspec.Struct, frozen=True, tag="unique_token", tag_field="type"):
    token_id: int
    token_extra_id: int = 0


class StoredBlock(msgspec.Struct, frozen=True, tag="stored_block", tag_field="type"):
    block_hash: int
    tokens: tuple[UniqueToken, ...]
    cache_level: int = 0
    """0 is the device, 1 the host; 2, the disk, is an addition of ours."""
    priority: int = 35
    mm_keys: tuple[dict[str, int | str], ...] = ()


class Created(msgspec.Struct, frozen=True, tag="created", tag_field="type"):
    """Once at start: the number of blocks at each cache level, device first."""

    num_blocks_per_cache_level: tuple[int, ...]


class Stored(msgspec.Struct, frozen=True, omit_defaults=True, tag="stored", tag_field="type"):
    """Complete blocks became reusable.

    `parent_hash` is that of the block before the first; None at the start of a sequence.
    """

    parent_hash: int | None
    blocks: tuple[StoredBlock, ...]
    cache_salt: str = ""
    """Salt of the request that computed them. An addition of ours: TensorRT-LLM 1.2 does not report it."""


class Removed(msgspec.Struct, frozen=True, tag="removed", tag_field="type"):
    """Blocks were evicted and can no longer be reused."""

    block_hashes: tuple[int, ...]


class EventDiff(msgspec.Struct, frozen=True, tag="event_diff", tag_field="type"):
    new_value: int
    old_value: int


class Updated(msgspec.Struct, frozen=True, tag="updated", tag_field="type"):
    """A block is at another cache level now, or its priority changed; what did not change is None. A block that several
    tiers have counts at the fastest."""

    block_hash: int
    cache_level: EventDiff | None = None
    priority: EventDiff | None = None


class Cleared(msgspec.Struct, frozen=True, tag="cleared", tag_field="type"):
    """Every reusable block was dropped. TensorRT-LLM has no such event: there the publisher derives it."""


class KvEvent(msgspec.Struct, frozen=True, omit_defaults=True):
    """One change of the cache.

    `event_id` grows by one with each event, so a gap means that events were lost. `window_size` is the attention window
    of the blocks in tokens; the context length for full attention.
    """

    event_id: int
    data: Created | Stored | Removed | Updated | Cleared
    window_size: int
    attention_dp_rank: int | None = None
