"""Encode replicas with a real vision tower give the same embeddings as a local encoder."""

import asyncio
from pathlib import Path
from typing import Any

import psutil
import pytest

from engine.config import EncoderConfig
from engine.embedded.vision.encoder import EmbeddedEncoder
from engine.errors import InvalidRequest
from engine.media import MediaInput
from tests.support.disaggregated import replica
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
    async with (
        replica("encode", **settings) as (url, life),
        encoder_of([url], local=local, model=("llava", "embedded")) as (pool, _, seen),
    ):
        assert pool.info == local.info
        assert await pool.encode(images) == await local.encode(images) and not seen.local
        with pytest.raises(InvalidRequest):
            await pool.encode([images[0], MediaInput(images[1].data[:100])])
        work = asyncio.create_task(pool.encode([MediaInput(image_bytes(900, 900, seed=seed)) for seed in range(16)]))
        await until(lambda: life.running)
        service: Any = life.service
        psutil.Process(service.encoder.pid).kill()
        assert len(await work) == 16 and seen.local
        await until(lambda: not life.running)
