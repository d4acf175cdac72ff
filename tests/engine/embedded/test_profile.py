"""Profiles that torch refuses to record."""

from pathlib import Path

import pytest

from engine.config import EmbeddedConfig
from engine.embedded.engine import EmbeddedEngine
from engine.errors import EngineFailure
from engine.types import GenerateRequest, SamplingParams
from tests.engine.embedded.models.native.test_native import make_folder


async def test_the_engine_goes_on_when_the_profiler_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: object) -> None:
        raise RuntimeError("already in use")

    folder = make_folder(tmp_path / "model")
    engine = EmbeddedEngine(EmbeddedConfig(model=str(folder), num_blocks=16, threads=1))
    await engine.start()
    try:
        for _ in range(2):
            with monkeypatch.context() as patch, pytest.raises(EngineFailure, match="already in use"):
                patch.setattr("torch.profiler.profile.start", fail)
                await engine.start_profile()
        request = GenerateRequest(
            request_id="r", prompt_token_ids=(5, 6, 7), sampling=SamplingParams(max_tokens=2, ignore_eos=True)
        )
        assert [delta async for delta in engine.generate(request)][-1].finish_reason == "length"
    finally:
        await engine.close()
