"""One hand-over on its way: asks a peer's /prefill, reads the framed answer, and keeps it open as the lease of the KV blocks."""

import asyncio
from collections.abc import AsyncIterator

import httpx
import msgspec

from engine import errors
from engine.handoff import MAX_BYTES, decode_handoff
from engine.types import Handoff
from protocol.internal import MEDIA_TYPE, SILENCE_SECONDS, FrameReader, PrefillInfo

CONNECT_SECONDS = 1.5
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
_OF_THE_PEER = frozenset({"invalid_api_key", "forbidden", "unknown_url", "method_not_allowed", "unsupported_media_type", "replicas_differ"})


class PeerError(errors.EngineUnavailable):
    """The peer itself is at fault, not the request: it cannot be reached, says nothing, or nothing that makes sense. The message is for
    the replica's clients too: it names no address, and leaves what a library said to the cause."""

    def __init__(self, message: str, outcome: str) -> None:
        super().__init__(message)
        self.outcome = outcome
        """For the metrics: unreachable, silent or refused."""


class _Error(msgspec.Struct):
    message: str = ""
    type: str = ""
    param: str | None = None
    code: str | None = None


class _Envelope(msgspec.Struct):
    error: _Error


_envelopes = msgspec.json.Decoder(_Envelope)
_infos = msgspec.msgpack.Decoder(PrefillInfo)


class Lease:
    """What a peer has handed over. It holds the KV blocks until `aclose`, or until `ended` returns."""

    def __init__(self, handoff: Handoff, response: httpx.Response, chunks: AsyncIterator[bytes]) -> None:
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
        """The blocks are needed no more."""
        await self._response.aclose()


async def prefill(http: httpx.AsyncClient, url: str, body: bytes, headers: dict[str, str]) -> Lease:
    """Have the peer at `url` prefill. Raises PeerError, or the error of `engine/errors` that it answers with."""
    request = http.build_request("POST", f"{url}/prefill", content=body, headers={**headers, "content-type": MEDIA_TYPE})
    response = await _answered(http, request, SILENCE_SECONDS + len(body) / _SLOWEST_UPLOAD)
    try:
        if response.status_code != httpx.codes.OK:
            raise _refusal(response.status_code, await _bounded(response))
        chunks = response.aiter_raw()
        return Lease(await _handoff(chunks), response, chunks)
    except (httpx.HTTPError, TimeoutError, ValueError) as error:
        await response.aclose()
        raise _peer_error(error) from error
    except BaseException:  # cancellation included
        await response.aclose()
        raise


async def describe(http: httpx.AsyncClient, url: str) -> PrefillInfo:
    """What the peer at `url` prefills with, if it would take a request now. Raises as `prefill` does."""
    response = await _answered(http, http.build_request("GET", f"{url}/prefill"))
    try:
        content = await _bounded(response)
    except (httpx.HTTPError, TimeoutError, ValueError) as error:
        raise _peer_error(error) from error
    finally:
        await response.aclose()
    if response.status_code != httpx.codes.OK:
        raise _refusal(response.status_code, content)
    try:
        return _infos.decode(content)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise PeerError("a prefill replica does not say what it prefills with", "refused") from error


async def _answered(http: httpx.AsyncClient, request: httpx.Request, seconds: float = SILENCE_SECONDS) -> httpx.Response:
    """The head of the answer. Raises PeerError."""
    try:
        async with asyncio.timeout(seconds):
            return await http.send(request, stream=True)
    except (httpx.HTTPError, TimeoutError) as error:
        raise _peer_error(error) from error


async def _handoff(chunks: AsyncIterator[bytes]) -> Handoff:
    """The first frame that says something. Raises TimeoutError after a silence, ValueError for what is no frame."""
    reader = FrameReader(MAX_BYTES)
    while True:
        async with asyncio.timeout(SILENCE_SECONDS):
            chunk = await anext(chunks, None)
        if chunk is None:
            raise PeerError("a prefill replica ended its answer without a handoff", "unreachable")
        for frame in reader.feed(chunk):
            if frame.failed:
                raise _refusal(httpx.codes.OK, frame.payload)
            if frame.payload:
                return _decoded(frame.payload)


def _decoded(payload: bytes) -> Handoff:
    try:
        return decode_handoff(payload)
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


def _peer_error(error: Exception) -> PeerError:
    if isinstance(error, TimeoutError | httpx.ReadTimeout | httpx.WriteTimeout):
        return PeerError(f"a prefill replica has been silent for {SILENCE_SECONDS:g} s", "silent")
    if isinstance(error, ValueError):
        return PeerError("a prefill replica's answer has no end, or makes no sense", "refused")
    return PeerError("a prefill replica cannot be reached", "unreachable")


def _refusal(status: int, content: bytes) -> errors.EngineError:
    """The error of an envelope. What is wrong between the replicas, rather than with the request, is the peer's."""
    try:
        error = _envelopes.decode(content).error
    except (msgspec.DecodeError, UnicodeDecodeError):
        return PeerError(f"a prefill replica answered {status} and no error that can be read", "refused")
    if error.code is None and error.type == "invalid_request_error":
        return errors.InvalidRequest(error.message, error.param)
    kind = _ERRORS.get(error.code or "")
    if kind is None and (error.code in _OF_THE_PEER or status >= httpx.codes.INTERNAL_SERVER_ERROR):
        return PeerError(f"a prefill replica refuses: {error.message}", "refused")
    kind = kind or errors.EngineFailure
    return kind(error.message, error.param) if issubclass(kind, errors.InvalidRequest) else kind(error.message)
