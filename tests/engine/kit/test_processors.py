"""The sample logits processors on every engine that has logits, and `Hello world!` through the whole server."""

import contextlib
import json
import pickle
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import httpx
import msgspec
import openai
import pytest
import tokenizers
import torch

from engine.config import EmbeddedConfig, EngineConfig, TrtllmConfig
from engine.errors import EngineFailure, InvalidRequest
from engine.kit.logits import create, unregister
from engine.kit.processors import ForcedSequence, HelloWorld, ProcessorConfig, Temperature, register_all
from multimodal.text.tokenizer import Tokenizer, byte_tokenizer
from server.compose.config import default_processors, engine_config, spelled
from server.settings import Settings
from tests.support.engine_cases import (
    FAKE_TRTLLM,
    VOCABULARY,
    config_of,
    engine_of,
    generate,
    prompt_of,
    request_for,
    tokens_of,
)
from tests.support.environment import python_path
from tests.support.servers import ServerProcess, serving

EOS = 2
FORCED = ProcessorConfig("forced", "forced_sequence", {"token_ids": [9, 7, 7], "eos_token_id": EOS})
BEYOND = ProcessorConfig("beyond", "forced_sequence", {"token_ids": [VOCABULARY], "eos_token_id": VOCABULARY})
COLD = ProcessorConfig("cold", "temperature", {"temperature": 1e-4})
CONFIGS = (FORCED, BEYOND, COLD)
TEXT = "Hello world!"


@pytest.fixture(autouse=True)
def registry() -> Iterator[None]:
    """Engines in this process register here."""
    yield
    for config in CONFIGS:
        with contextlib.suppress(KeyError):
            unregister(config.name)


def drawn(processor: Any, steps: int, vocabulary: int = 12) -> list[int]:
    tokens: list[int] = []
    for _ in range(steps):
        logits = torch.arange(vocabulary).float()
        processor(tokens, logits)
        tokens.append(int(logits.argmax()))
    return tokens


def test_a_forced_sequence_ends_and_stays_ended() -> None:
    assert drawn(ForcedSequence([5, 6, 5], EOS), 5) == [5, 6, 5, EOS, EOS]
    assert drawn(HelloWorld([3], EOS), 2) == [3, EOS]
    logits = torch.zeros(12)
    ForcedSequence([], EOS)((), logits)
    assert logits.softmax(0)[EOS] == 1, "no other token can be drawn"


def test_a_temperature_divides() -> None:
    logits = torch.tensor([1.0, -2.0, -torch.inf])
    Temperature(0.5)((), logits)
    assert logits.tolist() == [2.0, -4.0, -torch.inf]


@pytest.mark.parametrize("temperature", [0.0, -1.0, float("inf"), float("nan")])
def test_a_temperature_is_above_zero(temperature: float) -> None:
    with pytest.raises(ValueError, match="temperature must be above 0"):
        Temperature(temperature)


def test_configurations_are_values_that_travel_and_make_fresh_processors() -> None:
    for config in CONFIGS:
        assert pickle.loads(pickle.dumps(config)) == config  # noqa: S301 - our own bytes
    sent = EmbeddedConfig(model="m", processors=CONFIGS)
    arrived = msgspec.json.decode(msgspec.json.encode(sent), type=EngineConfig)
    assert arrived == sent
    assert drawn(FORCED(), 4) == drawn(FORCED(), 4) == [9, 7, 7, EOS]


def test_registering_again_is_no_conflict_and_another_meaning_is() -> None:
    register_all(CONFIGS)
    register_all(CONFIGS)
    assert isinstance(create("cold"), Temperature)
    with pytest.raises(ValueError, match="'cold' is registered already"):
        register_all([ProcessorConfig("cold", "temperature", {"temperature": 2.0})])


@pytest.mark.parametrize("arguments", [{}, {"temperature": 0}, {"token_ids": []}])
def test_wrong_arguments_stop_the_start(arguments: dict[str, Any]) -> None:
    with pytest.raises((TypeError, ValueError)):
        register_all([ProcessorConfig("wrong", "temperature", arguments)])
    with pytest.raises(InvalidRequest):
        create("wrong")


@pytest.mark.parametrize("kind", ["embedded", "trtllm"])  # hosted: `hello_server`
async def test_processors_of_the_configuration_work_where_the_engine_runs(kind: str, tiny_model: Path) -> None:
    base = config_of(kind, tiny_model)
    assert isinstance(base, EmbeddedConfig | TrtllmConfig)
    prompt = prompt_of(20)
    async with engine_of(kind, msgspec.structs.replace(base, processors=CONFIGS)) as engine:
        await engine.start()
        plain = tokens_of(await generate(engine, request_for(prompt)))
        forced = await generate(engine, request_for(prompt, processors=("forced",), ignore_eos=False))
        assert tokens_of(forced) == [9, 7, 7, EOS]
        assert forced[-1].finish_reason == "stop"
        assert tokens_of(await generate(engine, request_for(prompt, processors=("forced",)))) == [9, 7, 7, *[EOS] * 5]
        assert tokens_of(await generate(engine, request_for(prompt, processors=("beyond",)))) == plain, (
            "one that fails changes nothing"
        )
        hot = {"temperature": 1.0, "seed": 3}
        assert tokens_of(await generate(engine, request_for(prompt, **hot))) != plain
        assert tokens_of(await generate(engine, request_for(prompt, processors=("cold",), **hot))) == plain


