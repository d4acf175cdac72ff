"""/v1/audio/transcriptions and /v1/audio/translations, by a tiny Whisper model in this process."""

import asyncio
import io
import json
import wave
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import pytest_asyncio
from openai import AsyncOpenAI, BadRequestError, NotFoundError

from engine.embedded.whisper import reader
from engine.errors import InvalidRequest
from multimodal.speech import transcriber
from server.app import create_app
from server.settings import Settings
from tests.support.servers import CHAT, application
from tests.support.whisper_models import build_whisper, speech

pytestmark = pytest.mark.asyncio(loop_scope="module")
NAME = "tiny-whisper"
PATH = "/v1/audio/transcriptions"


class ReaderHere(reader.SpeechReader):
    """The reader without a process of its own: `tests/engine/embedded/whisper/test_reader.py` is about that."""

    async def read(self, data: Any) -> Any:
        return await super().read(reader.AudioFile(data))


def wav(seconds: float, seed: int = 0) -> bytes:
    file = io.BytesIO()
    with wave.open(file, "wb") as writer:
        writer.setnchannels(1)
        writer.setsampwidth(2)
        writer.setframerate(16000)
        writer.writeframes((speech(seconds, seed) * 32767).astype("<i2").tobytes())
    return file.getvalue()


@asynccontextmanager
async def serving(folder: Path, **settings: Any) -> AsyncIterator[tuple[httpx.AsyncClient, dict[str, Any]]]:
    asked = {"served_model_name": NAME, "threads": 1, "api_processes": 1, "max_transcription_seconds": 20} | settings
    app = create_app(Settings(model=str(folder), engine_process=False, **asked))
    async with app.router.lifespan_context(app) as state:
        assert state is not None

        async def with_state(scope: Any, receive: Any, send: Any) -> None:
            await app({**scope, "state": dict(state)}, receive, send)

        async with httpx.AsyncClient(transport=httpx.ASGITransport(with_state), base_url="http://test") as client:
            while not state["replica"].ready:
                assert state["replica"].failure is None, state["replica"].failure
                await asyncio.sleep(0.005)
            yield client, dict(state)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[httpx.AsyncClient]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reader, "HostedReader", ReaderHere)
        for name, value in (("LEAST_LOGPROB", -100.0), ("MOST_COMPRESSION", 100.0)):  # random weights write nonsense
            patch.setattr(transcriber, name, value)
        async with serving(build_whisper(tmp_path_factory.mktemp("whisper")), strict_fields=True) as (client, _):
            yield client


def sdk(client: httpx.AsyncClient) -> AsyncOpenAI:
    return AsyncOpenAI(base_url="http://test/v1", api_key="none", http_client=client, max_retries=0)


async def test_all_formats_tell_the_same(client: httpx.AsyncClient) -> None:
    """By OpenAI's SDK: five seconds are several windows of two."""
    create = sdk(client).audio.transcriptions.create
    ask: Any = {"model": NAME, "file": ("speech.wav", wav(5.0)), "language": "de", "temperature": 0.0}
    plain = await create(**ask)
    verbose = await create(**ask, response_format="verbose_json", timestamp_granularities=["segment", "word"])
    assert plain.text == verbose.text != ""
    assert plain.usage is not None and plain.usage.type == "duration" and plain.usage.seconds == 5
    assert (verbose.language, verbose.duration) == ("german", 5.0)
    assert verbose.segments and verbose.words
    assert "".join(segment.text for segment in verbose.segments).strip() == verbose.text
    assert [segment.id for segment in verbose.segments] == list(range(len(verbose.segments)))
    assert len({segment.seek for segment in verbose.segments}) > 1, "windows follow each other"
    for segment in verbose.segments:
        assert 0 <= segment.start <= segment.end <= 7 and segment.tokens and 0 <= segment.no_speech_prob <= 1
        assert segment.avg_logprob < 0 < segment.compression_ratio and segment.temperature in {0, 0.2, 0.4, 0.6, 0.8, 1}
    squeezed = "".join(verbose.text.split())
    assert "".join("".join(word.word.split()) for word in verbose.words) == squeezed
    assert (await create(**ask, response_format="text")).strip() == verbose.text
    srt, vtt = await create(**ask, response_format="srt"), await create(**ask, response_format="vtt")
    assert srt.startswith("1\n00:00:0") and vtt.startswith("WEBVTT\n\n00:00:0")
    assert srt.count(" --> ") == vtt.count(" --> ") == len(verbose.segments)


async def test_a_stream_is_the_text_window_by_window(client: httpx.AsyncClient) -> None:
    create = sdk(client).audio.transcriptions.create
    ask: Any = {"model": NAME, "file": ("speech.wav", wav(5.0)), "language": "de"}
    whole = await create(**ask)
    events = [event async for event in await create(**ask, stream=True)]
    *deltas, done = events
    assert done.type == "transcript.text.done" and done.usage.input_token_details.audio_tokens >= 250
    assert len(deltas) > 1 and {event.type for event in deltas} == {"transcript.text.delta"}
    assert "".join(event.delta for event in deltas).strip() == done.text.strip() == whole.text
    raw = await client.post(PATH, data={"model": NAME, "stream": "true"}, files={"file": ("a.wav", wav(1.0))})
    assert raw.headers["content-type"].startswith("text/event-stream") and raw.text.endswith("data: [DONE]\n\n")


