"""Conversion of KV-cache events into those for routers: which full blocks of full attention can be reused."""

import re
from collections.abc import Iterator
from itertools import groupby, takewhile
from operator import attrgetter

from blake3 import blake3

from engine.kv_events import Cleared, Created, EventDiff, KvEvent, Removed, Stored, StoredBlock, Updated
from engine.media import MmKeys
from engine.replicas.publisher.messages import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    MmInfo,
    MmObject,
    WireEvent,
    medium,
    signed,
)

_HEX = re.compile(r"[0-9a-fA-F]{16,}")


class Converter:
    """The events of one data-parallel rank, in order.

    Blocks of narrower attention windows are left out, since the widest says how long a prefix is. So are blocks that
    are not full, and those after them. When event ids begin again, the engine has started anew and has no blocks.
    """

    def __init__(self, block_size: int) -> None:
        self.lost = 0
        """Events that never came, by the gaps between event ids."""
        self._block_size = block_size
        self._last_id: int | None = None
        self._window = 0
        """The widest window so far: an engine's first events are a Created for each."""
        self._started = False
        """Whether there was any other event."""
        self._withheld: set[int] = set()
        self._levels: dict[int, int] = {}
        """Cache levels of the blocks that are not on the device."""

    def convert(self, event: KvEvent) -> Iterator[WireEvent]:
        """Yield what routers have to know of `event`."""
        if self._is_first(event):
            self._window = 0
            self._started = False
            self._withheld.clear()
            self._levels.clear()
            yield AllBlocksCleared()
        elif self._last_id is not None:
            self.lost += event.event_id - self._last_id - 1
        self._last_id = event.event_id
        self._started = self._started or not isinstance(event.data, Created)
        if event.window_size < self._window:
            return
        self._window = event.window_size
        match event.data:
            case Stored():
                yield from self._stored(event.data)
            case Removed():
                yield from self._removed(event.data)
            case Updated(block_hash, EventDiff(level)) if block_hash not in self._withheld:
                yield from self._moved(block_hash, level)
            case Cleared():
                self._withheld.clear()
                self._levels.clear()
                yield AllBlocksCleared()

    def _is_first(self, event: KvEvent) -> bool:
        """Return whether this is the first event of an engine."""
        if self._last_id is None or event.event_id <= self._last_id:
            return True
        return self._started and isinstance(event.data, Created)

    def _stored(self, data: Stored) -> Iterator[WireEvent]:
        full = list(takewhile(lambda block: len(block.tokens) == self._block_size, data.blocks))
        self._withheld.update(block.block_hash for block in data.blocks[len(full) :])
        if not full:
            return
        self._withheld.difference_update(block.block_hash for block in full)
        parent = data.parent_hash
        for level, group in groupby(full, key=attrgetter("cache_level")):
            blocks = list(group)
            yield self._stored_at(level, parent, blocks, data.cache_salt)
            yield from self._left(blocks, level)
            parent = blocks[-1].block_hash

    def _stored_at(self, level: int, parent: int | None, blocks: list[StoredBlock], cache_salt: str) -> BlockStored:
        infos = [_mm_info(block.mm_keys) for block in blocks]
        keys = [[*dict.fromkeys(str(key["hash"]) for key in block.mm_keys)] for block in blocks]
        if cache_salt and parent is None:
            keys[0].append(cache_salt)
        return BlockStored(
            block_hashes=[signed(block.block_hash) for block in blocks],
            parent_block_hash=None if parent is None else signed(parent),
            token_ids=[token.token_id for block in blocks for token in block.tokens],
            block_size=self._block_size,
            cache_salt=cache_salt or None,
            block_mm_infos=infos if any(infos) else None,
            extra_keys=[key or None for key in keys] if any(keys) else None,
            medium=medium(level),
        )

    def _left(self, blocks: list[StoredBlock], level: int) -> Iterator[BlockRemoved]:
        """Yield the removal of blocks from the levels where they were; they are at `level` from now on."""
        for block in blocks:
            before = self._levels.pop(block.block_hash, level)
            if level:
                self._levels[block.block_hash] = level
            if before != level:
                yield BlockRemoved([signed(block.block_hash)], medium(before))

    def _moved(self, block_hash: int, level: int) -> Iterator[WireEvent]:
        before = self._levels.pop(block_hash, 0)
        if level:
            self._levels[block_hash] = level
        if before != level:
            yield BlockStored([signed(block_hash)], None, [], self._block_size, medium=medium(level))
            yield BlockRemoved([signed(block_hash)], medium(before))

    def _removed(self, data: Removed) -> Iterator[BlockRemoved]:
        known = [block_hash for block_hash in data.block_hashes if block_hash not in self._withheld]
        self._withheld.difference_update(data.block_hashes)
        for level, hashes in groupby(known, key=lambda block_hash: self._levels.pop(block_hash, 0)):
            yield BlockRemoved([signed(block_hash) for block_hash in hashes], medium(level))


def _mm_info(mm_keys: MmKeys) -> MmInfo | None:
    """Offsets stay empty: an event tells which images a block has, not where they end."""
    hashes = dict.fromkeys(_mm_hash(str(key["hash"])) for key in mm_keys)
    return MmInfo(tuple(map(MmObject, hashes))) if hashes else None


def _mm_hash(key: str) -> int:
    """The first 16 hex digits of a key, or of the BLAKE3 hash of a key that is a name, as later TensorRT-LLM allows."""
    digits = key if _HEX.fullmatch(key) else blake3(key.encode()).hexdigest()
    return int(digits[:16], 16)
