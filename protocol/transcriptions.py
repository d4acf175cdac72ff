"""/v1/audio/transcriptions and /v1/audio/translations: OpenAI's forms and answers."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field

from protocol.common import Finite, ModelFields


class SpeechFields(ModelFields):
    """Fields that transcripts and translations share. The form has the audio in addition."""

    file: Any = None
    """The audio: a WAV, FLAC, MP3, Ogg Vorbis or Opus file."""
    prompt: str | None = None
    """Text that may have come before the audio, such as names in their correct spelling. Example: "Trellis, TensorRT"
    """
    response_format: Literal["json", "text", "srt", "verbose_json", "vtt"] | None = None
    """`json` has the text, `verbose_json` its segments too, `text`, `srt` and `vtt` are no JSON. Example: "json" """
    temperature: Annotated[Finite, Field(ge=0, le=1)] | None = None
    """Randomness. 0 takes the most likely text, and a higher one only where that repeats itself or is unlikely.
    Default: 0. Example: 0"""


class TranscriptionRequest(SpeechFields):
    """A form of /v1/audio/transcriptions."""

    language: str | None = None
    """Language of the audio, by its ISO 639-1 code; without, a multilingual model finds out. Example: "en" """
    stream: bool | None = None
    """Send the text of each window of 30 seconds as a server-sent event. Needs the format `json`. Example: false"""
    timestamp_granularities: list[Literal["word", "segment"]] | None = None
    """Also as `timestamp_granularities[]`: what `verbose_json` has times of; by default segments.
    Example: ["segment"]"""
    include: list[str] | None = None
    """Not supported."""
    chunking_strategy: Any = None
    """Not supported."""
    keywords: Any = None
    """Not supported."""
    languages: Any = None
    """Not supported."""
    known_speaker_names: Any = None
    """Not supported."""
    known_speaker_references: Any = None
    """Not supported."""


class TranslationRequest(SpeechFields):
    """A form of /v1/audio/translations."""


class DurationUsage(BaseModel):
    """Usage by which a transcript is billed."""

    type: Literal["duration"]
    """Always `duration`."""
    seconds: int
    """Length of the audio, rounded up."""


class TranscriptSegment(BaseModel):
    """A piece of a transcript. Its figures are those of the window that it was decoded with."""

    id: int
    """Place among the segments."""
    seek: int
    """First frame of the window; a frame is 10 ms."""
    start: float
    """Seconds from the beginning of the audio."""
    end: float
    """Likewise."""
    text: str
    """Text of the segment, with the space before it."""
    tokens: list[int]
    """Token ids, with timestamps."""
    temperature: float
    """Temperature at which the text was decoded."""
    avg_logprob: float
    """Mean log-probability of the tokens."""
    compression_ratio: float
    """Bytes of the text for each of the compressed text: more than 2.4 is a text that repeats itself."""
    no_speech_prob: float
    """Probability that there is no speech."""


class TranscriptWord(BaseModel):
    """A word and when it is spoken."""

    word: str
    """The word, with its punctuation."""
    start: float
    """Seconds from the beginning of the audio."""
    end: float
    """Likewise."""


class Transcription(BaseModel):
    """A transcript or a translation. All but `text` and `usage` come with `verbose_json` alone."""

    text: str
    """All that is said."""
    task: Literal["transcribe", "translate"] | None = None
    """The requested task."""
    language: str | None = None
    """English name of the language of the text."""
    duration: float | None = None
    """Seconds of audio."""
    segments: list[TranscriptSegment] | None = None
    """Segments, unless `timestamp_granularities` asks for words alone."""
    words: list[TranscriptWord] | None = None
    """Words, if `timestamp_granularities` asks for them."""
    usage: DurationUsage
    """Usage by which the transcript is billed."""


class TranscriptDelta(BaseModel):
    """An event of a streamed transcript."""

    type: Literal["transcript.text.delta"]
    """Always `transcript.text.delta`."""
    delta: str
    """The text of the next window."""


class SpeechTokens(BaseModel):
    """Tokens that the model has read."""

    text_tokens: int
    """Tokens of prompts."""
    audio_tokens: int
    """One for each 20 ms."""


class SpeechUsage(BaseModel):
    """Tokens of a streamed transcript."""

    type: Literal["tokens"]
    """Always `tokens`."""
    input_tokens: int
    """Sum of the details."""
    input_token_details: SpeechTokens
    """Input tokens by kind."""
    output_tokens: int
    """Tokens generated."""
    total_tokens: int
    """Both together."""


class TranscriptDone(BaseModel):
    """The last event of a streamed transcript."""

    type: Literal["transcript.text.done"]
    """Always `transcript.text.done`."""
    text: str
    """The whole text."""
    usage: SpeechUsage
    """Tokens of the whole request."""
