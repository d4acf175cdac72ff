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
from engine.errors import EngineDied, EngineFailure, EngineNotReady, InvalidRequest
from engine.media import Encoding
from engine.process.child import ServiceProcess
from engine.trtllm.disaggregation import EncoderState
from engine.trtllm.encoder import TrtllmEncoder
from engine.trtllm.hosted_encoder import ENCODER, HostedEncoder
from tests.support.engine_cases import FAKE_TRTLLM
from tests.support.environment import python_path
from tests.support.trtllm import model_folder, picture

TEXT = "w5 <image> w6"
IMAGES = [picture("red")]


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> TrtllmEncoderConfig:
    monkeypatch.setenv("PYTHONPATH", python_path(FAKE_TRTLLM))
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
    assert len(state.multimodal_embedding_handles) == 1 and state.multimodal_hashes is not None
    return state.multimodal_hashes


async def test_the_hosted_encoder_encodes_as_the_encoder_itself(config: TrtllmEncoderConfig) -> None:
    itself = TrtllmEncoder(config)
    await itself.start()
    expected = hashes(await itself.encode(IMAGES, TEXT))
    await itself.close()
    async with started(HostedEncoder(config)) as encoder:
        assert encoder.healthy
        for encoding in await asyncio.gather(*(encoder.encode(IMAGES, TEXT) for _ in range(5))):
            assert encoding.prompt == TEXT and hashes(encoding) == expected
        with pytest.raises(InvalidRequest, match="more than 1000 pixels"):
            await encoder.encode([picture(size=(40, 30))], TEXT)
        task = asyncio.create_task(encoder.encode(IMAGES, TEXT))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert (await encoder.encode(IMAGES, TEXT)).state
    assert not encoder.healthy
    with pytest.raises(EngineNotReady):
        await encoder.encode(IMAGES, TEXT)


async def test_a_killed_encoder_comes_back(config: TrtllmEncoderConfig) -> None:
    async with started(HostedEncoder(config)) as encoder:
        assert encoder.process is not None and encoder.process.pid is not None
        os.kill(encoder.process.pid, signal.SIGKILL)
        with pytest.raises((EngineDied, EngineNotReady)):
            while True:
                await encoder.encode(IMAGES, TEXT)
        async with asyncio.timeout(30):
            while not encoder.healthy:  # noqa: ASYNC110 - it has no signal for it
                await asyncio.sleep(0.05)
        assert (await encoder.encode(IMAGES, TEXT)).state


async def test_several_api_processes_share_one(config: TrtllmEncoderConfig) -> None:
    process = ServiceProcess(ENCODER, config)
    await process.start()
    try:
        async with (
            started(HostedEncoder(config, process.address)) as one,
            started(HostedEncoder(config, process.address)) as other,
        ):
            assert hashes(await one.encode(IMAGES, TEXT)) == hashes(await other.encode(IMAGES, TEXT))
    finally:
        await process.close()


async def test_an_encoder_that_cannot_load_reports_the_reason(config: TrtllmEncoderConfig) -> None:
    with pytest.raises(EngineFailure, match="cannot load"):
        await HostedEncoder(msgspec.structs.replace(config, arguments={"no_such": 1})).start()


async def test_before_it_has_started_it_encodes_nothing(config: TrtllmEncoderConfig) -> None:
    encoder = HostedEncoder(config, "ipc:///nowhere")
    with pytest.raises(EngineNotReady):
        _ = encoder.info
    with pytest.raises(EngineNotReady):
        await encoder.encode(IMAGES, TEXT)
    async with started(HostedEncoder(config)) as encoder:
        assert encoder.info.needs_prompt
