"""Transcripts of recordings: windows of 30 seconds, one after the other, each from where the text of the last one ends.

The algorithm is that of OpenAI's `transcribe.py` and transformers' long-form generation, without conditioning on
earlier text: a window that is decoded badly is tried again at a higher temperature, one without speech is skipped, and
timestamp tokens cut a window into segments. Unlike theirs, ours does not show the model a window without any sound.
"""

import asyncio
import zlib
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, Protocol
from uuid import uuid4
from weakref import finalize

from engine import trace
from engine.base import Engine
from engine.checkpoints.whisper import FRAMES_PER_POSITION, FRAMES_PER_SECOND, WhisperSizes, WhisperTokens
from engine.errors import EngineFailure, InvalidRequest, QueueFull, QueueTimeout
from engine.media import Speech
from engine.types import Delta, GenerateRequest, PromptReport, SamplingParams
from multimodal.errors import DeadlineExceeded, RequestError, shown
from multimodal.metrics import ChoiceTimer, GenerationMetrics
from multimodal.request import Limits
from multimodal.speech.languages import code_of
from multimodal.speech.words import Word, words_of
from multimodal.text.tokenizer import Tokenizer, encoded

if TYPE_CHECKING:
    from engine.kit.log_mel import Recording  # needs numpy, which most replicas do without

TEMPERATURES = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)
"""Temperatures that are tried in turn for a request with none or 0."""
MOST_COMPRESSION = 2.4
LEAST_LOGPROB = -1.0
"""Bounds of compression ratio and likelihood: a text beyond them is decoded again."""
SILENCE = 0.6
"""Probability of no speech above which an unlikely text counts as silence."""
MAX_HELD = 2 << 30
"""Maximum bytes of features of all recordings in an API process. Further ones are refused, like requests when too many
wait for the engine: files of a few kilobytes may be hours of silence."""
_QUEUE_PAUSE = 1.0
"""Seconds after which a window, other than the first, is submitted to a full queue again."""


class AudioReader(Protocol):
    """Makes features of files (`engine/embedded/whisper/reader.py`)."""

    async def read(self, data: bytes) -> "Recording":
        """Read a file. Raises InvalidRequest for a file that cannot be read, or is too long."""
        ...


@dataclass(frozen=True, kw_only=True)
class SpeechAsk:
    """Options of a transcription."""

    translate: bool = False
    """Whether to translate into English."""
    language: str | None = None
    """Language of the speech as an ISO code; None detects it."""
    prompt: str = ""
    """Text that precedes each window."""
    temperature: float = 0.0
    """0 begins with the most likely text, and continues with TEMPERATURES."""
    timestamps: bool = False
    """Whether to return segments; longer recordings have them in any case."""
    words: bool = False
    """Whether segments have words."""


@dataclass(frozen=True)
class Segment:
    """A piece of the transcript. Times are in seconds from the beginning."""

    seek: int
    """First frame of its window."""
    start: float
    end: float
    tokens: list[int]
    """Token ids, timestamps included."""
    text: str
    temperature: float
    avg_logprob: float
    compression_ratio: float
    no_speech_prob: float
    words: list[Word] = field(default_factory=list)


class _Attempt(NamedTuple):
    tokens: list[int]
    """Token ids without the end of the sequence."""
    temperature: float
    avg_logprob: float
    no_speech: float
    compression: float

    @property
    def silent(self) -> bool:
        return self.no_speech > SILENCE and self.avg_logprob < LEAST_LOGPROB

    @property
    def bad(self) -> bool:
        return not self.silent and (self.compression > MOST_COMPRESSION or self.avg_logprob < LEAST_LOGPROB)


