"""Sleep: an engine, or the encoder of an encode replica, releases the memory of its weights and of its KV cache, and
restores it when it wakes.

`SleepingEngine` and `SleepingEncoder` decide when, and what happens to requests; backends release and resume memory
(`Releasable`). They live where the backend lives, so that the API processes of a replica share one state; each of them
follows `sleep_states`.
"""

import asyncio
import contextvars
import logging
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Collection, Coroutine, Sequence
from typing import Any, Literal, Protocol, get_args

import msgspec
from msgspec.structs import replace

from engine.base import DeltaStream, Engine, EngineAround, Latest, Preparable
from engine.config import SleepConfig, Tag
from engine.encoder import Encoded, Encoder, EncoderInfo
from engine.errors import EngineAsleep, EngineError, EngineFailure, EngineNotReady, EngineWoken, NotSupported
from engine.kit.tasks import cancel
from engine.media import MediaInput, RemoteRows
from engine.types import CANARY_SALT, GenerateRequest

TAGS: tuple[Tag, ...] = get_args(Tag)
SETTLE_SECONDS = 0.1
"""Time after the last request within which requests that queued for its place in other processes may still arrive."""

log = logging.getLogger(__name__)


class SleepOrder(msgspec.Struct, frozen=True):
    """The memory to release, and what happens to running requests.

    Level 1 keeps the weights in the host's memory; level 2 reads them from the model's files again. KV blocks are
    dropped unless a tier has them. Mode `wait` lets running requests finish, mode `abort` ends them.
    """

    level: Literal[1, 2] = 1
    mode: Literal["wait", "abort"] = "abort"
    tags: tuple[Tag, ...] = TAGS
    on_demand: bool = False
    """Whether a request may wake the engine."""


class SleepState(msgspec.Struct, frozen=True):
    phase: Literal["awake", "falling_asleep", "asleep", "waking"] = "awake"
    level: int = 0
    """0 while awake."""
    released: tuple[Tag, ...] = ()
    on_demand: bool = False
    """Whether a request wakes the engine."""
    wake_seconds: float = 0.0
    """Seconds that the latest wake-up took."""

    @property
    def obstacle(self) -> str:
        """Reason why requests are refused; empty if they are not."""
        if self.phase == "awake" or self.on_demand:
            return ""
        if self.phase == "asleep":
            return f"The replica is asleep, at level {self.level}: POST /wake_up wakes it."
        return "The replica is waking up." if self.phase == "waking" else "The replica is falling asleep."


class Sleeper(Protocol):
    """An engine that can be put to sleep, here or in another process."""

    async def sleep(self, order: SleepOrder) -> SleepState:
        """Release memory, and return the state once it is released. Does nothing for memory that is released already.
        Continues if the caller is cancelled. Raises EngineWoken if the engine is woken before it sleeps, NotSupported,
        EngineNotReady and EngineFailure.
        """
        ...

    async def wake_up(self, tags: tuple[Tag, ...] = TAGS) -> SleepState:
        """Restore memory, and return the state once it is restored; with all memory, requests are accepted again. Does
        nothing for memory that was not released. Cancels a sleep that waits for running requests. Continues if the
        caller is cancelled. Raises EngineFailure, and stays asleep, if the memory or the weights cannot be restored.
        """
        ...

    def sleep_states(self) -> AsyncIterator[SleepState]:
        """Yield the state, then each newer one. Ends when the engine closes."""
        ...


class Releasable(Protocol):
    """A backend whose memory can be released. Its methods are called one at a time, and only while nothing runs."""

    def sleep_obstacle(self, level: int) -> str:
        """Return why memory cannot be released at a level; empty if it can."""
        ...

    async def release_memory(self, tags: Collection[Tag], level: int) -> None:
        """Release memory. Memory released at level 1 can then be released at level 2. Raises EngineFailure."""
        ...

    async def resume_memory(self, tags: Collection[Tag]) -> None:
        """Restore released memory; the KV cache is empty. May be repeated after EngineFailure."""
        ...


class ReleasableEngine(Engine, Releasable, Protocol):
    pass


class ReleasableEncoder(Encoder, Protocol):
    """An encoder whose weights can be released. Its methods are called only while nothing is encoded."""

    async def release_weights(self) -> None: ...

    async def resume_weights(self) -> None:
        """Load the weights again. May be repeated after EngineFailure, which it raises also if they have changed."""
        ...


class _Abortable(Protocol):
    def abort(self, error: EngineError) -> None:
        """End running requests with an error."""


class _Resumable(Protocol):
    """A request that waits until the backend is awake."""

    def enter(self) -> None:
        """Go on."""

    def fail(self, error: Exception) -> None: ...


