"""KV tiers below the device: what is copied to the host and to the disk, and what is read back instead of computed.

A full block is copied to the host as soon as enough requests have asked for it, and from there to the disk, so that
its eviction from a faster tier takes no time. A sequence that waits is offered what the tiers have of its prefix, as
far as that takes less time than computing it, by speeds that were measured at the start. Threads copy; everything else
belongs to the engine's thread.
"""

import contextlib
import ctypes
import logging
import queue
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from operator import add
from pathlib import Path
from typing import NamedTuple

import torch

from engine.config import EmbeddedConfig
from engine.embedded.kv.blocks import BlockKey
from engine.embedded.kv.disk_tier import HEADER_LIMIT, Description, DiskError, DiskTier, Found
from engine.embedded.kv.groups import BlockGroups
from engine.embedded.kv.host_tier import Copies, CopyPoint, Device, HostTier, Name, Slot, padded
from engine.embedded.kv.memory import KvMemory
from engine.embedded.kv.weighing import ABSENT, DEVICE, DISK, HOST, Speeds, weigh, weigh_windows
from engine.embedded.sequence import Sequence as Prompt
from engine.embedded.sequence import SequenceStatus
from engine.embedded.threads import compute_threads
from engine.errors import EngineFailure
from engine.kv_events import StoredBlock, UniqueToken
from engine.stats import TierStats
from engine.transfer.base import TransferError

LOADERS = 2
"""Threads that load blocks from the host."""
_MOST_LOADERS = 8
"""Threads that load blocks from the disk, where there are twice as many cores: each also checks what it has read."""
_REMEMBERED = 4
"""Keys whose requests are counted, for each block on the device and on the host."""
_SAMPLE, _TRIALS = 8, 3
"""Blocks that are copied to measure the speed, and how often."""
_TAIL_SECONDS = 0.01
"""The last copies of a load, for which no thread waits but the device: launching the step that reads their blocks takes
about as long."""
_SLOW_DISK = 100e6
"""Bytes a second."""
_MOST_WRITES = 0.5
"""Share of the host's blocks that may wait to be written to the disk."""

log = logging.getLogger(__name__)


class _BlockLoad(NamedTuple):
    """A block to load."""

    name: Name
    target: int
    """Address on the device."""
    size: int
    slot: Slot | None
    """Its place in host memory; None if it is on the disk."""
    header: int
    """Bytes of its file's header."""


class _BlockSave(NamedTuple):
    """A block to copy to the host."""

    name: Name
    source: int
    """Address on the device."""
    slot: Slot
    description: Description


class _Figures:
    """Counters of a tier."""

    def __init__(self) -> None:
        self.stored_bytes = self.loaded_bytes = 0
        self.hit_blocks = self.avoided_blocks = self.evicted_blocks = self.failures = 0
        self.load_seconds = 0.0


class _TierReading:
    """Blocks on their way to the device, in order, by threads that share the list of remaining blocks."""

    seconds = 0.0

    def __init__(self, tiers: "Tiers", sequence: Prompt, items: list[_BlockLoad]) -> None:
        self.num_bytes = sum(item.size for item in items)
        self.left = deque(items)
        self.cancelled = False
        self.failure: tuple[_BlockLoad | None, Exception] | None = None
        """An error, and the block whose load it ended; None if it came before any."""
        self.took: deque[tuple[int, int, float]] = deque()
        """Cache level, bytes and seconds of loads."""
        self.ends: deque[CopyPoint] = deque()
        """The end of each thread's copies, once all but the last few have ended."""
        self._tiers = tiers
        self._sequence = sequence
        self._items = items
        self._futures: list[Future[None]] = []
        self._over = False

    def begin(self, loaders: ThreadPoolExecutor, load: Callable[["_TierReading"], None], disk_threads: int) -> None:
        threads = LOADERS if all(item.slot is not None for item in self._items) else disk_threads
        self._futures = [loaders.submit(load, self) for _ in range(min(threads, len(self.left)))]

    @property
    def waits(self) -> bool:
        return False

    @property
    def copying(self) -> bool:
        """Whether a thread still has to do with it."""
        return not all(future.done() for future in self._futures)

    def done(self) -> bool:
        if self.copying:
            if len(self.ends) < len(self._futures) or self.cancelled or self.failure is not None:
                return False
            self._tiers.arriving(self)
            return True
        self.end()
        if self.failure is not None:
            raise TransferError(f"a KV tier failed: {self.failure[1]}")
        if self.cancelled:
            raise TransferError("the load was cancelled")
        return True

    def confirmed(self, *, wait: bool = False) -> bool:
        return True  # the tiers see to copies that are under way

    def end(self) -> None:
        """Wait for its threads, and have the tiers take note of what they did."""
        for future in self._futures:
            future.result()
        if not self._over:
            self._over = True
            while self.ends:
                self.ends.pop().close()
            self._tiers.ended(self, self._sequence, self._items)

    def cancel(self) -> None:
        self.cancelled = True
        self._tiers.refuse(self._sequence)


