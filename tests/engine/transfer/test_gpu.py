"""Transfers between the GPU memory of two processes: on one GPU, and from one to another."""

import importlib.util
import os

import msgspec
import pytest

from engine.transfer.base import Offer, Read, TransferError
from engine.transfer.transfers import Transfers
from tests.support.transfer import ended, owning
from tests.support.transfer_owner import content

torch = pytest.importorskip("torch")
GPUS = torch.cuda.device_count()
MIB = 1 << 20
SIZE = 64 * MIB
LARGE = 8192 * MIB
TWO = pytest.mark.skipif(GPUS < 2, reason="needs two CUDA devices")
NIXL = pytest.mark.skipif(importlib.util.find_spec("nixl_cu13") is None, reason="nixl-cu13 is not installed")
PROGRAM = "transfer_gpu_owner"

if GPUS:
    os.environ.setdefault("UCX_CUDA_IPC_CACHE", "n")  # as engines have it, before UCX is loaded

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(GPUS < 1, reason="needs a CUDA device"),
    pytest.mark.parametrize("method", ["cuda_ipc", pytest.param("nixl", marks=NIXL)]),
    pytest.mark.parametrize("theirs", [0, pytest.param(1, marks=TWO)]),
]


def on_gpu(size: int):  # type: ignore[no-untyped-def]  # torch is loaded on machines with a GPU only
    from tests.support.transfer_gpu_owner import on_gpu as make  # noqa: PLC0415

    return make(size, 0)


def test_only_the_requested_bytes_are_copied(method: str, theirs: int) -> None:
    memory, region = on_gpu(SIZE)
    transfers = Transfers([region], method)
    blocks = [Read(0, (block * 7 % 64) * MIB, block * MIB, MIB) for block in range(0, 64, 2)]
    blocks += [Read(0, block * MIB, block * MIB, MIB) for block in (1, 3, 5)]
    with owning(method, SIZE, theirs, program=PROGRAM) as owner:
        for _ in range(2):
            ended(transfers.read(owner.offers, blocks))
    source, wanted = content(0, SIZE), bytearray(SIZE)
    for _, remote, local, size in blocks:
        wanted[local : local + size] = source[remote : remote + size]
    assert memory.cpu().numpy().tobytes() == bytes(wanted)
    transfers.close()


def test_work_behind_a_transfer_sees_its_bytes(method: str, theirs: int) -> None:
    memory, region = on_gpu(LARGE // 8)
    transfers = Transfers([region], method)
    with owning(method, LARGE // 8, theirs, program=PROGRAM) as owner:
        ended(transfers.read(owner.offers, [Read(0, 0, 0, MIB)]))
        memory.zero_()
        torch.cuda.synchronize()
        transfer = transfers.queue(owner.offers, [Read(0, 0, 0, LARGE // 8)])
        assert (transfer is not None) == (method == "cuda_ipc")
        if transfer is not None:
            transfer.hold_back(torch.cuda.current_stream().cuda_stream)
            end = memory[-MIB:].clone()
            assert end.cpu().numpy().tobytes() == content(0, MIB)
            assert transfer.done()
    transfers.close()


def test_reads_beyond_the_peers_region_touch_nothing(method: str, theirs: int) -> None:
    memory, region = on_gpu(SIZE)
    transfers = Transfers([region], method)
    with (
        owning(method, MIB, theirs, program=PROGRAM) as small,
        pytest.raises(TransferError, match="ends beyond the peer's region"),
    ):
        ended(transfers.read(small.offers, [Read(0, 0, 0, 4096), Read(0, MIB - 1, 4096, 2)]))
    assert not memory.any()
    transfers.close()


def test_a_peer_that_lies_about_its_size_is_found_out(method: str, theirs: int) -> None:
    if method == "nixl":
        pytest.skip("UCX knows what was registered")
    memory, region = on_gpu(SIZE)
    transfers = Transfers([region], method)
    with owning(method, SIZE, theirs, program=PROGRAM) as owner:
        process, [[handle, offset, _]] = msgspec.msgpack.decode(owner.offers[0].data)
        for wrong in ([handle, offset, 1 << 40], [handle, 1 << 40, SIZE]):
            with pytest.raises(TransferError, match="the peer offers"):
                ended(
                    transfers.read([Offer(method, msgspec.msgpack.encode([process, [wrong]]))], [Read(0, 0, 0, SIZE)])
                )
        assert not memory.any()
        ended(transfers.read(owner.offers, [Read(0, 0, 0, SIZE)]))
    transfers.close()


def test_an_owner_that_was_killed(method: str, theirs: int) -> None:
    _, region = on_gpu(SIZE)
    transfers = Transfers([region], method)
    with owning(method, SIZE, theirs, program=PROGRAM) as owner:
        ended(transfers.read(owner.offers, [Read(0, 0, 0, SIZE)]))
        owner.kill()
        with pytest.raises(TransferError):
            ended(transfers.read(owner.offers, [Read(0, 0, 0, SIZE)]), seconds=2)
    with owning(method, SIZE, theirs, program=PROGRAM) as successor:
        ended(transfers.read(successor.offers, [Read(0, 0, 0, SIZE)]))
    transfers.close()


def test_cancelling_ends_soon(method: str, theirs: int) -> None:
    memory, region = on_gpu(LARGE)
    transfers = Transfers([region], method)
    with owning(method, LARGE, theirs, program=PROGRAM) as owner:
        ended(transfers.read(owner.offers, [Read(0, 0, 0, MIB)]))
        memory.zero_()
        torch.cuda.synchronize()
        transfer = transfers.read(owner.offers, [Read(0, 0, 0, LARGE)])
        transfer.cancel()
        with pytest.raises(TransferError, match="cancelled"):
            ended(transfer, seconds=1)
    transfers.close()


def test_memory_is_given_back(method: str, theirs: int) -> None:
    """A peer's memory stays open no longer than the peer: opening the next one's again and again costs nothing."""
    memory, region = on_gpu(SIZE)
    transfers = Transfers([region], method)
    free = []
    for _ in range(4):
        with owning(method, LARGE // 2, theirs, program=PROGRAM) as owner:
            ended(transfers.read(owner.offers, [Read(0, LARGE // 2 - SIZE, 0, SIZE)]))
        free.append(torch.cuda.mem_get_info(theirs)[0])
    transfers.close()
    assert memory.cpu().numpy().tobytes() == content(0, SIZE)
    assert free[0] - free[-1] < LARGE // 4
