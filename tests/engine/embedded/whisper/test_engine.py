"""The engine of Whisper models: its tokens are those of transformers, alone and in a batch."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import WhisperForConditionalGeneration
from transformers.models.whisper.generation_whisper import _dynamic_time_warping

from engine.config import EmbeddedConfig
from engine.create import create_engine
from engine.embedded.whisper import alignment
from engine.embedded.whisper.engine import WhisperEngine
from engine.errors import ContextOverflow, EngineNotReady, InvalidRequest, NotSupported
from engine.kit.log_mel import log_mel
from engine.media import Speech
from engine.sleep import TAGS
from engine.types import Delta, GenerateRequest, SamplingParams
from tests.support.engine_cases import idle
from tests.support.whisper_models import FIRST_TIMESTAMP, LANGUAGES, TOKENS, WINDOW_SECONDS, build_whisper, speech

START, END, TEXT = (TOKENS[f"<|{name}|>"] for name in ("startoftranscript", "endoftext", "notimestamps"))
GERMAN = (START, TOKENS["<|de|>"], TOKENS["<|transcribe|>"])
CONTEXT = 64


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_whisper(tmp_path_factory.mktemp("whisper"))


@pytest.fixture(scope="module")
def reference(folder: Path) -> Any:
    return WhisperForConditionalGeneration.from_pretrained(folder, dtype=torch.float32).eval()


def features_of(seed: int) -> np.ndarray:
    return log_mel(speech(WINDOW_SECONDS, seed), 80)


def window(seed: int, align: bool = False) -> Speech:
    return Speech(key=str(seed), data=features_of(seed).tobytes(), frames=100 * WINDOW_SECONDS, align=align)


def request_for(prompt: Sequence[int], media: Any, name: str = "a", **sampling: Any) -> GenerateRequest:
    sampling = {"max_tokens": CONTEXT - len(prompt), "temperature": 0.0, "logprobs": 0} | sampling
    return GenerateRequest(
        request_id=name, prompt_token_ids=tuple(prompt), sampling=SamplingParams(**sampling), media=media
    )


@asynccontextmanager
async def engine_of(folder: Path, **config: Any) -> AsyncIterator[WhisperEngine]:
    engine = create_engine(EmbeddedConfig(model=str(folder), threads=1, **config))
    assert isinstance(engine, WhisperEngine)
    try:
        await engine.start()
        yield engine
    finally:
        await engine.close()


async def collect(engine: WhisperEngine, request: GenerateRequest) -> Delta:
    """Return all deltas of a request as one."""
    async with aclosing(engine.generate(request)) as stream:
        deltas = [delta async for delta in stream]
    return Delta(
        tuple(token for delta in deltas for token in delta.token_ids),
        tuple(entry for delta in deltas for entry in delta.logprobs),
        deltas[-1].finish_reason,
        prompt=deltas[0].prompt,
    )


def generated(reference: Any, prompt: Sequence[int], seed: int, **how: Any) -> list[int]:
    """Return the tokens that transformers generates for a window behind a prompt, which `how` describes, without the
    end of sequence."""
    features = torch.from_numpy(features_of(seed))[None]
    tokens: list[int] = reference.generate(features, force_unique_generate_call=True, **how)[0].tolist()
    assert tokens[: len(prompt)] == [*prompt]
    tokens = tokens[len(prompt) :]
    return tokens[: tokens.index(END)] if END in tokens else tokens


async def test_tokens_are_those_of_transformers_alone_and_in_a_batch(folder: Path, reference: Any) -> None:
    """With and without timestamps, behind prompts of several lengths, more requests than places."""
    words = [ord(letter) - 33 for letter in "hello"]
    cases = {
        (*GERMAN, TEXT): {"language": "de", "task": "transcribe"},
        GERMAN: {"language": "de", "task": "transcribe", "return_timestamps": True},
        (START, TOKENS["<|ja|>"], TOKENS["<|translate|>"]): {
            "language": "ja", "task": "translate", "return_timestamps": True,
        },
        (TOKENS["<|startofprev|>"], *words, *GERMAN, TEXT): {
            "language": "de", "task": "transcribe", "prompt_ids": torch.tensor([TOKENS["<|startofprev|>"], *words]),
        },
    }  # fmt: skip
    asked = [(prompt, seed) for prompt in cases for seed in range(2)]
    async with engine_of(folder, max_batch_size=5) as engine:
        alone = [await collect(engine, request_for(prompt, window(seed))) for prompt, seed in asked]
        together = await asyncio.gather(
            *(collect(engine, request_for(*one, name=str(place))) for place, one in enumerate(
                (prompt, window(seed)) for prompt, seed in asked
            ))
        )  # fmt: skip
        stats = await idle(engine)
    assert stats.num_completed_requests == 2 * len(asked)
    lengths = set()
    for (prompt, seed), one, other in zip(asked, alone, together, strict=True):
        wanted = generated(reference, prompt, seed, **cases[prompt])
        found = [token for token in one.token_ids if token != END]
        assert found == wanted[: len(found)]
        assert len(found) == len(wanted) or one.finish_reason == "length"
        assert one.token_ids == other.token_ids
        assert one.prompt is not None and other.prompt is not None
        assert one.prompt.no_speech == pytest.approx(other.prompt.no_speech, rel=1e-3)
        lengths.add(len(found))
        if TEXT not in prompt:
            timed = [token for token in one.token_ids if token >= FIRST_TIMESTAMP]
            assert timed and timed == sorted(timed)
    assert len(lengths) > 1, "sequences of a batch end at different times"


async def test_the_language_and_silence_are_those_of_transformers(folder: Path, reference: Any) -> None:
    async with engine_of(folder) as engine:
        for seed in range(3):
            found = await collect(engine, request_for((START,), window(seed), max_tokens=1))
            features = torch.from_numpy(features_of(seed))[None]
            with torch.inference_mode():
                logits = reference(features, decoder_input_ids=torch.tensor([[START]])).logits[0, 0]
            assert found.token_ids == tuple(reference.detect_language(features).tolist())
            assert found.token_ids[0] in {TOKENS[f"<|{code}|>"] for code in LANGUAGES}
            assert found.prompt is not None
            silence = float(logits.softmax(-1)[TOKENS["<|nospeech|>"]])
            assert found.prompt.no_speech == pytest.approx(silence, rel=1e-3)


async def test_log_probabilities_are_those_of_transformers(folder: Path, reference: Any) -> None:
    features = torch.from_numpy(features_of(1))[None]
    made = reference.generate(
        features, language="de", task="transcribe", return_dict_in_generate=True, output_scores=True,
        force_unique_generate_call=True,
    )  # fmt: skip
    async with engine_of(folder) as engine:
        found = await collect(engine, request_for((*GERMAN, TEXT), window(1)))
    for token, (entry,), scores in zip(found.token_ids, found.logprobs, made.scores, strict=False):
        assert entry.logprob == pytest.approx(float(scores[0].log_softmax(-1)[token]), abs=1e-3)


async def test_a_seed_repeats_what_a_temperature_draws(folder: Path) -> None:
    async with engine_of(folder) as engine:
        draw = {"temperature": 1.0, "max_tokens": 20}
        first, same, other = [
            (await collect(engine, request_for((*GERMAN, TEXT), window(0), seed=seed, **draw))).token_ids
            for seed in (7, 7, 8)
        ]
    assert first == same != other
    assert not set(first) & {*range(TOKENS["<|startoftranscript|>"], FIRST_TIMESTAMP)}, "never generated"


async def test_times_of_tokens_equal_those_of_a_plain_algorithm() -> None:
    """OpenAI's way, cell by cell, as transformers has it."""
    noise = np.random.default_rng(3)
    for shape in ((5, 40), (1, 7), (9, 9), (6, 3)):
        cost = noise.normal(size=shape)
        rows, columns = _dynamic_time_warping(cost)
        starts = np.pad(np.diff(rows), (1, 0), constant_values=1).astype(bool)
        assert alignment.first_positions(cost) == columns[starts].tolist()


