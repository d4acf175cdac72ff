"""The KV block pool: which sequences reference a block, which prefixes can be reused, and what to evict.

A block holds the keys and values of `block_size` consecutive tokens, for all layers of a group
(`engine/embedded/kv/groups.py`). A full block is named by a key, the BLAKE3 hash of its parent's key, its tokens and
the images that they are part of, so a key stands for a whole prefix; the chain starts at a root made from the request's
cache salt. A block is in one of three states:

    referenced  by one or more sequences
    cached      by none, but reusable under its key; evicted in least-recently-used order
    free        by none, without contents
"""

import struct
from collections import OrderedDict
from collections.abc import Callable, Iterable, KeysView, Mapping, Sequence
from types import MappingProxyType

from blake3 import blake3

from engine.kv_events import Cleared, Created, EventDiff, Removed, Stored, StoredBlock, UniqueToken, Updated
from engine.media import MmKeys, Overlap

BlockKey = bytes
EventData = Created | Stored | Removed | Updated | Cleared


def root_key(cache_salt: str) -> BlockKey:
    """Return the parent of a first block: only requests with equal salts can share blocks."""
    return blake3(cache_salt.encode()).digest()


def block_key(parent: BlockKey, tokens: Sequence[int], overlaps: Iterable[Overlap] = ()) -> BlockKey:
    """Return 32 bytes that name the prefix ending with these tokens, some of them images' tokens."""
    media = b"".join(bytes.fromhex(key) + struct.pack("<2i", offset, place) for key, offset, place in overlaps)
    return blake3(parent + struct.pack(f"<{len(tokens)}i", *tokens) + media).digest()


def event_hash(key: BlockKey) -> int:
    """Return the unsigned 64-bit hash that KV events give for a key."""
    return int.from_bytes(key[:8], "little")


def first_block(position: int, window: int | None, block_size: int) -> int:
    """Return the index in its sequence of the first block that a token at `position` attends to."""
    return 0 if window is None else max(0, position - window + 1) // block_size