@dataclass(eq=False)
class Transcriber:
    """Prepares transcripts by one engine, whose model only transcribes."""

    engine: Engine
    reader: AudioReader
    tokenizer: Tokenizer
    sizes: WhisperSizes
    tokens: WhisperTokens
    limits: Limits
    metrics: GenerationMetrics
    model_name: str
    temperatures: Sequence[float] = TEMPERATURES
    _held: int = field(default=0, init=False)

    async def prepare(self, ask: SpeechAsk, file: bytes) -> "Transcript":
        """Read the file; starts nothing in the engine. Raises RequestError, QueueFull and DeadlineExceeded."""
        language = self._language(ask)
        if ask.words and not self.tokens.alignment_heads:
            raise RequestError(
                "The model's generation_config.json has no alignment_heads: it has no timestamps of words.",
                "timestamp_granularities",
                "unsupported_parameter",
            )
        transcript = Transcript(self, ask, language)
        async with transcript.in_time():
            transcript.before = await self._before(ask.prompt.strip())
            with trace.span("read audio"):
                try:
                    recording = await self.reader.read(file)
                except InvalidRequest as error:
                    raise RequestError(_sentence(str(error)), "file", "invalid_audio") from error
        size = len(recording.data)
        if self._held and self._held + size > MAX_HELD:
            raise QueueFull("too many recordings are being transcribed already")
        self._held += size
        transcript.recording = recording
        transcript.let_go = finalize(transcript, self._let_go, size)
        if (span := trace.current.get()) is not None:
            span.set(
                {
                    "gen_ai.operation.name": "translation" if ask.translate else "transcription",
                    "gen_ai.provider.name": "trellis",
                    "gen_ai.request.model": self.model_name,
                    "gen_ai.response.model": self.model_name,
                    "trellis.audio_seconds": transcript.recording.seconds,
                }
            )
        return transcript

    async def _before(self, text: str) -> list[int]:
        """Return the tokens of the text that precedes each window, or of the end of that text."""
        if not text:
            return []
        most = self.sizes.context // 2 - 1
        ids = await encoded(self.tokenizer, f" {text[-most * self.tokenizer.longest_token :]}")
        # Control tokens that the text spells do not steer the model.
        return [self.tokens.previous, *[token for token in ids if token < self.tokens.end][-most:]]

    def _let_go(self, size: int) -> None:
        self._held -= size

    def _language(self, ask: SpeechAsk) -> str | None:
        """Return the code of the language that the file is in, if it is known."""
        known = self.tokens.languages or {"en": -1}
        if ask.translate and not self.tokens.multilingual:
            raise RequestError(
                f"The model '{shown(self.model_name)}' knows English alone: it does not translate.", "model"
            )
        if not ask.language:
            return None if self.tokens.multilingual else "en"
        code = code_of(ask.language)
        if code not in known:
            others = "English alone" if len(known) == 1 else f"{len(known)} languages, by ISO 639-1 codes such as en"
            raise RequestError(f"'language' is '{shown(ask.language)}', and the model knows {others}.", "language")
        return code


