"""Embeddings that stay in a tower's memory: how long, for whom, and what a reader finds."""

import asyncio
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from msgspec.structs import replace

from engine.config import EncoderConfig
from engine.embedded.vision import kept as kept_module
from engine.embedded.vision.encoder import EmbeddedEncoder
from engine.embedded.vision.kept import KeptRows, RowsReader
from engine.errors import EmbeddingsLost, EngineError, InvalidRequest
from engine.media import EncodedMedia, MediaInput, MediaSpan, MediaSpans, RemoteRows
from engine.transfer.base import LeaseWord, Offer
from engine.types import Delta, GenerateRequest, Handoff, SamplingParams

PAGE = 4096
CPU = torch.device("cpu")


def rows_of(pages: int, seed: int = 0) -> torch.Tensor:
    return torch.randn((pages * 16, 128), generator=torch.Generator().manual_seed(seed)).to(torch.bfloat16)


def request_of(*remote: RemoteRows, **fields: Any) -> GenerateRequest:
    """A prompt that shows them; some bytes come with it."""
    spans = [
        MediaSpan(key=f"{index:064}", start=index, length=1, rows=1, dtype="bfloat16", remote=rows)
        for index, rows in enumerate(remote)
    ]
    spans.append(MediaSpan(key="f" * 64, start=len(spans), length=1, rows=1, dtype="bfloat16", data=b"here"))
    return GenerateRequest(
        request_id="a",
        prompt_token_ids=(1,) * len(spans),
        sampling=SamplingParams(max_tokens=1),
        media=MediaSpans(tuple(spans)),
        **fields,
    )


@pytest.fixture
async def reader() -> AsyncIterator[RowsReader]:
    reader = RowsReader(8 * PAGE, 1.0)
    yield reader
    await reader.close()


async def read(reader: RowsReader, rows: RemoteRows) -> bytes:
    span = (await reader.fetched(request_of(rows), "cpu")).spans[0]
    assert span.remote is None
    return bytes(span.data)  # type: ignore[arg-type]


async def test_what_an_engine_reads_is_what_was_kept(reader: RowsReader) -> None:
    kept = KeptRows(4 * PAGE, CPU, 60.0)
    tensors = [rows_of(1), rows_of(2, seed=1)]
    remote = [kept.put(rows) for rows in tensors]
    assert None not in remote
    request = request_of(*remote)  # type: ignore[arg-type]
    carried = msgspec.msgpack.decode(msgspec.msgpack.encode(request), type=GenerateRequest)
    assert carried == request and carried.has_remote
    found = await reader.fetched(carried, "cpu")
    assert not found.has_remote and found.spans[-1].data == b"here"
    assert [bytes(span.data) for span in found.spans[:2]] == [  # type: ignore[arg-type]
        rows.view(torch.uint8).numpy().tobytes() for rows in tensors
    ]


async def test_leased_rows_stay_and_released_ones_until_their_room_is_needed(reader: RowsReader) -> None:
    kept = KeptRows(4 * PAGE, CPU, 60.0)
    first, second = kept.put(rows_of(2)), kept.put(rows_of(2, seed=1))
    assert first is not None and second is not None
    assert kept.put(rows_of(1)) is None and kept.put(rows_of(5)) is None
    kept.release(second)
    kept.release(second)
    third = kept.put(rows_of(1, seed=2))
    assert third is not None
    assert await read(reader, first) == rows_of(2).view(torch.uint8).numpy().tobytes()
    with pytest.raises(EmbeddingsLost, match="given up before they had been read"):
        await read(reader, second)
    kept.release(second)  # whose place others have now
    kept.release(first)
    assert await read(reader, first) == rows_of(2).view(torch.uint8).numpy().tobytes(), "nobody needed its room"
    assert kept.put(rows_of(2, seed=3)) is not None
    with pytest.raises(EmbeddingsLost):
        await read(reader, first)
    assert await read(reader, third) == rows_of(1, seed=2).view(torch.uint8).numpy().tobytes()


def test_a_lease_that_nobody_ends_is_over_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(kept_module.time, "monotonic", lambda: now)
    kept = KeptRows(2 * PAGE, CPU, 30.0)
    assert kept.put(rows_of(2)) is not None
    now += 29.0
    assert kept.put(rows_of(2)) is None
    now += 2.0
    assert kept.put(rows_of(2)) is not None


