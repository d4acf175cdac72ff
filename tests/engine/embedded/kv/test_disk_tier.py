"""The disk tier: written blocks are read back, by this or another tier on the folder, and never other bytes."""

import ctypes
import errno
import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.embedded.kv import disk_tier
from engine.embedded.kv.disk_tier import Description, DiskError, DiskTier, digest_of
from engine.embedded.kv.host_tier import ALIGNMENT, Device, Name

SIZES = (3 * ALIGNMENT, 1000)
FILE = 4 * ALIGNMENT
"""Bytes of a file of the first group."""
DIGEST = bytes(range(32))
NAMES: list[Name] = [(0, bytes([number]) * 32) for number in range(12)]
DEVICE = Device(torch.device("cpu"))
ADDRESS = DEVICE.allocate(1 << 20)
BUFFER = memoryview((ctypes.c_ubyte * (1 << 20)).from_address(DEVICE.allocate(1 << 20))).cast("B")


class Opened:
    """A tier, and what it has said."""

    def __init__(self, root: Path, max_bytes: int = 1 << 30, digest: bytes = DIGEST) -> None:
        self.lost: list[Name] = []
        self.found: list[Name] = []
        self.done: list[bool] = []
        self.tier = DiskTier(root, digest, SIZES, max_bytes, self.lost.append)
        self.settle()

    def settle(self) -> None:
        """Wait for all threads, and take note of what they did."""
        while True:
            self.found += [one.name for one in self.tier.poll()]
            if not self.tier.working:
                return
            time.sleep(0.001)

    def write(self, name: Name, index: int = 0) -> bool:
        ctypes.memset(ADDRESS, name[1][0] + 1, SIZES[name[0]])
        about = Description(index, b"", (1, 2, 3), (), "salt")
        accepted = self.tier.write(name, about, ADDRESS, self.done.append)
        self.settle()
        return accepted

    def read(self, name: Name) -> bytes:
        start = self.tier.read(name, self.tier.header_of(name), BUFFER)
        return bytes(BUFFER[start : start + SIZES[name[0]]])

    def path(self, name: Name) -> Path:
        return self.tier.folder / f"{name[0]}-{name[1].hex()}"


def block(name: Name) -> bytes:
    return bytes([name[1][0] + 1]) * SIZES[name[0]]


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Opened]:
    one = Opened(tmp_path)
    yield one
    one.tier.close()


def test_blocks_of_every_group_are_read_back(opened: Opened) -> None:
    for name in (NAMES[0], (1, NAMES[1][1])):
        assert opened.tier.wants(name)
        opened.write(name)
        assert name in opened.tier and not opened.tier.wants(name)
        assert opened.read(name) == block(name)
    assert opened.done == [True, True]
    assert opened.tier.used == sum(path.stat().st_size for path in opened.tier.folder.iterdir())
    assert opened.path(NAMES[0]).stat().st_mode & 0o077 == opened.tier.folder.stat().st_mode & 0o077 == 0


def test_another_tier_finds_the_files_parents_first(opened: Opened, tmp_path: Path) -> None:
    for index in (2, 0, 1):
        opened.write(NAMES[index], index)
    later = Opened(tmp_path)
    assert later.found == NAMES[:3]
    assert later.read(NAMES[2]) == block(NAMES[2])
    opened.write(NAMES[5])
    found = later.tier.discover(NAMES[5])
    assert found is not None and found.description.tokens == (1, 2, 3) and found.description.cache_salt == "salt"
    assert later.read(NAMES[5]) == block(NAMES[5]) and later.tier.discover(NAMES[6]) is None
    later.tier.close()


def test_the_tier_of_another_model_finds_nothing(opened: Opened, tmp_path: Path) -> None:
    opened.write(NAMES[0])
    other = Opened(tmp_path, digest=bytes(32))
    assert not other.found and other.tier.used == opened.tier.used, "its bytes count"
    opened.path(NAMES[0]).rename(other.path(NAMES[0]))
    assert other.tier.discover(NAMES[0]) is None
    other.tier.close()


@given(st.integers(0, FILE - 1), st.integers(0, 7))
def test_a_flipped_bit_anywhere_is_noticed(tmp_path_factory: pytest.TempPathFactory, place: int, bit: int) -> None:
    opened = Opened(tmp_path_factory.mktemp("disk"))
    opened.write(NAMES[0])
    path = opened.path(NAMES[0])
    data = bytearray(path.read_bytes())
    assert len(data) == FILE
    data[place] ^= 1 << bit
    path.write_bytes(data)
    with pytest.raises(DiskError, match="damaged"):
        opened.read(NAMES[0])
    opened.tier.failed(NAMES[0], DiskError("damaged"))
    opened.settle()
    assert NAMES[0] not in opened.tier and opened.lost == [NAMES[0]] and opened.tier.failures == 1
    opened.tier.close()
    assert not path.exists()


@pytest.mark.parametrize("size", [0, 10, ALIGNMENT, FILE - 1, FILE + 1])
def test_a_torn_file_is_never_used(opened: Opened, tmp_path: Path, size: int) -> None:
    opened.write(NAMES[0])
    path = opened.path(NAMES[0])
    path.write_bytes(path.read_bytes().ljust(size, b"\0")[:size])
    if size <= FILE:
        with pytest.raises(DiskError):
            opened.read(NAMES[0])
    later = Opened(tmp_path)
    assert not later.found
    later.tier.close()
    assert not path.exists()


def test_a_file_that_another_replica_deleted_is_an_error(opened: Opened) -> None:
    opened.write(NAMES[0])
    opened.path(NAMES[0]).unlink()
    with pytest.raises(DiskError):
        opened.read(NAMES[0])


