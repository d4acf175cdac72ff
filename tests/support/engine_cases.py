"""Engines to hold against their promises, requests for them, and what is asked of their answers."""

import asyncio
import functools
import itertools
import json
import random
import shutil
from array import array
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from blake3 import blake3
from msgspec.structs import replace

from engine.admission import AdmissionEngine
from engine.base import Engine
from engine.config import EmbeddedConfig, EngineConfig, FakeConfig, TrtllmConfig
from engine.create import create_engine
from engine.kv_events import KvEvent, Stored
from engine.media import MediaSpan, MediaSpans
from engine.process.child import EngineProcess
from engine.process.client import EngineClient
from engine.stats import IterationStats
from engine.types import Delta, GenerateRequest, SamplingParams
from tests.support.environment import python_path
from tests.support.head_files import write_head
from tests.support.trtllm import NEWEST, OLDEST, stand_in

BLOCK, CONTEXT, VOCABULARY, EOS = 16, 512, 384, 2
KINDS = ["fake", "fake-host", "fake-admission", "embedded", "embedded-host", "trtllm", "trtllm-host"]
SPECULATING_KINDS = [pytest.param("embedded-ngram", marks=pytest.mark.slow)]
"""The embedded engine with every draft computed."""
NEWEST_KINDS = [pytest.param("trtllm-newest", marks=pytest.mark.slow)]
"""TensorRT-LLM's main, whose stand-in differs from 1.2.1's."""
TIERED_KINDS = [pytest.param("embedded-tiers", marks=pytest.mark.slow)]
"""The embedded engine with few blocks on the device, and tiers on the host and on disk."""
HANDING_OVER = [*KINDS, "embedded-ngram"]
"""The kinds that prefill for each other; one engine is both sides here."""
REAL = {"fake", "embedded", "embedded-ngram", "trtllm", "trtllm-newest"}
"""The kinds that compute; the others wrap one of these."""
TAKING_IMAGES = ["fake", "fake-host", "fake-admission", "embedded", "embedded-host", "embedded-ngram"]
"""The kinds that take images as embeddings, given a model that does."""
IMAGE_TOKEN, ROWS, HIDDEN = 3, 16, 64
"""Of `tests.support.vision_models.build_llava`: its image token, and the shape of an image's embeddings."""
FAKE_TRTLLM = str(Path(__file__).resolve().parents[1] / "fake_trtllm")
_ids = itertools.count()
_rng = random.Random(0)


EMBEDDED: dict[str, Any] = {
    "dtype": "float32", "device": "cpu", "threads": 1, "max_batch_size": 16, "kv_block_size": BLOCK, "num_blocks": 1024,
}  # fmt: skip


@contextmanager
def fake_trtllm(version: str = OLDEST) -> Iterator[None]:
    """tensorrt_llm can be imported, here and in child processes: the fake, which generates with the embedded engine."""
    with stand_in(version), pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", python_path(FAKE_TRTLLM))
        patch.setenv("FAKE_TRTLLM_ENGINE", "embedded")
        patch.setenv("FAKE_TRTLLM_CONFIG", json.dumps(EMBEDDED))
        yield


@functools.cache
def rounded(folder: Path) -> Path:
    """A copy of the model with weights that bfloat16 holds: compiled code computes it.

    A process that runs it does without transformers, whose import takes seconds.
    """
    from safetensors.torch import load_file, save_file  # noqa: PLC0415 - most tests do without

    copy = folder.with_name(f"{folder.name}-rounded")
    shutil.copytree(folder, copy)
    weights = load_file(copy / "model.safetensors")
    whole = {name: tensor.bfloat16().to(tensor.dtype) for name, tensor in weights.items()}
    save_file(whole, copy / "model.safetensors", {"format": "pt"})
    return copy


@functools.cache
def _random_head(folder: Path) -> Path:
    head = folder.with_name(f"{folder.name}-head")
    head.mkdir()
    write_head(head, vocab_size=VOCABULARY, max_position_embeddings=CONTEXT)
    return head


