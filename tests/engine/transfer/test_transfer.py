"""Transfers between two real processes, by every method that runs on this machine."""

import contextlib
import random
import socket
import time
from collections.abc import Iterator

import msgspec
import pytest

from engine.transfer.base import Offer, Read, Region, TransferError
from engine.transfer.transfers import METHODS, Transfers
from tests.support.transfer import ON_HOST, Memory, Owner, ended, owning
from tests.support.transfer_owner import content
from tests.support.waiting import slowness

MIB = 1 << 20
SIZES = (3 * MIB, 8 * MIB + 4096)
pytestmark = pytest.mark.usefixtures("fake_gpu")


@pytest.fixture(params=ON_HOST)
def method(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def owner(method: str) -> Iterator[Owner]:
    with owning(method, *SIZES) as owner:
        yield owner


@pytest.fixture
def memory(method: str) -> Memory:
    return Memory(*SIZES, method=method)


@pytest.fixture
def transfers(method: str, memory: Memory) -> Iterator[Transfers]:
    transfers = Transfers(memory.regions, method)
    yield transfers
    transfers.close()


def random_reads(seed: int) -> list[Read]:
    """Blocks of 16 KiB, some of them neighbours, in random order, to places that differ."""
    chance = random.Random(seed)
    reads = []
    for region, size in enumerate(SIZES):
        count = size // 16384
        places = chance.sample(range(count), count // 2)
        shift = chance.choice([0, 0, 3])
        reads += [Read(region, (place + shift) % count * 16384, place * 16384, 16384) for place in places]
    chance.shuffle(reads)
    return reads


def expected(reads: list[Read]) -> list[bytes]:
    sources = [content(region, size) for region, size in enumerate(SIZES)]
    wanted = [bytearray(size) for size in SIZES]
    for region, remote, local, size in reads:
        wanted[region][local : local + size] = sources[region][remote : remote + size]
    return [bytes(region) for region in wanted]


@pytest.mark.parametrize("seed", [1, 2])
def test_only_the_requested_bytes_are_copied(owner: Owner, transfers: Transfers, memory: Memory, seed: int) -> None:
    reads = random_reads(seed)
    ended(transfers.read(owner.offers, reads))
    assert [memory.bytes(region) for region in range(len(SIZES))] == expected(reads)


def test_a_peer_is_read_again(owner: Owner, transfers: Transfers, memory: Memory) -> None:
    ended(transfers.read(owner.offers, [Read(0, 0, 0, 1)]))
    for seed in (4, 5):
        reads = random_reads(seed)
        ended(transfers.read(owner.offers, reads))
        found, wanted = [memory.bytes(region) for region in range(len(SIZES))], expected(reads)
        for region, _, local, size in reads:
            assert found[region][local : local + size] == wanted[region][local : local + size]


def test_many_reads_at_once(owner: Owner, transfers: Transfers, memory: Memory) -> None:
    reads = random_reads(3)
    for running in [transfers.read(owner.offers, reads[part::8]) for part in range(8)]:
        ended(running)
    assert [memory.bytes(region) for region in range(len(SIZES))] == expected(reads)


def test_reading_nothing_ends(owner: Owner, transfers: Transfers, memory: Memory) -> None:
    ended(transfers.read(owner.offers, []))
    assert not memory.touched()


def test_reads_beyond_our_regions_are_refused_at_once(owner: Owner, transfers: Transfers, memory: Memory) -> None:
    with pytest.raises(TransferError, match="ends beyond this process's region"):
        transfers.read(owner.offers, [Read(0, 0, 0, MIB), Read(0, 0, SIZES[0] - 1, 2)])
    with pytest.raises(TransferError, match="no region 2"):
        transfers.read(owner.offers, [Read(2, 0, 0, MIB)])
    assert not memory.touched()


def test_reads_beyond_the_peers_regions_touch_nothing(method: str, transfers: Transfers, memory: Memory) -> None:
    with owning(method, 2 * MIB) as small:
        for wrong, complaint in (
            (Read(0, MIB, MIB, MIB + 1), "ends beyond the peer's region"),
            (Read(1, 0, 0, 1), "the peer has no region 1"),
        ):
            with pytest.raises(TransferError, match=complaint):
                ended(transfers.read(small.offers, [Read(0, 0, 0, MIB), wrong]))
    assert not memory.touched()


def larger(value: object, size: int) -> object:
    """An offer's content with all its sizes of regions made larger: what a peer that lies would send."""
    if isinstance(value, list):
        return [larger(item, size) for item in value]
    return 2 * size if value == size else value


def test_a_peer_that_lies_about_its_size_is_found_out(method: str, transfers: Transfers, memory: Memory) -> None:
    with owning(method, 2 * MIB) as small:
        (offer,) = small.offers
        lie = Offer(method, msgspec.msgpack.encode(larger(msgspec.msgpack.decode(offer.data), 2 * MIB)))
        with pytest.raises(TransferError):
            ended(transfers.read([lie], [Read(0, MIB, 0, 2 * MIB)]))
        assert not memory.touched()
        ended(transfers.read([offer], [Read(0, 0, 0, 2 * MIB)]))
    assert memory.bytes(0, 2 * MIB) == content(0, 2 * MIB)


def test_offers_that_are_none(method: str, transfers: Transfers, memory: Memory) -> None:
    for data in (b"", b"\xc1", b"\x00" * 100, msgspec.msgpack.encode(["a", []])):
        with pytest.raises(TransferError, match="cannot be read"):
            ended(transfers.read([Offer(method, data)], [Read(0, 0, 0, 1)]))
    with pytest.raises(TransferError, match=f"the peer offers smoke; this process reads by {method}"):
        transfers.read([Offer("smoke", b"")], [Read(0, 0, 0, 1)])
    with pytest.raises(TransferError, match="the peer offers nothing"):
        transfers.read([], [Read(0, 0, 0, 1)])
    assert not memory.touched()


@pytest.mark.parametrize(
    ("place", "value"), [(0, ["x..y"]), (0, ["\0"]), (0, ["localhost"]), (1, 0), (1, 1 << 63), (3, [-1])]
)
def test_a_tcp_offer_of_nonsense_fails_its_transfer_alone(place: int, value: object) -> None:
    memory = Memory(MIB)
    transfers = Transfers(memory.regions, "tcp")
    with owning("tcp", MIB) as owner:
        fields = msgspec.msgpack.decode(owner.offers[0].data)
        fields[place] = value
        with pytest.raises(TransferError):
            ended(transfers.read([Offer("tcp", msgspec.msgpack.encode(fields))], [Read(0, 0, 0, MIB)]))
        assert not memory.touched()
        ended(transfers.read(owner.offers, [Read(0, 0, 0, MIB)]))
    transfers.close()


def test_an_error_that_nobody_foresaw_is_a_failed_transfer(monkeypatch: pytest.MonkeyPatch) -> None:
    def read(*_: object) -> None:
        raise TypeError("incompatible function arguments")

    monkeypatch.setattr("engine.transfer.tcp.Tcp.read", read)
    transfers = Transfers(Memory(MIB).regions, "tcp")
    with pytest.raises(TransferError, match="tcp: TypeError"):
        ended(transfers.read(transfers.offers(), [Read(0, 0, 0, 1)]))
    transfers.close()


def test_tcp_serves_nobody_without_the_secret() -> None:
    with owning("tcp", MIB) as owner:
        addresses, port, *_ = msgspec.msgpack.decode(owner.offers[0].data)
        with socket.create_connection((addresses[-1], port), 5) as stranger:
            assert len(stranger.recv(32, socket.MSG_WAITALL)) == 32
            stranger.sendall(bytes(64))
            assert stranger.recv(1) == b""


def test_a_requested_port_is_used_or_its_number_is_in_the_error() -> None:
    memory = Memory(MIB)
    with socket.create_server(("", 0)) as other:
        port = other.getsockname()[1]
        for method in ("tcp", "auto"):
            with pytest.raises(OSError, match=f"port {port} cannot be listened on: Address already in use"):
                Transfers(memory.regions, method, port)
    transfers = Transfers(memory.regions, "tcp", port)
    assert msgspec.msgpack.decode(transfers.offers()[0].data)[1] == port
    transfers.close()


def test_strangers_neither_stay_nor_keep_peers_out() -> None:
    memory = Memory(MIB)
    transfers = Transfers(memory.regions, "tcp")
    with owning("tcp", MIB) as owner, contextlib.ExitStack() as stack:
        addresses, port, *_ = msgspec.msgpack.decode(owner.offers[0].data)
        start = time.monotonic()
        strangers = [stack.enter_context(socket.create_connection((addresses[-1], port), 5)) for _ in range(100)]
        ended(transfers.read(owner.offers, [Read(0, 0, 0, MIB)]), seconds=2 * slowness())
        assert memory.bytes(0) == content(0, MIB)
        with contextlib.suppress(OSError):
            while time.monotonic() < start + 20:  # a byte now and then is no sign of good will
                strangers[-1].sendall(b"x")
                time.sleep(0.2)
        assert 1 < time.monotonic() - start < 4 * slowness()
    transfers.close()


def test_tcp_does_not_trust_another_process_at_the_peers_address() -> None:
    memory = Memory(*SIZES)
    transfers = Transfers(memory.regions, "tcp")
    with owning("tcp", *SIZES) as owner, owning("tcp", *SIZES) as other:
        addresses, _, *rest = msgspec.msgpack.decode(owner.offers[0].data)
        port = msgspec.msgpack.decode(other.offers[0].data)[1]
        mixed = Offer("tcp", msgspec.msgpack.encode([addresses, port, *rest]))
        with pytest.raises(TransferError, match="cannot be reached"):
            ended(transfers.read([mixed], [Read(0, 0, 0, MIB)]))
    assert not memory.touched()
    transfers.close()


def test_auto_offers_the_best_transport_first_and_falls_back() -> None:
    memory = Memory(*SIZES)
    transfers = Transfers(memory.regions)
    with owning("auto", *SIZES) as owner:
        assert [offer.method for offer in owner.offers][:1] == ["shared_memory"]
        assert owner.offers[-1].method == "tcp"
        unusable = (Offer("shared_memory", b""), *owner.offers[1:])
        for _ in range(2):
            ended(transfers.read(unusable, [Read(1, 0, 0, MIB)]))
        with pytest.raises(TransferError, match=r"no offer of the peer works from here; shared_memory: .*; tcp: "):
            ended(transfers.read([Offer("shared_memory", b""), Offer("tcp", b"")], [Read(0, 0, 0, 1)]))
    assert memory.bytes(1)[:MIB] == content(1, MIB)
    transfers.close()


def test_methods_that_cannot_be_used_here_say_why() -> None:
    unshared = bytearray(4096)
    region = Region(id(unshared), 4096, -1)
    with pytest.raises(TransferError, match=r"shared_memory: the memory of the KV cache was not made to be shared"):
        Transfers([region], "shared_memory")
    with pytest.raises(TransferError, match=r"cuda_ipc: the KV cache is in host memory"):
        Transfers([region], "cuda_ipc")
    with pytest.raises(TransferError, match=r"tcp: the KV cache is in a GPU's memory"):
        Transfers([Region(0, 4096, 0)], "tcp")


def test_every_method_is_listed_best_first() -> None:
    assert list(METHODS) == ["shared_memory", "cuda_ipc", "nixl", "tcp"]
