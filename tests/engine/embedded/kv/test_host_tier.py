"""The host tier by property: a key always finds its own contents, pinned slots do not change, no slot is lost."""

import ctypes

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from engine.embedded.kv.host_tier import ALIGNMENT, Device, HostTier, Name, Slot, padded
from engine.embedded.kv.tiers import host_slots
from engine.errors import EngineFailure

SIZES = (100, 5000)
NAMES = st.tuples(st.integers(0, 1), st.integers(0, 6).map(lambda number: bytes([number])))


class HostMachine(RuleBasedStateMachine):
    """Blocks of two groups in three and two slots. The model is an ordered list for each group."""

    def __init__(self) -> None:
        super().__init__()
        self.device = Device(torch.device("cpu"))
        counts = (3, 2)
        whole = sum(count * padded(size) for count, size in zip(counts, SIZES, strict=True))
        self.tier = HostTier(counts, SIZES, self.device.allocate(whole))
        self.order: dict[int, list[bytes]] = {0: [], 1: []}
        """Least recently requested first."""
        self.pinned: list[tuple[Name, Slot, bytes]] = []
        self.dropped: list[Slot] = []
        """Pinned slots whose block has been dropped."""

    @property
    def kept(self) -> set[Name]:
        """Blocks that are here and pinned."""
        return {name for name, slot, _ in self.pinned if not any(slot is one for one in self.dropped)}

    def _note_drop(self, *names: Name) -> None:
        self.dropped += [slot for name, slot, _ in self.pinned if name in names]

    def teardown(self) -> None:
        for name, slot, _ in self.pinned:
            self.tier.unpin(name, slot)
        self.tier.audit()

    @rule(name=NAMES)
    def put(self, name: Name) -> None:
        group, key = name
        if self.tier.has(name):
            return
        free = len(self.order[group]) < self.tier.counts[group]
        held = {id(slot) for _, slot, _ in self.pinned}
        slot, evicted = self.tier.take(name)
        if slot is None:
            assert evicted is None
            return
        assert id(slot) not in held, "a pinned slot was given away"
        assert slot.address % ALIGNMENT == 0
        if evicted is not None:
            pins = {other for other_group, other in self.kept if other_group == group}
            assert evicted == next(old for old in self.order[group] if old not in pins), "not the least recent one"
            self.order[group].remove(evicted)
        else:
            assert free or self.pinned
        assert name not in self.tier, "it is not there before its copy has ended"
        ctypes.memset(slot.address, key[0] + 10 * group, SIZES[group])
        slot.ready = True
        self.tier.unpin(name, slot)
        self.order[group].append(key)

    @rule(name=NAMES)
    def touch(self, name: Name) -> None:
        self.tier.touch(name)
        group, key = name
        if key in self.order[group]:
            self.order[group].remove(key)
            self.order[group].append(key)

    @rule(name=NAMES)
    def pin(self, name: Name) -> None:
        assert (name in self.tier) == (name[1] in self.order[name[0]])
        if name in self.tier:
            slot = self.tier.pin(name)
            self.pinned.append((name, slot, ctypes.string_at(slot.address, SIZES[name[0]])))

    @precondition(lambda self: self.pinned)
    @rule(index=st.integers(0, 9))
    def unpin(self, index: int) -> None:
        name, slot, _ = self.pinned.pop(index % len(self.pinned))
        self.tier.unpin(name, slot)
        if not slot.pins:
            self.dropped = [one for one in self.dropped if one is not slot]

    @rule(name=NAMES)
    def drop(self, name: Name) -> None:
        if self.tier.has(name):
            self._note_drop(name)
            self.tier.drop(name)
            self.order[name[0]].remove(name[1])

    @rule()
    def clear(self) -> None:
        self._note_drop(*(name for name, _, _ in self.pinned))
        self.tier.clear()
        self.order = {0: [], 1: []}

    @invariant()
    def contents_are_their_own(self) -> None:
        for (group, key), slot, before in self.pinned:
            assert ctypes.string_at(slot.address, SIZES[group]) == before == bytes([key[0] + 10 * group]) * SIZES[group]
        assert len(self.tier) == sum(map(len, self.order.values()))


TestHostTier = HostMachine.TestCase
TestHostTier.settings = settings(max_examples=40, stateful_step_count=25)


def test_the_memory_is_shared_in_proportion_to_the_device() -> None:
    assert host_slots(3 << 20, (10, 10), (ALIGNMENT, 2 * ALIGNMENT)) == (256, 256)


def test_too_little_memory_is_refused_with_the_least_that_works() -> None:
    with pytest.raises(EngineFailure, match=r"KV_HOST_CACHE_MB=1 .* 3 at least"):
        host_slots(1 << 20, (8,), (1 << 20 | 1,))