def test_the_setting_has_the_references_name_too_and_names_the_processor(
    monkeypatch: pytest.MonkeyPatch, smollm2: Path
) -> None:
    assert default_processors(Settings()) == ()
    monkeypatch.setenv("DYN_ENABLE_TEST_LOGITS_PROCESSOR", "1")
    settings = Settings()
    config = engine_config(settings, smollm2)
    assert isinstance(config, EmbeddedConfig)
    assert default_processors(settings) == tuple(processor.name for processor in config.processors) != ()
    ids = config.processors[0].arguments["token_ids"]
    assert Tokenizer.load(smollm2).decode(ids) == TEXT and len(ids) < len(TEXT)
    assert engine_config(settings.model_copy(update={"enable_test_logits_processor": False}), smollm2) != config


def test_any_tokenizer_can_spell_it(smollm2: Path) -> None:
    """Also one that begins every text with a space of its own."""
    words = {word: token for token, word in enumerate(["▁Hello", "Hell", "Hello", "o", "▁world", "world", "!"])}
    spaced = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=words, merges=[]))
    spaced.decoder = tokenizers.decoders.Metaspace()
    for tokenizer in (byte_tokenizer(), Tokenizer.load(smollm2), Tokenizer(spaced, {})):
        ids = spelled(TEXT.encode(), tokenizer)
        assert b"".join(map(tokenizer.bytes_of, ids)) == TEXT.encode()
        assert not tokenizer.special_ids & set(ids)
    assert ids == [words["Hello"], words["▁world"], words["!"]]
    with pytest.raises(EngineFailure, match="no token of the model begins '\\?'"):
        spelled(b"Hello?", Tokenizer(spaced, {}))


EMBEDDED = {"dtype": "float32", "device": "cpu", "threads": 1, "kv_cache_memory_mb": 128}
ON_TENSORRT_LLM = {
    "PYTHONPATH": python_path(FAKE_TRTLLM),
    "FAKE_TRTLLM_ENGINE": "embedded",
    "FAKE_TRTLLM_CONFIG": json.dumps(EMBEDDED),
}


def hello_server(model: Path, engine: str, environment: dict[str, str]) -> AbstractContextManager[ServerProcess]:
    flags = (
        "--engine",
        engine,
        "--model",
        str(model),
        "--served-model-name",
        "smol",
        "--enable-test-logits-processor",
        "true",
        *(("--trtllm-sampling", "processors") if engine == "trtllm" else ()),
    )
    return serving(*flags, environment=environment)


def test_every_answer_on_tensorrt_llm_is_hello_world(smollm2: Path) -> None:
    with hello_server(smollm2, "trtllm", ON_TENSORRT_LLM) as server:
        _expect_hello(server)
        assert "every answer is 'Hello world!'" in server.log


def test_every_answer_of_the_embedded_engine_is_hello_world_after_a_restart_too(smollm2: Path) -> None:
    with hello_server(smollm2, "embedded", {"THREADS": "1"}) as server:
        _expect_hello(server)
        server.child("engine.process.host").kill()
        server.wait_metric("trellis_engine_restarts_total", 1)
        deadline = time.monotonic() + 60
        while httpx.get(f"{server.url}/health/ready").status_code != 200:
            assert time.monotonic() < deadline, server.log
            time.sleep(0.02)
        _expect_hello(server)


def _expect_hello(server: ServerProcess) -> None:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        _expect_answers(client)


def _expect_answers(client: openai.OpenAI) -> None:
    messages: Any = [{"role": "user", "content": "What is the capital of France?"}]
    for fields in ({}, {"temperature": 0}, {"temperature": 2, "seed": 1}, {"n": 2}, {"max_tokens": 50, "top_p": 0.5}):
        answer = client.chat.completions.create(model="smol", messages=messages, **fields)
        assert {(choice.message.content, choice.finish_reason) for choice in answer.choices} == {(TEXT, "stop")}
    stream = client.chat.completions.create(model="smol", messages=messages, stream=True)
    chunks = [chunk.choices[0] for chunk in stream]
    pieces = [chunk.delta.content for chunk in chunks if chunk.delta.content]
    assert "".join(pieces) == TEXT and chunks[-1].finish_reason == "stop"
    assert client.completions.create(model="smol", prompt="Once upon a time").choices[0].text == TEXT
    cut = client.chat.completions.create(model="smol", messages=messages, max_tokens=1).choices[0]
    assert cut.finish_reason == "length" and TEXT.startswith(cut.message.content or "?")
