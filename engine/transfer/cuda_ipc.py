"""Memory of GPUs of one host: KV blocks, and embeddings.

The reader opens the owner's device memory and copies from it: over NVLink between two GPUs, or into pinned memory of
the host.

A handle names a whole allocation, which may contain a region at any offset. Memory from CUDA's virtual memory
management (PyTorch's `expandable_segments`) and from its asynchronous pools has no such handle: the method `auto` then
tries NIXL.

A copy cannot be stopped once it is on its stream, so a transfer proceeds in pieces, and a cancellation waits for the
current piece. If the peer died meanwhile, the result is rejected.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import groupby
from threading import Event, Lock
from weakref import finalize

import msgspec

from engine.transfer.base import (
    NotFromHere,
    QueuedTransfer,
    Read,
    Region,
    TransferError,
    check_cancelled,
    split_reads,
)
from engine.transfer.cuda import HANDLE_BYTES, Cuda, Stream
from engine.transfer.mapped import MappedMethod, Owner
from engine.transfer.process_id import ProcessId, check_survived

PIECE = 1 << 30
"""Bytes copied between two checks for cancellation: some milliseconds over NVLink."""
_MOST_QUEUED = 256
"""Maximum number of copies that the thread which asks for them queues, each of which takes some microseconds."""


class _DeviceRange(msgspec.Struct, frozen=True, array_like=True):
    """Location of a region: `size` bytes from `offset` of the allocation that `handle` names."""

    handle: bytes
    offset: int
    size: int


class _DeviceMapping:
    """A peer's allocation, open as long as this object lives. CUDA counts how often each is open."""

    def __init__(self, cuda: Cuda, memory: _DeviceRange, device: int) -> None:
        if len(memory.handle) != HANDLE_BYTES or memory.offset < 0:
            raise NotFromHere("the offer names no memory")
        try:
            with cuda.on(device):
                self.address = cuda.open(memory.handle)
                finalize(self, _close, cuda, self.address, device).atexit = False
                base, size = cuda.allocation(self.address)
        except TransferError as error:
            raise NotFromHere(str(error)) from error
        if self.address + memory.offset + memory.size > base + size:
            raise NotFromHere(f"the peer offers {memory.size} bytes from {memory.offset} of {size}")


class CudaIpc(MappedMethod[_DeviceRange, _DeviceMapping]):
    """The method for device memory of one host. Pinned regions are read into, and not offered.

    Raises TransferError for other regions that are not in a GPU's memory or cannot be shared.
    """

    def __init__(self, regions: Sequence[Region]) -> None:
        if any(region.device < 0 for region in regions):
            raise TransferError("the KV cache is in host memory")
        self._cuda = Cuda()
        memories = []
        for region in regions:
            if not region.pinned:
                with self._cuda.on(region.device):
                    handle, offset = self._cuda.export(region.address)
                memories.append(_DeviceRange(handle, offset, region.size))
        self._streams = _Streams(self._cuda)
        super().__init__("cuda_ipc", Owner[_DeviceRange], regions, memories)

    def queue(self, data: bytes, reads: Sequence[Read]) -> QueuedTransfer | None:
        """Have the GPU begin to copy at once, if the peer's memory is open already and the reads are of at most one
        piece. Return None, with nothing begun, otherwise. If not all can begin, `done` raises why."""
        try:
            owner = self._owner(data, reads)
        except TransferError:
            return None  # `read` says what is wrong
        mappings = self._open_mappings(owner)
        devices = {self._regions[read.region].device for read in reads}
        size = sum(read.size for read in reads)
        if mappings is None or len(devices) != 1 or len(reads) > _MOST_QUEUED or size > PIECE:
            return None
        queued = _Queued(self._cuda, self._streams, devices.pop(), owner.process, mappings)
        try:
            with self._cuda.on(queued.device):
                for read in reads:
                    self._begin_copy(queued.stream, owner, mappings, read)
        except TransferError as failed:  # some of the copies may have begun
            queued.error = failed
        except Exception as failed:  # a library's bug costs one request its KV blocks, as in `Transfers`
            queued.error = TransferError(f"cuda_ipc: {type(failed).__name__}: {failed}")
        queued.note_end()
        return queued

    def close(self) -> None:
        super().close()
        self._streams.close()

    def _map(self, owner: Owner[_DeviceRange]) -> list[_DeviceMapping]:
        pairs = zip(owner.regions, self._regions, strict=False)
        return [_DeviceMapping(self._cuda, memory, region.device) for memory, region in pairs]

    def _copy(
        self, owner: Owner[_DeviceRange], mappings: Sequence[_DeviceMapping], reads: Sequence[Read], cancelled: Event
    ) -> None:
        for device, of_device in groupby(reads, key=lambda read: self._regions[read.region].device):
            with self._cuda.on(device), self._streams.on(device) as stream:  # which keeps the order of its copies
                waiting = 0
                for read in split_reads(list(of_device), PIECE):
                    check_cancelled(cancelled)
                    self._begin_copy(stream, owner, mappings, read)
                    waiting += read.size
                    if waiting >= PIECE:
                        stream.wait()
                        waiting = 0

    def _begin_copy(
        self, stream: Stream, owner: Owner[_DeviceRange], mappings: Sequence[_DeviceMapping], read: Read
    ) -> None:
        source = mappings[read.region].address + owner.regions[read.region].offset
        stream.copy(self._regions[read.region].address + read.local_offset, source + read.remote_offset, read.size)


