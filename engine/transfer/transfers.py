"""Offers the regions of this process to peers, by every method that works here, and reads the regions of peers."""

import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from threading import Event
from typing import Literal

from engine.transfer.base import (
    NotFromHere,
    Offer,
    QueuedTransfer,
    Read,
    Recent,
    Region,
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
"""Best first: a copy within the host, then RDMA, then TCP."""
MOST_AT_ONCE = 32
"""Maximum number of concurrent reads; others wait."""

logger = logging.getLogger(__name__)


class Transfers:
    """One process's transfers. Reads run in threads, mostly without the GIL, or on a GPU; only `close` blocks."""

    def __init__(self, regions: Sequence[Region], method: MethodName = "auto", port: int = 0) -> None:
        """Offer regions, which must stay mapped until `close`. `port` is for TCP; 0 takes a free one.

        Raises TransferError if the given method, or with `auto` every method, cannot be used on this machine for these
        regions, and OSError if the port cannot be used, even with `auto`.
        """
        self._regions = tuple(regions)
        self._methods: dict[str, TransferMethod] = {}
        self._works: Recent[tuple[Offer, ...], str] = Recent()
        """The method that last worked for a peer, by the peer's offers, which stay the same for its lifetime."""
        self._running: set[ThreadedTransfer] = set()
        reasons = []
        for name in _automatic(self._regions) if method == "auto" else [method]:
            try:
                self._methods[name] = Tcp(self._regions, port) if name == "tcp" else METHODS[name](self._regions)
            except TransferError as error:
                reasons.append(f"{name}: {error}")
        if not self._methods:
            raise TransferError(f"KV blocks cannot be transferred on this machine; {'; '.join(reasons)}")
        logger.info("peers may read KV blocks by %s", ", ".join(self._methods))
        self._offers = tuple(made.offer for made in self._methods.values())
        self._threads = ThreadPoolExecutor(MOST_AT_ONCE, thread_name_prefix="transfer")

    def offers(self) -> tuple[Offer, ...]:
        """Return how peers may read our regions, best first; the same on every call."""
        return self._offers

    def read(self, offers: Sequence[Offer], reads: Sequence[Read]) -> "ThreadedTransfer":
        """Start copying a peer's bytes into our regions, by the first of its offers that works from here.

        Nothing else may use the destination until the transfer is done, including work queued on a GPU. Regions are
        read in order: the content of one is as old as, or older than, the content of the next.

        Raises TransferError, with no memory written, for reads beyond our regions and for a peer without a common
        method. Other failures are raised by the transfer's `done`: no offer works, with a reason for each, or the peer
        died.
        """
        check_local(reads, self._regions)
        if not (known := self._known(offers)):
            theirs, ours = (
                ", ".join(names) or "nothing" for names in ([offer.method for offer in offers], self._methods)
            )
            raise TransferError(f"the peer offers {theirs}; this process reads by {ours}")
        transfer = ThreadedTransfer(self._threads, partial(self._read, known, join_reads(reads)))
        self._running = {running for running in self._running if not running.future.done()}
        self._running.add(transfer)
        return transfer

    def queue(self, offers: Sequence[Offer], reads: Sequence[Read]) -> QueuedTransfer | None:
        """Do as `read` does, but have a GPU begin at once, without a thread; return None, with nothing done, if that
        cannot be. Raises TransferError with no memory written."""
        check_local(reads, self._regions)
        known = self._known(offers)
        works = self._works.get(known)
        method = self._methods.get(works or "")
        if not isinstance(method, CudaIpc):
            return None
        return method.queue(next(offer.data for offer in known if offer.method == works), join_reads(reads))

    def close(self) -> None:
        """Cancel running transfers, wait for them and free all resources; the regions may be unmapped afterwards."""
        for running in self._running:
            running.cancel()
        self._threads.shutdown()
        for method in self._methods.values():
            method.close()

    def _known(self, offers: Sequence[Offer]) -> tuple[Offer, ...]:
        """Return the offers whose method this process has."""
        return tuple(offer for offer in offers if offer.method in self._methods)

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
            except Exception as error:  # a bad offer or a library's bug costs one request its KV blocks
                logger.exception("a read by %s failed", offer.method)
                raise TransferError(f"{offer.method}: {type(error).__name__}") from error
            self._works.put(offers, offer.method)
            return
        raise TransferError(f"no offer of the peer works from here; {'; '.join(reasons)}")


def _automatic(regions: Sequence[Region]) -> list[str]:
    """Return the methods that `auto` tries.

    Without RDMA, NIXL would use TCP, which engine/transfer/tcp.py does faster and more safely.
    """
    on_host = all(region.device < 0 for region in regions)
    return [name for name in METHODS if name != "nixl" or not on_host or has_rdma()]


class ThreadedTransfer:
    """A transfer that runs in a thread (`Transfer`)."""

    def __init__(self, threads: ThreadPoolExecutor, work: Callable[[Event], None]) -> None:
        self._cancelled = Event()
        self._work = work
        self._began = time.monotonic()
        self.seconds = 0.0
        self.future: Future[None] = threads.submit(self._run)
        """Completed, with the transfer's error if it has one, as soon as `done` would tell."""

    def done(self) -> bool:
        return self.future.done() and self.future.result() is None

    def cancel(self) -> None:
        self._cancelled.set()

    def _run(self) -> None:
        try:
            self._work(self._cancelled)
        finally:
            self.seconds = time.monotonic() - self._began
