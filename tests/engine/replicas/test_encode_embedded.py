"""Encode replicas with a real vision tower give the same embeddings as a local encoder."""

import asyncio
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from msgspec.structs import replace

from engine.config import EncoderConfig
from engine.embedded.vision.encoder import EmbeddedEncoder
from engine.embedded.vision.kept import RowsReader
from engine.errors import EngineUnavailable, InvalidRequest
from engine.media import MediaInput, RemoteRows
from engine.replicas.encoders import EncoderPool
from engine.transfer.base import TransferError
from tests.support.disaggregated import Seen, replica
from tests.support.encode import encoder_of
from tests.support.vision_models import build_llava, image_bytes
from tests.support.waiting import until

SMALL = {"engine": "embedded", "device": "cpu", "dtype": "float32", "threads": 1, "kv_cache_memory_mb": 64}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_llava(tmp_path_factory.mktemp("llava"))


async def test_a_replicas_tower_makes_what_one_here_makes_and_its_death_costs_nothing(folder: Path) -> None:
    images = [MediaInput(image_bytes(40 + 8 * seed, 64, seed=seed)) for seed in range(10)]
    local = EmbeddedEncoder(EncoderConfig(model=str(folder), device="cpu", dtype="float32", threads=1))
    settings: dict[str, Any] = {**SMALL, "model": str(folder), "served_model_name": "llava", "encode_inline_kb": 0}
    settings["embedding_transfer"] = "direct"
    async with (
        replica("encode", **settings) as (url, life),
        encoder_of([url], local=local, model=("llava", "embedded")) as (pool, _, seen),
    ):
        assert pool.info == local.info
        assert await pool.encode(images) == await local.encode(images) and not seen.local
        service: Any = life.service
        rows = await stay_until_released(pool, images, [one.data for one in await local.encode(images)], service, seen)
        await until(lambda: not life.running)
        with pytest.raises(InvalidRequest):
            await pool.encode([images[0], MediaInput(images[1].data[:100])])
        work = asyncio.create_task(pool.encode([MediaInput(image_bytes(900, 900, seed=seed)) for seed in range(16)]))
        await until(lambda: life.running)
        psutil.Process(service.encoder.pid).kill()
        assert len(await work) == 16 and seen.local
        await until(lambda: not life.running)
        with pytest.raises(TransferError, match="gone"):
            await read(rows)


async def stay_until_released(
    pool: EncoderPool, images: list[MediaInput], expected: list[Any], service: Any, seen: Seen
) -> RemoteRows:
    """Have the embeddings of images stay with the tower, read and release them; return where one's are."""
    staying = [replace(image, stay=True) for image in images]
    found: Any = await pool.encode(staying)
    assert not any(one.data for one in found)
    assert [await read(one.remote) for one in found] == expected
    assert service.store.held == [one.remote.size for one in found]
    (copied,) = await pool.encode([MediaInput(b"", kept=found[0].remote)])  # type: ignore[misc]
    assert copied.data == expected[0]  # type: ignore[union-attr]
    for one in found:
        pool.release(one.remote)
    await until(lambda: not service.store.held)
    assert await read(found[0].remote) == expected[0], "nobody needed its room"
    with pytest.raises(EngineUnavailable, match="not leased"):
        await pool.encode([MediaInput(b"", kept=found[0].remote)])
    (again,) = await pool.encode(staying[:1])  # type: ignore[misc]
    pool.release(again.remote, lost=True)  # type: ignore[arg-type, union-attr]
    assert [one.data for one in await pool.encode(staying)] == expected  # type: ignore[union-attr]
    assert seen.rows == {"released": len(images), "lost": 1}
    return found[0].remote  # type: ignore[no-any-return]


async def read(rows: RemoteRows) -> bytes:
    """Return the bytes that an engine reads."""
    reader = RowsReader(1 << 20, 5.0)
    try:
        return bytes(await reader.read(rows, torch.device("cpu")))  # type: ignore[arg-type]
    finally:
        await reader.close()