class _Queued:
    """Copies from a peer's memory, which stays open until they have ended (`QueuedTransfer`)."""

    def __init__(
        self, cuda: Cuda, streams: "_Streams", device: int, process: ProcessId, mappings: list[_DeviceMapping]
    ) -> None:
        self.device = device
        self.stream = streams.take(device)
        self.seconds = 0.0
        self.error: TransferError | None = None
        """Why not all of them have begun."""
        self._cuda = cuda
        self._streams = streams
        self._process = process
        self._mappings = mappings
        with cuda.on(device):
            self._start = self._end = self.stream.point(timed=True)
        self._over = False

    def note_end(self) -> None:
        """Note that the copies so far are all that there are."""
        with self._cuda.on(self.device):
            if self._end is not self._start:
                self._end.close()
            self._end = self.stream.point(timed=True)

    def done(self) -> bool:
        if not self._over:
            with self._cuda.on(self.device):
                if not self._end.reached():
                    return False
                self._finish()
        if self.error is not None:
            raise self.error
        return True

    def wait(self) -> None:
        if not self._over:
            with self._cuda.on(self.device):
                self._end.wait()

    def cancel(self) -> None:
        """Do nothing: the copies cannot be stopped, and take some milliseconds by NVLink."""

    def copy(self, to: int, source: int, size: int) -> None:
        with self._cuda.on(self.device):
            self.stream.copy(to, source, size)
        self.note_end()

    def hold_back(self, stream: int) -> None:
        with self._cuda.on(self.device):
            self._end.hold_back(stream)

    def _finish(self) -> None:
        self._over = True
        self.seconds = self._end.seconds_since(self._start)
        for point in (self._start, self._end):
            point.close()
        self._streams.give_back(self.device, self.stream)
        self._mappings.clear()
        try:
            check_survived(self._process)
        except TransferError as error:
            self.error = self.error or error


class _Streams:
    """Streams for copies, which are kept: making one takes a fifth of a millisecond."""

    def __init__(self, cuda: Cuda) -> None:
        self._cuda = cuda
        self._lock = Lock()
        self._free: dict[int, list[Stream]] = {}
        self._all = ExitStack()

    def take(self, device: int) -> Stream:
        """Return a stream of a GPU that nobody else uses until `give_back`."""
        with self._lock:
            if free := self._free.get(device):
                return free.pop()
            with self._cuda.on(device):
                return self._all.enter_context(self._cuda.stream())

    def give_back(self, device: int, stream: Stream) -> None:
        """Return a stream whose work has ended."""
        with self._lock:
            self._free.setdefault(device, []).append(stream)

    @contextmanager
    def on(self, device: int) -> Iterator[Stream]:
        """Yield a stream. Its work has ended when the block ends."""
        stream = self.take(device)
        try:
            yield stream
        finally:
            with self._cuda.on(device):
                stream.wait()
            self.give_back(device, stream)

    def close(self) -> None:
        """Wait for the work of all streams."""
        self._all.close()


def _close(cuda: Cuda, address: int, device: int) -> None:
    with cuda.on(device):
        cuda.close(address)
