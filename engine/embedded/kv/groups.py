"""Blocks by group: layers that look equally far back share a pool, and a sequence has one table of blocks in each.

Full attention makes one group, each sliding window another. A table lists a sequence's blocks by their index; those
that lie wholly behind the window have been given back and leave GONE in their place. What was given back can be reused
as long as it is not evicted, so a prefix can be taken up wherever every group still has what the next token attends to.
"""

from collections.abc import Mapping, Sequence

from engine.embedded.kv.blocks import BlockKey, BlockPool
from engine.media import MmKeys
from engine.stats import KvCacheStats

GONE = -1
"""Entry of a table without a block, because no later token attends to it."""
MISSING = -2
"""Entry of a table that is not referenced yet: a block that has to be read from a source."""
UNLIMITED = 1 << 62

Table = list[int]


def longest_chunk(pool_blocks: int, block_size: int, window: int) -> int:
    """Return the most tokens of a sequence in one step with which it can always go on alone: two such chunks, one
    computed and one prepared, and the window before them fit into the group's pool, wherever they begin within a
    block."""
    return ((pool_blocks - 2) * block_size - window) // 2


class BlockGroups:
    """The pools of all groups, that of full attention first if there is one."""

    def __init__(self, pools: Sequence[BlockPool]) -> None:
        assert all(pool.window is not None for pool in pools[1:]), "full attention is one group, the first"
        self.pools = pools
        self.block_size = pools[0].block_size
        self.reuse = pools[0].reuse
        self.reused = self.missed = 0
        """Blocks of prefixes that admitted sequences reused, and those that they had to compute; each is counted
        once, not once for each group."""
        self._sliding = [(index, pool, pool.window) for index, pool in enumerate(pools) if pool.window is not None]
        self.sliding = bool(self._sliding)
        self.max_chunk = min(
            (longest_chunk(pool.num_blocks, self.block_size, window) for _, pool, window in self._sliding),
            default=UNLIMITED,
        )
        """Maximum number of tokens of a sequence in one step."""

    @property
    def capacity(self) -> int:
        """Maximum number of tokens of a sequence; the pool of a window sets no limit."""
        return UNLIMITED if self.pools[0].window is not None else self.pools[0].num_blocks * self.block_size

    def stats(self) -> KvCacheStats:
        """Return figures of all groups; what was reused or not is counted in blocks of a prefix."""
        looked_up = self.reused + self.missed
        return KvCacheStats(
            max_num_blocks=sum(pool.num_blocks for pool in self.pools),
            free_num_blocks=sum(pool.available for pool in self.pools),
            used_num_blocks=sum(pool.used for pool in self.pools),
            tokens_per_block=self.block_size,
            alloc_total_blocks=sum(pool.alloc_total for pool in self.pools),
            alloc_new_blocks=sum(pool.alloc_new for pool in self.pools),
            reused_blocks=self.reused,
            missed_blocks=self.missed,
            cache_hit_rate=self.reused / looked_up if looked_up else 0.0,
        )

    def match(self, keys: Sequence[BlockKey]) -> list[Table]:
        """Return tables for the longest reusable prefix of the chain that `keys` name, without referencing blocks."""
        if not self._sliding:
            return [self.pools[0].match(keys)]
        count = self._reusable(keys) if self.reuse else 0
        tables = []
        for pool in self.pools:
            first = pool.first(count * self.block_size)
            tables.append([GONE] * first + pool.match(keys[first:count]))
        return tables

    def plan(self, keys: Sequence[BlockKey], position: int) -> list[Table]:
        """Return tables for a sequence that goes on at `position`, whose full blocks before it have these `keys`:
        blocks that can be reused, and MISSING. References none."""
        count, tables = _blocks(position, self.block_size), []
        for pool in self.pools:
            first = pool.first(position)
            found = [MISSING if block is None else block for block in pool.find(keys[first:])]
            tables.append([GONE] * first + found + [MISSING] * (count - first - len(found)))
        return tables

    def fill(self, tables: Sequence[Table]) -> list[list[int]]:
        """Allocate the blocks that are MISSING in referenced tables; return their indices, by group."""
        places = [[index for index, block in enumerate(table) if block == MISSING] for table in tables]
        for pool, table, missing in zip(self.pools, tables, places, strict=True):
            for index, block in zip(missing, pool.allocate(len(missing)), strict=True):
                table[index] = block
        return places

    def _reusable(self, keys: Sequence[BlockKey]) -> int:
        """Return the longest prefix, in blocks, after which every group has what the next token attends to."""
        if self.pools[0].window is None:
            keys = keys[: len(self.pools[0].match(keys))]
        best, runs = 0, [0] * len(self._sliding)
        for count, key in enumerate(keys, start=1):
            runs = [run + 1 if key in pool else 0 for run, (_, pool, _) in zip(runs, self._sliding, strict=True)]
            if all(
                run >= count - pool.first(count * self.block_size)
                for run, (_, pool, _) in zip(runs, self._sliding, strict=True)
            ):
                best = count
        return best

    def fits(self, matched: Sequence[Table], length: int, end: int, spare: int) -> bool:
        """Return whether a sequence of `length` tokens, the first `end` of them computed in its first step, can be
        admitted with matched tables so that `spare` blocks are left in each pool. A window is counted whole: blocks
        behind it are freed only later."""
        for pool, table in zip(self.pools, matched, strict=True):
            tokens = length if pool.window is None else min(length, end + pool.window)
            new = _blocks(tokens, self.block_size) - len(table) + table.count(MISSING)
            if new + pool.idle_among(_present(table)) + spare > pool.available:
                return False
        return True

    def owed(self, tables: Sequence[Table], length: int, computed: int) -> int:
        """Return how many blocks of a window `fits` has counted that a sequence has not taken yet."""
        return max(
            max(0, _blocks(min(length, computed + window), self.block_size) - len(tables[index]))
            for index, _, window in self._sliding
        )

    def reference(self, matched: Sequence[Table], length: int) -> None:
        """Take a reference to the blocks of matched tables, for a sequence of `length` tokens."""
        for pool, table in zip(self.pools, matched, strict=True):
            pool.reference(_present(table))
        reused = len(matched[0]) - matched[0].count(MISSING)
        self.reused += reused
        self.missed += _blocks(length, self.block_size) - reused

    def grow(self, tables: Sequence[Table], length: int, end: int) -> bool:
        """Add blocks for the tokens up to `end`, and for all `length` tokens where attention is full. Returns False,
        without a change, if there are too few."""
        needed = [_blocks(length if pool.window is None else end, self.block_size) for pool in self.pools]
        if any(
            count - len(table) > pool.available for count, table, pool in zip(needed, tables, self.pools, strict=True)
        ):
            return False
        for count, table, pool in zip(needed, tables, self.pools, strict=True):
            if count > len(table):
                table += pool.allocate(count - len(table))
        return True

    def store(
        self,
        tables: Sequence[Table],
        keys: Sequence[BlockKey],
        tokens: Sequence[int],
        first: int,
        mm_keys: Mapping[BlockKey, MmKeys],
        cache_salt: str,
    ) -> None:
        """Make a sequence's computed blocks reusable, from index `first` to the last of `keys`, except those that are
        gone by then. `mm_keys` are the images of blocks that contain any; events repeat the salt."""
        size = self.block_size
        for pool, table in zip(self.pools, tables, strict=True):
            start = first
            while start < len(keys) and table[start] == GONE:
                start += 1
            chain = [(table[i], keys[i], tokens[i * size : (i + 1) * size]) for i in range(start, len(keys))]
            pool.store(keys[start - 1] if start else None, chain, mm_keys, cache_salt)

    def leave_behind(self, tables: Sequence[Table], position: int) -> None:
        """Release the blocks that no token from `position` on attends to."""
        for index, pool, _ in self._sliding:
            table = tables[index]
            start = stop = pool.first(position)
            while start and table[start - 1] != GONE:
                start -= 1
            if start < stop:
                pool.release(table[start:stop])
                table[start:stop] = [GONE] * (stop - start)

    def count(self, tables: Sequence[Table]) -> int:
        """Return the number of blocks in a sequence's tables."""
        return sum(len(_present(table)) for table in tables)

    def release(self, tables: Sequence[Table]) -> None:
        """Release the blocks of a sequence's tables."""
        for pool, table in zip(self.pools, tables, strict=False):  # a sequence that waits has none
            pool.release(table if pool.window is None else _present(table))

    def audit(self, sequences: Sequence[Sequence[Table]]) -> None:
        """Assert that the reference counts of every pool are right, given the tables of every live sequence."""
        for index, pool in enumerate(self.pools):
            pool.audit([_present(tables[index]) for tables in sequences if tables])


def _present(table: Table) -> Table:
    return [block for block in table if block >= 0]


def _blocks(tokens: int, block_size: int) -> int:
    return -(-tokens // block_size)
