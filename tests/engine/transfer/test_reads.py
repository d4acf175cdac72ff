"""The arithmetic of reads: joining, splitting and checking them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.transfer.base import Read, Region, TransferError, check_local, check_remote, join_reads, split_reads

REGIONS = [Region(0, 400, -1)] * 2


@st.composite
def disjoint_reads(draw: st.DrawFn) -> list[Read]:
    """In blocks of 8 bytes, so that many are adjacent; each place of ours is written once at most."""
    places = draw(st.lists(st.tuples(st.integers(0, 1), st.integers(0, 15)), unique=True, max_size=20))
    shift = draw(st.integers(0, 3))
    free = draw(st.lists(st.integers(0, 15), min_size=len(places), max_size=len(places)))
    follow = draw(st.booleans())
    return [
        Read(region, 8 * (block + shift if follow else other), 8 * block, draw(st.sampled_from([8, 8, 8, 0])))
        for (region, block), other in zip(places, free, strict=True)
    ]


def bytes_moved(reads: list[Read]) -> dict[tuple[int, int], int]:
    """Our bytes, by region and place, and which of the peer's each is."""
    return {(r.region, r.local_offset + i): r.remote_offset + i for r in reads for i in range(r.size)}


@given(disjoint_reads())
def test_joined_reads_move_the_same_bytes_and_cannot_be_joined_further(reads: list[Read]) -> None:
    joined = join_reads(reads)
    assert bytes_moved(joined) == bytes_moved(reads)
    assert sum(read.size for read in joined) == sum(read.size for read in reads)
    moved = bytes_moved(reads)
    starts = [place for place, source in moved.items() if moved.get((place[0], place[1] - 1)) != source - 1]
    assert sorted((read.region, read.local_offset) for read in joined) == sorted(starts)


@given(disjoint_reads(), st.integers(1, 40))
def test_split_reads_move_the_same_bytes(reads: list[Read], most: int) -> None:
    split = split_reads(reads, most)
    assert bytes_moved(split) == bytes_moved(reads)
    assert all(0 < read.size <= most for read in split)


@given(disjoint_reads())
def test_reads_within_the_regions_pass(reads: list[Read]) -> None:
    check_local(reads, REGIONS)
    check_remote(reads, [400, 400])


@pytest.mark.parametrize(
    ("reads", "complaint"),
    [
        ([Read(2, 0, 0, 8)], "no region 2"),
        ([Read(-1, 0, 0, 8)], "no region -1"),
        ([Read(0, 0, 396, 8)], "ends beyond"),
        ([Read(0, -8, 0, 8)], "negative"),
        ([Read(0, 0, -8, 8)], "negative"),
        ([Read(0, 0, 0, -8)], "negative"),
        ([Read(1, 0, 0, 16), Read(1, 32, 8, 16)], "write the same bytes"),
    ],
)
def test_wrong_reads_are_refused(reads: list[Read], complaint: str) -> None:
    with pytest.raises(TransferError, match=complaint):
        check_local(reads, REGIONS)


@pytest.mark.parametrize(
    ("read", "complaint"), [(Read(1, 0, 0, 8), "no region 1"), (Read(0, 96, 0, 8), "ends beyond the peer's")]
)
def test_reads_beyond_the_peer_are_refused(read: Read, complaint: str) -> None:
    with pytest.raises(TransferError, match=complaint):
        check_remote([read], [100])