@dataclass(eq=False)
class Transcript:
    """A prepared transcript; iterate over `segments` once. Closing the iteration aborts running work."""

    by: Transcriber
    ask: SpeechAsk
    language: str | None
    """Code of the spoken language; None until it is known."""
    recording: "Recording" = field(init=False)
    let_go: Callable[[], object] = field(init=False)
    """Releases the recording, at the latest when nothing refers to the transcript."""
    before: Sequence[int] = ()
    """Tokens of the text that precedes each window."""
    input_tokens: int = 0
    """Prompt tokens of the accepted attempts."""
    output_tokens: int = 0
    audio_tokens: int = 0
    """Positions of 20 ms that were encoded."""
    _id: str = field(default_factory=lambda: uuid4().hex)
    _requests: int = 0
    _deadline: float = field(init=False)

    def __post_init__(self) -> None:
        self._deadline = asyncio.get_running_loop().time() + self.by.limits.request_timeout_seconds

    @asynccontextmanager
    async def in_time(self) -> AsyncIterator[None]:
        """Limit the time of the whole request."""
        try:
            async with asyncio.timeout_at(self._deadline):
                yield
        except TimeoutError as error:
            raise DeadlineExceeded(self.by.limits.request_timeout_seconds) from error

    async def segments(self) -> AsyncGenerator[list[Segment]]:
        """Yield the segments of each window, the first not before its text is complete. Raises DeadlineExceeded and
        what the engine raises."""
        seek = 0
        try:
            while seek < self.recording.frames:
                async with self.in_time():
                    found, seek = await self._window(seek)
                yield found
        finally:
            self.let_go()
        self.by.metrics.speech_seconds.inc(self.recording.seconds)

    async def _window(self, seek: int) -> tuple[list[Segment], int]:
        """Return the segments of the window from frame `seek` on, and the first frame of the next window."""
        by = self.by
        frames = min(by.sizes.frames, self.recording.frames - seek)
        if self.recording.silent(seek, frames):  # the model would make up words
            return [], seek + frames
        speech = Speech(key=f"{self._id}-{seek}", data=self.recording.window(seek, by.sizes.frames), frames=frames)
        self.audio_tokens += frames // FRAMES_PER_POSITION
        with trace.span("window", {"trellis.seek_seconds": seek / FRAMES_PER_SECOND}):
            if self.language is None:
                self.language = await self._detect(speech)
            attempt = await self._attempts(speech)
            if attempt.silent:
                return [], seek + frames
            cuts, used = _cut(attempt.tokens, frames, by.tokens.first_timestamp)
            segments = [one for cut in cuts if (one := self._segment(cut, seek, attempt)).text.strip()]
            if self.ask.words:
                segments = await self._with_words(segments, speech)
        return segments, seek + used

    def _segment(self, cut: "_Cut", seek: int, attempt: _Attempt) -> Segment:
        text = self.by.tokenizer.decode([token for token in cut.tokens if token < self.by.tokens.end])
        start = seek / FRAMES_PER_SECOND
        return Segment(
            seek,
            round(start + cut.start * FRAMES_PER_POSITION / FRAMES_PER_SECOND, 2),
            round(start + cut.end * FRAMES_PER_POSITION / FRAMES_PER_SECOND, 2),
            cut.tokens,
            text,
            attempt.temperature,
            attempt.avg_logprob,
            attempt.compression,
            attempt.no_speech,
        )

    async def _attempts(self, speech: Speech) -> _Attempt:
        """Decode a window until the text is good enough, or no temperature is left."""
        asked = self.ask.temperature
        attempt: _Attempt | None = None
        for temperature in [asked] if asked else self.by.temperatures:
            # Without a requested temperature, results are reproducible.
            attempt = await self._attempt(speech, temperature, None if asked else self._requests)
            if not attempt.bad:
                break
        assert attempt is not None
        self.input_tokens += len(self._prompt())
        self.output_tokens += len(attempt.tokens)
        return attempt

    async def _attempt(self, speech: Speech, temperature: float, seed: int | None) -> _Attempt:
        prompt = self._prompt()
        most = self.by.sizes.context - len(prompt)
        sampling = SamplingParams(max_tokens=most, temperature=temperature, seed=seed, logprobs=0)
        output: list[int] = []
        logprob = 0.0
        report = PromptReport()

        def take(delta: Delta) -> None:
            nonlocal report, logprob
            output.extend(delta.token_ids)
            logprob += sum(entry[0].logprob for entry in delta.logprobs)
            report = delta.prompt or report

        await self._generate(prompt, speech, sampling, take)
        average = logprob / max(1, len(output))
        tokens = output[:-1] if output[-1:] == [self.by.tokens.end] else output
        text = self.by.tokenizer.decode([token for token in tokens if token < self.by.tokens.end]).encode()
        ratio = len(text) / len(zlib.compress(text))
        return _Attempt(tokens, temperature, average, report.no_speech or 0.0, ratio)

    async def _detect(self, speech: Speech) -> str:
        """Return the code of the language that is spoken in a window."""
        found: list[int] = []
        sampling = SamplingParams(max_tokens=1, temperature=0.0)
        await self._generate([self.by.tokens.start], speech, sampling, lambda delta: found.extend(delta.token_ids))
        return next(code for code, token in self.by.tokens.languages.items() if token == found[0])

    async def _with_words(self, segments: list[Segment], speech: Speech) -> list[Segment]:
        """Return a window's segments with the times of their words."""
        by = self.by
        texts = [[token for token in segment.tokens if token < by.tokens.end] for segment in segments]
        whole = [token for text in texts for token in text]
        prompt = [*self._steer(), by.tokens.no_timestamps, *whole, by.tokens.end][: by.sizes.context]
        times: list[float] = []

        def take(delta: Delta) -> None:
            times.extend(delta.prompt.spoken if delta.prompt is not None else ())

        aligned = Speech(key=speech.key, data=speech.data, frames=speech.frames, align=True)
        await self._generate(prompt, aligned, SamplingParams(max_tokens=0), take)
        offset = segments[0].seek / FRAMES_PER_SECOND if segments else 0.0
        words = words_of(whole, times, offset, by.tokenizer, "en" if self.ask.translate else self.language or "en")
        found: list[Segment] = []
        for segment, text in zip(segments, texts, strict=True):
            own: list[Word] = []
            left = len(text)
            while words and left > 0:
                own.append(words.pop(0))
                left -= own[-1].tokens
            found.append(Segment(**{**vars(segment), "words": own}))
        return found

    def _steer(self) -> list[int]:
        """Return the control tokens of the prompt: language, task and timestamps."""
        tokens = self.by.tokens
        if not tokens.multilingual:
            return [tokens.start]
        assert self.language is not None
        task = tokens.translate if self.ask.translate else tokens.transcribe
        return [tokens.start, tokens.languages[self.language], task]

    def _prompt(self) -> list[int]:
        prompt = [*self.before, *self._steer()]
        if not self.ask.timestamps and self.recording.frames <= self.by.sizes.frames:
            prompt.append(self.by.tokens.no_timestamps)
        return prompt

    async def _generate(
        self, prompt: Sequence[int], speech: Speech, sampling: SamplingParams, take: Callable[[Delta], None]
    ) -> None:
        """Have the engine generate one sequence. Only the first sequence of a transcript fails if the engine is
        busy."""
        while True:
            try:
                await self._follow(prompt, speech, sampling, take)
                return
            except (QueueFull, QueueTimeout):
                if self._requests == 1:
                    raise
                await asyncio.sleep(_QUEUE_PAUSE)

    async def _follow(
        self, prompt: Sequence[int], speech: Speech, sampling: SamplingParams, take: Callable[[Delta], None]
    ) -> None:
        by = self.by
        self._requests += 1
        request = GenerateRequest(
            request_id=f"{self._id}-{self._requests}",
            prompt_token_ids=tuple(prompt),
            sampling=sampling,
            media=speech,
            trace=trace.headers(),
        )
        by.metrics.requested(request)
        timer, stages, count = ChoiceTimer(by.metrics), trace.Stages(), 0
        try:
            async with aclosing(by.engine.generate(request)) as stream:
                async for delta in stream:
                    if delta.prompt is not None:
                        timer.prompt(len(prompt), 0, delta.prompt.queue_seconds)
                        stages.begun(delta.prompt, len(prompt))
                    timer.tokens(len(delta.token_ids))
                    count += len(delta.token_ids)
                    take(delta)
                    if delta.finish_reason is not None:
                        timer.finish(delta.finish_reason)
                        stages.end(count)
                        return
            raise EngineFailure("the engine ended the request without a reason")
        except Exception as error:
            timer.fail()
            stages.end(count, error)
            raise
        finally:
            timer.stop()
            stages.stop(count)


