"""Tiers by property: whatever is stored, evicted, loaded, damaged, cleared and restarted, a block is read with its own
contents, and KV events say where each one is."""

import ctypes
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from blake3 import blake3
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from msgspec.structs import replace

from engine.config import EmbeddedConfig
from engine.embedded.kv.blocks import BlockKey, BlockPool, EventData, event_hash
from engine.embedded.kv.groups import MISSING, BlockGroups
from engine.embedded.kv.host_tier import Device, HostTier
from engine.embedded.kv.layout import Attends
from engine.embedded.kv.memory import KvMemory
from engine.embedded.kv.source import Reading
from engine.embedded.kv.tiers import Tiers, open_tiers
from engine.embedded.kv.weighing import ABSENT, DEVICE, DISK, HOST, Speeds, weigh
from engine.embedded.sequence import Sequence, SequenceStatus
from engine.errors import EngineFailure
from engine.kv_events import Cleared, EventDiff, Removed, Stored, Updated
from engine.transfer.base import TransferError
from tests.engine.embedded.test_scheduler import make

SIZE, BYTES, WINDOW = 2, 600, 5
BLOCKS = (8, 8)
LOADS = Speeds(1.0, (0.0, 0.0), (0.0, 0.0))
"""Loading is always faster."""


def contents(group: int, key: BlockKey) -> bytes:
    return blake3(key + bytes([group])).digest(length=BYTES)


