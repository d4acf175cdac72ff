"""The KV blocks of the fake engine: counts, prefix reuse and events, but no tensors."""

from collections import OrderedDict
from collections.abc import Sequence
from hashlib import blake2b

from engine.kit.kv_log import KvEventLog
from engine.kv_events import Created, KvEvent, Removed, Stored, StoredBlock, UniqueToken
from engine.media import MediaSpan, Overlap, mm_keys_of, overlaps_of
from engine.stats import KvCacheStats


class FakeBlocks:
    """A pool of `num_blocks` blocks of `block_size` tokens.

    A complete block is identified by the hash of its content and all preceding content. Running sequences share equal
    blocks, and the pool keeps unreferenced ones for reuse until it needs the room, evicting the least recently used
    first.
    """

    def __init__(self, num_blocks: int, block_size: int, window_size: int) -> None:
        self.events = KvEventLog()
        self._num_blocks = num_blocks
        self._block_size = block_size
        self._window_size = window_size
        self._next_event = 0
        self._users: dict[int, int] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()
        self._partial = 0
        self._reused = 0
        self._missed = 0
        self.publish(Created((num_blocks,)))

    @property
    def used(self) -> int:
        """Number of blocks that running sequences reference."""
        return len(self._users) + self._partial

    @property
    def hashes(self) -> set[int]:
        return {*self._users, *self._idle}

    def open(self, tokens: tuple[int, ...], salt: str, images: Sequence[MediaSpan]) -> "FakeSequenceBlocks":
        """Return the blocks of a new sequence, known ones of its prompt first; at least one token is left to do."""
        sequence = FakeSequenceBlocks(self, self._block_size, salt, images)
        reusable = (len(tokens) - 1) // self._block_size
        for start in range(0, reusable * self._block_size, self._block_size):
            block = tokens[start : start + self._block_size]
            key = sequence.key(block)
            if key not in self._users and key not in self._idle:
                break
            self.hold(key)
            sequence.keys.append(key)
        self._reused += len(sequence.keys)
        self._missed += reusable - len(sequence.keys)
        return sequence

    def hold(self, key: int) -> bool:
        """Reference the block `key`; return whether it is new."""
        known = key in self._users or key in self._idle
        self._idle.pop(key, None)
        self._users[key] = self._users.get(key, 0) + 1
        self._make_room()
        return not known

    def hold_partial(self, count: int) -> None:
        """Reference `count` more incomplete blocks; a negative count releases them."""
        self._partial += count
        self._make_room()

    def drop(self, keys: list[int]) -> None:
        """Release the blocks of one sequence; the last of a chain is evicted first."""
        for key in reversed(keys):
            self._users[key] -= 1
            if not self._users[key]:
                del self._users[key]
                self._idle[key] = None

    def clear(self) -> None:
        """Forget the blocks that no sequence references."""
        if self._idle:
            self.publish(Removed(tuple(self._idle)))
        self._idle.clear()

    def stats(self) -> KvCacheStats:
        looked_up = self._reused + self._missed
        return KvCacheStats(
            max_num_blocks=self._num_blocks,
            free_num_blocks=self._num_blocks - self.used,
            used_num_blocks=self.used,
            tokens_per_block=self._block_size,
            reused_blocks=self._reused,
            missed_blocks=self._missed,
            cache_hit_rate=self._reused / looked_up if looked_up else 0.0,
        )

    def _make_room(self) -> None:
        evicted = []
        while self._idle and self.used + len(self._idle) > self._num_blocks:
            evicted.append(self._idle.popitem(last=False)[0])
        if evicted:
            self.publish(Removed(tuple(evicted)))
        assert self.used <= self._num_blocks, "more blocks in use than there are"

    def publish(self, data: Created | Stored | Removed) -> None:
        self.events.put(KvEvent(self._next_event, data, self._window_size))
        self._next_event += 1


class FakeSequenceBlocks:
    """The blocks of one running sequence: complete ones by key, in order, and at most one incomplete block."""

    def __init__(self, pool: FakeBlocks, block_size: int, salt: str, images: Sequence[MediaSpan]) -> None:
        self.keys: list[int] = []
        self._pool = pool
        self._block_size = block_size
        self._salt = salt
        self._images = images
        self._partial = 0

    def __len__(self) -> int:
        return len(self.keys) + self._partial

    def key(self, tokens: tuple[int, ...]) -> int:
        """Return the hash of `tokens` as the next block, an unsigned 64-bit integer."""
        parent = self.keys[-1].to_bytes(8, "little") if self.keys else self._salt.encode()
        overlaps = self._next_overlaps()
        return int.from_bytes(
            blake2b(parent + repr((tokens, overlaps) if overlaps else tokens).encode(), digest_size=8).digest(),
            "little",
        )

    def fill(self, tokens: tuple[int, ...] | list[int]) -> None:
        """Extend the blocks to `tokens`, all tokens of the sequence whose keys and values are computed."""
        parent = self.keys[-1] if self.keys else None
        new: list[StoredBlock] = []
        for start in range(len(self.keys) * self._block_size, len(tokens) - self._block_size + 1, self._block_size):
            block = tuple(tokens[start : start + self._block_size])
            key = self.key(block)
            self._set_partial(0)
            if self._pool.hold(key):
                new.append(StoredBlock(key, tuple(map(UniqueToken, block)), mm_keys=mm_keys_of(self._next_overlaps())))
            elif new:
                self._pool.publish(Stored(parent, tuple(new), self._salt))
                new = []
            self.keys.append(key)
            parent = parent if new else key
        if new:
            self._pool.publish(Stored(parent, tuple(new), self._salt))
        self._set_partial(int(len(tokens) % self._block_size > 0))

    def _next_overlaps(self) -> tuple[Overlap, ...]:
        """The images in the block that would come next."""
        return overlaps_of(self._images, len(self.keys) * self._block_size, self._block_size)

    def release(self) -> None:
        self._pool.drop(self.keys)
        self._set_partial(0)
        self.keys = []

    def _set_partial(self, count: int) -> None:
        self._pool.hold_partial(count - self._partial)
        self._partial = count
