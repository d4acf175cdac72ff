"""Index of the prefixes in each replica's KV cache, learnt from its events.

A block is known by our key for it (`block_keys`), which names a whole prefix whatever hashes the replicas use. For each
key there is the set of replicas that have the block, as the bits of a number.
"""

from collections.abc import Hashable, Sequence
from itertools import chain, islice, repeat

from engine.replicas.block_keys import block_keys, root_key
from engine.replicas.routing.events import CacheEvent, ClearedEvent, RemovedEvent, StoredEvent

WEIGHTS = {"CPU": 0.75, "CPU_PINNED": 0.75, "CPU_TIER1": 0.75}
"""Weight of a cached token whose block is on a tier below the device, by the tier's name in vLLM and Dynamo."""
MEDIA = (*WEIGHTS, "DISK", "CPU_TIER2")
"""Names of the tiers below the device. A block that moves to another medium may still be known under one of these."""
LOWEST_WEIGHT = 0.25
"""The same for a block on disk, or anywhere else."""
MAX_BLOCKS = 1 << 19
"""Blocks remembered for one replica; beyond that the oldest eighth is forgotten."""


class _Blocks:
    """The blocks of one replica."""

    __slots__ = ("keys", "lower", "shared", "size")

    def __init__(self) -> None:
        self.keys: dict[Hashable, int] = {}
        """Keys by the replica's own hash, oldest first: a number in the first rank's device memory, else (tier,
        number)."""
        self.shared: dict[int, int] = {}
        """Number of additional hashes of each key that the replica has under several hashes."""
        self.lower: dict[int, list[float]] = {}
        """Weights of the tiers below the device that have each key."""
        self.size = 0
        """Tokens in a block; 0 before the first."""

    def weight(self, key: int) -> float:
        """Return what a token of a block that the replica has counts: 1 on the device."""
        weights = self.lower.get(key, ())
        return max(weights) if len(weights) > self.shared.get(key, 0) else 1.0


