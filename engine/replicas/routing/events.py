"""What replicas say of their KV caches on the wire: messages of events as vLLM, Dynamo and our own publisher send them, read strictly.

A payload is msgpack, `[timestamp, [event, …], data-parallel rank | nil]`. An event is a map with a `type`, or an array that begins with it.
"""

import struct
from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from typing import Any

import msgspec

SEQUENCE = struct.Struct(">q")
"""A message's number; -1 closes a replay."""
END_OF_REPLAY = -1
_ARRAY_FIELDS = {
    "BlockStored": (
        *(
            "block_hashes",
            "parent_block_hash",
            "token_ids",
            "block_size",
            "lora_id",
            "medium",
            "lora_name",
            "extra_keys",
        ),
        *("block_mm_infos", "group_idx", "kv_cache_spec_kind", "kv_cache_spec_sliding_window"),
    ),
    "BlockRemoved": ("block_hashes", "medium"),
    "AllBlocksCleared": (),
}
_DEVICE = ("GPU", "gpu", None)
_decoder = msgspec.msgpack.Decoder()


@dataclass(frozen=True, slots=True)
class StoredEvent:
    """Blocks that can be reused from now on, each the child of the one before; the first that of `parent`, or of none."""

    hashes: tuple[int, ...]
    parent: int | None
    tokens: tuple[int, ...]
    """`block_size` for each block."""
    block_size: int
    namespace: tuple[str, str] = ("", "")
    """Cache salt and LoRA adapter: blocks are shared among requests with the same."""
    media: tuple[Hashable, ...] = ()
    """For each block what it holds of images, None for nothing; empty if no block does."""
    tier: Hashable = None
    """Where they are, unless on the device, and of which data-parallel rank they are, unless of the first."""


@dataclass(frozen=True, slots=True)
class RemovedEvent:
    hashes: tuple[int, ...]
    tier: Hashable = None


@dataclass(frozen=True, slots=True)
class ClearedEvent:
    """All blocks of a data-parallel rank are gone, those of every tier."""

    rank: int = 0


CacheEvent = StoredEvent | RemovedEvent | ClearedEvent


def decode(payload: bytes) -> list[CacheEvent]:
    """The events of a message that say something of whole blocks of full attention on that replica. Raises ValueError for nonsense."""
    try:
        message = _decoder.decode(payload)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"no msgpack: {error}") from error
    if not isinstance(message, list) or len(message) < 2 or not isinstance(message[1], list):
        raise ValueError("a message must be [timestamp, events, rank]")
    rank = message[2] if len(message) > 2 and message[2] is not None else 0
    if not isinstance(rank, int):
        raise ValueError("a rank must be a number")
    return list(_events(message[1], rank))


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
    """Whether the blocks are there and of layers that attend to everything: those behind a window come and go in ways of their own."""
    local = fields.get("locality", "LOCAL") in ("LOCAL", None)
    return local and fields.get("group_idx") in (0, None) and fields.get("kv_cache_spec_sliding_window") is None


def _stored(fields: dict[str, Any], tier: Hashable) -> StoredEvent:
    hashes, tokens, size = (
        _integers(fields.get("block_hashes")),
        _integers(fields.get("token_ids")),
        fields.get("block_size"),
    )
    parent = fields.get("parent_block_hash")
    if not isinstance(size, int) or size < 1 or not isinstance(parent, int | None):
        raise ValueError("a stored event must have a block_size, and a number for its parent if it has one")
    whole = min(len(hashes), len(tokens) // size)
    if tokens and not (min(tokens) >= -(1 << 31) and max(tokens) < 1 << 32):
        raise ValueError("a token id is out of range")
    infos = fields.get("block_mm_infos") or fields.get("extra_keys") or ()
    media = tuple(None if not info else _frozen(info) for info in infos) if isinstance(infos, list) else ()
    return StoredEvent(
        hashes[:whole],
        parent,
        tokens[: whole * size],
        size,
        (str(fields.get("cache_salt") or ""), str(fields.get("lora_name") or "")),
        media if any(media) else (),
        tier,
    )


def _frozen(info: Any) -> Hashable:
    return msgspec.msgpack.encode(info)


def _integers(value: Any) -> tuple[int, ...]:
    """Eagle's pairs of tokens are no token ids either."""
    if not isinstance(value, list) or not set(map(type, value)) <= {int}:
        raise ValueError("hashes and token ids must be lists of numbers")
    return tuple(value)
