"""Memory taken in pieces and given back, and read by peers."""

import asyncio
import gc
import itertools
import threading
from functools import partial

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from engine.media import EncodedMedia
from engine.replicas.encode_answers import EmbeddingStore
from engine.transfer.arena import Arena, Place, private_copy
from engine.transfer.base import LeaseWord, TransferError
from engine.transfer.shared_bytes import readable
from engine.transfer.transfers import Transfers
from tests.support import fake_cuda
from tests.support.transfer import Memory
from tests.support.waiting import until

PAGE = 4096
SIZE = 16 * PAGE


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.integers(0, 5 * PAGE)), max_size=40))
def test_places_do_not_overlap_and_come_back_whole(steps: list[tuple[bool, int]]) -> None:
    async def run() -> None:
        arena = Arena(SIZE, "shared_memory")
        taken: list[Place] = []
        for takes, number in steps:
            if takes:
                place = await arena.take(number, 0)
                if place is not None:
                    taken.append(place)
            elif taken:
                arena.free(taken.pop(number % len(taken)))
            assert arena.taken == sorted(taken)
            ends = [(place.offset, place.offset + place.size) for place in sorted(taken)]
            assert all(end <= start for (_, end), (start, _) in itertools.pairwise(ends))
            assert not ends or (ends[0][0] >= 0 and ends[-1][1] <= SIZE)
        for place in taken:
            arena.free(place)
        assert await arena.take(SIZE, 0) == Place(0, SIZE)
        await arena.close()

    asyncio.run(run())


async def test_waiting_for_room_in_a_full_arena_has_a_time_limit() -> None:
    arena = Arena(SIZE, "shared_memory")
    first = await arena.take(SIZE, 0)
    assert first is not None
    waiting = asyncio.create_task(arena.take(PAGE, 5.0))
    assert await arena.take(PAGE, 0.05) is None
    assert not waiting.done()
    arena.free(first)
    assert await waiting == Place(0, PAGE)
    assert await arena.take(SIZE + 1, 0.01) is None
    await arena.close()


async def test_one_arena_reads_another_in_parts() -> None:
    theirs, ours = Arena(SIZE, "auto"), Arena(SIZE, "auto")
    place = await theirs.take(3000, 0)
    assert place is not None
    theirs.write(place, [b"a" * 1000, b"b" * 2000])
    assert await ours.read(theirs.offers, place.offset, [1000, 0, 2000], 5.0) == [b"a" * 1000, b"", b"b" * 2000]
    with pytest.raises(TransferError, match="no room"):
        await ours.read(theirs.offers, 0, [SIZE + 1], 0.05)
    with pytest.raises(TransferError, match="beyond the peer"):
        await ours.read(theirs.offers, SIZE - 10, [20], 5.0)
    assert not ours.taken
    await theirs.close()
    await ours.close()


@pytest.mark.usefixtures("fake_gpu")
async def test_a_gpus_memory_is_read_into_pinned_memory_while_it_is_leased() -> None:
    theirs = Memory(SIZE, PAGE, method="cuda_ipc")
    theirs.maps[0][PAGE : 3 * PAGE] = b"x" * 2 * PAGE
    theirs.maps[1][16:24] = (7).to_bytes(8, "little")
    transfers = Transfers(theirs.regions, "cuda_ipc")
    ours = Arena(SIZE, "cuda_ipc", device=0)
    assert len(fake_cuda.pinned) == 2
    read = partial(ours.read, transfers.offers(), PAGE, [PAGE, PAGE], 5.0, copy=private_copy)
    assert [bytes(part) for part in await read(LeaseWord(2, 7))] == [b"x" * PAGE] * 2  # type: ignore[arg-type]
    for wrong in (LeaseWord(2, 8), LeaseWord(3, 7)):
        with pytest.raises(TransferError, match="given up before they had been read"):
            await read(wrong)
    peer = Arena(SIZE, "cuda_ipc", device=0)
    with pytest.raises(TransferError, match="the peer has no region 0"):
        await peer.read(ours.offers, 0, [PAGE], 5.0)
    assert not ours.taken and not peer.taken
    await asyncio.gather(ours.close(), peer.close())
    transfers.close()
    del ours, peer, read

    def freed() -> bool:
        gc.collect()
        return not fake_cuda.pinned

    await until(freed)  # a thread may not have dropped its last job yet


class Slow(Arena):
    """Writes only when the test lets it."""

    def __init__(self) -> None:
        super().__init__(SIZE, "shared_memory")
        self.go = threading.Event()

    def write(self, place: Place, parts: object) -> None:
        assert self.go.wait(10)
        super().write(place, parts)  # type: ignore[arg-type]


class Held:
    """An observer that remembers."""

    def __init__(self) -> None:
        self.last = (0, 0)

    def encoded(self, images: int, seconds: float) -> None: ...

    def holds(self, answers: int, size: int) -> None:
        self.last = (answers, size)


async def test_a_place_that_is_written_to_is_free_only_when_that_is_over() -> None:
    arena, held = Slow(), Held()
    store = EmbeddingStore(arena, 0, held)
    image = EncodedMedia(text="x", rows=1, data=bytes(PAGE), dtype="float32")
    putting = asyncio.create_task(store.put([image], False))
    while held.last != (1, PAGE):  # noqa: ASYNC110
        await asyncio.sleep(0.005)
    putting.cancel()
    await asyncio.wait([putting])
    assert putting.cancelled() and held.last == (1, PAGE)
    arena.go.set()
    async with asyncio.timeout(20):
        while held.last != (0, 0):  # noqa: ASYNC110
            await asyncio.sleep(0.005)
    assert not arena.taken
    await store.close()


async def test_memory_of_free_places_is_given_back() -> None:
    arena, peer = Arena(SIZE, "shared_memory"), Arena(SIZE, "shared_memory")
    kept, left = await arena.take(2 * PAGE, 0), await arena.take(3 * PAGE, 0)
    assert kept is not None and left is not None
    for place in (kept, left):
        arena.write(place, [b"x" * place.size])
    arena.free(left)
    arena.trim()
    held, free = await peer.read(arena.offers, 0, [2 * PAGE, 3 * PAGE], 5.0)
    assert bytes(readable(held)) == b"x" * 2 * PAGE and not any(bytes(readable(free)))
    again = await arena.take(3 * PAGE, 0)
    assert again is not None
    arena.write(again, [b"y" * again.size])
    await asyncio.gather(arena.close(), peer.close())