class _Delayed:
    """A request that waits until the engine is awake. Its stream then passes the engine's on."""

    def __init__(
        self,
        request: GenerateRequest,
        begin: Callable[[GenerateRequest], DeltaStream],
        leave: "Callable[[_Delayed], object]",
    ) -> None:
        self._request = request
        self._context = contextvars.copy_context()
        self._inner: DeltaStream | None = None
        self._begin = begin
        self._leave = leave
        self.stream = DeltaStream(self._abort)

    def enter(self) -> None:
        self._inner = self._context.run(self._begin, self._request)
        self._inner.pipe(self.stream.push)

    def fail(self, error: Exception) -> None:
        self.stream.fail(error)

    def _abort(self) -> None:
        if self._inner is not None:
            self._inner.close()
        else:
            self._leave(self)


class _SleepControl(ABC):
    """A `Sleeper` around a backend, which falls asleep by itself if the configuration says so."""

    def __init__(self, backend: Releasable, config: SleepConfig) -> None:
        self._backend = backend
        self._config = config
        self.state = SleepState()
        """The newest of `sleep_states`."""
        self._states: Latest[SleepState] = Latest()
        self._states.publish(self.state)
        self._turn = asyncio.Lock()
        self._accepts = True
        """Whether requests reach the backend: while awake, and while it waits for running ones."""
        self._running: dict[_Abortable, bool] = {}
        """Running requests; the value says whether each keeps the backend awake, which a canary does not."""
        self._quiet = asyncio.Event()
        """Set while nothing runs."""
        self._quiet.set()
        self._woken = asyncio.Event()
        """Set while calls wait for their turn to wake the backend."""
        self._wakers = 0
        """The number of these calls."""
        self._waiting: dict[_Resumable, None] = {}
        self._orders: set[asyncio.Task[None]] = set()
        self._idle: asyncio.Task[None] | None = None
        self._active_at = 0.0
        self._closed = False

    @abstractmethod
    async def close(self) -> None: ...

    async def _begin_idling(self) -> None:
        """Fall asleep when idle from now on. Raises EngineFailure, and closes, if the backend cannot."""
        if self._config.idle_seconds and (reason := self._backend.sleep_obstacle(self._config.idle_level)):
            await self.close()
            raise EngineFailure(f"SLEEP_AFTER_IDLE_SECONDS={self._config.idle_seconds:g} cannot be kept: {reason}")
        self._active_at = asyncio.get_running_loop().time()
        if self._config.idle_seconds:
            self._idle = asyncio.create_task(self._sleep_when_idle(self._config.idle_seconds), name="idle")

    async def _end(self) -> None:
        """Cancel orders, and end waiting requests."""
        self._closed = True
        if self._idle is not None:
            await cancel([self._idle])  # first, since it would try again when its order has ended
        await cancel(self._orders)
        self._fail_waiting(EngineNotReady("the engine is closing"))
        self._states.close()

    def _queue(self, waiting: _Resumable) -> None:
        """Queue a request until the backend is awake, and wake it."""
        if self._closed:
            waiting.fail(EngineNotReady("the engine is closing"))
            return
        self._waiting[waiting] = None
        if not self._woken.is_set() and self.state.phase != "waking":
            self._order(self._wake(TAGS))

    def _takes(self, *, counts: bool) -> bool:
        """Return whether a request reaches the backend now. While the backend falls asleep, a canary does not:
        successive canaries would delay that forever."""
        return self._accepts and (counts or self.state.phase == "awake")

    def _begun(self, running: _Abortable, *, counts: bool) -> None:
        self._running[running] = counts
        self._quiet.clear()

    def _ended(self, running: _Abortable) -> None:
        if self._running.pop(running):
            self._active_at = asyncio.get_running_loop().time()
        if not self._running:
            self._quiet.set()

    async def sleep(self, order: SleepOrder) -> SleepState:
        if reason := self._backend.sleep_obstacle(order.level):
            raise NotSupported(reason)
        return await self._outcome(self._order(self._fall_asleep(order)))

    async def wake_up(self, tags: tuple[Tag, ...] = TAGS) -> SleepState:
        return await self._outcome(self._order(self._wake(tags)))

    def sleep_states(self) -> AsyncIterator[SleepState]:
        return self._states.values()

    def _order(self, work: Coroutine[Any, Any, None]) -> "asyncio.Task[None]":
        """Start an order, which continues even if the caller is cancelled. Raises EngineNotReady while the engine
        closes.
        """
        if self._closed:
            work.close()
            raise EngineNotReady("the engine is closing")
        task = asyncio.create_task(work)
        self._orders.add(task)
        task.add_done_callback(self._orders.discard)
        task.add_done_callback(_note_failure)
        return task

    async def _outcome(self, order: "asyncio.Task[None]") -> SleepState:
        try:
            await asyncio.shield(order)
            return self.state
        except asyncio.CancelledError:
            if not order.cancelled():
                raise  # the caller has left
            raise EngineNotReady("the engine is closing") from None

    async def _fall_asleep(self, order: SleepOrder) -> None:
        if order.mode == "abort" and self.state.phase == "falling_asleep":
            self._abort_running()  # for which another order waits
        async with self._turn:
            before = self.state
            if before.phase == "awake":
                self._accepts = order.mode == "wait"
                self._set(replace(before, phase="falling_asleep", on_demand=order.on_demand))
                if order.mode == "abort":
                    self._abort_running()
                if not await self._rested():
                    self._accepts = True
                    self._set(before)
                    raise EngineWoken("The replica was woken before it slept.")
                self._accepts = False
            released = tuple(tag for tag in TAGS if tag in before.released or tag in order.tags)
            asleep = SleepState(
                phase="asleep",
                level=max(before.level, order.level),
                released=released,
                on_demand=order.on_demand and (before.on_demand or before.phase == "awake"),
                wake_seconds=before.wake_seconds,
            )
            if asleep != before:
                try:
                    await self._backend.release_memory(order.tags, order.level)
                except Exception:
                    await self._undo(before, asleep)
                    raise
                log.info("asleep at level %d: released %s", asleep.level, " and ".join(released))
                self._set(asleep)

    async def _undo(self, before: SleepState, asleep: SleepState) -> None:
        """Restore the memory after a partial release that failed. If that fails too, the engine is asleep, and may be
        woken again."""
        if before.phase == "awake":
            try:
                await self._backend.resume_memory(TAGS)
            except Exception as error:
                self._set(asleep)
                self._fail_waiting(error)
                raise
            self._accepts = True
        self._set(before)
        if self._accepts:
            self._enter_waiting()

    async def _rested(self) -> bool:
        """Wait until nothing runs; return False if the engine is woken first."""
        woken = asyncio.ensure_future(self._woken.wait())
        try:
            settled = self._quiet.is_set()
            while not settled and not woken.done():
                quiet = asyncio.ensure_future(self._quiet.wait())
                await asyncio.wait([quiet, woken], return_when=asyncio.FIRST_COMPLETED)
                quiet.cancel()
                if self._accepts:
                    await asyncio.wait([woken], timeout=SETTLE_SECONDS)
                settled = self._quiet.is_set()
            return settled and not self._woken.is_set()
        finally:
            woken.cancel()

    def _abort_running(self) -> None:
        self._accepts = False
        for stream in list(self._running):
            stream.abort(EngineAsleep("The replica was put to sleep while the request ran."))

    async def _wake(self, tags: tuple[Tag, ...]) -> None:
        self._wakers += 1
        self._woken.set()
        async with self._turn:
            self._wakers -= 1
            if not self._wakers:
                self._woken.clear()
            before = self.state
            wanted = tuple(tag for tag in before.released if tag in tags)
            if wanted:
                self._set(replace(before, phase="waking"))
                loop = asyncio.get_running_loop()
                started = loop.time()
                try:
                    await self._backend.resume_memory(wanted)
                except Exception as error:
                    self._set(before)
                    self._fail_waiting(error)
                    raise
                seconds = loop.time() - started
                left = tuple(tag for tag in before.released if tag not in wanted)
                log.info("resumed %s in %.3f s", " and ".join(wanted), seconds)
                if left:
                    self._set(replace(before, released=left, wake_seconds=seconds))
                else:
                    self._active_at = loop.time()
                    self._accepts = True
                    self._set(SleepState(wake_seconds=seconds))
            if self._accepts:
                self._enter_waiting()
            elif self._waiting and not self._woken.is_set():  # requests that came meanwhile need the rest, too
                self._order(self._wake(TAGS))

    def _enter_waiting(self) -> None:
        queued, self._waiting = self._waiting, {}
        for one in queued:
            one.enter()

    def _fail_waiting(self, error: Exception) -> None:
        if not isinstance(error, EngineError):  # a bug, or a library's, which `_note_failure` logs
            error = EngineFailure(f"the engine cannot wake: {type(error).__name__}")
        queued, self._waiting = self._waiting, {}
        for one in queued:
            one.fail(error)

    def _set(self, state: SleepState) -> None:
        self.state = state
        self._states.publish(state)

    async def _sleep_when_idle(self, seconds: float) -> None:
        order = SleepOrder(self._config.idle_level, "wait", on_demand=self._config.wake_on_demand)
        loop = asyncio.get_running_loop()
        while True:
            busy = any(self._running.values()) or self.state.phase != "awake"
            left = seconds if busy else self._active_at + seconds - loop.time()
            if left > 0:
                await asyncio.sleep(left)
                continue
            try:
                await self.sleep(order)
            except Exception as error:
                log.warning("the idle engine does not fall asleep: %s", error)
                await asyncio.sleep(seconds)


