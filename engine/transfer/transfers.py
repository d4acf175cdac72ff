"""Transfers: a process's side of moving KV blocks. It offers its regions by every method that works here and reads those of peers."""

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from threading import Event
from typing import Literal

from engine.transfer.base import (
    NotFromHere,
    Offer,
    Read,
    Recent,
    Region,
    Transfer,
    TransferError,
    TransferMethod,
    check_cancelled,
    check_local,
    join_reads,
)
from engine.transfer.cuda_ipc import CudaIpc
from engine.transfer.nixl import Nixl, has_rdma
from engine.transfer.shared_memory import SharedMemory
from engine.transfer.tcp import Tcp

MethodName = Literal["auto", "shared_memory", "cuda_ipc", "nixl", "tcp"]
METHODS: dict[str, Callable[[Sequence[Region]], TransferMethod]] = {
    "shared_memory": SharedMemory,
    "cuda_ipc": CudaIpc,
    "nixl": Nixl,
    "tcp": Tcp,
}
"""Best first: a copy within the host, then the network card, then a socket."""
MOST_AT_ONCE = 32

logger = logging.getLogger(__name__)


class Transfers:
    """Reads run in threads: the copy itself holds no lock of the interpreter, and nothing here waits but `close`."""

    def __init__(self, regions: Sequence[Region], method: MethodName = "auto", port: int = 0) -> None:
        """The regions stay mapped until `close`. `port` is for TCP; 0 takes a free one.

        Raises TransferError if the method named, or with `auto` every method, cannot be used on this machine for these regions, OSError
        if the port cannot be had, whatever the method: somebody wanted it.
        """
        self._regions = tuple(regions)
        self._methods: dict[str, TransferMethod] = {}
        self._works: Recent[tuple[Offer, ...], str] = Recent()
        """The method that served a peer last, by the peer's offers, which stay the same as long as it lives."""
        self._running: set[_Threaded] = set()
        reasons = []
        for name in _automatic(self._regions) if method == "auto" else [method]:
            try:
                self._methods[name] = Tcp(self._regions, port) if name == "tcp" else METHODS[name](self._regions)
            except TransferError as error:
                reasons.append(f"{name}: {error}")
        if not self._methods:
            raise TransferError(f"KV blocks cannot be transferred on this machine; {'; '.join(reasons)}")
        logger.info("peers may read from here by %s", ", ".join(self._methods))
        self._offers = tuple(made.offer() for made in self._methods.values())
        self._threads = ThreadPoolExecutor(MOST_AT_ONCE, thread_name_prefix="transfer")

    def offers(self) -> tuple[Offer, ...]:
        """How peers may read our regions, best first; the same on every call."""
        return self._offers

    def read(self, offers: Sequence[Offer], reads: Sequence[Read]) -> Transfer:
        """Start copying a peer's bytes into our regions by the first of its offers that works from here.

        Nothing else may use the places it writes, work queued on a GPU included, until the transfer is done. The regions are read in
        their order: what is read of one is as old as, or older than, what is read of the next.

        Raises TransferError, nothing touched, for reads beyond our regions and for a peer with no method of ours. What can be known only
        by asking the peer, the transfer's `done` raises: that no offer works, each with its reason, or that the peer died.
        """
        check_local(reads, self._regions)
        known = tuple(offer for offer in offers if offer.method in self._methods)
        if not known:
            theirs, ours = (
                ", ".join(names) or "nothing" for names in ([offer.method for offer in offers], self._methods)
            )
            raise TransferError(f"the peer offers {theirs}; this process reads by {ours}")
        joined = join_reads(reads)
        transfer = _Threaded(self._threads, lambda cancelled: self._read(known, joined, cancelled))
        self._running = {running for running in self._running if not running.ended}
        self._running.add(transfer)
        return transfer

    def close(self) -> None:
        """Cancel what runs, wait for it, and give everything back; the regions may be unmapped afterwards."""
        for running in self._running:
            running.cancel()
        self._threads.shutdown()
        for method in self._methods.values():
            method.close()

    def _read(self, offers: tuple[Offer, ...], reads: Sequence[Read], cancelled: Event) -> None:
        best = self._works.get(offers)
        reasons = []
        for offer in sorted(offers, key=lambda offer: offer.method != best):
            check_cancelled(cancelled)
            try:
                self._methods[offer.method].read(offer.data, reads, cancelled)
            except NotFromHere as error:
                reasons.append(f"{offer.method}: {error}")
                continue
            except TransferError:
                raise
            except Exception as error:  # whatever a peer offered, or a library of others raised: one request's KV blocks, not the engine
                logger.exception("a read by %s failed", offer.method)
                raise TransferError(f"{offer.method}: {type(error).__name__}") from error
            self._works.put(offers, offer.method)
            return
        raise TransferError(f"no offer of the peer works from here; {'; '.join(reasons)}")


def _automatic(regions: Sequence[Region]) -> list[str]:
    """NIXL would read host memory over TCP where there is no RDMA, which engine/transfer/tcp.py does faster and more safely."""
    on_host = all(region.device < 0 for region in regions)
    return [name for name in METHODS if name != "nixl" or not on_host or has_rdma()]


class _Threaded:
    """A transfer that a thread makes."""

    def __init__(self, threads: ThreadPoolExecutor, work: Callable[[Event], None]) -> None:
        self._cancelled = Event()
        self._future: Future[None] = threads.submit(work, self._cancelled)

    @property
    def ended(self) -> bool:
        return self._future.done()

    def done(self) -> bool:
        if not self._future.done():
            return False
        self._future.result()
        return True

    def cancel(self) -> None:
        self._cancelled.set()
