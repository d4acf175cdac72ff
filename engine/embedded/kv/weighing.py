"""Weighs loading a prefix from the KV tiers against computing it."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from engine.embedded.kv.groups import BlockGroups

DEVICE, HOST, DISK = range(3)
"""Cache levels, as KV events number them."""
ABSENT = 3
_OVERHEAD_SECONDS = 0.002
"""Time for which a load delays a sequence, whatever its size."""


class Speeds(NamedTuple):
    """Seconds for a block of each group, and for computing a block's tokens."""

    compute: float
    host: tuple[float, ...]
    disk: tuple[float, ...]
    """While all threads read."""
    latency: float = 0.0
    """Seconds that a load from the disk takes longer than this, however few blocks it has."""

    def of(self, level: int, group: int) -> float:
        """Return the seconds that loading a block from a cache level takes."""
        return (self.host if level == HOST else self.disk)[group] if level in (HOST, DISK) else 0.0


class Weighed(NamedTuple):
    """Leading blocks of a prefix: how many some level has, how many the device has, and up to where loading saves most
    time, which includes those of the device."""

    usable: int
    present: int
    offered: int


def weigh(levels: Iterable[int], speeds: Speeds) -> Weighed:
    """Weigh a prefix where attention is full, by the fastest level that has each block."""
    costs = [speeds.of(level, 0) for level in (DEVICE, HOST, DISK)]
    end = present = offered = 0
    gain, load, waits = 0.0, _OVERHEAD_SECONDS, False
    for level in levels:
        if level == ABSENT:
            break
        end += 1
        if level == DEVICE and present == end - 1:
            present = offered = end
            continue
        if level == DISK and not waits:
            waits, load = True, load + speeds.latency
        load += costs[level]
        saved = (end - present) * speeds.compute - load
        if saved > gain:
            offered, gain = end, saved
    return Weighed(end, present, offered)


def weigh_windows(levels: Iterable[Sequence[int]], speeds: Speeds, blocks: BlockGroups) -> Weighed:
    """Weigh a prefix where some groups attend to a window; `levels` are those of each block, for each group."""
    size, groups = blocks.block_size, range(len(blocks.pools))
    seconds: list[list[float]] = [[0.0] for _ in groups]
    """Seconds to load each group's blocks up to each index."""
    runs, device_runs = [0] * len(groups), [0] * len(groups)
    """Blocks up to each index that some level has, and that the device has, without a gap."""
    usable = present = count = 0
    gain = wait = 0.0
    """Seconds that this saves, and that the disk takes to begin."""
    for end, found in enumerate(levels, 1):
        for group, level in enumerate(found):
            wait = speeds.latency if level == DISK else wait
            runs[group] = 0 if level == ABSENT else runs[group] + 1
            device_runs[group] = device_runs[group] + 1 if level == DEVICE else 0
            seconds[group].append(seconds[group][-1] + speeds.of(level, group))
        needed = [end - pool.first(end * size) for pool in blocks.pools]
        if runs[0] < needed[0] == end:
            break
        if any(run < need for run, need in zip(runs, needed, strict=True)):
            continue
        usable = end
        if all(run >= need for run, need in zip(device_runs, needed, strict=True)):
            present, count, gain = end, end, 0.0
            continue
        load = sum(seconds[group][end] - seconds[group][end - needed[group]] for group in groups)
        saved = (end - present) * speeds.compute - load - wait - _OVERHEAD_SECONDS
        if saved > gain:
            count, gain = end, saved
    return Weighed(usable, present, count)
