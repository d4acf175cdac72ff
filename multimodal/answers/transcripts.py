"""OpenAI's formats of transcripts: JSON, plain text, and subtitles."""

import math
from collections.abc import Callable, Sequence
from typing import Any, Literal

import orjson

from multimodal.speech.languages import LANGUAGES
from multimodal.speech.transcriber import Segment, Transcript

Format = Literal["json", "text", "srt", "verbose_json", "vtt"]
_Form = Callable[[Transcript, Sequence[Segment]], bytes]


def text_of(segments: Sequence[Segment]) -> str:
    return "".join(segment.text for segment in segments).strip()


def _json(transcript: Transcript, segments: Sequence[Segment]) -> bytes:
    return orjson.dumps({"text": text_of(segments), "usage": _duration(transcript)})


def _verbose(transcript: Transcript, segments: Sequence[Segment], granularities: frozenset[str]) -> bytes:
    language = "en" if transcript.ask.translate else transcript.language or "en"
    answer: dict[str, Any] = {
        "task": "translate" if transcript.ask.translate else "transcribe",
        "language": LANGUAGES.get(language, language),
        "duration": round(transcript.recording.seconds, 2),
        "text": text_of(segments),
    }
    if "segment" in granularities:
        answer["segments"] = [
            {
                "id": number,
                "seek": segment.seek,
                "start": segment.start,
                "end": segment.end,
                "text": segment.text,
                "tokens": segment.tokens,
                "temperature": segment.temperature,
                "avg_logprob": segment.avg_logprob,
                "compression_ratio": segment.compression_ratio,
                "no_speech_prob": segment.no_speech_prob,
            }
            for number, segment in enumerate(segments)
        ]
    if "word" in granularities:
        words = (word for segment in segments for word in segment.words)
        answer["words"] = [{"word": word.text.strip(), "start": word.start, "end": word.end} for word in words]
    return orjson.dumps(answer | {"usage": _duration(transcript)})


def _text(_: Transcript, segments: Sequence[Segment]) -> bytes:
    return f"{text_of(segments)}\n".encode()


def _srt(_: Transcript, segments: Sequence[Segment]) -> bytes:
    return "".join(
        f"{number}\n{_clock(one.start, ',')} --> {_clock(one.end, ',')}\n{_line(one)}\n\n"
        for number, one in enumerate(segments, 1)
    ).encode()


def _vtt(_: Transcript, segments: Sequence[Segment]) -> bytes:
    cues = (f"{_clock(one.start, '.')} --> {_clock(one.end, '.')}\n{_line(one)}\n\n" for one in segments)
    return f"WEBVTT\n\n{''.join(cues)}".encode()


def _line(segment: Segment) -> str:
    """Return the text of a subtitle, without arrows, which would be read as times."""
    return segment.text.strip().replace("-->", "->")


def _clock(seconds: float, mark: str) -> str:
    whole, milliseconds = divmod(round(seconds * 1000), 1000)
    return f"{whole // 3600:02d}:{whole // 60 % 60:02d}:{whole % 60:02d}{mark}{milliseconds:03d}"


def _duration(transcript: Transcript) -> dict[str, Any]:
    return {"type": "duration", "seconds": math.ceil(transcript.recording.seconds)}


_FORMS: dict[Format, tuple[_Form, str]] = {
    "json": (_json, "application/json"),
    "text": (_text, "text/plain; charset=utf-8"),
    "srt": (_srt, "text/plain; charset=utf-8"),
    "vtt": (_vtt, "text/vtt; charset=utf-8"),
}


def whole(
    transcript: Transcript, segments: Sequence[Segment], form: Format, granularities: frozenset[str]
) -> tuple[bytes, str]:
    """Return a finished transcript in a format, and its media type."""
    if form == "verbose_json":
        return _verbose(transcript, segments, granularities), "application/json"
    write, kind = _FORMS[form]
    return write(transcript, segments), kind


def delta_event(text: str) -> bytes:
    return orjson.dumps({"type": "transcript.text.delta", "delta": text})


def done_event(transcript: Transcript, text: str) -> bytes:
    """Return the last event of a stream."""
    sent, heard = transcript.input_tokens, transcript.audio_tokens
    usage = {
        "type": "tokens",
        "input_tokens": sent + heard,
        "input_token_details": {"text_tokens": sent, "audio_tokens": heard},
        "output_tokens": transcript.output_tokens,
        "total_tokens": sent + heard + transcript.output_tokens,
    }
    return orjson.dumps({"type": "transcript.text.done", "text": text, "usage": usage})
