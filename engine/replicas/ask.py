"""One hand-over on its way: asks a peer's /prefill or /encode, reads the framed answer, and keeps it open as the lease of what is held."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar
from urllib.parse import urlsplit

import httpx
import msgspec

from engine import errors, trace
from engine.handoff import MAX_BYTES, decode_encoding, decode_handoff
from engine.replicas.encode_answers import decode_embeddings
from protocol.frames import FrameReader
from protocol.internal import MEDIA_TYPE, SILENCE_SECONDS, EncodeInfo, PrefillInfo

CONNECT_SECONDS = 1.5
I = TypeVar("I", bound=msgspec.Struct)  # noqa: E741
T = TypeVar("T")
_SLOWEST_UPLOAD = 50 << 20
"""Bytes in a second: how much longer than others a peer may take to begin its answer to a request with images."""
_MOST_ERROR_BYTES = 1 << 16
_ERRORS: dict[str, type[errors.EngineError]] = {
    "context_length_exceeded": errors.ContextOverflow,
    "request_too_large": errors.ContextOverflow,  # for that replica: as with its context, another may have more room
    "not_ready": errors.EngineNotReady,
    "engine_died": errors.EngineDied,
    "queue_full": errors.QueueFull,
    "queue_timeout": errors.QueueTimeout,
    "unavailable": errors.EngineUnavailable,
    "engine_failure": errors.EngineFailure,
    "internal_error": errors.EngineFailure,
}
"""By the code of the error envelope. Others are about one request, except for these."""
_OF_THE_PEER = frozenset(
    {"invalid_api_key", "forbidden", "unknown_url", "method_not_allowed", "unsupported_media_type", "replicas_differ"}
)


class PeerError(errors.EngineUnavailable):
    """The peer itself is at fault, not the request: it cannot be reached, says nothing, or nothing that makes sense. The message is for
    the replica's clients too: it names no address, and leaves what a library said to the cause."""

    def __init__(self, message: str, outcome: str) -> None:
        super().__init__(message)
        self.outcome = outcome
        """For the metrics: unreachable, silent or refused."""


@dataclass(frozen=True)
class Service(Generic[I, T]):
    """What a kind of replicas does for others: at which path, and how its answers are read."""

    name: str
    infos: msgspec.msgpack.Decoder[I]
    """Of what a replica says of itself."""
    read: Callable[[bytes], T]
    """Of what it hands over. Raises InvalidRequest."""

    @property
    def path(self) -> str:
        return f"/{self.name}"

    @property
    def one(self) -> str:
        return f"{'an' if self.name == 'encode' else 'a'} {self.name} replica"


PREFILL = Service("prefill", msgspec.msgpack.Decoder(PrefillInfo), decode_handoff)
ENCODE = Service("encode", msgspec.msgpack.Decoder(EncodeInfo), decode_embeddings)
ENCODE_PROMPT = Service("encode", msgspec.msgpack.Decoder(EncodeInfo), decode_encoding)


class _Error(msgspec.Struct):
    message: str = ""
    type: str = ""
    param: str | None = None
    code: str | None = None


class _Envelope(msgspec.Struct):
    error: _Error


_envelopes = msgspec.json.Decoder(_Envelope)


class Lease(Generic[T]):
    """What a peer has handed over. It holds KV blocks, or embeddings, until `aclose`, or until `ended` returns."""

    def __init__(self, handoff: T, response: httpx.Response, chunks: AsyncIterator[bytes]) -> None:
        self.handoff = handoff
        self._response = response
        self._chunks = chunks

    async def ended(self) -> None:
        """Return when the peer has ended the lease, or has gone."""
        try:
            async for _ in self._chunks:
                pass
        except httpx.HTTPError:
            return

    async def aclose(self) -> None:
        """What is held is needed no more."""
        await self._response.aclose()


async def ask(
    http: httpx.AsyncClient, service: Service[I, T], url: str, body: Sequence[bytes], headers: dict[str, str]
) -> Lease[T]:
    """Have the peer at `url` do it. Raises PeerError, or the error of `engine/errors` that it answers with."""
    at = urlsplit(url)
    to: trace.Attributes = {
        "server.address": at.hostname or "",
        "server.port": at.port or (443 if at.scheme == "https" else 80),
    }
    with trace.span(f"POST {service.path}", to, client=True):
        return await _asked(http, service, url, body, {**headers, **trace.headers()})


