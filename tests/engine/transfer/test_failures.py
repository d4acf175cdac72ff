"""Transfers that end early: peers that die or hang, cancellation, and leftovers."""

import gc
import signal
import time
from collections.abc import Sequence
from threading import Event, Thread

import pytest

from engine.transfer import mapped
from engine.transfer.base import Offer, QueuedTransfer, Read, TransferError
from engine.transfer.nixl import NixlAgent
from engine.transfer.transfers import Transfers
from tests.support import fake_cuda
from tests.support.transfer import NIXL, ON_HOST, Memory, ended, held, owning
from tests.support.transfer_owner import content
from tests.support.waiting import slowness

MIB = 1 << 20
SIZES = (3 * MIB, 8 * MIB + 4096)
LARGE = 256 * MIB

pytestmark = pytest.mark.usefixtures("fake_gpu")
on_host = pytest.mark.parametrize("method", ON_HOST)


def large(method: str) -> int:
    """Bytes whose transfer takes long enough to do something meanwhile."""
    return LARGE if method != "cuda_ipc" else fake_cuda.SPEED // 2


@on_host
def test_an_owner_that_was_killed_before(method: str) -> None:
    memory = Memory(MIB, method=method)
    transfers = Transfers(memory.regions, method)
    with owning(method, MIB) as owner:
        ended(transfers.read(owner.offers, [Read(0, 0, 0, MIB)]))
        owner.kill()
        with pytest.raises(TransferError):
            ended(transfers.read(owner.offers, [Read(0, 0, 0, MIB)]), seconds=2)
    transfers.close()


@on_host
def test_an_owner_that_is_killed_meanwhile(method: str) -> None:
    size = large(method)
    memory = Memory(size, method=method)
    transfers = Transfers(memory.regions, method)
    with owning(method, size) as owner:
        transfer = transfers.read(owner.offers, [Read(0, 0, 0, size)])
        owner.kill()
        with pytest.raises(TransferError):
            ended(transfer, seconds=5 * slowness())
    with owning(method, MIB) as successor:
        ended(transfers.read(successor.offers, [Read(0, 0, 0, MIB)]))
    transfers.close()


@on_host
def test_cancelling_ends_soon_and_then_nothing_is_touched(method: str) -> None:
    size = large(method)
    memory = Memory(size, method=method)
    transfers = Transfers(memory.regions, method)
    with owning(method, size) as owner:
        transfer = transfers.read(owner.offers, [Read(0, 0, 0, size)])
        transfer.cancel()
        with pytest.raises(TransferError, match="cancelled"):
            ended(transfer, seconds=5)
        before = memory.digest(0)
        time.sleep(0.1)
        assert memory.digest(0) == before
        ended(transfers.read(owner.offers, [Read(0, 0, 0, MIB)]))
        assert memory.bytes(0, MIB) == content(0, MIB)
    transfers.close()


@on_host
def test_closing_ends_what_runs(method: str) -> None:
    size = large(method)
    memory = Memory(size, method=method)
    transfers = Transfers(memory.regions, method)
    with owning(method, size) as owner:
        transfer = transfers.read(owner.offers, [Read(0, 0, 0, size)])
        start = time.monotonic()
        transfers.close()
        assert time.monotonic() - start < 2 * slowness()
        with pytest.raises(TransferError, match="cancelled"):
            transfer.done()


def test_a_peer_that_hangs_holds_nobody_up() -> None:
    """Over TCP, where the owner has a part in the transfer."""
    memory = Memory(LARGE)
    transfers = Transfers(memory.regions, "tcp")
    with owning("tcp", LARGE) as owner:
        transfer = transfers.read(owner.offers, [Read(0, 0, 0, LARGE)])
        owner.process.send_signal(signal.SIGSTOP)
        time.sleep(0.2)
        assert not transfer.done()
        transfer.cancel()
        with pytest.raises(TransferError, match="cancelled"):
            ended(transfer, seconds=5)
        owner.process.send_signal(signal.SIGCONT)
        ended(transfers.read(owner.offers, [Read(0, 0, 0, MIB)]))
    transfers.close()