async def test_prompts_are_aligned(folder: Path) -> None:
    prompt = (*GERMAN, TEXT, 10, 20, 30, END)
    async with engine_of(folder) as engine:
        found = await collect(engine, request_for(prompt, window(0, align=True), max_tokens=0))
    assert found.finish_reason == "length" and not found.token_ids
    assert found.prompt is not None
    spoken = found.prompt.spoken
    assert len(spoken) == 4 and list(spoken) == sorted(spoken) and 0 <= spoken[0] <= spoken[-1] <= WINDOW_SECONDS


async def test_requests_that_leave_make_room(folder: Path) -> None:
    """One that is aborted while it runs, and one while it waits, leave the others' tokens as they are."""
    prompt = (*GERMAN, TEXT)
    async with engine_of(folder, max_batch_size=2) as engine:
        assert engine.info.max_num_seqs == 2
        wanted = (await collect(engine, request_for(prompt, window(2)))).token_ids
        streams = [engine.generate(request_for(prompt, window(seed), name=str(seed))) for seed in range(4)]
        await anext(streams[0])
        streams[0].close()
        streams[3].close()
        found = [token async for delta in streams[2] for token in delta.token_ids]
        assert tuple(found) == wanted
        streams[1].close()
        stats = await idle(engine)
        assert (stats.num_active_requests, stats.num_queued_requests) == (0, 0)
        assert stats.num_aborted_requests >= 2


async def test_requests_other_than_transcription_are_refused(folder: Path) -> None:
    async with engine_of(folder) as engine:
        with pytest.raises(InvalidRequest, match="transcribes speech and does nothing else"):
            await collect(engine, request_for((1, 2), None))
        with pytest.raises(InvalidRequest, match="features of a window have"):
            await collect(engine, request_for(GERMAN, Speech(key="a", data=b"1234", frames=1)))
        with pytest.raises(ContextOverflow):
            await collect(engine, request_for(GERMAN, window(0), max_tokens=CONTEXT))
        with pytest.raises(NotSupported):
            await engine.start_profile()
    with pytest.raises(EngineNotReady):
        await collect(engine, request_for(GERMAN, window(0)))


async def test_the_engine_computes_the_same_after_a_sleep(folder: Path) -> None:
    prompt = (*GERMAN, TEXT)
    async with engine_of(folder) as engine:
        wanted = (await collect(engine, request_for(prompt, window(0)))).token_ids
        await engine.reset_prefix_cache()
        for tags in (TAGS, ("weights",), ("kv_cache",)):
            await engine.release_memory(tags, 2)
            await engine.resume_memory(tags)
            assert (await collect(engine, request_for(prompt, window(0)))).token_ids == wanted