class SleepingEngine(_SleepControl, EngineAround):
    """A `Sleeper` around an engine."""

    def __init__(self, inner: ReleasableEngine, config: SleepConfig) -> None:
        _SleepControl.__init__(self, inner, config)
        EngineAround.__init__(self, inner)

    async def prepare(self) -> None:
        if isinstance(self.inner, Preparable):
            await self.inner.prepare()

    async def start(self) -> None:
        await super().start()
        await self._begin_idling()

    def generate(self, request: GenerateRequest) -> DeltaStream:
        counts = request.cache_salt != CANARY_SALT
        if self._takes(counts=counts):
            stream = self.inner.generate(request)
            self._begun(stream, counts=counts)
            stream.when_done(lambda: self._ended(stream))
            return stream
        if not (self.state.on_demand and counts):
            return DeltaStream.failed(EngineAsleep(self.state.obstacle or "The replica is asleep."))
        delayed = _Delayed(request, self.generate, lambda one: self._waiting.pop(one, None))
        self._queue(delayed)
        return delayed.stream

    async def close(self) -> None:
        await self._end()
        await self.inner.close()


class _EncoderTurn:
    """A request to an encoder, which runs or waits until the encoder is awake."""

    def __init__(self) -> None:
        self._done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def wait(self, work: "asyncio.Future[Encoded] | None" = None) -> None:
        """Wait until the request may continue, or until `work` is done. Raises the error that ended the request."""
        either: list[asyncio.Future[Any]] = [self._done] if work is None else [self._done, work]
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if self._done.done():
            self._done.result()

    def enter(self) -> None:
        self._done.set_result(None)

    def fail(self, error: Exception) -> None:
        if not self._done.done():
            self._done.set_exception(error)

    abort = fail