def test_a_file_of_another_block_is_never_used(opened: Opened) -> None:
    opened.write(NAMES[0])
    opened.write(NAMES[1])
    opened.path(NAMES[0]).replace(opened.path(NAMES[1]))
    with pytest.raises(DiskError, match="damaged"):
        opened.read(NAMES[1])


def test_the_size_is_kept_and_the_least_recent_file_goes(tmp_path: Path) -> None:
    opened = Opened(tmp_path, 3 * FILE)
    for name in NAMES[:3]:
        opened.write(name)
    opened.tier.touch(NAMES[0])
    opened.write(NAMES[3])
    assert opened.lost == [NAMES[1]] and opened.tier.evictions == 1
    assert [name in opened.tier for name in NAMES[:4]] == [True, False, True, True]
    assert opened.tier.used == 3 * FILE == sum(path.stat().st_size for path in opened.tier.folder.iterdir())
    opened.tier.close()


def test_files_of_other_models_make_way_once_nobody_uses_them(tmp_path: Path) -> None:
    other = Opened(tmp_path, digest=bytes(32))
    for name in NAMES[:3]:
        other.write(name)
    opened = Opened(tmp_path, 3 * FILE)
    assert not opened.write(NAMES[0]), "they were used a moment ago"
    for path in other.tier.folder.iterdir():
        os.utime(path, (1, 1))
    opened.tier.close()
    opened = Opened(tmp_path, 2 * FILE)
    assert opened.write(NAMES[0]) and opened.tier.used == 2 * FILE
    other.tier.close()
    opened.tier.close()


def test_unfinished_files_of_a_killed_process_are_deleted(opened: Opened, tmp_path: Path) -> None:
    old, new = opened.tier.folder / ".1-1.tmp", opened.tier.folder / ".1-2.tmp"
    for path in (old, new):
        path.write_bytes(b"half")
    os.utime(old, (1, 1))
    Opened(tmp_path).tier.close()
    assert not old.exists() and new.exists()


def test_unfinished_files_of_a_process_of_the_same_number_are_left_alone(opened: Opened) -> None:
    """Processes of containers often have equal numbers, and share the folder."""
    other = opened.tier.folder / f".{os.getpid()}-1.tmp"
    other.write_bytes(b"half")
    opened.write(NAMES[0])
    assert opened.done == [True] and opened.tier.failures == 0 and opened.read(NAMES[0]) == block(NAMES[0])
    assert other.read_bytes() == b"half"


def failing(code: int):
    def write(*_: object) -> int:
        raise OSError(code, os.strerror(code))

    return write


def test_a_full_disk_pauses_writing(opened: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    opened.write(NAMES[0])
    with monkeypatch.context() as patch:
        patch.setattr(os, "writev", failing(errno.ENOSPC))
        opened.write(NAMES[1])
    assert opened.done == [True, False] and opened.tier.failures == 1 and not opened.tier.broken
    assert not opened.tier.wants(NAMES[2]) and opened.read(NAMES[0]) == block(NAMES[0])
    assert [path.name for path in opened.tier.folder.iterdir()] == [opened.path(NAMES[0]).name], "nothing is left"
    monkeypatch.setattr(disk_tier.time, "monotonic", lambda: time.perf_counter() + 1e9)
    assert opened.tier.wants(NAMES[2])


def test_failures_in_a_row_end_the_tier(opened: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    opened.write(NAMES[0])
    monkeypatch.setattr(os, "writev", failing(errno.EIO))
    for name in NAMES[1:9]:
        assert not opened.tier.broken
        opened.write(name)
    assert opened.tier.broken and opened.lost == [NAMES[0]] and not opened.tier.wants(NAMES[9])
    assert opened.tier.discover(NAMES[0]) is None and opened.path(NAMES[0]).exists()


def test_threads_that_read_together_are_timed(opened: Opened) -> None:
    addresses = [DEVICE.allocate(1 << 16) for _ in range(4)]
    with ThreadPoolExecutor(4) as threads:
        for _ in range(20):
            assert 0 < opened.tier.time_reads(0, addresses, threads) < 1
    assert not list(opened.tier.folder.iterdir())


def test_clearing_deletes_files_and_those_that_are_being_written(opened: Opened) -> None:
    opened.write(NAMES[0])
    ctypes.memset(ADDRESS, 1, SIZES[0])
    opened.tier.write(NAMES[1], Description(0, b"", (), (), ""), ADDRESS, opened.done.append)
    opened.tier.clear()
    opened.settle()
    assert not list(opened.tier.folder.iterdir()) and opened.tier.used == 0


def test_closing_deletes_what_was_being_written_when_all_was_cleared(tmp_path: Path) -> None:
    opened = Opened(tmp_path)
    opened.tier.write(NAMES[0], Description(0, b"", (), (), ""), ADDRESS, opened.done.append)
    opened.tier.clear()
    opened.tier.close()
    assert opened.done == [True] and not list(opened.tier.folder.iterdir())


def test_a_folder_that_cannot_be_used_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError):
        Opened(tmp_path / "file")


def test_the_digest_is_of_all_weights_and_of_the_configuration(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(bytes(1 << 20))
    first = digest_of(tmp_path, "float32")
    assert first == digest_of(tmp_path, "float32") != digest_of(tmp_path, "bfloat16")
    weights.write_bytes(bytes((1 << 20) - 5) + b"\1" + bytes(4))
    assert digest_of(tmp_path, "float32") != first
