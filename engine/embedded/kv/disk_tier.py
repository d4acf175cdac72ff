"""The disk tier: KV blocks as files, in one folder for each digest of model, weights and configuration.

A file is written under another name, without the page cache where the file system allows that, and renamed when it is
whole. It begins with a header, which names the block it is of and has hashes of itself and of the block: a file that is
torn, has a flipped bit, or belongs to another block or model is never used. Replicas of a host may share a folder. Any
of them may delete a file at any time; whoever misses it computes the block.
"""

import contextlib
import ctypes
import errno
import logging
import mmap
import os
import queue
import secrets
import struct
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor, wait
from pathlib import Path
from typing import NamedTuple

import msgspec
from blake3 import blake3

from engine.embedded.kv.host_tier import ALIGNMENT, Name, padded
from engine.media import MmKeys

FORMAT = b"trlskv01"
HEADER_LIMIT = 64 << 10
"""Maximum number of bytes of a header. A block whose header would be larger is not stored."""
_FIXED = struct.Struct("<8sIIQ32s32s")
"""Format, size of the header, of its description and of the block, hash of the block and of the header."""
_STALE_SECONDS = 600.0
"""Age from which an unfinished file is considered abandoned."""
_SCAN_SECONDS = 30.0
_IDLE_SECONDS = 3600.0
"""Age from which on files of other models make way for ours."""
_PAUSE_SECONDS = 10.0
"""Pause of writing after a disk was full."""
_MISSED_SECONDS, _MOST_MISSED = 1.0, 4096
"""Seconds for which a missing file is not looked for again, and how many such files are remembered."""
_MOST_FAILURES = 8
"""Failures one after the other that end the tier."""
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)

log = logging.getLogger(__name__)


class Description(msgspec.Struct, frozen=True, array_like=True):
    """The facts about a block that its file keeps for KV events."""

    index: int
    """Position of the block in its sequence."""
    parent: bytes
    """Key of the previous block; empty for the first block."""
    tokens: tuple[int, ...]
    mm_keys: MmKeys
    cache_salt: str


class Found(NamedTuple):
    """A file with a valid header."""

    name: Name
    header: int
    """Bytes of the header."""
    description: Description


class DiskError(Exception):
    """A file cannot be read, or is not what it should be."""


_NOTHING = Description(0, b"", (), (), "")
_encode = msgspec.msgpack.Encoder().encode
_descriptions = msgspec.msgpack.Decoder(Description)


