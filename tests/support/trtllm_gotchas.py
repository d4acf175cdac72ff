"""TensorRT-LLM's backend on the stand-in, and what the tests of the gotchas ask of it."""

import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from engine.checkpoints.facts import ModelFacts
from engine.config import TrtllmConfig
from engine.trtllm.engine import TrtllmEngine
from engine.types import GenerateRequest, SamplingParams
from server.compose.engine_args import effective
from server.settings import read_settings
from tests.support.trtllm import PROMPT, found, model_folder, trt  # noqa: F401 - a fixture

ROOT = Path(__file__).resolve().parents[2]
SOURCES = {path.name: path.read_text(encoding="utf-8") for path in (ROOT / "engine" / "trtllm").glob("*.py")}
PRODUCT = [
    path
    for folder in ("server", "routers", "multimodal", "engine", "protocol")
    for path in (ROOT / folder).rglob("*.py")
]
FACTS = ModelFacts({"vocab_size": 64, "max_position_embeddings": 4096, "eos_token_id": 2})


@pytest.fixture(autouse=True)
def folder(trt: Any, tmp_path: Path) -> Path:  # noqa: F811 - a fixture, too
    return model_folder(tmp_path)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
    """The arguments of every call of `LLM.generate_async`, without the LLM."""
    made: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
    original = found("tensorrt_llm.LLM").generate_async

    def generate_async(self: Any, *args: Any, **kwargs: Any) -> Any:
        made.append((args, kwargs))
        return original(self, *args, **kwargs)

    monkeypatch.setattr(found("tensorrt_llm.LLM"), "generate_async", generate_async)
    return made


def arguments_of(role: str, override: dict[str, Any] | None = None) -> dict[str, Any]:
    """As a server's settings make them."""
    flags = ["--disaggregation-mode", role, "--override-engine-args", json.dumps(override or {})]
    return effective(read_settings(["--engine", "trtllm", *flags])).arguments


@contextlib.asynccontextmanager
async def running(folder: Path, role: Any = "aggregated", **arguments: Any) -> AsyncIterator[TrtllmEngine]:
    async with TrtllmEngine(TrtllmConfig(model=str(folder), arguments=arguments_of(role, arguments))) as engine:
        yield engine


def request(**fields: Any) -> GenerateRequest:
    wanted = {
        "max_tokens": 6,
        "temperature": 0.0,
        **{name: fields.pop(name) for name in list(fields) if name in SamplingParams.__struct_fields__},
    }
    return GenerateRequest(
        **{"request_id": "r", "prompt_token_ids": tuple(PROMPT), "sampling": SamplingParams(**wanted), **fields}
    )


async def tokens(engine: TrtllmEngine, wanted: GenerateRequest) -> list[int]:
    return [token async for delta in engine.generate(wanted) for token in delta.token_ids]