class PrefixIndex:
    """The blocks of any number of replicas, which are numbered from 0."""

    def __init__(self, max_blocks: int = MAX_BLOCKS) -> None:
        self._max_blocks = max_blocks
        self._holders: dict[int, int] = {}
        self._replicas: dict[int, _Blocks] = {}

    def blocks(self, replica: int) -> int:
        """Return how many blocks of a replica are known."""
        return len(self._replicas[replica].keys) if replica in self._replicas else 0

    def __len__(self) -> int:
        """The number of different blocks."""
        return len(self._holders)

    @property
    def block_sizes(self) -> set[int]:
        return {blocks.size for blocks in self._replicas.values() if blocks.size}

    def apply(self, replica: int, event: CacheEvent) -> int:
        """Apply an event; return how many blocks were left out because their parent is not known."""
        blocks = self._replicas.setdefault(replica, _Blocks())
        match event:
            case StoredEvent():
                return self._store(replica, blocks, event)
            case RemovedEvent(hashes, tier):
                for block_hash in hashes:
                    self._drop(replica, blocks, _name(block_hash, tier))
            case ClearedEvent(rank):
                for name in [name for name in blocks.keys if _rank(name) == rank]:
                    self._drop(replica, blocks, name)
        return 0

    def remove(self, replica: int) -> None:
        """Forget a replica."""
        if (blocks := self._replicas.pop(replica, None)) is not None:
            for name in list(blocks.keys):
                self._drop(replica, blocks, name)

    def overlaps(self, tokens: Sequence[int], namespace: tuple[str, str] = ("", "")) -> dict[int, int]:
        """Return how many tokens of a prompt each replica has: whole blocks, from the first one on. Those on a tier
        below the device count less."""
        found: dict[int, int] = {}
        for size in self.block_sizes:
            mask = sum(1 << replica for replica, blocks in self._replicas.items() if blocks.size == size)
            for length, key in enumerate(block_keys(tokens, size, root_key(*namespace)), 1):
                rest = mask & self._holders.get(key, 0)
                if rest != mask:
                    _note(found, mask & ~rest, (length - 1) * size)
                mask = rest
                if not mask:
                    break
            _note(found, mask, len(tokens) // size * size)
            for replica in [number for number in found if self._replicas[number].lower]:
                blocks = self._replicas[replica]
                if blocks.size == size:
                    keys = islice(block_keys(tokens, size, root_key(*namespace)), found[replica] // size)
                    found[replica] -= int(sum((1 - blocks.weight(key)) * size for key in keys))
        return found

    def _store(self, replica: int, blocks: _Blocks, event: StoredEvent) -> int:
        if not event.tokens:
            return self._move(replica, blocks, event)
        parent = root_key(*event.namespace) if event.parent is None else self._parent(blocks, event)
        if parent is None:
            return len(event.hashes)
        blocks.size = event.block_size
        keys = block_keys(event.tokens, event.block_size, parent, chain(event.media, repeat(None)))
        for block_hash, key in zip(event.hashes, keys, strict=True):
            name = _name(block_hash, event.tier)
            if blocks.keys.get(name) != key:
                self._drop(replica, blocks, name)
                self._add(replica, blocks, name, key)
        return 0

    def _move(self, replica: int, blocks: _Blocks, event: StoredEvent) -> int:
        """Add blocks to a tier whose tokens were said when they came to another one; return how many are unknown."""
        unknown = 0
        for block_hash in event.hashes:
            key, name = self._known(blocks, block_hash, event.tier), _name(block_hash, event.tier)
            if key is None:
                unknown += 1
            elif name not in blocks.keys:
                self._add(replica, blocks, name, key)
        return unknown

    def _parent(self, blocks: _Blocks, event: StoredEvent) -> int | None:
        """Return the key of the block before, which may be on another tier than its child; None if it is not known."""
        assert event.parent is not None
        return self._known(blocks, event.parent, event.tier)

    def _known(self, blocks: _Blocks, block_hash: int, tier: Hashable) -> int | None:
        """Return the key of a block that is on this tier or another one of the same rank; None if it is not known."""
        rank = tier[0] if isinstance(tier, tuple) else 0
        tiers = dict.fromkeys([tier, None if rank == 0 else (rank, None), *((rank, name) for name in MEDIA)])
        return next((key for one in tiers if (key := blocks.keys.get(_name(block_hash, one))) is not None), None)

    def _add(self, replica: int, blocks: _Blocks, name: Hashable, key: int) -> None:
        if len(blocks.keys) >= self._max_blocks:
            for oldest in list(islice(blocks.keys, -(-self._max_blocks // 8))):
                self._drop(replica, blocks, oldest)
        blocks.keys[name] = key
        holders = self._holders.get(key, 0)
        if holders >> replica & 1:
            blocks.shared[key] = blocks.shared.get(key, 0) + 1
        else:
            self._holders[key] = holders | 1 << replica
        if (weight := _weight(name)) is not None:
            blocks.lower.setdefault(key, []).append(weight)

    def _drop(self, replica: int, blocks: _Blocks, name: Hashable) -> None:
        key = blocks.keys.pop(name, None)
        if key is None:
            return
        if (weight := _weight(name)) is not None:
            blocks.lower[key].remove(weight)
            if not blocks.lower[key]:
                del blocks.lower[key]
        if more := blocks.shared.pop(key, 0):
            if more > 1:
                blocks.shared[key] = more - 1
        elif left := self._holders.pop(key) & ~(1 << replica):
            self._holders[key] = left


def _name(block_hash: int, tier: Hashable) -> Hashable:
    """Hashes come signed from some replicas and unsigned from others; a single replica may mix them."""
    number = block_hash & 0xFFFFFFFFFFFFFFFF
    return number if tier is None else (tier, number)


def _weight(name: Hashable) -> float | None:
    """Return the weight of the tier that is part of a name; None for the device's."""
    medium = name[0][1] if isinstance(name, tuple) else None
    return None if medium is None else WEIGHTS.get(medium, LOWEST_WEIGHT)


def _rank(name: Hashable) -> int:
    return int(name[0][0]) if isinstance(name, tuple) else 0


def _note(found: dict[int, int], replicas: int, tokens: int) -> None:
    while tokens and replicas:
        lowest = replicas & -replicas
        found[lowest.bit_length() - 1] = tokens
        replicas ^= lowest