async def test_translations_are_english(client: httpx.AsyncClient) -> None:
    fields = {"model": NAME, "prompt": "Hello", "response_format": "verbose_json"}
    found = await client.post("/v1/audio/translations", data=fields, files={"file": ("speech.wav", wav(1.5))})
    answer = found.json()
    assert (answer["task"], answer["language"], answer["duration"]) == ("translate", "english", 1.5)
    assert answer["text"] and answer["segments"]


async def test_requests_take_turns(client: httpx.AsyncClient) -> None:
    """Eight at once give what each gives alone."""
    create = sdk(client).audio.transcriptions.create
    files = [("speech.wav", wav(2.5, seed)) for seed in range(4)]
    alone = [(await create(model=NAME, file=file, language="en", response_format="text")) for file in files]
    both = [create(model=NAME, file=file, language="en", response_format="text") for file in files * 2]
    assert await asyncio.gather(*both) == [*alone, *alone]


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"language": "tlh"}, "language", None),
        ({"temperature": "1.5"}, "temperature", None),
        ({"temperature": "warm"}, "temperature", None),
        ({"response_format": "diarized_json"}, "response_format", None),
        ({"timestamp_granularities[]": "word"}, "timestamp_granularities", None),
        ({"timestamp_granularities[]": "day", "response_format": "verbose_json"}, "timestamp_granularities", None),
        ({"stream": "true", "response_format": "srt"}, "stream", "unsupported_parameter"),
        ({"include[]": "logprobs"}, "include", "unsupported_parameter"),
        ({"chunking_strategy": "auto"}, "chunking_strategy", "unsupported_parameter"),
        ({"known_speaker_names[]": "agent"}, "known_speaker_names", "unsupported_parameter"),
        ({"colour": "red"}, "colour", "unknown_parameter"),
    ],
)
async def test_invalid_fields_are_refused_by_name(
    client: httpx.AsyncClient, fields: dict[str, str], param: str, code: str | None
) -> None:
    found = await client.post(PATH, data={"model": NAME, **fields}, files={"file": ("a.wav", wav(0.5))})
    assert found.status_code == 400, found.text
    error = found.json()["error"]
    assert (error["type"], error["param"], error["code"]) == ("invalid_request_error", param, code)
    assert f"'{param}" in error["message"]


async def test_files_that_cannot_be_transcribed_are_refused(client: httpx.AsyncClient) -> None:
    create = sdk(client).audio.transcriptions.create
    for data, said in ((b"MZ no audio", "cannot be read"), (wav(21.0), "longer than 20"), (wav(0.05), "shorter than")):
        with pytest.raises(BadRequestError, match=said) as raised:
            await create(model=NAME, file=("speech.wav", data))
        assert (raised.value.param, raised.value.code) == ("file", "invalid_audio")
    without = await client.post(PATH, files={"model": (None, NAME)})
    assert without.json()["error"]["param"] == "file"
    assert (await client.post(PATH, json={"model": NAME})).status_code == 415
    with pytest.raises(NotFoundError):
        await create(model="other", file=("speech.wav", wav(0.5)))


async def test_other_routes_say_what_the_model_does(client: httpx.AsyncClient) -> None:
    for path, body in (("chat/completions", CHAT), ("completions", {"prompt": "a"}), ("responses", {"input": "a"})):
        found = await client.post(f"/v1/{path}", json={"model": NAME, **body})
        assert found.status_code == 404 and "/v1/audio/transcriptions" in found.json()["error"]["message"], path
    metrics = (await client.get("/metrics")).text
    assert 'trtllm_transcribed_audio_seconds_total{model_name="tiny-whisper"}' in metrics
    document = (await client.get("/openapi.json")).json()
    content = document["paths"][PATH]["post"]["requestBody"]["content"]
    assert content["multipart/form-data"]["schema"]["$ref"].endswith("/TranscriptionRequest")


async def test_a_model_of_chats_transcribes_nothing() -> None:
    async with application() as (client, _):
        found = await client.post(PATH, data={"model": "fake"}, files={"file": ("a.wav", b"RIFF")})
    assert found.status_code == 404
    assert "does not transcribe audio" in json.loads(found.content)["error"]["message"]


async def test_the_reader_refuses_what_is_no_audio() -> None:
    here = ReaderHere(reader.ReaderConfig(bins=80, frames=200, max_seconds=5, timeout_seconds=5))
    with pytest.raises(InvalidRequest, match="cannot be read"):
        await here.read(b"text")
    recording = await here.read(wav(2.5))
    assert (recording.frames, len(recording.window(200, 200)) // 4) == (250, 80 * 200)
    last = np.frombuffer(recording.window(200, 200), np.float32).reshape(80, 200)
    assert last[:, :50].any() and not last[:, 50:].any()
