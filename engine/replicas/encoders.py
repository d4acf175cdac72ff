"""An `Encoder` that has other replicas encode, and one here where there is one and no replica can.

Each file goes to the replica with the fewest to encode; all files of a prompt go to one, for an encoder that needs the
prompt. Embeddings that a replica's answer does not contain are read from its memory before the answer is closed.
"""

import asyncio
import logging
import uuid
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from typing import Any, TypeVar

import msgspec
from msgspec.structs import replace

from engine.encoder import Encoded, Encoder, EncoderInfo
from engine.errors import EngineError, EngineNotReady, EngineUnavailable, InvalidRequest
from engine.kit.tasks import all_of, cancel
from engine.media import EncodedMedia, MediaInput, RemoteRows, detach_media
from engine.replicas.ask import ENCODE, RemoteAnswer
from engine.replicas.encode_answers import EncodeAnswer, check_answer, encode_info, fetch
from engine.replicas.remote import RemoteObserver, RemotePool, RemoteReplica, is_final
from engine.transfer.arena import Arena
from engine.transfer.base import TransferError
from engine.transfer.process_id import process_domain
from protocol.internal import VERSION, EncodeInfo, EncodeRequest, pieces

_LOOK_SECONDS = 0.05
_END_SECONDS = 1.0
"""Maximum seconds to wait for the end of an answer that holds no memory."""
T = TypeVar("T")

log = logging.getLogger(__name__)


class EncodeReplica(RemoteReplica[EncodeInfo, EncodeAnswer]):
    """An encode replica.

    Once its memory could not be read, it sends embeddings within its answers, until it has been unavailable; and none
    stay with its encoder once an engine could not read them there.
    """

    service = ENCODE
    inline = False
    keeps = True

    def set_unready(self, error: EngineError) -> None:
        super().set_unready(error)
        self.inline = False
        self.keeps = True


class _RowsLease:
    """An open answer, by which embeddings stay with the encoder; `ended` is called when it has been closed."""

    def __init__(self, replica: EncodeReplica, answer: RemoteAnswer[EncodeAnswer], ended: Callable[[], None]) -> None:
        self.replica = replica
        self._following = asyncio.create_task(answer.ended())

        def end(_: object) -> None:
            answer.close()
            ended()

        self._following.add_done_callback(end)

    def close(self) -> None:
        self._following.cancel()


class EncodePool(RemotePool[EncodeReplica]):
    """Encode replicas.

    Embeddings that are not in their answers are read into `arena`, within `seconds`; without one they all are.
    """

    kind = EncodeReplica

    def __init__(
        self,
        urls: Sequence[str],
        secret: str,
        attempts: int,
        observer: RemoteObserver,
        arena: Arena | None = None,
        seconds: float = 0.0,
    ) -> None:
        super().__init__(urls, secret, attempts, observer)
        self._arena = arena
        self._seconds = seconds
        self._leases: dict[RemoteRows, _RowsLease] = {}

    def found(self, model_name: str, backend: str) -> EncodeInfo | None:
        """Return the description of the first available replica of this model; None without one."""
        wanted = (VERSION, model_name, backend)
        infos = (replica.info for replica in self.replicas if replica.available and replica.info is not None)
        return next((info for info in infos if (info.version, info.model, info.backend) == wanted), None)

    async def encode(self, media: Sequence[MediaInput], prompt: str, mine: EncodeInfo) -> Encoded:
        """Encode by one replica that agrees with `mine`, or have one copy what it has kept. Raises as `Encoder.encode`
        does, and NoReplica."""
        name = uuid.uuid4().hex
        bare, parts = detach_media(media)
        raw = msgspec.Raw(msgspec.msgpack.encode(bare))

        async def answered(replica: EncodeReplica, *, inline: bool) -> Encoded:
            reader = process_domain() if replica.keeps and not inline and any(file.stay for file in media) else ""
            request = EncodeRequest(VERSION, mine.model, raw, [*map(len, parts)], prompt, inline, reader)
            answer = await replica.ask(pieces(request, parts), name, len(media))
            stays = False
            try:
                found = answer.handoff
                check_answer(found, 0 if prompt else len(media), mine.hidden_size)
                encoded = found.encoding or await fetch(found, self._arena, self._seconds)
                if rows := [one.remote for one in found.media if one.remote is not None]:
                    stays = True
                    self._hold(rows, replica, answer)
                elif not found.offers:
                    with suppress(TimeoutError):  # the end of an answer that holds nothing: its connection is kept
                        async with asyncio.timeout(_END_SECONDS):
                            await answer.ended()
                return encoded
            except InvalidRequest as error:  # the replica's mistake, not the user's
                raise EngineUnavailable(f"an encode replica's answer is wrong: {error}") from error
            finally:
                if not stays:
                    answer.close()

        async def ask(replica: EncodeReplica) -> Encoded:
            if not (replica.inline or self._arena is None):
                try:
                    return await answered(replica, inline=False)
                except TransferError as error:
                    log.warning("%s sends embeddings from now on: its memory cannot be read: %s", replica.name, error)
                    replica.inline = True
            try:
                return await answered(replica, inline=True)
            except TransferError as error:
                raise EngineUnavailable("an encode replica does not send its embeddings") from error

        if (kept := media[0].kept) is not None:
            if (lease := self._leases.get(kept)) is None:
                raise EngineUnavailable("the embeddings are not leased any more")
            return await ask(lease.replica)
        return await self.try_in_turn(mine, name, lambda replica: replica.in_flight, ask)

    def release(self, rows: RemoteRows, *, lost: bool = False) -> None:
        """See `Encoder.release`. None stay any more with a replica that still has them and could not be read."""
        self.observer.remote_rows("lost" if lost else "released")
        lease = self._leases.pop(rows, None)
        if lease is None:
            return
        if lost and lease.replica.keeps:
            log.warning("%s keeps no embeddings from now on: an engine could not read them there", lease.replica.name)
            lease.replica.keeps = False
        if lease not in self._leases.values():
            lease.close()

    def _hold(self, rows: Sequence[RemoteRows], replica: EncodeReplica, answer: RemoteAnswer[EncodeAnswer]) -> None:
        """Leave an answer open until all its rows have been released, or the replica ends it."""

        def ended() -> None:
            for each in rows:
                self._leases.pop(each, None)

        self._leases.update(dict.fromkeys(rows, _RowsLease(replica, answer, ended)))

    async def close(self) -> None:
        for lease in {*self._leases.values()}:
            lease.close()
        await super().close()
        if self._arena is not None:
            await self._arena.close()


