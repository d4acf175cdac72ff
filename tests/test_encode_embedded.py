"""Encode replicas with a real vision tower: what they make is what one here makes, and whole servers answer alike."""

import asyncio
import base64
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from disaggregated_support import SECRET, replica, wait_empty
from encode_support import encoder_of, until
from http_support import ServerProcess
from vision_models import build_llava, image_bytes

from engine.config import EncoderConfig
from engine.embedded.vision.encoder import EmbeddedEncoder
from engine.encoder import ImageInput
from engine.errors import InvalidRequest

SMALL = {"engine": "embedded", "device": "cpu", "dtype": "float32", "threads": 1, "kv_cache_memory_mb": 64}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_llava(tmp_path_factory.mktemp("llava"))


async def test_a_replicas_tower_makes_what_one_here_makes_and_its_death_costs_nothing(folder: Path) -> None:
    images = [ImageInput(image_bytes(40 + 8 * seed, 64, seed=seed)) for seed in range(10)]
    local = EmbeddedEncoder(EncoderConfig(model=str(folder), device="cpu", dtype="float32", threads=1))
    settings: dict[str, Any] = {**SMALL, "model": str(folder), "served_model_name": "llava", "encode_inline_kb": 0}
    async with replica("encode", **settings) as (url, life), encoder_of([url], local=local, model=("llava", "embedded")) as (pool, _, seen):
        assert pool.info == local.info
        assert await pool.encode(images) == await local.encode(images) and not seen.local
        with pytest.raises(InvalidRequest):
            await pool.encode([images[0], ImageInput(images[1].data[:100])])
        work = asyncio.create_task(pool.encode([ImageInput(image_bytes(900, 900, seed=seed)) for seed in range(16)]))
        await until(lambda: life.running)
        service: Any = life.encoding
        psutil.Process(service._encoder.pid).kill()
        assert len(await work) == 16 and seen.local
        await until(lambda: not life.running, 1.0)


def answers(server: ServerProcess, seeds: Sequence[int]) -> list[Any]:
    """Text and tokens' log-probabilities of the same question about different images, and about none."""
    said = []
    for seed in (*seeds, None):
        url = "" if seed is None else "data:image/png;base64," + base64.b64encode(image_bytes(48, 64, seed=seed)).decode()
        parts: list[Any] = [{"type": "text", "text": "What is this? " * 5}]
        parts += [] if seed is None else [{"type": "image_url", "image_url": {"url": url}}]
        body = {"messages": [{"role": "user", "content": parts}], "max_tokens": 8, "temperature": 0, "logprobs": True, "top_logprobs": 0}
        answer = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=60, verify=False)
        assert answer.status_code == 200, answer.text
        (choice,) = answer.json()["choices"]
        said.append((choice["message"]["content"], [round(token["logprob"], 3) for token in choice["logprobs"]["content"]]))
    return said


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_one_server_two_kinds_and_three_kinds_of_replicas_answer_alike(folder: Path) -> None:
    """And differently for different images."""
    flags = [part for name, value in SMALL.items() for part in (f"--{name.replace('_', '-')}", str(value))]
    common = (*flags, "--model", str(folder), "--internal-secret", SECRET)
    started = [ServerProcess(*common, *role) for role in ((), ("--disaggregation-mode", "encode"), ("--disaggregation-mode", "prefill"))]
    try:
        for server in started:
            server.wait_ready(100)
        whole, encode, prefill = started
        decode = (*common, "--disaggregation-mode", "decode", "--prefill-urls", prefill.url, "--prefill-min-tokens", "0")
        started += [ServerProcess(*decode), ServerProcess(*decode, "--encode-urls", encode.url, "--encode-fallback", "refuse")]
        expected = answers(whole, (1, 2, 3))
        assert len({str(answer) for answer in expected}) == 4
        for front in started[3:]:
            front.wait_ready(100)
            assert answers(front, (1, 2, 3)) == expected
            assert front.metric("trtllm_prefill_local_total") == 0
        assert encode.metric("trtllm_encoded_images_total") == 3
        wait_empty(whole, prefill, *started[3:])
    finally:
        for server in started:
            server.process.terminate()
        for server in started:
            server.wait(20)
