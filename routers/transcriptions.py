"""POST /v1/audio/transcriptions and /v1/audio/translations: OpenAI's, by a Whisper model."""

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any, TypeVar

from fastapi import APIRouter, Request, Response

from multimodal.answers import transcripts
from multimodal.errors import RequestError
from multimodal.speech.transcriber import Segment, SpeechAsk, Transcriber, Transcript
from protocol.errors import ErrorEnvelope
from protocol.transcriptions import (
    SpeechFields,
    TranscriptDelta,
    TranscriptDone,
    Transcription,
    TranscriptionRequest,
    TranslationRequest,
)
from routers.body import while_connected
from routers.endpoint import OPENAI, EventStream
from routers.errors import WrongReplica
from routers.forms import Form, read_form
from routers.state import ChatService, ChatServiceDep, StateDep

router = APIRouter(tags=["transcription"])
PATHS = ("/v1/audio/transcriptions", "/v1/audio/translations")
BODIES = (TranscriptionRequest, TranslationRequest)
EVENTS = (TranscriptDelta, TranscriptDone)
_LISTS = ("timestamp_granularities", "include")
_TIMED = ("srt", "vtt", "verbose_json")
_REFUSED = ("chunking_strategy", "keywords", "languages", "known_speaker_names", "known_speaker_references")

B = TypeVar("B", bound=SpeechFields)


def _described(body: type[SpeechFields], path: str) -> dict[str, Any]:
    """Return the description of a route for the OpenAPI document."""
    formats = {kind: {"schema": {"type": "string"}} for kind in ("text/plain", "text/vtt")}
    return {
        "path": path,
        "response_model": Transcription,
        "responses": {
            "200": {"content": formats},
            "4XX": {"model": ErrorEnvelope},
            "5XX": {"model": ErrorEnvelope},
        },
        "openapi_extra": {
            "requestBody": {
                "required": True,
                "content": {"multipart/form-data": {"schema": {"$ref": f"#/components/schemas/{body.__name__}"}}},
            }
        },
    }


@router.post(**_described(TranscriptionRequest, PATHS[0]), summary="Transcribe audio")
async def transcribe(request: Request, state: StateDep, service: ChatServiceDep) -> Response:
    """The text of an audio file. With `stream` it comes as server-sent events, closed by `data: [DONE]`."""
    form = await read_form(request)
    for name in (name for name in _REFUSED if f"{name}[]" in form.fields):
        raise _unsupported(name)
    lists = {name: [*form.fields.pop(name, ()), *form.fields.pop(f"{name}[]", ())] for name in _LISTS}
    by = _transcriber(service)
    body = _parsed(form, TranscriptionRequest, service)
    for name in _REFUSED:
        if getattr(body, name) is not None:
            raise _unsupported(name)
    if lists["include"]:
        raise _unsupported("include")
    form_of = body.response_format or "json"
    granularities = frozenset(lists["timestamp_granularities"])
    if granularities - {"word", "segment"}:
        raise RequestError("'timestamp_granularities' must be word or segment, or both.", "timestamp_granularities")
    if granularities and form_of != "verbose_json":
        raise RequestError(
            "'timestamp_granularities' needs 'response_format': verbose_json.", "timestamp_granularities"
        )
    if body.stream and form_of not in ("json", "text"):
        raise RequestError("'stream' needs 'response_format': json or text.", "stream", "unsupported_parameter")
    words = "word" in granularities
    ask = _ask(body, form_of in _TIMED, language=body.language, words=words)
    transcript = await while_connected(request, by.prepare(ask, _file(form)))
    del form  # the transcript may take minutes, and does without the file
    if body.stream:
        return EventStream(_events(transcript), OPENAI, state["http"].ping_interval, state["render_error"])
    return await while_connected(request, _whole(transcript, form_of, granularities or frozenset({"segment"})))


@router.post(**_described(TranslationRequest, PATHS[1]), summary="Translate audio to English")
async def translate(request: Request, service: ChatServiceDep) -> Response:
    """The English text of an audio file in another language."""
    form = await read_form(request)
    by = _transcriber(service)
    body = _parsed(form, TranslationRequest, service)
    form_of = body.response_format or "json"
    ask = _ask(body, form_of in _TIMED, translate=True)
    transcript = await while_connected(request, by.prepare(ask, _file(form)))
    del form
    return await while_connected(request, _whole(transcript, form_of, frozenset({"segment"})))


def _transcriber(service: ChatService) -> Transcriber:
    if service.transcriber is None:
        raise WrongReplica("The model of this server does not transcribe audio: serve a Whisper model.", "model")
    return service.transcriber


def _parsed(form: Form, model: type[B], service: ChatService) -> B:
    body = form.parsed(model)
    service.fields.check(body)
    return body


def _file(form: Form) -> bytes:
    file = form.file("file")
    if not file:
        raise RequestError("'file' must be an audio file of the form.", "file")
    return bytes(file)


def _ask(body: SpeechFields, timestamps: bool, **more: Any) -> SpeechAsk:
    return SpeechAsk(prompt=body.prompt or "", temperature=body.temperature or 0.0, timestamps=timestamps, **more)


def _unsupported(name: str) -> RequestError:
    return RequestError(f"This server does not support {name!r}.", name, "unsupported_parameter")


async def _whole(transcript: Transcript, form: transcripts.Format, granularities: frozenset[str]) -> Response:
    segments: list[Segment] = []
    async with aclosing(transcript.segments()) as windows:
        async for found in windows:
            segments += found
    content, kind = transcripts.whole(transcript, segments, form, granularities)
    return Response(content, media_type=kind)


async def _events(transcript: Transcript) -> AsyncGenerator[bytes]:
    text = ""
    async with aclosing(transcript.segments()) as windows:
        async for found in windows:
            new = "".join(segment.text for segment in found)
            if not text:
                new = new.lstrip()
            if new:
                text += new
                yield transcripts.delta_event(new)
    yield transcripts.done_event(transcript, text)