async def _asked(
    http: httpx.AsyncClient, service: Service[I, T], url: str, body: Sequence[bytes], headers: dict[str, str]
) -> Lease[T]:
    size = sum(map(len, body))
    headers = {**headers, "content-type": MEDIA_TYPE, "content-length": str(size)}
    request = http.build_request("POST", url + service.path, content=_sent(body), headers=headers)
    response = await _answered(http, service, request, SILENCE_SECONDS + size / _SLOWEST_UPLOAD)
    try:
        if response.status_code != httpx.codes.OK:
            raise _refusal(service, response.status_code, await _bounded(response))
        chunks = response.aiter_raw()
        return Lease(await _handoff(service, chunks), response, chunks)
    except (httpx.HTTPError, TimeoutError, ValueError) as error:
        await response.aclose()
        raise _peer_error(service, error) from error
    except BaseException:  # cancellation included
        await response.aclose()
        raise


async def _sent(body: Sequence[bytes]) -> AsyncIterator[bytes]:
    for piece in body:
        yield piece


async def describe(http: httpx.AsyncClient, service: Service[I, T], url: str) -> I:
    """What the peer at `url` does it with, if it would take a request now. Raises as `ask` does."""
    response = await _answered(http, service, http.build_request("GET", url + service.path), SILENCE_SECONDS)
    try:
        content = await _bounded(response)
    except (httpx.HTTPError, TimeoutError, ValueError) as error:
        raise _peer_error(service, error) from error
    finally:
        await response.aclose()
    if response.status_code != httpx.codes.OK:
        raise _refusal(service, response.status_code, content)
    try:
        return service.infos.decode(content)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise PeerError(f"{service.one} does not say what it {service.name}s with", "refused") from error


async def _answered(
    http: httpx.AsyncClient, service: Service[I, T], request: httpx.Request, seconds: float
) -> httpx.Response:
    """The head of the answer, in `seconds` from here. Raises PeerError."""
    try:
        async with asyncio.timeout(seconds):
            return await http.send(request, stream=True)
    except (httpx.HTTPError, TimeoutError) as error:
        raise _peer_error(service, error) from error


async def _handoff(service: Service[I, T], chunks: AsyncIterator[bytes]) -> T:
    """The first frame that says something. Raises TimeoutError after a silence, ValueError for what is no frame."""
    reader = FrameReader(MAX_BYTES)
    while True:
        async with asyncio.timeout(SILENCE_SECONDS):
            chunk = await anext(chunks, None)
        if chunk is None:
            raise PeerError(f"{service.one} ended its answer without a handoff", "unreachable")
        for frame in reader.feed(chunk):
            if frame.failed:
                raise _refusal(service, httpx.codes.OK, frame.payload)
            if frame.payload:
                return _decoded(service, frame.payload)


def _decoded(service: Service[I, T], payload: bytes) -> T:
    try:
        return service.read(payload)
    except errors.InvalidRequest as error:  # of the peer's making, not of the user's
        raise PeerError(str(error), "refused") from error


async def _bounded(response: httpx.Response) -> bytes:
    content = b""
    async with asyncio.timeout(SILENCE_SECONDS):
        async for chunk in response.aiter_raw():
            content += chunk
            if len(content) > _MOST_ERROR_BYTES:
                raise ValueError("an answer without an end")
    return content


def _peer_error(service: Service[I, T], error: Exception) -> PeerError:
    if isinstance(error, TimeoutError | httpx.ReadTimeout | httpx.WriteTimeout):
        return PeerError(f"{service.one} has been silent for {SILENCE_SECONDS:g} s", "silent")
    if isinstance(error, ValueError):
        return PeerError(f"{service.one}'s answer has no end, or makes no sense", "refused")
    return PeerError(f"{service.one} cannot be reached", "unreachable")


def _refusal(service: Service[I, T], status: int, content: bytes) -> errors.EngineError:
    """The error of an envelope. What is wrong between the replicas, rather than with the request, is the peer's."""
    try:
        error = _envelopes.decode(content).error
    except (msgspec.DecodeError, UnicodeDecodeError):
        return PeerError(f"{service.one} answered {status} and no error that can be read", "refused")
    if error.code is None and error.type == "invalid_request_error":
        return errors.InvalidRequest(error.message, error.param)
    kind = _ERRORS.get(error.code or "")
    if kind is None and (error.code in _OF_THE_PEER or status >= httpx.codes.INTERNAL_SERVER_ERROR):
        return PeerError(f"{service.one} refuses: {error.message}", "refused")
    kind = kind or errors.EngineFailure
    return kind(error.message, error.param) if issubclass(kind, errors.InvalidRequest) else kind(error.message)
