"""Properties of the block pool: for any order of calls, counts are consistent and a key finds its own contents."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, rule

from engine.embedded.kv.blocks import BlockPool, block_key, event_hash, root_key
from engine.kv_events import Cleared, Created, Removed, Stored

SIZE = 2


class PoolMachine(RuleBasedStateMachine):
    """Sequences of two-token blocks over a pool of eight.

    They are compared with a model that remembers what every block was filled with.
    """

    sequences = Bundle("sequences")

    def __init__(self) -> None:
        super().__init__()
        self.events: list[Created | Stored | Removed | Cleared] = []
        self.pool = BlockPool(8, SIZE, reuse=True, publish=self.events.append)
        self.contents: dict[int, tuple[int, ...]] = {}
        self.held: dict[int, list[int]] = {}
        self.count = 0

    @rule(target=sequences, tokens=st.lists(st.integers(0, 2), min_size=1, max_size=9), salt=st.sampled_from(["", "a"]))
    def open(self, tokens: list[int], salt: str):
        parent, keys = root_key(salt), []
        for start in range(0, len(tokens) - SIZE + 1, SIZE):
            parent = block_key(parent, tokens[start : start + SIZE])
            keys.append(parent)
        matched = self.pool.match(keys)
        needed = -(-len(tokens) // SIZE) - len(matched)
        if needed + self.pool.idle_among(matched) > self.pool.available:
            return multiple()
        for index, block in enumerate(matched):
            assert self.contents[block] == (salt, *tokens[: (index + 1) * SIZE])
        self.pool.reference(matched)
        blocks = matched + self.pool.allocate(needed)
        for index in range(len(matched), len(keys)):
            self.contents[blocks[index]] = (salt, *tokens[: (index + 1) * SIZE])
        chain = [(blocks[i], keys[i], tokens[i * SIZE : (i + 1) * SIZE]) for i in range(len(matched), len(keys))]
        self.pool.store(keys[len(matched) - 1] if matched else None, chain)
        self.count += 1
        self.held[self.count] = blocks
        return self.count

    @rule(sequence=consumes(sequences))
    def close(self, sequence: int) -> None:
        self.pool.release(self.held.pop(sequence))

    @rule()
    def clear(self) -> None:
        self.pool.clear()

    @invariant()
    def balanced(self) -> None:
        self.pool.audit(list(self.held.values()))

    @invariant()
    def events_tell_the_index(self) -> None:
        """A consumer that replays the events knows exactly the keys that the pool can match."""
        known: set[int] = set()
        for event in self.events:
            if isinstance(event, Stored):
                assert event.parent_hash is None or event.parent_hash in known
                for block in event.blocks:
                    assert block.block_hash not in known
                    known.add(block.block_hash)
            elif isinstance(event, Removed):
                assert known.issuperset(event.block_hashes)
                known.difference_update(event.block_hashes)
            elif isinstance(event, Cleared):
                known.clear()
        assert known == {event_hash(key) for key in self.pool.keys}


PoolMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
test_pool = PoolMachine.TestCase


def _pool(blocks: int, **options: bool) -> BlockPool:
    return BlockPool(blocks, SIZE, reuse=options.get("reuse", True), publish=lambda _: None)


def test_the_least_recently_used_prefix_is_evicted_first_and_its_end_before_its_beginning() -> None:
    pool = _pool(4)
    keys = {}
    for name in "ab":
        parent = root_key(name)
        keys[name] = [parent := block_key(parent, [1, 2]) for _ in range(2)]
        blocks = pool.allocate(2)
        pool.store(None, [(block, key, [1, 2]) for block, key in zip(blocks, keys[name], strict=True)])
        pool.release(blocks)
    pool.allocate(1)
    assert len(pool.match(keys["a"])) == 1
    assert len(pool.match(keys["b"])) == 2


def test_a_block_released_twice_is_our_bug() -> None:
    pool = _pool(1)
    blocks = pool.allocate(1)
    pool.release(blocks)
    with pytest.raises(AssertionError, match="twice"):
        pool.release(blocks)


def test_the_audit_finds_a_lost_block() -> None:
    pool = _pool(2)
    pool.allocate(1)
    with pytest.raises(AssertionError, match="reference counts"):
        pool.audit([])


def test_without_reuse_nothing_matches() -> None:
    pool = _pool(2, reuse=False)
    key = block_key(root_key(""), [1, 2])
    pool.store(None, [(pool.allocate(1)[0], key, [1, 2])])
    assert pool.match([key]) == []


def test_salts_separate_and_prefixes_chain() -> None:
    assert block_key(root_key("a"), [1, 2]) != block_key(root_key("b"), [1, 2])
    assert block_key(block_key(root_key(""), [1, 2]), [3, 4]) != block_key(root_key(""), [3, 4])
    assert 0 <= event_hash(block_key(root_key(""), [1, 2])) < 1 << 64