class Store:
    """Pools of two groups of layers, the second with a window, their memory, and tiers below; no engine."""

    def __init__(self, folder: Path, *, slots: tuple[int, int] = (64, 64), min_requests: int = 1) -> None:
        self.said: list[dict[int, int]] = [{}, {}]
        """The cache level of each block of each group, as events say."""
        pools = [
            BlockPool(count, SIZE, reuse=True, publish=self._publisher(group), window=WINDOW if group else None)
            for group, count in enumerate(BLOCKS)
        ]
        self.blocks = BlockGroups(pools)
        self.memory = [torch.zeros(count, BYTES, dtype=torch.uint8) for count in BLOCKS]
        config = EmbeddedConfig(
            model="",
            kv_host_cache_mb=1,
            kv_disk_cache_mb=1,
            kv_disk_cache_dir=str(folder),
            kv_offload_min_requests=min_requests,
        )
        memory = KvMemory("test", Attends((None, WINDOW), 1, 1), self.memory)
        self.tiers = open_tiers(config, torch.device("cpu"), self.blocks, memory, lambda: bytes(32))
        self.tiers.host = HostTier(slots, (BYTES, BYTES), self.tiers.host.take((0, b""))[0].address)
        self.tiers.speeds = LOADS
        self.number = 0

    def _publisher(self, group: int):
        def publish(data: EventData) -> None:
            said = self.said[group]
            match data:
                case Stored(_, blocks):
                    said.update((block.block_hash, block.cache_level) for block in blocks)
                case Updated(block_hash, EventDiff(level, before)):
                    assert said[block_hash] == before != level
                    said[block_hash] = level
                case Removed(hashes):
                    for block_hash in hashes:
                        del said[block_hash]
                case Cleared():
                    said.clear()

        return publish

    def settle(self) -> None:
        while True:
            self.tiers.poll()
            if not self.tiers.working:
                return
            time.sleep(0.0005)

    def sequence(self, tokens: list[int], salt: str = "", *, skip_save: bool = False) -> Sequence:
        self.number += 1
        sequence = make(str(self.number), tokens, 1)
        sequence.request = replace(sequence.request, cache_salt=salt, skip_save=skip_save)
        sequence.extend_keys(SIZE)
        return sequence

    def ask(self, sequence: Sequence) -> int:
        """Run a prompt as the scheduler would; return how many of its tokens were not computed."""
        keys, length = sequence.keys, len(sequence.tokens)
        position = self.tiers.offer(sequence)
        tables = self.blocks.plan(keys[: position // SIZE], position)
        if any(MISSING in table for table in tables):
            self.blocks.reference(tables, length)
            missing = self.blocks.fill(tables)
            sequence.tables = tables
            sequence.status = SequenceStatus.FETCHING
            try:
                reading = self.tiers.read(sequence, missing)
                while not reading.done():
                    time.sleep(0.0002)
            except TransferError:
                self.blocks.release(tables)
                sequence.tables, sequence.status = [], SequenceStatus.WAITING
                self.tiers.release(sequence)
                assert self.tiers.offer(sequence) == 0, "what failed is not offered again"
                return self.ask(sequence)
            self._store(sequence, 0, position // SIZE)
        else:
            sequence.tables = self.blocks.match(keys[: (length - 1) // SIZE])
            position = len(sequence.tables[0]) * SIZE
            self.blocks.reference(sequence.tables, length)
        self.check(sequence, position // SIZE)
        self.tiers.release(sequence)
        sequence.status, sequence.stored = SequenceStatus.RUNNING, position // SIZE
        self.tiers.admitted(sequence)
        assert self.blocks.grow(sequence.tables, length, length)
        for group, table in enumerate(sequence.tables):
            for index in range(position // SIZE, len(keys)):
                self.memory[group][table[index]] = torch.frombuffer(
                    bytearray(contents(group, keys[index])), dtype=torch.uint8
                )
        self._store(sequence, position // SIZE, len(keys))
        self.tiers.offload(sequence, position // SIZE, len(keys))
        self.blocks.leave_behind(sequence.tables, length)
        sequence.status = SequenceStatus.FINISHED
        self.tiers.release(sequence)
        self.blocks.release(sequence.tables)
        return position

    def _store(self, sequence: Sequence, first: int, stop: int) -> None:
        salt = sequence.request.cache_salt
        self.blocks.store(sequence.tables, sequence.keys[:stop], sequence.tokens, first, {}, salt)

    def check(self, sequence: Sequence, count: int) -> None:
        for group, table in enumerate(sequence.tables):
            for index in range(self.blocks.pools[group].first(count * SIZE), count):
                found = bytes(self.memory[group][table[index]].numpy())
                assert found == contents(group, sequence.keys[index]), "another block's contents"

    def forget(self) -> None:
        """Have other prompts take all blocks of the device."""
        for salt in ("x", "y"):
            self.ask(self.sequence([9] * 14, salt, skip_save=True))


PROMPTS = st.lists(st.integers(0, 1), min_size=2, max_size=13)


class TiersMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(prefix="trellis-test-"))
        self.store = Store(self.folder, slots=(5, 4))
        self.damaged = False

    def teardown(self) -> None:
        self.store.settle()
        self.store.tiers.host.audit()
        self.store.tiers.close()
        shutil.rmtree(self.folder)

    @rule(tokens=PROMPTS, salt=st.sampled_from(["", "a"]), skip_save=st.booleans())
    def ask(self, tokens: list[int], salt: str, skip_save: bool) -> None:
        self.store.ask(self.store.sequence(tokens, salt, skip_save=skip_save))
        assert self.damaged or not any(tier.failures for tier in self.store.tiers.stats())

    @rule()
    def settle(self) -> None:
        self.store.settle()

    @rule()
    def forget(self) -> None:
        self.store.forget()

    @rule(place=st.integers(0, 10_000), index=st.integers(0, 20))
    def flip(self, place: int, index: int) -> None:
        self.store.settle()
        files = sorted(self.folder.glob("*/*-*"))
        if files:
            path = files[index % len(files)]
            data = bytearray(path.read_bytes())
            data[place % len(data)] ^= 1
            path.write_bytes(data)
            self.damaged = True

    @rule(index=st.integers(0, 20))
    def delete(self, index: int) -> None:
        self.store.settle()
        files = sorted(self.folder.glob("*/*-*"))
        if files:
            files[index % len(files)].unlink()
            self.damaged = True

    @rule()
    def clear(self) -> None:
        self.store.tiers.clear()
        for pool in self.store.blocks.pools:
            pool.clear()
        self.store.settle()
        assert not list(self.folder.glob("*/*-*"))

    @rule()
    def restart(self) -> None:
        self.store.tiers.close()
        self.store = Store(self.folder, slots=(5, 4))

    @invariant()
    def events_say_where_blocks_are(self) -> None:
        tiers = self.store.tiers
        for group, pool in enumerate(self.store.blocks.pools):
            assert tiers.disk is not None
            disk = [key for other, key in tiers.disk if other == group]
            levels = dict.fromkeys(disk, 2) | dict.fromkeys(tiers.host.keys(group), 1) | dict.fromkeys(pool.keys, 0)
            assert self.store.said[group] == {event_hash(key): level for key, level in levels.items()}


TestTiers = TiersMachine.TestCase
TestTiers.settings = settings(max_examples=25, stateful_step_count=15)


@pytest.fixture
def store(tmp_path: Path):
    one = Store(tmp_path)
    yield one
    one.settle()
    one.tiers.host.audit()
    one.tiers.close()


PROMPT = [1, 2, 3, 4, 5, 6, 7, 8, 9]


def test_a_prefix_comes_back_from_the_host(store: Store) -> None:
    assert store.ask(store.sequence(PROMPT)) == 0
    store.settle()
    store.forget()
    assert store.ask(store.sequence(PROMPT)) == 8
    host = store.tiers.stats()[0]
    assert host.tier == "host" and host.hit_blocks >= 4 and host.loaded_bytes == host.hit_blocks * BYTES


def test_a_prefix_comes_back_from_the_disk_after_a_restart(store: Store, tmp_path: Path) -> None:
    store.ask(store.sequence(PROMPT))
    store.settle()
    later = Store(tmp_path)
    later.settle()
    assert later.ask(later.sequence(PROMPT)) == 8
    disk = later.tiers.stats()[1]
    assert disk.tier == "disk" and disk.hit_blocks >= 4 and disk.load_seconds > 0
    later.tiers.close()


def test_two_engines_share_a_folder(store: Store, tmp_path: Path) -> None:
    """Also what one writes after the other has looked through the folder."""
    other = Store(tmp_path)
    other.settle()
    store.ask(store.sequence(PROMPT))
    store.settle()
    assert other.ask(other.sequence(PROMPT)) == 8
    other.tiers.close()


def test_a_salt_is_part_of_the_key(store: Store) -> None:
    store.ask(store.sequence(PROMPT, "one"))
    store.settle()
    store.forget()
    assert store.ask(store.sequence(PROMPT, "two")) == 0
    store.settle()
    assert store.ask(store.sequence(PROMPT, "one")) == 8


def test_a_request_can_opt_out(store: Store) -> None:
    store.ask(store.sequence(PROMPT, skip_save=True))
    store.settle()
    store.forget()
    assert len(store.tiers.host) == 0 and store.ask(store.sequence(PROMPT)) == 0


def test_blocks_are_kept_once_enough_requests_have_asked(tmp_path: Path) -> None:
    store = Store(tmp_path, min_requests=2)
    store.ask(store.sequence(PROMPT))
    store.settle()
    assert len(store.tiers.host) == 0
    assert store.ask(store.sequence(PROMPT)) == 8, "the device has it still"
    store.settle()
    assert len(store.tiers.host) > 0
    store.forget()
    assert store.ask(store.sequence(PROMPT)) == 8
    store.tiers.close()


@pytest.mark.parametrize(
    ("speeds", "tokens"),
    [
        pytest.param(Speeds(1.0, (2.0, 0.0), (9.0, 9.0)), 0, id="computing is faster"),
        pytest.param(Speeds(1.0, (0.5, 0.4), (9.0, 9.0)), 8, id="loading is faster"),
    ],
)
def test_loading_or_computing_is_chosen_by_speed(store: Store, speeds: Speeds, tokens: int) -> None:
    store.tiers.speeds = speeds
    store.ask(store.sequence(PROMPT))
    store.settle()
    store.forget()
    assert store.ask(store.sequence(PROMPT)) == tokens
    assert store.tiers.stats()[0].avoided_blocks == (0 if tokens else 4)


@given(
    st.lists(st.sampled_from([DEVICE, DEVICE, HOST, HOST, DISK, ABSENT]), max_size=12),
    st.sampled_from([0.0, 0.001, 0.004, 0.02]),
    st.sampled_from([0.0, 0.003, 0.05]),
)
def test_of_a_prefix_as_much_is_loaded_as_saves_most(levels: list[int], host: float, disk: float) -> None:
    """Compare with a search over all lengths of the prefix, which computes the time that each one saves."""
    usable = [*levels, ABSENT].index(ABSENT)
    present = next((index for index, level in enumerate(levels) if level != DEVICE), len(levels))
    seconds = {DEVICE: 0.0, HOST: host, DISK: disk}

    def saved(end: int) -> float:
        waits = 0.02 if DISK in levels[:end] else 0.0
        return (end - present) * 0.01 - sum(seconds[level] for level in levels[:end]) - waits - 0.002

    best = max(range(present, usable + 1), key=lambda end: saved(end) if end > present else 0.0, default=present)
    found = weigh(levels, Speeds(0.01, (host,), (disk,), 0.02))
    assert (found.usable, found.present) == (usable, present)
    assert saved(found.offered) == pytest.approx(saved(best)) or found.offered == best == present


def loading(store: Store) -> tuple[Sequence, Reading]:
    sequence = store.sequence(PROMPT)
    position = store.tiers.offer(sequence)
    tables = store.blocks.plan(sequence.keys[: position // SIZE], position)
    store.blocks.reference(tables, len(PROMPT))
    missing = store.blocks.fill(tables)
    sequence.tables = tables
    return sequence, store.tiers.read(sequence, missing)


def test_a_load_that_took_too_long_is_not_offered_again(store: Store) -> None:
    store.ask(store.sequence(PROMPT))
    store.settle()
    store.forget()
    sequence, reading = loading(store)
    reading.cancel()
    with pytest.raises(TransferError):
        while not reading.done():
            time.sleep(0.0005)
    store.blocks.release(sequence.tables)
    assert store.tiers.offer(sequence) == 0
    sequence.status = SequenceStatus.FINISHED
    store.tiers.release(sequence)
    assert store.tiers.offer(store.sequence(PROMPT)) == 8


class SlowCopies:
    """Copies that end, and begin, when a test lets them: the bodies of loads and their ends."""

    def __init__(self) -> None:
        self.body, self.end = threading.Event(), threading.Event()
        self.held_back = 0
        self.fails = False
        self._begun: list[tuple[int, int, int]] = []

    @contextmanager
    def copies(self, _: Device) -> Iterator["SlowCopies"]:
        yield self

    def copy(self, *copy: int) -> None:
        self._begun.append(copy)

    def point(self) -> "SlowPoint":
        return SlowPoint(self)

    def wait(self) -> None:
        self.end.wait()
        if self.fails:
            raise TransferError("the device is broken")
        for to, source, size in self._begun:
            ctypes.memmove(to, source, size)


class SlowPoint:
    def __init__(self, copies: SlowCopies) -> None:
        self._copies = copies

    def wait(self) -> None:
        self._copies.body.wait()

    def hold_back(self, stream: int) -> None:
        raise AssertionError("there is no stream")

    def close(self) -> None:
        pass


@pytest.fixture
def slow(store: Store, monkeypatch: pytest.MonkeyPatch) -> Iterator[SlowCopies]:
    """Have blocks of a prompt in the host tier, and copies under control from then on."""
    store.ask(store.sequence(PROMPT))
    store.settle()
    store.forget()
    slow = SlowCopies()
    monkeypatch.setattr("engine.embedded.kv.tiers.LOADERS", 1)
    monkeypatch.setattr(Device, "copies", lambda device: slow.copies(device))

    def hold_back(_: Device, points: list[SlowPoint]) -> None:
        slow.held_back += len(points)

    monkeypatch.setattr(Device, "hold_back", hold_back)
    store.tiers.speeds = Speeds(1.0, (0.004, 0.004), (0.0, 0.0))
    yield slow
    slow.body.set()
    slow.end.set()


def until(condition: Callable[[], bool]) -> None:
    while not condition():
        time.sleep(0.0005)


def test_the_device_waits_for_the_last_copies_of_a_load_and_no_thread_does(store: Store, slow: SlowCopies) -> None:
    sequence, reading = loading(store)
    assert not reading.done() and not slow.held_back
    slow.body.set()
    until(reading.done)
    assert slow.held_back == 1 and store.tiers.copying and store.tiers.working
    store.tiers.poll()
    assert store.tiers.copying and store.tiers.stats()[0].hit_blocks == 0, "its slots stay pinned"
    slow.end.set()
    store.tiers.land()
    assert not store.tiers.copying and store.tiers.stats()[0].hit_blocks > 0
    store.check(sequence, 4)
    store.blocks.release(sequence.tables)


def test_a_last_copy_that_fails_ends_the_engine(store: Store, slow: SlowCopies) -> None:
    sequence, reading = loading(store)
    slow.body.set()
    until(reading.done)
    slow.fails = True
    slow.end.set()
    with pytest.raises(RuntimeError, match="copies of KV blocks have failed"):
        store.tiers.land()
    store.blocks.release(sequence.tables)


def test_a_copy_that_cannot_even_begin_is_a_failure_of_the_tier(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    store.ask(store.sequence(PROMPT))
    store.settle()
    store.forget()

    @contextmanager
    def no_stream(self: Device) -> Iterator[None]:
        raise TransferError("no stream")
        yield

    monkeypatch.setattr(Device, "copies", no_stream)
    assert store.ask(store.sequence(PROMPT)) == 0
    assert store.tiers.stats()[0].failures == 1


def test_measuring_keeps_the_contents_and_finds_speeds(store: Store) -> None:
    for group, memory in enumerate(store.memory):
        memory.fill_(group + 1)
    store.tiers.measure(3.0)
    assert all(bool((memory == group + 1).all()) for group, memory in enumerate(store.memory))
    speeds = store.tiers.speeds
    assert speeds.compute == 3.0 and all(0 < host < disk for host, disk in zip(speeds.host, speeds.disk, strict=True))
    assert len(store.tiers.host) == 0


def test_a_folder_that_cannot_be_used_stops_the_start(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(EngineFailure, match=r"KV_DISK_CACHE_DIR=.*file"):
        Store(tmp_path / "file")


def test_the_engine_goes_on_without_a_disk_that_failed(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    store.ask(store.sequence(PROMPT))
    store.settle()
    assert isinstance(store.tiers, Tiers) and store.tiers.disk is not None
    store.tiers.disk.give_up()
    store.forget()
    assert store.ask(store.sequence(PROMPT)) == 8, "the host has it"
    store.settle()
    host, disk = store.tiers.stats()
    assert (disk.capacity_bytes, disk.num_blocks) == (0, 0) and host.num_blocks > 0