class _EncoderMemory:
    """The memory of an encoder and of the stores of its embeddings, which count as its cache. Levels 1 and 2 are the
    same."""

    def __init__(self, encoder: ReleasableEncoder) -> None:
        self.caches: list[Callable[[], None]] = []
        self._encoder = encoder

    def sleep_obstacle(self, level: int) -> str:
        return ""

    async def release_memory(self, tags: Collection[Tag], level: int) -> None:
        if "kv_cache" in tags:
            for empty in self.caches:
                empty()
        if "weights" in tags:
            await self._encoder.release_weights()

    async def resume_memory(self, tags: Collection[Tag]) -> None:
        if "weights" in tags:
            await self._encoder.resume_weights()


class SleepingEncoder(_SleepControl):
    """A `Sleeper` around an encoder, and an `Encoder` itself. Asleep it is healthy: the replica's state says more."""

    def __init__(self, inner: ReleasableEncoder, config: SleepConfig) -> None:
        memory = _EncoderMemory(inner)
        super().__init__(memory, config)
        self.inner = inner
        self.caches = memory.caches
        """Functions that release the memory of embeddings."""

    @property
    def info(self) -> EncoderInfo:
        return self.inner.info

    @property
    def healthy(self) -> bool:
        return self.inner.healthy or self.state.phase != "awake"

    async def start(self) -> None:
        await self.inner.start()
        await self._begin_idling()

    async def encode(self, media: Sequence[MediaInput], prompt: str = "", *, counts: bool = True) -> Encoded:
        """See `Encoder`. `counts`: whether this keeps the replica awake, and wakes it."""
        while not self._takes(counts=counts):
            if not (self.state.on_demand and counts):
                raise EngineAsleep(self.state.obstacle or "The replica is asleep.")
            waiting = _EncoderTurn()
            self._queue(waiting)
            try:
                await waiting.wait()
            finally:
                self._waiting.pop(waiting, None)
        turn, work = _EncoderTurn(), asyncio.ensure_future(self.inner.encode(media, prompt))
        self._begun(turn, counts=counts)
        try:
            await turn.wait(work)
            return work.result()
        finally:
            work.cancel()
            self._ended(turn)

    def release(self, rows: RemoteRows, *, lost: bool = False) -> None:
        self.inner.release(rows, lost=lost)

    async def close(self) -> None:
        await self._end()
        await self.inner.close()


def _note_failure(order: "asyncio.Task[None]") -> None:
    """Log the failure of an order, whose caller may have been cancelled."""
    if not order.cancelled() and (error := order.exception()) is not None:
        log.warning("%s", error, exc_info=None if isinstance(error, EngineError) else error)