class EncoderPool:
    """Encodes by `replicas` of the model `model_name` and, where none can, by `local`, if there is one.

    `backend` is that of this replica. `info`, if the replicas' is known beforehand, spares waiting for one that tells
    it.
    """

    def __init__(
        self,
        replicas: EncodePool,
        model_name: str,
        backend: str,
        local: Encoder | None = None,
        info: EncoderInfo | None = None,
    ) -> None:
        self._replicas = replicas
        self._model_name = model_name
        self._backend = backend
        self._local = local
        self._mine = None if info is None else encode_info(model_name, backend, info)
        self._running: set[asyncio.Task[Any]] = set()
        self._closed = False

    @property
    def info(self) -> EncoderInfo:
        if self._mine is None:
            raise EngineNotReady("no encode replica has answered yet")
        return EncoderInfo(**{name: getattr(self._mine, name) for name in EncoderInfo.__struct_fields__})

    @property
    def healthy(self) -> bool:
        if self._closed or self._mine is None:
            return False
        return self._replicas.healthy(self._mine) or (self._local is not None and self._local.healthy)

    async def start(self) -> None:
        """Find the replicas.

        Without an encoder here, wait until one has said what it encodes with; all others have to agree with it.
        """
        await all_of([self._replicas.start(), *([self._local.start()] if self._local is not None else [])])
        if self._local is not None:
            self._mine = encode_info(self._model_name, self._backend, self._local.info)
        while self._mine is None:
            self._mine = self._replicas.found(self._model_name, self._backend)
            await asyncio.sleep(_LOOK_SECONDS)

    async def encode(self, media: Sequence[MediaInput], prompt: str = "") -> Encoded:
        if self._closed or self._mine is None:
            raise EngineNotReady("the encoder is starting or closing")
        if self._mine.placeholder:
            return await self._run(all_of(self._one(file, self._mine) for file in media))
        return await self._run(self._replicas.encode(media, prompt, self._mine))

    def release(self, rows: RemoteRows, *, lost: bool = False) -> None:
        self._replicas.release(rows, lost=lost)

    async def close(self) -> None:
        self._closed = True
        await cancel(self._running)
        await self._replicas.close()
        if self._local is not None:
            await self._local.close()

    async def _one(self, file: MediaInput, mine: EncodeInfo) -> EncodedMedia:
        try:
            found = await self._replicas.encode([file], "", mine)
        except EngineError as error:
            if self._local is None or is_final(error) or file.kept is not None:
                raise
            log.info("an image is encoded here: %s", error)
            self._replicas.observer.computed_locally("no_peer")
            found = await self._local.encode([replace(file, stay=False)])
        assert isinstance(found, list), "encoded without its prompt"
        return found[0]

    async def _run(self, work: Coroutine[Any, Any, T]) -> T:
        """Return the result of `work`. Closing makes it raise EngineNotReady, cancelling cancels it."""
        task = asyncio.create_task(work)
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        try:
            await asyncio.wait({task})
        finally:
            task.cancel()
        if task.cancelled():
            raise EngineNotReady("the encoder is closing")
        return task.result()