class Tiers:
    """The host tier, and the disk tier if there is one, as a `Source` of the scheduler and a place for its blocks."""

    is_transfer = False

    def __init__(
        self,
        device: Device,
        blocks: BlockGroups,
        memory: KvMemory,
        host: HostTier,
        min_requests: int,
    ) -> None:
        """Blocks that `min_requests` requests have asked for are kept. Nothing is offered before `measure`."""
        self.host = host
        self.disk: DiskTier | None = None
        self.speeds = Speeds(0.0, (0.0,) * len(blocks.pools), (0.0,) * len(blocks.pools))
        self._device = device
        self._blocks = blocks
        self._sizes = memory.block_bytes
        self._base = [tensor.data_ptr() for tensor in memory.blocks]
        self._min_requests = min_requests
        self._requests: OrderedDict[BlockKey, int] = OrderedDict()
        self._remembered = _REMEMBERED * (sum(pool.num_blocks for pool in blocks.pools) + sum(host.counts))
        self._figures = {HOST: _Figures(), DISK: _Figures()}
        self._saving: dict[Name, Future[None]] = {}
        self._saved: queue.SimpleQueue[tuple[list[_BlockSave], Exception | None]] = queue.SimpleQueue()
        self._arriving: list[_TierReading] = []
        """Readings whose last copies are under way, while the device waits for them."""
        self._refused: set[str] = set()
        """Requests to which nothing is offered any more, because a load failed or took too long."""
        self._avoided: dict[str, tuple[int, int]] = {}
        """Blocks on the host and on the disk that requests do not load because computing them is faster."""
        self._saver = ThreadPoolExecutor(1, thread_name_prefix="kv-save")
        self._threads = LOADERS
        self._loaders = ThreadPoolExecutor(LOADERS, thread_name_prefix="kv-load")
        self._buffers: queue.SimpleQueue[int] = queue.SimpleQueue()
        """Addresses of memory for one file each."""
        for group, pool in enumerate(blocks.pools):
            pool.below = partial(self._below, group)

    def add_disk(self, root: Path, digest: bytes, max_bytes: int, cores: int = 0) -> None:
        """Add a disk tier, before anything is loaded; half of the `cores` may read from it. Raises OSError."""
        self.disk = DiskTier(root, digest, self._sizes, max_bytes, lambda name: self._lost(DISK, name))
        self._buffer_bytes = HEADER_LIMIT + max(map(padded, self._sizes))
        self._threads = max(LOADERS, min(_MOST_LOADERS, cores // 2))
        self._loaders.shutdown()
        self._loaders = ThreadPoolExecutor(self._threads, thread_name_prefix="kv-load")
        for _ in range(self._threads):
            self._buffers.put(self._device.allocate(self._buffer_bytes))

    @property
    def copying(self) -> bool:
        """Whether a thread is copying from the device, or to blocks of sequences that run already."""
        return bool(self._saving or self._arriving)

    @property
    def working(self) -> bool:
        """Whether threads are copying from or to the device, or to the disk."""
        return self.copying or (self.disk is not None and self.disk.working)

    def stats(self) -> tuple[TierStats, ...]:
        """Return figures of each tier."""
        sizes = list(map(padded, self._sizes))
        used = sum(len(self.host.keys(group)) * size for group, size in enumerate(sizes))
        capacity = sum(count * size for count, size in zip(self.host.counts, sizes, strict=True))
        figures = vars(self._figures[HOST])
        found = [TierStats("host", capacity, used, len(self.host), **figures)]
        if (disk := self.disk) is not None:
            figures = vars(self._figures[DISK]) | {"evicted_blocks": disk.evictions, "failures": disk.failures}
            found.append(TierStats("disk", 0 if disk.broken else disk.max_bytes, disk.used, len(disk), **figures))
        return tuple(found)

    # Calls of the scheduler.

    def admitted(self, sequence: Prompt) -> None:
        """Count a request for the blocks of a sequence that runs from now on, and keep those that it has."""
        if self._min_requests > 1:
            for key in sequence.keys:
                self._requests[key] = self._requests.pop(key, 0) + 1
            while len(self._requests) > self._remembered:
                self._requests.popitem(last=False)
        self.offload(sequence, 0, sequence.stored)

    def offload(self, sequence: Prompt, start: int, stop: int, *, always: bool = False) -> None:
        """Keep the computed blocks from index `start` to `stop` of a sequence, if requests have asked for them often
        enough, or `always`."""
        if sequence.request.skip_save:
            return
        begun: list[_BlockSave] = []
        for group, (pool, table) in enumerate(zip(self._blocks.pools, sequence.tables, strict=True)):
            for index in range(start, stop):
                key = sequence.keys[index]
                if table[index] < 0 or not (always or self._requests.get(key, 1) >= self._min_requests):
                    continue
                name = group, key
                if self.host.has(name):
                    self.host.touch(name)
                    if name in self.host and self.disk is not None and self.disk.wants(name):
                        self._write(name, self.host.pin(name), _describe(sequence, index, self._blocks.block_size))
                    continue
                [block] = pool.find([key])
                if block is None:
                    continue
                slot = self._take(name)
                if slot is None:
                    break
                source = self._base[group] + block * self._sizes[group]
                begun.append(_BlockSave(name, source, slot, _describe(sequence, index, self._blocks.block_size)))
        if begun:
            saving = self._saver.submit(self._save, begun)
            self._saving.update((save.name, saving) for save in begun)

    def offer(self, sequence: Prompt) -> int:
        """Offer the prefix that saves most time, including blocks that are already on the device."""
        if sequence.request.request_id in self._refused:
            return 0
        size = self._blocks.block_size
        keys = sequence.extend_keys(size)[: (len(sequence.tokens) - 1) // size]
        if self._blocks.sliding:
            groups = range(len(self._sizes))
            levels = ([self._level((group, key)) for group in groups] for key in keys)
            usable, present, count = weigh_windows(levels, self.speeds, self._blocks)
        else:
            usable, present, count = weigh((self._level((0, key)) for key in keys), self.speeds)
        self._avoided.pop(sequence.request.request_id, None)
        if usable > count:
            avoided = [self._level((0, key)) for key in keys[count:usable]]
            self._avoided[sequence.request.request_id] = avoided.count(HOST), avoided.count(DISK)
        if count == present:
            return 0
        self._touch(keys[:count])
        return count * size

    def read(self, sequence: Prompt, missing: list[list[int]]) -> _TierReading:
        items = []
        try:
            for index, group in sorted((index, group) for group, places in enumerate(missing) for index in places):
                name, size = (group, sequence.keys[index]), self._sizes[group]
                target = self._base[group] + sequence.tables[group][index] * size
                if name in self.host:
                    items.append(_BlockLoad(name, target, size, self.host.pin(name), 0))
                elif self.disk is not None and name in self.disk:
                    items.append(_BlockLoad(name, target, size, None, self.disk.header_of(name)))
                else:
                    raise TransferError("a block has been evicted from the KV tiers")
        except TransferError:
            self._unpin(items)
            raise
        reading = _TierReading(self, sequence, items)
        reading.begin(self._loaders, self._load, self._threads)
        return reading

    def release(self, sequence: Prompt) -> None:
        """The beginning of its prefix counts as requested last, so that the end is evicted first."""
        request_id = sequence.request.request_id
        if sequence.status is SequenceStatus.FINISHED:
            self._refused.discard(request_id)
            self._avoided.pop(request_id, None)
        elif request_id in self._avoided:
            for level, count in zip((HOST, DISK), self._avoided.pop(request_id), strict=True):
                self._figures[level].avoided_blocks += count
        self._touch(sequence.keys)

    # Calls of the core.

    def poll(self) -> bool:
        """Take note of what threads have done; return whether there was anything."""
        changed = not self._saved.empty() or (self.disk is not None and self.disk.reported)
        while not self._saved.empty():
            self._note_saves(*self._saved.get())
        self._land(wait=False)
        if self.disk is not None:
            for found in self.disk.poll():
                self._tell(found)
        return changed

    def land(self) -> None:
        """Wait for the last copies to blocks of sequences that run already, some milliseconds: else others could read
        into these blocks at the same time, if such a sequence has ended before its first step."""
        self._land(wait=True)

    def measure(self, compute: float) -> None:
        """Measure loads while nothing runs; computing a block's tokens takes `compute` seconds. Blocks keep their
        contents."""
        groups = range(len(self._sizes))
        host = tuple(map(self._host_seconds, groups))
        shared, alone = zip(*map(self._disk_seconds, groups), strict=True)
        latency = max(0.0, *(one - other for one, other in zip(alone, shared, strict=True)))
        disk = tuple(map(add, shared, host)) if self.disk is not None else shared
        self.speeds = Speeds(compute, host, disk, latency)

        def milliseconds(seconds: Sequence[float]) -> str:
            return "/".join(f"{second * 1e3:.2f}" for second in seconds)

        from_disk = f", from the disk {milliseconds(disk)} ms" if self.disk is not None else ""
        from_host = f"{milliseconds(host)} ms"
        log.info("a KV block is computed in %.2f ms, loaded from the host in %s%s", compute * 1e3, from_host, from_disk)

    def clear(self) -> None:
        """Forget all blocks, and delete the files."""
        self._finish_saves()
        self.host.clear()
        self._requests.clear()
        if self.disk is not None:
            self.disk.clear()

    def close(self) -> None:
        """Finish all copies and files; the memory is not used afterwards."""
        self._loaders.shutdown()
        self._saver.shutdown()
        self.poll()
        if self.disk is not None:
            self.disk.close()
        self._device.close()

    def arriving(self, reading: _TierReading) -> None:
        """Have the device wait for the last copies of a reading before it computes anything else."""
        self._device.hold_back(list(reading.ends))
        self._arriving.append(reading)

    def _land(self, *, wait: bool) -> None:
        """Note the readings that have arrived whole. A copy that fails now would leave a running sequence without its
        blocks, but only on a broken device does one fail. Raises RuntimeError then."""
        arriving, self._arriving = self._arriving, []
        for reading in arriving:
            if reading.copying and not wait:
                self._arriving.append(reading)
                continue
            reading.end()
            if reading.failure is not None:
                raise RuntimeError("copies of KV blocks have failed") from reading.failure[1]

    def ended(self, reading: _TierReading, sequence: Prompt, items: Sequence[_BlockLoad]) -> None:
        """Note that threads are done with a reading."""
        self._unpin(items)
        for level, size, seconds in reading.took:
            self._figures[level].loaded_bytes += size
            self._figures[level].hit_blocks += bool(size)
            self._figures[level].load_seconds += seconds
        if reading.failure is not None:
            self.refuse(sequence)
            item, error = reading.failure
            if item is None or item.slot is not None:
                self._figures[HOST].failures += 1
            elif self.disk is not None:
                self.disk.failed(item.name, error)
        elif self.disk is not None:
            self.disk.succeeded()

    def refuse(self, sequence: Prompt) -> None:
        """Offer nothing more to a sequence, unless it has ended: reading failed, or takes too long."""
        if sequence.status is not SequenceStatus.FINISHED:
            self._refused.add(sequence.request.request_id)

    def _host_seconds(self, group: int) -> float:
        """Return the time to load a block from the host, of the best of a few trials."""
        count = min(_SAMPLE, self.host.counts[group], self._blocks.pools[group].num_blocks)
        names = [(group, bytes([number])) for number in range(count)]
        slots = [slot for name in names if (slot := self.host.take(name)[0]) is not None]
        size, best = self._sizes[group], float("inf")
        with self._device.copies() as copies:
            for to_host in (True, *[False] * _TRIALS):
                started = time.perf_counter()
                for number, slot in enumerate(slots):
                    ends = self._base[group] + number * size, slot.address
                    copies.copy(*(ends[::-1] if to_host else ends), size)
                copies.wait()
                if not to_host:
                    best = min(best, (time.perf_counter() - started) / count)
        for name, slot in zip(names, slots, strict=True):
            self.host.drop(name)
            self.host.unpin(name, slot)
        return best

    def _disk_seconds(self, group: int) -> tuple[float, float]:
        """Return the time to read a block from the disk while all threads do, and while one does, each of the best of a
        few trials; what slow disks take if nothing can be written now."""
        if (disk := self.disk) is None:
            return 0.0, 0.0
        buffers = [self._buffers.get() for _ in range(self._threads)]
        try:
            shared = min(disk.time_reads(group, buffers, self._loaders) for _ in range(_TRIALS))
            return shared, min(disk.time_reads(group, buffers[:1], self._loaders) for _ in range(_TRIALS))
        except (OSError, DiskError) as error:
            log.warning("the speed of the disk tier is not known: %s", error)
            return self._sizes[group] / _SLOW_DISK, 0.0
        finally:
            for buffer in buffers:
                self._buffers.put(buffer)

    def _level(self, name: Name) -> int:
        """Return the fastest level that has a block."""
        if name[1] in self._blocks.pools[name[0]]:
            return DEVICE
        if name in self.host:
            return HOST
        if self.disk is None:
            return ABSENT
        if name not in self.disk:
            found = self.disk.discover(name)
            if found is None:
                return ABSENT
            self._tell(found)
        return DISK

    def _touch(self, keys: Sequence[BlockKey]) -> None:
        """Note that blocks were requested, the beginning of a prefix last, so that its end is evicted first."""
        for group in range(len(self._sizes)):
            for key in reversed(keys):
                self.host.touch((group, key))
                if self.disk is not None:
                    self.disk.touch((group, key))

    def _note_saves(self, saves: list[_BlockSave], error: Exception | None) -> None:
        for name, _, slot, description in saves:
            del self._saving[name]
            slot.ready = error is None
            if error is not None:
                self._figures[HOST].failures += 1
                self.host.drop(name)
                self.host.unpin(name, slot)
                self._lost(HOST, name)
                continue
            self._figures[HOST].stored_bytes += self._sizes[name[0]]
            if self.disk is not None and self.disk.wants(name):
                self._write(name, slot, description)
            else:
                self.host.unpin(name, slot)
        if error is not None:
            log.warning("could not copy %d KV blocks to the host: %s", len(saves), error)

    def _below(self, group: int, key: BlockKey) -> int:
        """Return the level where a block stays that the device gives up. Its memory may be written to at once, so a
        copy of it has to end first."""
        name = group, key
        if name in self._saving:
            self._finish_saves()
        if self.host.has(name):
            return HOST
        return DISK if self.disk is not None and name in self.disk else DEVICE

    def _lost(self, level: int, name: Name) -> None:
        """Publish that a tier no longer has a block, unless a faster one has it."""
        pool = self._blocks.pools[name[0]]
        if name[1] not in pool and not (level == DISK and self.host.has(name)):
            below = DISK if level == HOST and self.disk is not None and name in self.disk else DEVICE
            pool.publish_level(level, [(name[1], below)])

    def _take(self, name: Name) -> Slot | None:
        slot, evicted = self.host.take(name)
        if evicted is not None:
            self._figures[HOST].evicted_blocks += 1
            self._lost(HOST, (name[0], evicted))
        return slot

    def _write(self, name: Name, slot: Slot, description: Description) -> None:
        """Begin to write a pinned block to the disk; its slot is unpinned when that is over."""
        assert self.disk is not None
        size = self._sizes[name[0]]

        def done(written: bool) -> None:
            self.host.unpin(name, slot)
            self._figures[DISK].stored_bytes += size * written

        free = self.disk.pending < max(1, int(_MOST_WRITES * self.host.counts[name[0]]))
        if not (free and self.disk.write(name, description, slot.address, done)):
            self.host.unpin(name, slot)

    def _tell(self, found: Found) -> None:
        """Publish a block that was found on the disk."""
        (group, key), said = found.name, found.description
        pool = self._blocks.pools[group]
        if key not in pool and not self.host.has(found.name):
            hashed = int.from_bytes(key[:8], "little")
            block = StoredBlock(hashed, tuple(map(UniqueToken, said.tokens)), DISK, mm_keys=said.mm_keys)
            pool.publish_found(said.parent or None, block, said.cache_salt)

    def _unpin(self, items: Sequence[_BlockLoad]) -> None:
        for item in items:
            if item.slot is not None:
                self.host.unpin(item.name, item.slot)

    def _finish_saves(self) -> None:
        for saving in set(self._saving.values()):
            saving.result()
        self.poll()

    # Threads.

    def _save(self, saves: list[_BlockSave]) -> None:
        error = None
        try:
            with self._device.copies() as copies:
                for save in saves:
                    copies.copy(save.slot.address, save.source, self._sizes[save.name[0]])
                copies.wait()
        except TransferError as raised:
            error = raised
        self._saved.put((saves, error))

    def _load(self, reading: _TierReading) -> None:
        buffer = self._buffers.get() if self.disk is not None else 0
        item: _BlockLoad | None = None
        body: CopyPoint | None = None
        tail = int(_TAIL_SECONDS / seconds) if (seconds := max(self.speeds.host)) else 0
        try:
            with self._device.copies() as copies:
                while reading.left and not (reading.cancelled or reading.failure):
                    with contextlib.suppress(IndexError):  # another thread may have taken the last
                        item = reading.left.popleft()
                        if body is None and len(reading.left) < tail:
                            body = copies.point()
                        reading.took.append(self._load_block(item, buffer, copies))
                started = time.perf_counter()
                end = copies.point()
                (body or end).wait()
                if body is not None:
                    body.close()
                reading.ends.append(end)
                copies.wait()
                reading.took.append((HOST, 0, time.perf_counter() - started))
        except (DiskError, TransferError) as error:
            reading.failure = item, error
        finally:
            if buffer:
                self._buffers.put(buffer)

    def _load_block(self, item: _BlockLoad, buffer: int, copies: Copies) -> tuple[int, int, float]:
        """Load a block, and return its cache level and bytes and the seconds it took."""
        started = time.perf_counter()
        if item.slot is not None:
            copies.copy(item.target, item.slot.address, item.size)
            return HOST, item.size, time.perf_counter() - started
        assert self.disk is not None
        view = memoryview((ctypes.c_ubyte * self._buffer_bytes).from_address(buffer)).cast("B")
        start = self.disk.read(item.name, item.header, view)
        copies.copy(item.target, buffer + start, item.size)
        copies.wait()  # the buffer is used again
        return DISK, item.size, time.perf_counter() - started


def _describe(sequence: Prompt, index: int, size: int) -> Description:
    key = sequence.keys[index]
    return Description(
        index,
        sequence.keys[index - 1] if index else b"",
        tuple(sequence.tokens[index * size : (index + 1) * size]),
        sequence.mm_keys.get(key, ()),
        sequence.request.cache_salt,
    )


def open_tiers(
    config: EmbeddedConfig, device: torch.device, blocks: BlockGroups, memory: KvMemory, digest: Callable[[], bytes]
) -> Tiers:
    """Return the tiers that a configuration asks for. `digest` stands for model, weights and configuration. Raises
    EngineFailure."""
    sizes = memory.block_bytes
    counts = host_slots(config.kv_host_cache_mb << 20, [pool.num_blocks for pool in blocks.pools], sizes)
    own = Device(device)
    try:
        whole = sum(count * padded(size) for count, size in zip(counts, sizes, strict=True))
        # The processor reads blocks only to write them to the disk.
        address = own.allocate(whole, write_combined=not config.kv_disk_cache_mb)
    except (OSError, ValueError, TransferError) as error:
        raise EngineFailure(f"KV_HOST_CACHE_MB={config.kv_host_cache_mb} cannot be allocated: {error}") from error
    tiers = Tiers(own, blocks, memory, HostTier(counts, sizes, address), config.kv_offload_min_requests)
    if config.kv_disk_cache_mb:
        try:
            cores = compute_threads(config.threads)
            tiers.add_disk(Path(config.kv_disk_cache_dir), digest(), config.kv_disk_cache_mb << 20, cores)
        except OSError as error:
            folder = f"KV_DISK_CACHE_DIR={config.kv_disk_cache_dir}"
            raise EngineFailure(f"{folder} cannot be used: {error.strerror or error}") from error
    return tiers


def host_slots(host_bytes: int, num_blocks: Sequence[int], block_bytes: Sequence[int]) -> tuple[int, ...]:
    """Return how many blocks of each group the host has room for, in proportion to the device's. Raises EngineFailure
    if it is less than two."""
    groups = list(zip(num_blocks, block_bytes, strict=True))
    whole = sum(count * size for count, size in groups)
    slots = tuple(host_bytes * count * size // whole // padded(size) for count, size in groups)
    if min(slots) < 2:
        least = max(-(-2 * padded(size) * whole // (count * size)) for count, size in groups)
        raise EngineFailure(
            f"KV_HOST_CACHE_MB={host_bytes >> 20} has no room for two KV blocks of each group of layers: "
            f"{-(-least >> 20)} at least, or 0 for no host tier"
        )
    return slots
