"""Chats with recordings: encoded here or by an encode replica, answers equal those of transformers."""

import base64
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import soundfile
import torch
from tokenizers import Tokenizer
from transformers import AudioFlamingo3ForConditionalGeneration, WhisperFeatureExtractor

from multimodal.text.templates import ChatTemplate
from tests.support.audio_models import TOKENS, build_audio_flamingo
from tests.support.engine_cases import rounded
from tests.support.servers import ServerProcess
from tests.support.sounds import sound, sound_bytes

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
SECRET = "between the replicas"
QUESTION = {"type": "text", "text": "What is said?"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return rounded(build_audio_flamingo(tmp_path_factory.mktemp("flamingo")))


@pytest.fixture(scope="module")
def servers(folder: Path) -> Iterator[list[ServerProcess]]:
    """A server that encodes by itself, and one that asks an encode replica."""
    common = ("--engine", "embedded", "--engine-process", "false", "--model", str(folder),
              "--served-model-name", "tiny", "--dtype", "float32", "--threads", "1", "--kv-cache-memory-mb", "16",
              "--internal-secret", SECRET, "--max-audio-seconds", "20")  # fmt: skip
    started = [ServerProcess(*common), ServerProcess(*common, "--disaggregation-mode", "encode")]
    try:
        started[1].wait_ready(200)
        started.append(ServerProcess(*common, "--encode-urls", started[1].url, "--encode-fallback", "refuse"))
        for server in started:
            server.wait_ready(200)
        yield [started[0], started[2]]
        assert started[1].metric("trtllm_encoded_images_total") > 0
    finally:
        for server in started:
            server.process.terminate()
        for server in started:
            server.wait(20)


def chat(server: ServerProcess, *parts: dict[str, Any]) -> httpx.Response:
    body = {"model": "tiny", "temperature": 0, "max_tokens": 12, "return_token_ids": True, "logprobs": True}
    messages = [{"role": "user", "content": [*parts, QUESTION]}]
    return httpx.post(f"{server.url}/v1/chat/completions", json={**body, "messages": messages}, timeout=60)


def spoken(data: bytes, form: str) -> dict[str, Any]:
    return {"type": "input_audio", "input_audio": {"data": base64.b64encode(data).decode(), "format": form}}


def expected(folder: Path, *recordings: np.ndarray) -> list[int]:
    """What transformers generates, its logits those of tied embeddings."""
    model = AudioFlamingo3ForConditionalGeneration.from_pretrained(folder).eval()
    model.lm_head.weight = model.get_input_embeddings().weight
    extractor = WhisperFeatureExtractor.from_pretrained(folder)
    windows = [
        (samples.astype(np.float32) / 32768)[at : at + extractor.n_samples]
        for samples in recordings
        for at in range(0, len(samples), extractor.n_samples)
    ]
    inputs = extractor(windows, sampling_rate=16_000, return_attention_mask=True, return_tensors="pt")
    frames = inputs["attention_mask"].sum(-1)
    counts = iter((((frames - 1) // 2 + 1) // 2).tolist())
    rows = [sum(next(counts) for _ in range(0, len(samples), extractor.n_samples)) for samples in recordings]
    template = ChatTemplate((folder / "chat_template.jinja").read_text(), {})
    parts = [*({"type": "audio"} for _ in recordings), QUESTION]
    first, *rest = template.render([{"role": "user", "content": parts}], add_generation_prompt=True).split("<sound>")
    text = first + "".join("<sound>" * count + part for count, part in zip(rows, rest, strict=True))
    ids = torch.tensor([Tokenizer.from_file(str(folder / "tokenizer.json")).encode(text).ids])
    assert int((ids == TOKENS["<sound>"]).sum()) == sum(rows)
    made = model.generate(
        input_ids=ids, attention_mask=torch.ones_like(ids), input_features=inputs["input_features"],
        input_features_mask=inputs["attention_mask"], max_new_tokens=12, do_sample=False, pad_token_id=0,
    )  # fmt: skip
    return made[0, ids.shape[1] :].tolist()


def test_answers_equal_those_of_transformers_wherever_audio_is_encoded(
    servers: list[ServerProcess], folder: Path
) -> None:
    flac = io.BytesIO()
    soundfile.write(flac, sound(0.6, 2), 16_000, format="FLAC")
    parts = [spoken(sound_bytes(4.3, 1), "wav"), spoken(flac.getvalue(), "flac")]
    wanted = expected(folder, sound(4.3, 1), sound(0.6, 2))
    for server in servers:
        counted = ("trtllm_embedding_cache_hits_total", "trtllm_request_type_audio_total")
        before = [server.metric(name) for name in counted]
        answers = [chat(server, *parts), chat(server, *parts)]
        for answer in answers:
            assert answer.status_code == 200, answer.text
            assert answer.json()["choices"][0]["token_ids"] == wanted
            assert answer.json()["usage"]["prompt_tokens_details"]["audio_tokens"] == 107 + 15
        assert answers[1].json()["usage"]["prompt_tokens_details"]["cached_tokens"] > 100
        assert [server.metric(name) - old for name, old in zip(counted, before, strict=True)] == [2, 2]
    other = chat(servers[0], parts[1], parts[0]).json()["choices"][0]["token_ids"]
    assert other != wanted, "recordings keep their order"


def test_each_part_is_refused_by_its_name(servers: list[ServerProcess]) -> None:
    good = spoken(sound_bytes(0.5), "wav")
    url = f"data:audio/mpeg;base64,{base64.b64encode(b'ID3' + bytes(50)).decode()}"
    cases = (
        (spoken(b"nothing", "wav"), "input_audio", 415, "Supported formats are WAV, FLAC"),
        (spoken(sound_bytes(21), "wav"), "input_audio", 400, "21 seconds"),
        (spoken(sound_bytes(0.01), "ogg"), "input_audio", 400, "too short"),
        ({"type": "audio_url", "audio_url": {"url": url}}, "audio_url", 400, "cannot be read"),
        ({"type": "audio_url", "audio_url": "http://169.254.169.254/a.wav"}, "audio_url", 400, "may fetch from"),
        ({"type": "image_url", "image_url": "http://a.test/a.png"}, "image_url", 400, "no image"),
    )
    for server in servers:
        for part, field, status, said in cases:
            answer = chat(server, good, part)
            error = answer.json()["error"]
            assert answer.status_code == status and said in error["message"], error
            assert error["param"] == f"messages.0.content.1.{field}"