class BlockPool:
    """Allocation, sharing and eviction of `num_blocks` blocks. Not thread-safe: the engine's thread owns it."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        reuse: bool,
        publish: Callable[[EventData], None],
        window: int | None = None,
        lower_blocks: int = 0,
    ) -> None:
        """`lower_blocks` is the number of blocks that the host tier holds, for the first event."""
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.reuse = reuse
        self.window = window
        """Number of tokens, itself included, that a token of these layers attends to; None for all."""
        self.below: Callable[[BlockKey], int] = _nowhere
        """Called when a block is evicted: returns the cache level where it stays, 0 if it is gone."""
        self._publish = publish
        self._references = [0] * num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._key_of: dict[int, BlockKey] = {}
        self._block_of: dict[BlockKey, int] = {}
        self.alloc_total = 0
        self.alloc_new = 0
        publish(Created((num_blocks, lower_blocks)))

    @property
    def available(self) -> int:
        """Number of blocks that `allocate` can give: free ones and cached ones."""
        return len(self._free) + len(self._cached)

    @property
    def used(self) -> int:
        """Number of blocks that sequences reference."""
        return self.num_blocks - self.available

    @property
    def keys(self) -> KeysView[BlockKey]:
        """Keys of the blocks that can be reused."""
        return self._block_of.keys()

    def __contains__(self, key: BlockKey) -> bool:
        """Return whether a block with this key can be reused."""
        return key in self._block_of

    def first(self, position: int) -> int:
        """Return the index in its sequence of the first block that a token at `position` attends to."""
        return first_block(position, self.window, self.block_size)

    def match(self, keys: Sequence[BlockKey]) -> list[int]:
        """Return the longest run of reusable blocks for a chain of keys, without referencing them."""
        blocks: list[int] = []
        if self.reuse:
            for key in keys:
                block = self._block_of.get(key)
                if block is None:
                    break
                blocks.append(block)
        return blocks

    def find(self, keys: Sequence[BlockKey]) -> list[int | None]:
        """Return the reusable block of each key, None where there is none, without referencing them."""
        return [self._block_of.get(key) for key in keys] if self.reuse else [None] * len(keys)

    def idle_among(self, blocks: Sequence[int]) -> int:
        """Return how many of these blocks `available` counts now and would not once they are referenced."""
        return sum(self._references[block] == 0 for block in blocks)

    def reference(self, blocks: Sequence[int]) -> None:
        """Take a reference to matched blocks."""
        for block in blocks:
            if self._references[block] == 0:
                del self._cached[block]
            self._references[block] += 1
        self.alloc_total += len(blocks)

    def allocate(self, count: int) -> list[int]:
        """Return `count` blocks with undefined contents, each referenced once. Evicts cached blocks when there are
        too few free ones."""
        assert count <= self.available, "allocate must be preceded by a look at `available`"
        evicted = [self._cached.popitem(last=False)[0] for _ in range(count - len(self._free))]
        if evicted:
            self.publish_level(0, [(key, self.below(key)) for key in map(self._forget, evicted)])
            self._free.extend(reversed(evicted))
        blocks = [self._free.pop() for _ in range(count)]
        for block in blocks:
            self._references[block] = 1
        self.alloc_total += count
        self.alloc_new += count
        return blocks

    def release(self, blocks: Sequence[int]) -> None:
        """Give up one reference to each, the last first: the end of a prefix is evicted before its beginning."""
        for block in reversed(blocks):
            assert self._references[block] > 0, "a block was released twice"
            self._references[block] -= 1
            if self._references[block] == 0:
                if block in self._key_of:
                    self._cached[block] = None
                else:
                    self._free.append(block)

    def store(
        self,
        parent: BlockKey | None,
        chain: Sequence[tuple[int, BlockKey, Sequence[int]]],
        mm_keys: Mapping[BlockKey, MmKeys] = MappingProxyType({}),
        cache_salt: str = "",
    ) -> None:
        """Make computed blocks reusable: `(block, key, tokens)` in order; `parent` is None at the start of a sequence,
        and `mm_keys` has the images of blocks that contain any. Events repeat the salt of their root.

        A block whose key another one already has stays private to its sequence.
        """
        if not self.reuse:
            return
        run: list[StoredBlock] = []
        for block, key, tokens in chain:
            if key in self._block_of:
                self._publish_run(parent, run, cache_salt)
                run = []
            else:
                self._block_of[key] = block
                self._key_of[block] = key
                run.append(StoredBlock(event_hash(key), tuple(map(UniqueToken, tokens)), mm_keys=mm_keys.get(key, ())))
            if not run:
                parent = key
        self._publish_run(parent, run, cache_salt)

    def _publish_run(self, parent: BlockKey | None, run: list[StoredBlock], cache_salt: str) -> None:
        if run:
            self._publish(Stored(None if parent is None else event_hash(parent), tuple(run), cache_salt))

    def publish_level(self, old: int, moved: Iterable[tuple[BlockKey, int]]) -> None:
        """Publish at which cache level blocks are now that were at level `old`; 0 if they are gone."""
        gone = []
        for key, level in moved:
            if level:
                self._publish(Updated(event_hash(key), EventDiff(level, old)))
            else:
                gone.append(event_hash(key))
        if gone:
            self._publish(Removed(tuple(gone)))

    def publish_found(self, parent: BlockKey | None, block: StoredBlock, cache_salt: str) -> None:
        """Publish that a block is at a lower cache level, which no event has said before."""
        self._publish(Stored(None if parent is None else event_hash(parent), (block,), cache_salt))

    def _forget(self, block: int) -> BlockKey:
        key = self._key_of.pop(block)
        del self._block_of[key]
        return key

    def clear(self) -> None:
        """Drop every cached block. Blocks that sequences reference keep their contents and lose their keys."""
        self._free.extend(self._cached)
        self._cached.clear()
        self._key_of.clear()
        self._block_of.clear()
        self._publish(Cleared())

    def evict(self) -> None:
        """Drop every block, as `allocate` does; no sequence references one."""
        assert not self.used, "a block is in use"
        cached = list(self._cached)
        self.publish_level(0, [(key, self.below(key)) for key in map(self._forget, cached)])
        self._free.extend(cached)
        self._cached.clear()

    def audit(self, tables: Sequence[Sequence[int]] = ()) -> None:
        """Assert that reference counts are right, given the blocks of every live sequence: no block is lost or
        counted twice."""
        counts = [0] * self.num_blocks
        for blocks in tables:
            for block in blocks:
                counts[block] += 1
        assert counts == self._references, "reference counts differ from the tables of sequences"
        idle = sorted([*self._free, *self._cached])
        assert idle == [block for block in range(self.num_blocks) if not counts[block]], (
            "an idle block is lost or listed twice"
        )
        assert self._cached.keys() <= self._key_of.keys(), "a cached block has no key"
        assert {key: block for block, key in self._key_of.items()} == self._block_of, "keys and blocks disagree"


def _nowhere(_: BlockKey) -> int:
    return 0