def config_of(kind: str, tiny_model: Path) -> EngineConfig:
    if kind.endswith("-host") and not kind.startswith("fake"):
        tiny_model = rounded(tiny_model)
    if kind == "embedded-tiers":
        tiers = {"kv_host_cache_mb": 1, "kv_disk_cache_mb": 8, "kv_disk_cache_dir": str(tiny_model.parent / "kv")}
        return EmbeddedConfig(model=str(tiny_model), kv_transfer="auto", **EMBEDDED | tiers | {"num_blocks": 96})
    if kind.startswith("embedded"):
        how = kind.partition("-")[2]
        options = EMBEDDED
        if how in ("ngram", "suffix", "draft", "eagle3"):
            options = options | {"speculative": how, "speculative_min_match": 1, "speculative_min_speedup": 0}
        if how == "draft":
            options = options | {"speculative_model": str(tiny_model)}  # whose drafts are right
        elif how == "eagle3":
            options = options | {"speculative_model": str(_random_head(tiny_model))}
        return EmbeddedConfig(model=str(tiny_model), kv_transfer="auto", **options)
    if kind.startswith("trtllm"):
        cache = {"tokens_per_block": BLOCK, "event_buffer_max_size": 10_000}
        arguments = {
            "kv_cache_config": cache,
            "max_batch_size": 16,
            "guided_decoding_backend": "xgrammar",
            "enable_iter_perf_stats": True,
        }
        arguments |= {"cache_transceiver_config": {"backend": "DEFAULT"}, "disable_overlap_scheduler": True}
        if kind.endswith("-newest"):
            cache["use_kv_cache_manager_v2"] = True
        return TrtllmConfig(model=str(tiny_model), arguments=arguments, sampling="processors")
    return FakeConfig(
        vocab_size=VOCABULARY,
        context_length=CONTEXT,
        block_size=BLOCK,
        num_blocks=1024,
        max_num_seqs=16,
        token_delay=0.002,
    )


@asynccontextmanager
async def engine_of(kind: str, config: EngineConfig) -> AsyncIterator[Engine]:
    """An engine that has not started yet, closed at the end."""
    version = NEWEST if kind.endswith("-newest") else OLDEST
    with fake_trtllm(version) if kind.startswith("trtllm") else nullcontext():
        async with _engine_of(kind, config) as engine:
            yield engine


@asynccontextmanager
async def _engine_of(kind: str, config: EngineConfig) -> AsyncIterator[Engine]:
    if not kind.endswith("-host"):
        engine: Engine = create_engine(config)
        if kind.endswith("-admission"):
            engine = AdmissionEngine(engine, max_queue_size=100, queue_timeout=30.0)
        try:
            yield engine
        finally:
            await engine.close()
        return
    process = EngineProcess(config)
    await process.start()
    client = EngineClient(process.address, process.wait_failed)
    try:
        yield client
    finally:
        await client.close()
        await process.close()


@dataclass
class Subject:
    """A running engine and the KV events it has sent so far."""

    engine: Engine
    events: list[KvEvent] = field(default_factory=list)

    async def collect_events(self) -> None:
        async for batch in self.engine.kv_events():
            self.events += batch


@dataclass
class Answer:
    request: GenerateRequest
    deltas: list[Delta]


class _Recorded:
    """A stream of deltas that are kept."""

    def __init__(self, stream: AsyncIterator[Delta], deltas: list[Delta]) -> None:
        self._stream, self._deltas = stream, deltas

    def __aiter__(self) -> AsyncIterator[Delta]:
        return self

    async def __anext__(self) -> Delta:
        self._deltas.append(await anext(self._stream))
        return self._deltas[-1]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def recorded(engine: Engine) -> list[Answer]:
    """Keep an engine's answers from now on."""
    answers, original = list[Answer](), engine.generate

    def generate(request: GenerateRequest) -> Any:
        answers.append(Answer(request, []))
        return _Recorded(original(request), answers[-1].deltas)

    engine.generate = generate  # type: ignore[method-assign]
    return answers


async def compare(answers: list[Answer], engine: Engine) -> int:
    """Have another engine give the same whole answers, where a request says all that they depend on; return how many
    these were."""
    compared = 0
    for request, deltas in ((answer.request, answer.deltas) for answer in answers):
        sampling, whole = request.sampling, bool(deltas) and deltas[-1].finish_reason is not None
        if whole and request.handoff is None and (sampling.temperature == 0 or sampling.seed is not None):
            again = await generate(engine, replace(request, request_id=f"again-{next(_ids)}"))
            assert _told(again) == _told(deltas), request
            assert _logprobs(again) == pytest.approx(_logprobs(deltas), abs=1e-3), request
            compared += 1
    return compared


