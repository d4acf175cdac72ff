"""A strict reader of messages of KV-cache events as vLLM, Dynamo and our own publisher send them.

A payload is msgpack, `[timestamp, [event, …], data-parallel rank | nil]`. An event is a map with a `type`, or an array
that begins with it.
"""

import struct
from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from typing import Any

import msgspec

SEQUENCE = struct.Struct(">q")
"""The number of a message; -1 ends a replay."""
END_OF_REPLAY = -1
_ARRAY_FIELDS = {
    "BlockStored": (
        *("block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium", "lora_name"),
        *("extra_keys", "block_mm_infos", "group_idx", "kv_cache_spec_kind", "kv_cache_spec_sliding_window"),
    ),
    "BlockRemoved": ("block_hashes", "medium"),
    "AllBlocksCleared": (),
}
_DEVICE = ("GPU", "gpu", None)


class _EventsMessage(msgspec.Struct, array_like=True):
    timestamp: Any
    events: list[Any]
    rank: int | None = 0


_messages = msgspec.msgpack.Decoder(_EventsMessage)


@dataclass(frozen=True, slots=True)
class StoredEvent:
    """Blocks that can be reused from now on. Each is the child of the one before, the first of `parent`, if any."""

    hashes: tuple[int, ...]
    parent: int | None
    tokens: tuple[int, ...]
    """Tokens of all blocks, `block_size` of each; none if the blocks are known already, from another tier."""
    block_size: int
    namespace: tuple[str, str] = ("", "")
    """Cache salt and LoRA adapter: requests with the same may share blocks."""
    media: tuple[Hashable, ...] = ()
    """Images of each block, None for a block without any; empty if no block has images."""
    tier: Hashable = None
    """Data-parallel rank and medium; None for the first rank's device memory."""


@dataclass(frozen=True, slots=True)
class RemovedEvent:
    hashes: tuple[int, ...]
    tier: Hashable = None


@dataclass(frozen=True, slots=True)
class ClearedEvent:
    """All blocks of a data-parallel rank are gone, of every tier."""

    rank: int = 0


CacheEvent = StoredEvent | RemovedEvent | ClearedEvent


def decode(payload: bytes) -> list[CacheEvent]:
    """Return the events of a message that concern whole blocks of full attention on the replica. Raises ValueError."""
    try:
        message = _messages.decode(payload)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"a message must be msgpack of [timestamp, events, rank]: {error}") from error
    return list(_events(message.events, message.rank or 0))


def _events(items: Iterable[Any], rank: int) -> Iterable[CacheEvent]:
    for item in items:
        fields = _fields(item)
        kind = fields.get("type")
        medium = fields.get("medium")
        tier = None if rank == 0 and medium in _DEVICE else (rank, None if medium in _DEVICE else str(medium))
        if kind == "AllBlocksCleared":
            yield ClearedEvent(rank)
        elif kind == "BlockRemoved":
            yield RemovedEvent(_integers(fields.get("block_hashes")), tier)
        elif kind == "BlockStored" and _is_ours(fields):
            yield _stored(fields, tier)


def _fields(item: Any) -> dict[str, Any]:
    if isinstance(item, dict):
        return item
    if isinstance(item, list) and item and isinstance(item[0], str):
        return {"type": item[0], **dict(zip(_ARRAY_FIELDS.get(item[0], ()), item[1:], strict=False))}
    raise ValueError("an event must be a map or an array with its type")


def _is_ours(fields: dict[str, Any]) -> bool:
    """Return whether the blocks are local and of layers with full attention: those of windows are freed earlier."""
    local = fields.get("locality", "LOCAL") in ("LOCAL", None)
    return local and fields.get("group_idx") in (0, None) and fields.get("kv_cache_spec_sliding_window") is None


def _stored(fields: dict[str, Any], tier: Hashable) -> StoredEvent:
    hashes = _integers(fields.get("block_hashes"))
    tokens = _integers(fields.get("token_ids"))
    size = fields.get("block_size")
    parent = fields.get("parent_block_hash")
    if not isinstance(size, int) or size < 1 or not isinstance(parent, int | None):
        raise ValueError("a stored event must have a block_size, and a number for its parent if it has one")
    whole = len(hashes) if tier is not None and not tokens else min(len(hashes), len(tokens) // size)
    if tokens and not (min(tokens) >= -(1 << 31) and max(tokens) < 1 << 32):
        raise ValueError("a token id is out of range")
    salt = str(fields.get("cache_salt") or "")
    infos = fields.get("block_mm_infos") or (() if salt else fields.get("extra_keys"))  # ours repeat the salt there
    infos = infos if isinstance(infos, list) else ()
    media = tuple(msgspec.msgpack.encode(info) if info else None for info in infos)
    return StoredEvent(
        hashes[:whole],
        parent,
        tokens[: whole * size],
        size,
        (salt, str(fields.get("lora_name") or "")),
        media if any(media) else (),
        tier,
    )


def _integers(value: Any) -> tuple[int, ...]:
    """Check a list of numbers. Eagle's pairs of tokens are refused too."""
    if not isinstance(value, list) or not set(map(type, value)) <= {int}:
        raise ValueError("hashes and token ids must be lists of numbers")
    return tuple(value)
