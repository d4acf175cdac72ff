"""One request to another replica's /prefill or /encode. Its open answer is the lease of what the replica keeps."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from http import HTTPStatus
from typing import Generic, TypeVar

import msgspec
from pydantic import ValidationError

from engine import errors, trace
from engine.kit.handoff import MAX_BYTES, decode_handoff
from engine.replicas.client import AnswerTooLong, ConnectionFailed, Header, ReplicaClient, ReplicaConnection
from engine.replicas.encode_answers import decode_answer
from protocol.errors import ErrorEnvelope
from protocol.frames import FrameReader
from protocol.internal import MEDIA_TYPE, SILENCE_SECONDS, EncodeInfo, PrefillInfo

I = TypeVar("I", bound=msgspec.Struct)  # noqa: E741
T = TypeVar("T")
_SLOWEST_UPLOAD = 50 << 20
"""Bytes per second: a replica has this much more time to begin its answer to a large request."""
_ERRORS: dict[str, type[errors.EngineError]] = {
    "context_length_exceeded": errors.ContextOverflow,
    "request_too_large": errors.ContextOverflow,  # for that replica: as with its context, another may have more room
    "not_ready": errors.EngineNotReady,
    "asleep": errors.EngineAsleep,
    "engine_died": errors.EngineDied,
    "embeddings_lost": errors.EmbeddingsLost,
    "queue_full": errors.QueueFull,
    "queue_timeout": errors.QueueTimeout,
    "unavailable": errors.EngineUnavailable,
    "engine_failure": errors.EngineFailure,
    "internal_error": errors.EngineFailure,
}
"""Exceptions by code of the error envelope. Other codes fail a single request, except those of _OF_THE_REPLICA."""
_OF_THE_REPLICA = frozenset(
    {"invalid_api_key", "forbidden", "unknown_url", "wrong_replica", "method_not_allowed"}
    | {"unsupported_media_type", "replicas_differ"}
)


class ReplicaFault(errors.EngineUnavailable):
    """The replica is at fault, not the request: it cannot be reached, is silent, or makes no sense.

    The message is for clients too: it names no address, and leaves details to the cause.
    """

    def __init__(self, message: str, outcome: str) -> None:
        super().__init__(message)
        self.outcome = outcome
        """Label for the metrics: unreachable, silent or refused."""


@dataclass(frozen=True)
class Service(Generic[I, T]):
    """An internal route: its name, and how its answers are read."""

    name: str
    infos: msgspec.msgpack.Decoder[I]
    """Decodes the answer to GET, the replica's description of itself."""
    read: Callable[[bytes], T]
    """Decodes the answer to POST. Raises InvalidRequest."""

    @property
    def path(self) -> bytes:
        return f"/{self.name}".encode()

    @property
    def one(self) -> str:
        return f"{'an' if self.name == 'encode' else 'a'} {self.name} replica"


PREFILL = Service("prefill", msgspec.msgpack.Decoder(PrefillInfo), decode_handoff)
ENCODE = Service("encode", msgspec.msgpack.Decoder(EncodeInfo), decode_answer)


class RemoteAnswer(Generic[T]):
    """A replica's answer. The replica keeps the KV blocks or embeddings until `close`, or until `ended` returns."""

    def __init__(self, handoff: T, client: ReplicaClient, connection: ReplicaConnection) -> None:
        self.handoff = handoff
        self._client = client
        self._connection = connection

    async def ended(self) -> None:
        """Return when the replica has ended the lease, or is lost."""
        with suppress(ConnectionFailed):
            while await self._connection.chunk():
                pass

    def close(self) -> None:
        """End the lease. Idempotent."""
        self._client.release(self._connection)


async def only(_: object) -> bool:
    """Take the first result as the last one."""
    return True


