"""Conversion of KV-cache events into those for routers: which full blocks of full attention can be reused."""

import re
from collections.abc import Iterator
from itertools import takewhile

from blake3 import blake3

from engine.kv_events import Cleared, Created, KvEvent, Removed, Stored
from engine.media import MmKeys
from engine.replicas.publisher.messages import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    MmInfo,
    MmObject,
    WireEvent,
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

    def convert(self, event: KvEvent) -> Iterator[WireEvent]:
        """Yield what routers have to know of `event`."""
        if self._is_first(event):
            self._window = 0
            self._started = False
            self._withheld.clear()
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
            case Cleared():
                self._withheld.clear()
                yield AllBlocksCleared()

    def _is_first(self, event: KvEvent) -> bool:
        """Return whether this is the first event of an engine."""
        if self._last_id is None or event.event_id <= self._last_id:
            return True
        return self._started and isinstance(event.data, Created)

    def _stored(self, data: Stored) -> Iterator[BlockStored]:
        full = list(takewhile(lambda block: len(block.tokens) == self._block_size, data.blocks))
        self._withheld.update(block.block_hash for block in data.blocks[len(full) :])
        if not full:
            return
        self._withheld.difference_update(block.block_hash for block in full)
        infos = [_mm_info(block.mm_keys) for block in full]
        yield BlockStored(
            block_hashes=[signed(block.block_hash) for block in full],
            parent_block_hash=None if data.parent_hash is None else signed(data.parent_hash),
            token_ids=[token.token_id for block in full for token in block.tokens],
            block_size=self._block_size,
            cache_salt=data.cache_salt or None,
            block_mm_infos=infos if any(infos) else None,
        )

    def _removed(self, data: Removed) -> Iterator[BlockRemoved]:
        known = [signed(block_hash) for block_hash in data.block_hashes if block_hash not in self._withheld]
        self._withheld.difference_update(data.block_hashes)
        if known:
            yield BlockRemoved(known)


def _mm_info(mm_keys: MmKeys) -> MmInfo | None:
    """Offsets stay empty: an event tells which images a block has, not where they end."""
    hashes = dict.fromkeys(_mm_hash(str(key["hash"])) for key in mm_keys)
    return MmInfo(tuple(map(MmObject, hashes))) if hashes else None


def _mm_hash(key: str) -> int:
    """The first 16 hex digits of a key, or of the BLAKE3 hash of a key that is a name, as later TensorRT-LLM allows."""
    digits = key if _HEX.fullmatch(key) else blake3(key.encode()).hexdigest()
    return int(digits[:16], 16)