class DiskTier:
    """An index of the files, owned by the engine's thread, and what threads do with the files.

    `used` bytes stay below `max_bytes`, those of other models in the same `root` included: the files least recently
    requested are deleted.
    """

    def __init__(
        self,
        root: Path,
        digest: bytes,
        block_bytes: tuple[int, ...],
        max_bytes: int,
        lost: Callable[[Name], object],
    ) -> None:
        """`lost` is called with each block that is not here any more. Raises OSError if the folder cannot be made or
        written to."""
        self.folder = root / digest.hex()[:32]
        self.max_bytes = max_bytes
        self.evictions = 0
        self.failures = 0
        """Files that could not be written or read, or were wrong."""
        self.broken = False
        """Whether the tier has been given up."""
        self._lost = lost
        self._digest = digest
        self._block_bytes = block_bytes
        self._files: OrderedDict[Name, int] = OrderedDict()
        """Bytes of the header of each file, the least recently requested first."""
        self._own = 0
        self._others = 0
        """Bytes of our files, those being written included, and of other models' files."""
        self._writing: set[Name] = set()
        self._pending_bytes = 0
        """Bytes of the files being written."""
        self._deletions = 0
        """Deletions that a thread has yet to carry out."""
        self._in_a_row = 0
        self._resume = 0.0
        self._scanned = -_SCAN_SECONDS
        """Time of the last scan of the folder."""
        self._scanning = False
        self._missed: dict[Name, float] = {}
        """Times from which on missing files may be looked for again."""
        self._unfinished = f".{secrets.token_hex(8)}"
        """Prefix of the names of unfinished files. It is random, since process ids are equal in containers that share a
        folder, and in a container that starts again."""
        self._temporary = 0
        self._cleared = 0
        """Number of times that all files were deleted."""
        self._reports: queue.SimpleQueue[Callable[[], list[Found]]] = queue.SimpleQueue()
        """Results of the other threads, which the engine's thread takes."""
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._direct = self._allows_direct()
        self._header = mmap.mmap(-1, HEADER_LIMIT)
        """Header of the file that is being written; only one thread writes files."""
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="kv-disk")

    def __contains__(self, name: Name) -> bool:
        return name in self._files

    def __len__(self) -> int:
        return len(self._files)

    def __iter__(self) -> Iterator[Name]:
        return iter(self._files)

    @property
    def used(self) -> int:
        """Bytes of all files."""
        return self._own + self._others

    @property
    def pending(self) -> int:
        """Number of blocks that are being written."""
        return len(self._writing)

    @property
    def working(self) -> bool:
        """Whether a thread works for the tier."""
        return bool(self._writing) or self._scanning or self._deletions > 0

    @property
    def reported(self) -> bool:
        """Whether `poll` would take note of something."""
        return not self._reports.empty()

    def file_bytes(self, group: int, header: int = ALIGNMENT) -> int:
        return header + padded(self._block_bytes[group])

    def touch(self, name: Name) -> None:
        """Note that a block has been requested."""
        if name in self._files:
            self._files.move_to_end(name)

    def wants(self, name: Name) -> bool:
        """Return whether a block should be written now."""
        here = name in self._files or name in self._writing
        return not (self.broken or here or time.monotonic() < self._resume)

    def write(self, name: Name, description: Description, address: int, done: Callable[[bool], None]) -> bool:
        """Begin to write the block at an aligned `address`; return whether there is room for it.

        `done` is called when the memory is not needed any more, with whether the block has been written.
        """
        head = self._make_header(name, description)
        size = self.file_bytes(name[0], len(head))
        if len(head) > HEADER_LIMIT or self._others + self._pending_bytes + size > self.max_bytes:
            return False
        evicted = []
        while self.used + size > self.max_bytes:
            evicted.append(next(iter(self._files)))
            self._forget(evicted[-1])
        self._own += size
        self._pending_bytes += size
        self._writing.add(name)
        self.evictions += len(evicted)
        cleared = self._cleared

        def work() -> None:
            error = None
            try:
                self._unlink(evicted)
                self._write(name, head, address)
            except OSError as raised:
                error = raised
            self._reports.put(lambda: self._written(name, len(head), size, error, done, cleared))

        self._writer.submit(work)
        return True

    def read(self, name: Name, header: int, buffer: memoryview) -> int:
        """Read a file into an aligned buffer of at least its size, and return where the block begins there. In any
        thread. Raises DiskError."""
        size = self._block_bytes[name[0]]
        whole = self.file_bytes(name[0], header)
        try:
            descriptor = self._open(self._path(name), os.O_RDONLY)
            try:
                count = os.preadv(descriptor, [buffer[:whole]], 0)
                os.utime(descriptor)
            finally:
                os.close(descriptor)
        except OSError as error:
            raise DiskError(f"{self._path(name).name}: {error}") from error
        _, said, digest = self._check(name, bytes(buffer[:header])) or (None, 0, b"")
        block = buffer[header : header + size]
        if count != whole or said != header or blake3(block).digest() != digest:
            raise DiskError(f"{self._path(name).name} is damaged")
        return header

    def time_reads(self, group: int, addresses: Sequence[int], threads: Executor) -> float:
        """Write a block's worth of bytes from each of these aligned addresses, and return the seconds that reading one
        takes while `threads` read all of them. Raises OSError and DiskError."""
        names = [(group, os.urandom(32)) for _ in addresses]
        try:
            for name, address in zip(names, addresses, strict=True):
                self._write(name, self._make_header(name, _NOTHING), address)

            def read(name: Name, address: int) -> None:
                view = memoryview((ctypes.c_ubyte * self.file_bytes(group)).from_address(address)).cast("B")
                self.read(name, len(self._make_header(name, _NOTHING)), view)

            started = time.perf_counter()
            reads = [threads.submit(read, name, address) for name, address in zip(names, addresses, strict=True)]
            wait(reads)
            for one in reads:
                one.result()
            return (time.perf_counter() - started) / len(names)
        finally:
            self._unlink(names)

    def header_of(self, name: Name) -> int:
        return self._files[name]

    def discover(self, name: Name) -> Found | None:
        """Look for a file that another replica may have written; a file that is wrong is not found."""
        now = time.monotonic()
        if self.broken or name in self._writing or self._missed.get(name, now) > now:
            return None
        found = self._examine(name)
        if found is None:
            if len(self._missed) >= _MOST_MISSED:
                self._missed.clear()
            self._missed[name] = now + _MISSED_SECONDS
        else:
            self._add(found)
        return found

    def poll(self) -> list[Found]:
        """Take note of what threads have done; return the files that have been found, parents before children."""
        found: list[Found] = []
        while True:
            try:
                found += self._reports.get_nowait()()
            except queue.Empty:
                break
        if not (self._scanning or self.broken) and time.monotonic() >= self._scanned + _SCAN_SECONDS:
            self._scanning = True
            self._writer.submit(self._scan, set(self._files))
        return sorted(found, key=lambda one: one.description.index)

    def failed(self, name: Name, error: Exception) -> None:
        """Forget a file that could not be read."""
        if name in self._files:
            self._forget(name)
            self._delete([name])
        if not isinstance(error.__cause__, FileNotFoundError):  # it was evicted, here or by another replica
            self._count_failure(error)

    def succeeded(self) -> None:
        """Note that a file has been read."""
        self._in_a_row = 0

    def clear(self) -> None:
        """Delete all files of this model."""
        self._cleared += 1
        names = list(self._files)
        for name in names:
            self._forget(name)
        self._delete(names)

    def give_up(self) -> None:
        """Stop using the tier. The files stay."""
        self.broken = True
        for name in list(self._files):
            self._forget(name)
        self._others = 0

    def close(self) -> None:
        """Finish what is being written, and delete what has been cleared meanwhile."""
        self._writer.submit(int).result()  # comes after all writes
        self.poll()
        self._writer.shutdown()

    # The engine's thread.

    def _add(self, found: Found) -> None:
        if found.name not in self._files:
            self._files[found.name] = found.header
            self._own += self.file_bytes(found.name[0], found.header)

    def _forget(self, name: Name) -> None:
        self._own -= self.file_bytes(name[0], self._files.pop(name))
        self._lost(name)

    def _delete(self, names: list[Name]) -> None:
        if not names:
            return

        def work() -> None:
            self._unlink(names)
            self._reports.put(self._deleted)

        self._deletions += 1
        self._writer.submit(work)

    def _deleted(self) -> list[Found]:
        self._deletions -= 1
        return []

    def _written(
        self, name: Name, header: int, size: int, error: OSError | None, done: Callable[[bool], None], cleared: int
    ) -> list[Found]:
        self._writing.discard(name)
        self._pending_bytes -= size
        self._own -= size
        if error is not None:
            self._failed_to_write(error)
        elif cleared != self._cleared:
            self._delete([name])
        elif not self.broken:
            self._in_a_row = 0
            self._add(Found(name, header, _NOTHING))
        done(error is None)
        return []

    def _failed_to_write(self, error: OSError) -> None:
        if error.errno in _FULL:
            self.failures += 1
            self._resume = time.monotonic() + _PAUSE_SECONDS
            log.warning("the disk of %s is full: no KV blocks are written for %.0f s", self.folder, _PAUSE_SECONDS)
        else:
            self._count_failure(error)

    def _count_failure(self, error: Exception) -> None:
        self.failures += 1
        self._in_a_row += 1
        log.warning("a KV block on disk was given up: %s", error)
        if self._in_a_row >= _MOST_FAILURES and not self.broken:
            log.error("the disk tier in %s is given up after %d failures in a row", self.folder, self._in_a_row)
            self.give_up()

    def _note_scan(self, found: list[Found], gone: set[Name], others: int) -> list[Found]:
        self._scanning = False
        self._scanned = time.monotonic()
        if self.broken:
            return []
        self._others = others
        for name in gone & self._files.keys():
            self._forget(name)
        new = [one for one in found if one.name not in self._files and one.name not in self._writing]
        for one in new:
            self._add(one)
        return new

    # Any thread.

    def _path(self, name: Name) -> Path:
        return self.folder / f"{name[0]}-{name[1].hex()}"

    def _open(self, path: Path, flags: int) -> int:
        return os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW | (os.O_DIRECT if self._direct else 0), 0o600)

    def _allows_direct(self) -> bool:
        """Return whether the file system allows direct I/O. Raises OSError if it cannot be written to."""
        path = self.folder / f"{self._unfinished}-probe.tmp"
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600))
        try:
            os.close(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECT))
        except OSError:
            return False
        finally:
            path.unlink(missing_ok=True)
        return True

    def _make_header(self, name: Name, description: Description) -> bytes:
        """Return a header, with room for the hashes."""
        said = _encode(description)
        header = padded(_FIXED.size + len(said))
        fixed = _FIXED.pack(FORMAT, header, len(said), self._block_bytes[name[0]], bytes(32), bytes(32))
        return (fixed + said).ljust(header, b"\0")

    def _seal(self, name: Name, head: bytes, digest: bytes) -> bytes:
        """Return a header with the hash of the block and its own."""
        before = _FIXED.size - 64
        head = head[:before] + digest + bytes(32) + head[_FIXED.size :]
        own = blake3(head + bytes([name[0]]) + name[1], key=self._digest).digest()
        return head[: before + 32] + own + head[_FIXED.size :]

    def _check(self, name: Name, head: bytes) -> tuple[Description, int, bytes] | None:
        """Return a header's description, its size and the hash of the block; None unless it is this block's."""
        if len(head) < _FIXED.size:
            return None
        form, header, said, size, digest, _ = _FIXED.unpack_from(head)
        if form != FORMAT or size != self._block_bytes[name[0]] or header != len(head):
            return None
        if self._seal(name, head, digest) != head:
            return None
        return _descriptions.decode(head[_FIXED.size : _FIXED.size + said]), header, digest

    def _write(self, name: Name, head: bytes, address: int) -> None:
        """Write a file. Raises OSError."""
        size = self._block_bytes[name[0]]
        block = memoryview((ctypes.c_ubyte * padded(size)).from_address(address)).cast("B")
        self._header[: len(head)] = self._seal(name, head, blake3(block[:size]).digest())
        self._temporary += 1
        path = self.folder / f"{self._unfinished}-{self._temporary}.tmp"
        try:
            descriptor = self._open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
            try:
                whole = len(head) + len(block)
                if os.writev(descriptor, [memoryview(self._header)[: len(head)], block]) != whole:
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            finally:
                os.close(descriptor)
            path.rename(self._path(name))
        except OSError:
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)
            raise

    def _unlink(self, names: Iterable[Name]) -> None:
        for name in names:
            with contextlib.suppress(OSError):
                self._path(name).unlink()

    def _examine(self, name: Name) -> Found | None:
        """Return the file of a block if its header is right."""
        path = self._path(name)
        try:
            with path.open("rb", buffering=0) as file:
                head = file.read(ALIGNMENT)
                header = _FIXED.unpack_from(head)[1] if len(head) >= _FIXED.size else 0
                if ALIGNMENT < header <= HEADER_LIMIT:
                    head += file.read(header - ALIGNMENT)
                size = os.fstat(file.fileno()).st_size
            said = self._check(name, head)
        except (OSError, msgspec.DecodeError):
            return None
        if said is None or size != self.file_bytes(name[0], said[1]):
            return None
        return Found(name, said[1], said[0])

    def _scan(self, known: set[Name]) -> None:
        """Look for files that came or went, and keep the folder of all models within its size."""
        found: list[Found] = []
        present: set[Name] = set()
        others = 0
        try:
            new = []
            for entry in os.scandir(self.folder):
                name = _name_of(entry.name, len(self._block_bytes))
                if name is not None:
                    present.add(name)
                    if name not in known:
                        new.append((_modified(entry), name))
                elif _modified(entry) < time.time() - _STALE_SECONDS:
                    Path(entry.path).unlink(missing_ok=True)
            for _, name in sorted(new):
                one = self._examine(name)
                if one is None:
                    self._unlink([name])
                else:
                    found.append(one)
            others = self._trim_others()
        except OSError as error:
            log.warning("the folder %s could not be read: %s", self.folder, error)
            present = known
        self._reports.put(lambda: self._note_scan(found, known - present, others))

    def _trim_others(self) -> int:
        """Delete files of other models, the least recently used first, until an eighth is free; return the bytes that
        others still use."""
        files = []
        for folder in os.scandir(self.folder.parent):
            if folder.is_dir(follow_symlinks=False) and folder.name != self.folder.name:
                for entry in os.scandir(folder.path):
                    with contextlib.suppress(OSError):
                        stat = entry.stat(follow_symlinks=False)
                        files.append((stat.st_mtime, stat.st_size, entry.path))
        total = sum(size for _, size, _ in files)
        for modified, size, path in sorted(files):
            if total + self._own <= self.max_bytes * 7 // 8 or modified > time.time() - _IDLE_SECONDS:
                break
            with contextlib.suppress(OSError):
                os.unlink(path)
                total -= size
        return total


def _name_of(file: str, groups: int) -> Name | None:
    """Return the block that a file's name says; None for other files."""
    group, dash, key = file.partition("-")
    try:
        name = int(group), bytes.fromhex(key)
    except ValueError:
        return None
    return name if dash and 0 <= name[0] < groups and len(name[1]) == 32 and file == f"{name[0]}-{key}" else None


def _modified(entry: "os.DirEntry[str]") -> float:
    try:
        return entry.stat(follow_symlinks=False).st_mtime
    except OSError:
        return time.time()


def digest_of(folder: Path, *configuration: str) -> bytes:
    """Return a hash over all weights of a model, its config.json, and everything else on which its keys and values
    depend. Raises OSError."""
    digest = blake3(max_threads=blake3.AUTO)
    for path in sorted([folder / "config.json", *folder.glob("*.safetensors"), *folder.glob("*.gguf")]):
        if path.stat().st_size:
            digest.update_mmap(path)
        digest.update(path.name.encode() + b"\0")
    for part in configuration:
        digest.update(part.encode() + b"\0")
    return digest.digest()