class _Cut(NamedTuple):
    """A part of a window's tokens; times are positions of the window."""

    tokens: list[int]
    start: int
    end: int


def _cut(tokens: list[int], frames: int, first_timestamp: int) -> tuple[list[_Cut], int]:
    """Cut the tokens of a window of this many frames into segments, at pairs of timestamps. Return also the number of
    frames that are done: the next window repeats the speech behind the last pair."""
    marks = [token >= first_timestamp for token in tokens]
    ends = [place for place in range(1, len(tokens)) if marks[place - 1] and marks[place]]
    if not ends:
        last = next((token for token in reversed(tokens) if token > first_timestamp), None)
        end = frames // FRAMES_PER_POSITION if last is None else last - first_timestamp
        return [_Cut(tokens, 0, end)], frames
    finished = marks[-2:] == [False, True]  # nothing is said behind the last timestamp
    if finished:
        ends.append(len(tokens))
    starts = [0, *ends[:-1]]
    cuts = [
        _Cut(tokens[start:end], tokens[start] - first_timestamp, tokens[end - 1] - first_timestamp)
        for start, end in zip(starts, ends, strict=True)
    ]
    return cuts, frames if finished else cuts[-1].end * FRAMES_PER_POSITION


def _sentence(message: str) -> str:
    return f"{message[:1].upper()}{message[1:]}."
