"""Transcripts: windows as in transformers' long-form generation, repeated attempts, and words."""

import threading
from collections.abc import Callable
from copy import copy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from engine.base import DeltaStream
from engine.checkpoints.whisper import read_sizes, read_tokens
from engine.errors import QueueFull
from engine.media import Speech
from engine.types import Delta, GenerateRequest, Logprob, PromptReport
from multimodal.errors import DeadlineExceeded, RequestError
from multimodal.metrics import GenerationMetrics
from multimodal.request import Limits
from multimodal.speech import transcriber as speech_module
from multimodal.speech.languages import code_of
from multimodal.speech.transcriber import Segment, SpeechAsk, Transcriber
from multimodal.speech.words import words_of
from multimodal.text.tokenizer import Tokenizer
from tests.support.whisper_models import FIRST_TIMESTAMP, TOKENS, build_whisper, byte_level

TOKENIZER = Tokenizer(byte_level(), {})
END, TEXT, START = (TOKENS[f"<|{name}|>"] for name in ("endoftext", "notimestamps", "startoftranscript"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_whisper(tmp_path_factory.mktemp("whisper"))


@dataclass
class Recording:
    """A recording of so many seconds, in windows of 2."""

    seconds: float
    data: bytes = bytes(100)
    silence: int = 0
    """Frames at the beginning without any sound."""

    @property
    def frames(self) -> int:
        return int(100 * self.seconds)

    def window(self, start: int, frames: int) -> bytes:
        return f"{start}+{frames}".encode()

    def silent(self, start: int, frames: int) -> bool:
        return start < self.silence


@dataclass
class Scripted:
    """An engine with scripted answers, in order; exceptions are raised. It is the reader, too."""

    answers: list[Any]
    seconds: float = 2.0
    silence: int = 0
    requests: list[GenerateRequest] = field(default_factory=list)

    async def read(self, data: bytes) -> Recording:
        return Recording(self.seconds, silence=self.silence)

    def generate(self, request: GenerateRequest) -> DeltaStream:
        self.requests.append(request)
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            return DeltaStream.failed(answer)
        stream = DeltaStream(lambda: None)
        if answer is None:  # it never answers
            return stream
        tokens, logprob, silence = answer
        report = PromptReport(no_speech=silence)
        entries = tuple((Logprob(token, logprob, 1),) for token in tokens)
        stream.put(Delta(tuple(tokens), entries, finish_reason="stop", prompt=report))
        return stream


def said(text: str, *, logprob: float = -0.1, silence: float = 0.0, between: tuple[int, int] | None = None) -> Any:
    """Return what an engine answers: a text, between two timestamps, in positions, if there are any."""
    letters = [_ids(text)] if between is None else [[at(between[0])], _ids(text), [at(between[1])]]
    return [*(token for part in letters for token in part), END], logprob, silence


def at(position: int) -> int:
    return FIRST_TIMESTAMP + position


def _ids(text: str) -> list[int]:
    return TOKENIZER.encode(text)


@pytest.fixture
def transcriber_of(folder: Path) -> Callable[..., Transcriber]:

    def make(engine: Any, **changes: Any) -> Transcriber:
        limits = Limits(request_timeout_seconds=changes.pop("timeout", 60.0))
        metrics = GenerationMetrics(CollectorRegistry(), "tiny")
        facts = read_sizes(folder), read_tokens(folder)
        return Transcriber(engine, engine, TOKENIZER, *facts, limits, metrics, "tiny", **changes)

    return make


async def segments_of(transcriber: Transcriber, **ask: Any) -> list[Segment]:
    transcript = await transcriber.prepare(SpeechAsk(**({"language": "en"} | ask)), b"audio")
    return [segment async for found in transcript.segments() for segment in found]


async def test_windows_begin_where_the_last_one_was_understood(transcriber_of: Any) -> None:
    """As OpenAI's algorithm has it: what is said behind the last pair of timestamps is said again."""
    cut = [at(0), *_ids(" one"), at(40), at(40), *_ids(" two"), at(80), at(80), *_ids(" thr"), END]
    engine = Scripted([(cut, -0.1, 0.0), said(" three", between=(0, 60)), said(" end", between=(0, 20))], seconds=5.0)
    found = await segments_of(transcriber_of(engine))
    assert [(one.text, one.seek, one.start, one.end) for one in found] == [
        (" one", 0, 0.0, 0.8), (" two", 0, 0.8, 1.6), (" three", 160, 1.6, 2.8), (" end", 360, 3.6, 4.0),
    ]  # fmt: skip
    windows = [request.media.data for request in engine.requests if isinstance(request.media, Speech)]
    assert windows == [b"0+200", b"160+200", b"360+200"]
    assert [request.media.frames for request in engine.requests if isinstance(request.media, Speech)] == [200, 200, 140]
    assert engine.requests[0].prompt_token_ids == (START, TOKENS["<|en|>"], TOKENS["<|transcribe|>"])
    assert engine.requests[0].sampling.max_tokens == 64 - 3


async def test_a_short_recording_needs_no_timestamps_unless_they_are_asked_for(transcriber_of: Any) -> None:
    engine = Scripted([said(" hello"), said(" hello", between=(0, 50))])
    (segment,) = await segments_of(transcriber_of(engine))
    assert (segment.text, segment.start, segment.end) == (" hello", 0.0, 2.0)
    (segment,) = await segments_of(transcriber_of(engine), timestamps=True)
    assert (segment.text, segment.start, segment.end) == (" hello", 0.0, 1.0)
    assert [TEXT in request.prompt_token_ids for request in engine.requests] == [True, False]


async def test_a_bad_text_is_tried_again_at_higher_temperatures(transcriber_of: Any) -> None:
    engine = Scripted([said("la" * 40), said(" unsure", logprob=-2.0), said(" right")])
    (segment,) = await segments_of(transcriber_of(engine))
    assert (segment.text, segment.temperature) == (" right", 0.4)
    assert [request.sampling.temperature for request in engine.requests] == [0.0, 0.2, 0.4]
    assert len({request.media.key for request in engine.requests if isinstance(request.media, Speech)}) == 1
    engine = Scripted([said(" unsure", logprob=-2.0)])
    (segment,) = await segments_of(transcriber_of(engine), temperature=0.3)
    assert (segment.temperature, segment.avg_logprob) == (0.3, -2.0)


async def test_a_window_without_speech_is_skipped(transcriber_of: Any) -> None:
    engine = Scripted([said(" hm", logprob=-2.0, silence=0.9), said(" words", between=(0, 50))], seconds=3.0)
    assert [(one.text, one.seek) for one in await segments_of(transcriber_of(engine))] == [(" words", 200)]


async def test_a_window_without_any_sound_is_not_shown_to_the_model(transcriber_of: Any) -> None:
    engine = Scripted([said(" words", between=(0, 50))], seconds=5.0, silence=400)
    assert [(one.text, one.seek) for one in await segments_of(transcriber_of(engine))] == [(" words", 400)]
    assert len(engine.requests) == 1


async def test_prompt_language_and_task_steer_the_model(transcriber_of: Any) -> None:
    engine = Scripted([([TOKENS["<|de|>"]], -0.1, 0.0), said(" hi"), said(" hi")])
    await segments_of(transcriber_of(engine), language=None, translate=True, prompt="  Trellis<|translate|> ")
    detect, asked = (request.prompt_token_ids for request in engine.requests)
    assert detect == (START,)
    steer = (START, TOKENS["<|de|>"], TOKENS["<|translate|>"], TEXT)
    assert asked == (TOKENS["<|startofprev|>"], *_ids(" Trellis"), *steer)
    await segments_of(transcriber_of(engine), prompt="word " * 100)
    assert len(engine.requests[-1].prompt_token_ids) == 1 + 31 + 4, "the end of a long prompt"
    with pytest.raises(RequestError, match="'language' is 'xx', and the model knows 3 languages"):
        await segments_of(transcriber_of(engine), language="xx")
    assert code_of("German") == code_of("de-DE") == code_of(" DE") == "de"
    assert code_of("castilian") == "es" and code_of("klingon") is None


async def test_only_the_first_request_gives_up_at_a_busy_engine(
    transcriber_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(speech_module, "_QUEUE_PAUSE", 0.0)
    busy = QueueFull("busy")
    engine = Scripted([said(" a", between=(0, 100)), busy, busy, said(" b", between=(0, 50))], seconds=3.0)
    assert [one.text for one in await segments_of(transcriber_of(engine))] == [" a", " b"]
    with pytest.raises(QueueFull):
        await segments_of(transcriber_of(Scripted([busy])))


async def test_a_long_prompt_is_tokenised_once_and_off_the_event_loop(
    transcriber_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    lengths: list[int] = []

    def encode(text: str, add_special_tokens: bool = False) -> list[int]:
        if len(text) > 1:  # not a sample, by which it is known where a text may be cut
            assert threading.current_thread() is not threading.main_thread()
            lengths.append(len(text))
        return _ids("word ") * 100

    tokenizer = copy(TOKENIZER)
    monkeypatch.setattr(tokenizer, "encode", encode)
    monkeypatch.setattr(tokenizer, "longest_token", 200)
    engine = Scripted([said(" unsure", logprob=-2.0), said(" a", between=(0, 100)), said(" b")], seconds=3.0)
    transcriber = transcriber_of(engine)
    transcriber.tokenizer = tokenizer
    await segments_of(transcriber, prompt="word " * 200_000)
    assert len(engine.requests) == 3
    assert sum(lengths) == 1 + 31 * 200, "no more than the tokens that count may have"


async def test_recordings_have_a_limited_amount_of_memory_together(
    transcriber_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file of a few kilobytes may be hours of silence."""
    monkeypatch.setattr(speech_module, "MAX_HELD", 250)
    engine = Scripted([said(" a")])
    transcriber = transcriber_of(engine)
    ask = SpeechAsk(language="en")
    first, second = [await transcriber.prepare(ask, b"audio") for _ in range(2)]
    with pytest.raises(QueueFull, match="too many recordings"):
        await transcriber.prepare(ask, b"audio")
    assert [len(found) async for found in first.segments()] == [1]
    third = await transcriber.prepare(ask, b"audio")
    del second  # its client left before its first window
    await transcriber.prepare(ask, b"audio")
    assert third.recording.seconds == 2.0


async def test_the_whole_request_has_a_deadline(transcriber_of: Any) -> None:
    with pytest.raises(DeadlineExceeded):
        await segments_of(transcriber_of(Scripted([None]), timeout=0.01))


async def test_words_have_times(transcriber_of: Any) -> None:
    """Of two segments whose words are aligned by one request, in a window that begins after two seconds."""
    text = [at(0), *_ids(" Oh, no"), at(40), at(40), *_ids(' "yes"!'), at(80), END]

    engine = Scripted([said(" a", between=(0, 100)), (text, -0.1, 0.0)], seconds=4.0)
    times = tuple(place / 10 for place in range(len(_ids(' Oh, no "yes"!')) + 1))
    stream_of = engine.generate

    def generate(request: GenerateRequest) -> DeltaStream:
        if not (isinstance(request.media, Speech) and request.media.align):
            return stream_of(request)
        stream = DeltaStream(lambda: None)
        count = len(request.prompt_token_ids) - request.prompt_token_ids.index(TEXT) - 1
        stream.put(Delta((), finish_reason="length", prompt=PromptReport(spoken=times[:count])))
        return stream

    engine.generate = generate  # type: ignore[method-assign]
    found = await segments_of(transcriber_of(engine), words=True, timestamps=True)
    assert [[word.text for word in one.words] for one in found] == [[" a"], [" Oh,", " no"], [' "yes"!']]
    assert [(word.start, word.end) for one in found[1:] for word in one.words] == [
        (2.0, 2.3), (2.4, 2.7), (2.8, 3.2),
    ]  # fmt: skip


def test_words_of_a_language_without_spaces() -> None:
    tokens = _ids("東京")
    words = words_of(tokens, [place / 10 for place in range(len(tokens) + 1)], 0.0, TOKENIZER, "ja")
    assert [(word.text, word.start) for word in words] == [("東", 0.0), ("京", 0.3)]