@pytest.mark.parametrize("method", [NIXL])
def test_nixl_is_torn_down_when_a_peer_hangs(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over TCP, where the owner has a part in the transfer, and goes on with it later."""
    monkeypatch.setenv("UCX_TLS", "tcp")
    monkeypatch.setattr("engine.transfer.nixl.GRACE", 0.3)
    memory = Memory(LARGE)
    transfers = Transfers(memory.regions, method)
    with owning(method, LARGE, UCX_TLS="tcp") as owner:
        ended(transfers.read(owner.offers, [Read(0, 0, 0, 1)]))
        transfer = transfers.read(owner.offers, [Read(0, 0, 0, LARGE)])
        owner.process.send_signal(signal.SIGSTOP)
        time.sleep(0.2)
        assert not transfer.done()
        transfer.cancel()
        with pytest.raises(TransferError, match="the peer hangs"):
            ended(transfer, seconds=5)
        before = memory.digest(0)
        owner.process.send_signal(signal.SIGCONT)
        time.sleep(0.3)
        assert memory.digest(0) == before
    with owning(method, MIB, UCX_TLS="tcp") as successor:
        ended(transfers.read(successor.offers, [Read(0, 0, 0, MIB)]))
    transfers.close()


@pytest.mark.parametrize("method", [NIXL])
def test_an_unreachable_peer_delays_no_other_transfer(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    memory, go_on, real = Memory(MIB), Event(), NixlAgent.connect
    transfers = Transfers(memory.regions, method)
    with owning(method, MIB) as dead, owning(method, MIB) as other:

        def connect(agent: NixlAgent, metadata: bytes) -> None:
            if metadata in dead.offers[0].data:
                assert go_on.wait(20)
            real(agent, metadata)

        monkeypatch.setattr(NixlAgent, "connect", connect)
        hanging = [transfers.read(dead.offers, [Read(0, 0, 0, MIB)]) for _ in range(3)]
        ended(transfers.read(other.offers, [Read(0, 0, 0, MIB)]), seconds=5)
        assert not any(transfer.done() for transfer in hanging)
        go_on.set()
        for transfer in hanging:
            ended(transfer)
    transfers.close()


@on_host
def test_failed_transfers_leave_no_resources(method: str) -> None:
    memory = Memory(*SIZES, method=method)
    reads = [Read(1, block * 32768, block * 16384, 16384) for block in range(256)]

    def round_of(kill: bool) -> None:
        transfers = Transfers(memory.regions, method)
        with owning(method, *SIZES) as owner:
            ended(transfers.read(owner.offers, reads))
            if kill:
                owner.kill()
                with pytest.raises(TransferError):
                    ended(transfers.read(owner.offers, reads))
        transfers.close()

    round_of(kill=True)  # what a library takes once for the process
    gc.collect()  # errors of earlier tests keep what raised them
    before = held()
    for kill in (False, True, True, False):
        round_of(kill)
    gc.collect()
    assert held() == before


def test_shared_memory_whose_descriptor_is_gone() -> None:
    memory = Memory(*SIZES)
    transfers = Transfers(memory.regions, "shared_memory")
    with owning("shared_memory", *SIZES) as owner:
        owner.say("forget")
        assert owner.line() == "forgotten"
        with pytest.raises(TransferError, match="cannot be opened: No such file"):
            ended(transfers.read(owner.offers, [Read(0, 0, 0, 1)]))
    transfers.close()


@pytest.mark.parametrize("method", ["shared_memory", "cuda_ipc"])
def test_dead_peers_memory_is_let_go_at_once(method: str) -> None:
    """A replica that starts again needs the memory of the one before, whether or not anybody reads."""
    memory = Memory(*SIZES, method=method)
    transfers = Transfers(memory.regions, method)
    with owning(method, *SIZES) as first, owning(method, *SIZES) as second:
        ended(transfers.read(first.offers, [Read(0, 0, 0, MIB)]))
        gc.collect()  # memories of other tests
        one_peer = held()["memories"]
        ended(transfers.read(second.offers, [Read(0, 0, 0, MIB)]))
        assert held()["memories"] > one_peer
        first.kill()
        deadline = time.monotonic() + 10 * slowness()
        while held()["memories"] > one_peer:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        ended(transfers.read(second.offers, [Read(0, 0, 0, MIB)]))
    transfers.close()


def queued(transfers: Transfers, offers: Sequence[Offer], reads: Sequence[Read]) -> QueuedTransfer:
    transfer = transfers.queue(offers, reads)
    assert transfer is not None
    return transfer


def test_a_copy_that_cannot_begin_fails_its_read_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = Memory(*SIZES, method="cuda_ipc")
    transfers = Transfers(memory.regions, "cuda_ipc")
    reads = [Read(0, 0, 0, 4096), Read(0, 8192, 8192, 4096)]
    copy, begun = fake_cuda.FakeCuda.copy, []

    def fail_second(cuda: fake_cuda.FakeCuda, to: int, source: int, size: int) -> None:
        begun.append(to)
        if len(begun) == 2:
            raise TransferError("cudaMemcpyAsync: out of luck (error 1)")
        copy(cuda, to, source, size)

    with owning("cuda_ipc", *SIZES) as owner:
        ended(transfers.read(owner.offers, [Read(0, 0, 0, 1)]))
        monkeypatch.setattr(fake_cuda.FakeCuda, "copy", fail_second)
        with pytest.raises(TransferError, match="out of luck"):
            ended(queued(transfers, owner.offers, reads))
        ended(queued(transfers, owner.offers, reads))
        assert memory.bytes(0)[8192:12288] == content(0, SIZES[0])[8192:12288]
        last = queued(transfers, owner.offers, reads)
        owner.kill()
        with pytest.raises(TransferError, match=r"died while it was read|is gone"):
            ended(last)
    transfers.close()


class _NoThread(Thread):
    def start(self) -> None:
        raise RuntimeError("can't start new thread")


def test_a_peer_is_read_where_no_thread_is_left_to_wait_for_its_death(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mapped, "Thread", _NoThread)
    memory = Memory(MIB, method="shared_memory")
    transfers = Transfers(memory.regions, "shared_memory")
    with owning("shared_memory", MIB) as owner:
        ended(transfers.read(owner.offers, [Read(0, 0, 0, MIB)]))
        transfers.close()