async def ask(
    client: ReplicaClient,
    service: Service[I, T],
    body: Sequence[bytes],
    headers: Sequence[Header],
    take: Callable[[T], Awaitable[bool]] = only,
) -> RemoteAnswer[T]:
    """Send a request. `take` is called with each result, and returns whether it is the last. Raises ReplicaFault, or
    the error of `engine/errors` that the replica answers with."""
    to: trace.Attributes = {"server.address": client.host, "server.port": client.port}
    with trace.span(f"POST /{service.name}", to, client=True):
        size = sum(map(len, body))
        traced = [(name.encode(), value.encode()) for name, value in trace.headers().items()]
        sent = [*headers, (b"content-type", MEDIA_TYPE.encode()), *traced]
        with _faults(service), ExitStack() as unless_answered:
            async with asyncio.timeout(SILENCE_SECONDS + size / _SLOWEST_UPLOAD):
                connection = await client.request(client.head("POST", service.path, sent, size), *body)
            unless_answered.callback(client.release, connection)
            if connection.status != HTTPStatus.OK:
                async with asyncio.timeout(SILENCE_SECONDS):
                    raise _refusal(service, connection.status, await connection.body())
            answer = RemoteAnswer(await _handoff(service, connection, take), client, connection)
            unless_answered.pop_all()
            return answer


async def describe(client: ReplicaClient, service: Service[I, T], headers: Sequence[Header]) -> I:
    """Return the replica's description of itself, if it takes requests now. Raises as `ask` does."""
    with _faults(service):
        async with asyncio.timeout(SILENCE_SECONDS):
            status, content = await client.get(service.path, headers)
    if status != HTTPStatus.OK:
        raise _refusal(service, status, content)
    try:
        return service.infos.decode(content)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ReplicaFault(f"{service.one} does not say what it {service.name}s with", "refused") from error


async def _handoff(service: Service[I, T], connection: ReplicaConnection, take: Callable[[T], Awaitable[bool]]) -> T:
    """The frame with the result. Raises TimeoutError after a silence, ValueError for a malformed frame."""
    reader = FrameReader(MAX_BYTES)
    while True:
        async with asyncio.timeout(SILENCE_SECONDS):
            chunk = await connection.chunk()
        if not chunk:
            raise ReplicaFault(f"{service.one} ended its answer without a handoff", "unreachable")
        for frame in reader.feed(chunk):
            if frame.failed:
                raise _refusal(service, HTTPStatus.OK, frame.payload)
            if frame.payload:
                try:
                    result = service.read(frame.payload)
                except errors.InvalidRequest as error:  # the replica's mistake, not the user's
                    raise ReplicaFault(str(error), "refused") from error
                if await take(result):
                    return result


@contextmanager
def _faults(service: Service[I, T]) -> Iterator[None]:
    """Translate errors of the connection, and of the frames that come over it, to ReplicaFault."""
    try:
        yield
    except TimeoutError as error:
        raise ReplicaFault(f"{service.one} has been silent for {SILENCE_SECONDS:g} s", "silent") from error
    except (AnswerTooLong, ValueError) as error:
        raise ReplicaFault(f"{service.one}'s answer has no end, or makes no sense", "refused") from error
    except ConnectionFailed as error:
        raise ReplicaFault(f"{service.one} cannot be reached", "unreachable") from error


def _refusal(service: Service[I, T], status: int, content: bytes) -> errors.EngineError:
    """The error in an envelope. Errors between replicas, rather than of the request, are the replica's fault."""
    try:
        error = ErrorEnvelope.model_validate_json(content).error
    except ValidationError:
        return ReplicaFault(f"{service.one} answered {status} and no error that can be read", "refused")
    if error.code is None and error.type == "invalid_request_error":
        return errors.InvalidRequest(error.message, error.param)
    kind = _ERRORS.get(error.code or "")
    if kind is None and (error.code in _OF_THE_REPLICA or status >= HTTPStatus.INTERNAL_SERVER_ERROR):
        return ReplicaFault(f"{service.one} refuses: {error.message}", "refused")
    kind = kind or errors.EngineFailure
    return kind(error.message, error.param) if issubclass(kind, errors.InvalidRequest) else kind(error.message)
