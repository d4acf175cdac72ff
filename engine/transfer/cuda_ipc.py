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
    BegunCopies,
    NotFromHere,
    Read,
    Region,
    TransferError,
    check_cancelled,
    split_reads,
)
from engine.transfer.cuda import HANDLE_BYTES, Cuda, Stream
from engine.transfer.mapped import MappedMethod, Owner
from engine.transfer.process_id import check_survived

PIECE = 1 << 30
"""Bytes copied between two checks for cancellation: some milliseconds over NVLink."""
_MOST_BEGUN = 256
"""Maximum number of copies that are begun by the thread that asks for them, each of which takes some microseconds."""


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

    def begin(self, data: bytes, reads: Sequence[Read]) -> BegunCopies | None:
        """Have the GPU begin to copy at once, if the peer's memory is open already and the reads are of at most one
        piece. Return None if nothing has begun."""
        try:
            owner = self._owner(data, reads)
        except TransferError:
            return None
        mappings = self._open_mappings(owner)
        devices = {self._regions[read.region].device for read in reads}
        size = sum(read.size for read in reads)
        if mappings is None or len(devices) != 1 or len(reads) > _MOST_BEGUN or size > PIECE:
            return None
        [device] = devices
        begun = _Begun(self._cuda, device, owner, mappings)
        try:
            with self._cuda.on(device):
                stream = begun.on(self._streams)
                for read in reads:
                    self._begin_copy(stream, owner, mappings, read)
        except TransferError as failed:  # some of the copies may have begun
            begun.error = failed
        except Exception as failed:  # a library's bug costs one request its KV blocks, as in `Transfers`
            begun.error = TransferError(f"cuda_ipc: {type(failed).__name__}: {failed}")
        return begun

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


class _Begun:
    """Copies from a peer's memory that a GPU has been given (`BegunCopies`)."""

    def __init__(self, cuda: Cuda, device: int, owner: Owner[_DeviceRange], mappings: list[_DeviceMapping]) -> None:
        self.error: TransferError | None = None
        """Why not all of them have begun."""
        self._cuda = cuda
        self._device = device
        self._owner = owner
        self._mappings = mappings
        self._stack = ExitStack()
        self._stream: Stream | None = None

    def on(self, streams: "_Streams") -> Stream:
        """Return the stream for the copies."""
        self._stream = self._stack.enter_context(streams.on(self._device))
        return self._stream

    def end(self, cancelled: Event) -> None:
        with self._stack:  # which waits for the copies; until then the peer's memory stays open
            pass
        self._mappings.clear()
        if self.error is not None:
            raise self.error
        check_survived(self._owner.process)

    def hold_back(self, stream: int) -> bool:
        if self.error is not None or self._stream is None:
            return False
        with self._cuda.on(self._device):
            point = self._stream.point()
            point.hold_back(stream)
            point.close()
        return True


class _Streams:
    """Streams for copies, which are kept: making one takes a fifth of a millisecond."""

    def __init__(self, cuda: Cuda) -> None:
        self._cuda = cuda
        self._lock = Lock()
        self._free: dict[int, list[Stream]] = {}
        self._all = ExitStack()

    @contextmanager
    def on(self, device: int) -> Iterator[Stream]:
        """Yield a stream of a GPU that nobody else uses meanwhile. Its work has ended when the block ends."""
        with self._lock:
            free = self._free.setdefault(device, [])
            stream = free.pop() if free else None
            if stream is None:
                with self._cuda.on(device):
                    stream = self._all.enter_context(self._cuda.stream())
        try:
            yield stream
        finally:
            with self._cuda.on(device):
                stream.wait()
            with self._lock:
                free.append(stream)

    def close(self) -> None:
        self._all.close()


def _close(cuda: Cuda, address: int, device: int) -> None:
    with cuda.on(device):
        cuda.close(address)
