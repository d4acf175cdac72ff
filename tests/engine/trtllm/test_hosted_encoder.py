"""TensorRT-LLM's encoder in a process of its own, and what the replica's API processes see of it."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest

from engine.config import TrtllmEncoderConfig
from engine.create import create_engine
from engine.errors import EngineDied, EngineFailure, EngineNotReady, EngineUnavailable, InvalidRequest
from engine.process.child import EngineProcess
from engine.trtllm.disaggregation import EncoderState
from engine.trtllm.encoder import TrtllmEncoder
from engine.trtllm.encoding_engine import EncodingEngine
from engine.trtllm.hosted_encoder import HostedEncoder
from engine.types import Encoding, GenerateRequest, SamplingParams
from tests.support.engine_cases import FAKE_TRTLLM
from tests.support.trtllm import model_folder, picture

TEXT = "w5 <image> w6 <image>"
IMAGES = [picture("red"), picture("blue")]


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> TrtllmEncoderConfig:
    monkeypatch.setenv("PYTHONPATH", FAKE_TRTLLM)
    monkeypatch.syspath_prepend(FAKE_TRTLLM)
    return TrtllmEncoderConfig(model=str(model_folder(tmp_path)), max_image_pixels=1000)


@asynccontextmanager
async def started(encoder: HostedEncoder) -> AsyncIterator[HostedEncoder]:
    await encoder.start()
    try:
        yield encoder
    finally:
        await encoder.close()


def hashes(encoding: Encoding) -> list[list[int]]:
    state = msgspec.msgpack.decode(encoding.state, type=EncoderState)
    assert len(state.multimodal_embedding_handles) == 2 and state.multimodal_hashes is not None
    return state.multimodal_hashes


async def test_it_encodes_as_the_encoder_itself(config: TrtllmEncoderConfig) -> None:
    itself = TrtllmEncoder(config)
    await itself.start()
    expected = hashes(await itself.encode(TEXT, IMAGES))
    await itself.close()
    async with started(HostedEncoder(config)) as encoder:
        assert encoder.healthy
        for encoding in await asyncio.gather(*(encoder.encode(TEXT, IMAGES) for _ in range(5))):
            assert encoding.prompt == TEXT and hashes(encoding) == expected
        assert hashes(await encoder.encode(TEXT, IMAGES[::-1])) == expected[::-1]
        with pytest.raises(InvalidRequest, match="more than 1000 pixels"):
            await encoder.encode(TEXT, [picture(), picture(size=(40, 30))])
        task = asyncio.create_task(encoder.encode(TEXT, IMAGES))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert (await encoder.encode(TEXT, IMAGES)).state
    assert not encoder.healthy
    with pytest.raises(EngineNotReady):
        await encoder.encode(TEXT, IMAGES)


async def test_a_killed_encoder_comes_back(config: TrtllmEncoderConfig) -> None:
    async with started(HostedEncoder(config)) as encoder:
        assert encoder._process is not None and encoder._process.pid is not None
        os.kill(encoder._process.pid, signal.SIGKILL)
        with pytest.raises((EngineDied, EngineNotReady)):
            while True:
                await encoder.encode(TEXT, IMAGES)
        async with asyncio.timeout(30):
            while not encoder.healthy:  # noqa: ASYNC110 - it has no signal for it
                await asyncio.sleep(0.05)
        assert (await encoder.encode(TEXT, IMAGES)).state


async def test_several_api_processes_share_one(config: TrtllmEncoderConfig) -> None:
    process = EngineProcess(config)
    await process.start()
    try:
        async with (
            started(HostedEncoder(config, process.address)) as one,
            started(HostedEncoder(config, process.address)) as other,
        ):
            assert hashes(await one.encode(TEXT, IMAGES)) == hashes(await other.encode(TEXT, IMAGES))
    finally:
        await process.close()


async def test_one_that_cannot_load_says_why(config: TrtllmEncoderConfig) -> None:
    with pytest.raises(EngineFailure, match="cannot load"):
        await HostedEncoder(msgspec.structs.replace(config, arguments={"no_such": 1})).start()


async def test_its_engine_takes_prompts_with_images_alone(config: TrtllmEncoderConfig) -> None:
    engine = create_engine(config)
    assert isinstance(engine, EncodingEngine)
    with pytest.raises(EngineNotReady):
        _ = engine.info
    await engine.start()
    with pytest.raises(InvalidRequest, match="images alone"):
        await anext(
            engine.generate(
                GenerateRequest(request_id="r", prompt_token_ids=(5,), sampling=SamplingParams(max_tokens=1))
            )
        )
    assert engine.info.backend == "trtllm" and engine.healthy
    await engine.close()
    assert [stats async for stats in engine.stats()] == [] and [batch async for batch in engine.kv_events()] == []
    with pytest.raises(EngineUnavailable):
        await HostedEncoder(config, "ipc:///nowhere").encode(TEXT, IMAGES)