async def test_rows_that_cannot_be_read_are_lost(reader: RowsReader) -> None:
    kept = KeptRows(4 * PAGE, CPU, 60.0)
    rows = kept.put(rows_of(1))
    assert rows is not None
    wrong: list[tuple[RemoteRows, str]] = [
        (replace(rows, size=9 * PAGE), "do not fit into EMBEDDING_MEMORY_MB"),
        (replace(rows, offset=4 * PAGE), "ends beyond the peer's region"),
        (replace(rows, lease=LeaseWord(1 << 40, 1)), "ends beyond the peer's region"),
        (replace(rows, lease=replace(rows.lease, word=1)), "given up"),
        (replace(rows, offers=()), "the peer offers nothing"),
        (replace(rows, offers=(Offer("cuda_ipc", rows.offers[0].data),)), "the peer offers cuda_ipc"),
        (replace(rows, offers=(_of_another_host(rows.offers[0]),)), "the peer is on another host"),
        (replace(rows, offers=(_of_another_container(rows.offers[0]),)), "the peer is in another container"),
    ]
    for each, reason in wrong:
        with pytest.raises(EmbeddingsLost, match=reason):
            await read(reader, each)
    assert len(await read(reader, rows)) == PAGE


async def test_a_request_that_goes_on_from_a_handoff_does_without(reader: RowsReader) -> None:
    handoff = Handoff(version=1, backend="embedded", first=Delta((1,)), state=b"x")
    rows = RemoteRows((), 0, PAGE, LeaseWord(0, 1))
    span = (await reader.fetched(request_of(rows, handoff=handoff), "cpu")).spans[0]
    assert span.remote is None and not span.data


async def test_readers_wait_for_room(reader: RowsReader) -> None:
    kept = KeptRows(64 * PAGE, CPU, 60.0)
    remote = [kept.put(rows_of(3, seed)) for seed in range(12)]
    found = await asyncio.gather(*(read(reader, rows) for rows in remote if rows is not None))
    assert found == [rows_of(3, seed).view(torch.uint8).numpy().tobytes() for seed in range(12)]


class _Encoder(EmbeddedEncoder):
    """Sends nothing, and receives what a test says."""

    def __init__(self) -> None:
        super().__init__(EncoderConfig(model=""))
        self._serving = True
        self._answers: list[tuple[int, dict[int, EncodedMedia | EngineError]]] = []
        self.released: list[RemoteRows] = []

    def release(self, rows: RemoteRows, *, lost: bool = False) -> None:
        self.released.append(rows)

    def sent(self) -> None:
        process: Any = SimpleNamespace(together=1)
        lane = self._lanes[0]
        lane.sent.append({job.number: job for job in lane.next_batch(process)})

    async def answered(self, *outcomes: EncodedMedia | EngineError) -> None:
        numbers = [number for batch in self._lanes[0].sent for number in batch]
        self._answers = [(0, dict(zip(numbers, outcomes, strict=True)))]
        process: Any = self
        await self._receive(process)

    async def receive(self) -> tuple[int, dict[int, EncodedMedia | EngineError]] | None:
        return self._answers.pop() if self._answers else None


@pytest.mark.parametrize("cancelled", [True, False])
async def test_rows_that_nobody_waits_for_any_more_are_released(cancelled: bool) -> None:
    encoder = _Encoder()
    rows = RemoteRows((), 0, PAGE, LeaseWord(0, 1))
    encoding = asyncio.create_task(encoder.encode([MediaInput(b"a"), MediaInput(b"b")]))
    await asyncio.sleep(0)
    encoder.sent()
    if cancelled:
        encoding.cancel()
        await asyncio.wait([encoding])
    left = EncodedMedia(text="", rows=1, dtype="bfloat16", remote=rows)
    await encoder.answered(left, InvalidRequest("it cannot be read"))
    with pytest.raises(asyncio.CancelledError if cancelled else InvalidRequest):
        await encoding
    assert encoder.released == [rows]


def _of_another_host(offer: Offer) -> Offer:
    return _changed(offer, 2, "another boot")


def _of_another_container(offer: Offer) -> Offer:
    return _changed(offer, 3, "pid:[1]")


def _changed(offer: Offer, field: int, value: str) -> Offer:
    process, regions = msgspec.msgpack.decode(offer.data)
    process[field] = value
    return Offer(offer.method, msgspec.msgpack.encode([process, regions]))