def _told(deltas: list[Delta]) -> tuple[object, ...]:
    """Return what an answer consists of; in which deltas its tokens came does not count."""
    listed = [(entry.token_id, entry.rank) for delta in deltas for entries in delta.logprobs for entry in entries]
    return tokens_of(deltas), listed, deltas[-1].finish_reason, deltas[-1].stop_reason


def _logprobs(deltas: list[Delta]) -> list[float]:
    return [entry.logprob for delta in deltas for entries in delta.logprobs for entry in entries]


def prompt_of(length: int) -> tuple[int, ...]:
    """A prompt that no other test has used, without special ids."""
    return tuple(_rng.randrange(3, VOCABULARY) for _ in range(length))


def request_for(prompt: tuple[int, ...], cache_salt: str = "", **sampling: Any) -> GenerateRequest:
    params = SamplingParams(**{"max_tokens": 8, "temperature": 0.0, "ignore_eos": True, **sampling})
    return GenerateRequest(
        request_id=f"conformance-{next(_ids)}", prompt_token_ids=prompt, sampling=params, cache_salt=cache_salt
    )


def image_of(seed: int, start: int) -> MediaSpan:
    """An image of `ROWS` tokens, alike for equal seeds."""
    values = random.Random(seed)
    data = array("f", (values.gauss(0.0, 1.0) for _ in range(ROWS * HIDDEN))).tobytes()
    return MediaSpan(key=blake3(data).hexdigest(), start=start, length=ROWS, rows=ROWS, dtype="float32", data=data)


def showing(*parts: int | tuple[int, ...], cache_salt: str = "", **sampling: Any) -> GenerateRequest:
    """A request whose prompt consists of token ids, and of images by their seeds."""
    prompt: tuple[int, ...] = ()
    images = []
    for part in parts:
        if isinstance(part, int):
            images.append(image_of(part, len(prompt)))
            part = (IMAGE_TOKEN,) * ROWS
        prompt += part
    return replace(request_for(prompt, cache_salt, **sampling), media=MediaSpans(tuple(images)))


async def collect(stream: AsyncIterator[Delta]) -> list[Delta]:
    return [delta async for delta in stream]


async def generate(engine: Engine, request: GenerateRequest) -> list[Delta]:
    return await collect(engine.generate(request))


def tokens_of(deltas: list[Delta]) -> list[int]:
    return [token for delta in deltas for token in delta.token_ids]


async def idle(engine: Engine, since: IterationStats | None = None, timeout: float = 30.0) -> IterationStats:
    """Return statistics with nothing running, waiting or held, and with some request over since `since`.

    Fails if they do not come in time.
    """
    async with asyncio.timeout(timeout):
        async for stats in engine.stats():
            nothing = not (
                stats.num_active_requests or stats.num_queued_requests or stats.kv_cache_stats.used_num_blocks
            )
            if nothing and (since is None or _over(stats) > _over(since)):
                return stats
    raise AssertionError("the statistics have ended")


def _over(stats: IterationStats) -> int:
    return stats.num_completed_requests + stats.num_aborted_requests


def stored_chain(events: list[KvEvent], prompt: tuple[int, ...]) -> list[int]:
    """Return the hashes under which the complete blocks of `prompt` were stored, each below the one before.

    The list is empty until all are stored.
    """
    stored: dict[tuple[int | None, tuple[int, ...]], int] = {}
    for event in events:
        if isinstance(event.data, Stored):
            parent = event.data.parent_hash
            for block in event.data.blocks:
                stored[parent, tuple(token.token_id for token in block.tokens)] = block.block_hash
                parent = block.block_hash
    chain: list[int] = []
    for start in range(0, len(prompt) - BLOCK + 1, BLOCK):
        block_hash = stored.get((chain[-1] if chain else None, prompt[start : start + BLOCK]))
        if block_hash is None:
            return []
        chain.append(block_hash)
    return chain


async def exhaust(stats: AsyncIterator[IterationStats]) -> None:
    async for _ in stats:
        pass
