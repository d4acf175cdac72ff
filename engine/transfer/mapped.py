"""The base of methods that read memory of another process of this host by mapping it."""

import os
import select
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import suppress
from threading import Event, Lock, Thread
from typing import Generic, Protocol, TypeVar

import msgspec

from engine.transfer.base import Offer, Read, Region, check_remote, decode_offer
from engine.transfer.process_id import ProcessId, check_reachable, check_survived, lives, this_process


class _HasSize(Protocol):
    @property
    def size(self) -> int: ...


RangeT = TypeVar("RangeT", bound=_HasSize)
MappingT = TypeVar("MappingT")


class Owner(msgspec.Struct, Generic[RangeT], frozen=True, array_like=True):
    """Content of an offer: the process that has the regions, and where each of them lies."""

    process: ProcessId
    regions: tuple[RangeT, ...]


class MappedMethod(ABC, Generic[RangeT, MappingT]):
    """A `TransferMethod`; the mappings of a peer live as long as their objects.

    Memory of a process that has died is freed once nobody has it mapped, so a thread for each peer waits for its death.
    """

    def __init__(
        self, name: str, owner_type: type[Owner[RangeT]], regions: Sequence[Region], ranges: Sequence[RangeT]
    ) -> None:
        self.offer = Offer(name, msgspec.msgpack.encode(Owner(this_process(), tuple(ranges))))
        self._owner_type = owner_type
        self._regions = regions
        self._lock = Lock()
        self._peers: dict[Owner[RangeT], list[MappingT]] = {}
        self._watches: list[Thread] = []
        self._closing = os.eventfd(0)

    def read(self, data: bytes, reads: Sequence[Read], cancelled: Event) -> None:
        owner = self._owner(data, reads)
        self._copy(owner, self._mappings(owner), reads, cancelled)
        check_survived(owner.process)

    def close(self) -> None:
        os.eventfd_write(self._closing, 1)
        for watch in self._watches:
            watch.join()
        os.close(self._closing)
        self._peers.clear()

    @abstractmethod
    def _map(self, owner: Owner[RangeT]) -> list[MappingT]:
        """Map a peer's regions. Raises NotFromHere."""

    @abstractmethod
    def _copy(
        self, owner: Owner[RangeT], mappings: Sequence[MappingT], reads: Sequence[Read], cancelled: Event
    ) -> None:
        """Copy from the mappings of a peer into our regions. Raises TransferError."""

    def _owner(self, data: bytes, reads: Sequence[Read]) -> Owner[RangeT]:
        """Return the content of an offer. Raises NotFromHere, and TransferError for reads beyond its regions."""
        owner = decode_offer(data, self._owner_type)
        check_remote(reads, [memory.size for memory in owner.regions])
        return owner

    def _open_mappings(self, owner: Owner[RangeT]) -> list[MappingT] | None:
        """Return the mappings of a peer that was read before, in a list of the caller's own; None if there are none, or
        if others are being opened or closed. Does not wait."""
        if not self._lock.acquire(blocking=False):
            return None
        try:
            mappings = self._peers.get(owner)
            return None if mappings is None else [*mappings]
        finally:
            self._lock.release()

    def _mappings(self, owner: Owner[RangeT]) -> list[MappingT]:
        """Return the mappings of a peer, opened on first use.

        Mappings of dead peers are dropped, and unmapped once no thread uses them.

        Raises NotFromHere, also for a process that died: the peer's other offers are then tried and fail the same way.
        """
        with self._lock:
            for other in [other for other in self._peers if not lives(other.process)]:
                del self._peers[other]
            if owner not in self._peers:
                check_reachable(owner.process)
                self._peers[owner] = self._map(owner)
                self._watches = [watch for watch in self._watches if watch.is_alive()]
                watch = Thread(target=self._drop_dead, args=(owner,), daemon=True)
                with suppress(RuntimeError):  # no thread is left: they are dropped at the next read
                    watch.start()
                    self._watches.append(watch)
            return self._peers[owner]

    def _drop_dead(self, owner: Owner[RangeT]) -> None:
        """Drop the mappings of a peer when it dies."""
        try:
            died = os.pidfd_open(owner.process.pid)
        except ProcessLookupError:
            died = -1
        except OSError:  # forbidden here: they are dropped at the next read
            return
        if died >= 0:
            try:
                if lives(owner.process):  # the descriptor is of no later process
                    self._wait(died)
            finally:
                os.close(died)
        with self._lock:
            self._peers.pop(owner, None)

    def _wait(self, died: int) -> None:
        """Return once a process has died, or on `close`."""
        poll = select.poll()
        for descriptor in (died, self._closing):
            poll.register(descriptor, select.POLLIN)
        poll.poll()
