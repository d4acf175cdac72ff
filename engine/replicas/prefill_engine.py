"""An `Engine` that has its prompts computed by other replicas: prefill there, decode by the engine here.

The first token comes with the handoff, and goes to the consumer at once. The local engine then reads the KV blocks, or
the last of them, if early handoffs came before; until its first delta the replica's answer stays open and keeps them in
place. If it ends too early, nothing that was read is trusted: the engine computes the prompt itself and goes on, with
no token repeated and none lost.

Images go to prefill as embeddings; the local engine uses these only if it has to compute the prompt itself.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any, Protocol

from msgspec.structs import replace

from engine import trace
from engine.base import DeltaStream, Engine, EngineAround
from engine.errors import EngineError, EngineFailure, EngineNotReady, EngineUnavailable, InvalidRequest
from engine.kit.checks import check_prompt
from engine.kit.handoff import prefill_info
from engine.kit.tasks import all_of
from engine.media import Unexpanded
from engine.replicas.remote import RemoteObserver, is_final
from engine.types import Delta, GenerateRequest, Handoff, NextHandoff
from protocol.internal import PrefillInfo

_END_SECONDS = 1.0
"""Maximum seconds to wait for the end of an answer that keeps no blocks, so that its connection can be used again."""

log = logging.getLogger(__name__)


class Lease(Protocol):
    """A computed prompt, whose KV blocks stay in place until `close`, or until `ended` returns."""

    @property
    def handoff(self) -> Handoff: ...

    async def ended(self) -> None:
        """Return when the replica has ended the lease, or is lost."""

    def close(self) -> None:
        """End the lease. Idempotent."""


class Prefills(Protocol):
    """A source of computed prompts: prefill replicas, or a handoff that came with the request."""

    def healthy(self, mine: PrefillInfo) -> bool:
        """Whether a request made now would be prefilled somewhere."""
        ...

    async def start(self) -> None: ...

    async def prefill(
        self, request: GenerateRequest, mine: PrefillInfo, announce: Callable[[Handoff | None], Awaitable[None]]
    ) -> Lease:
        """Return the computed prompt of a request; the caller closes the lease. `announce` is called with each early
        handoff before that, and with None if the blocks of those before are lost. Raises EngineError."""
        ...

    async def close(self) -> None: ...


class DisaggregatedEngine(EngineAround):
    """Prefills in `pool`, decodes with `local`. Prefill replicas have to serve `model_name` too.

    Prompts of fewer than `min_tokens` tokens are computed here, and all while no replica can be asked. With None no
    prompt is: requests fail with EngineUnavailable instead.
    """

    def __init__(
        self, local: Engine, pool: Prefills, model_name: str, min_tokens: int | None, observer: RemoteObserver
    ) -> None:
        super().__init__(local)
        self.pool = pool
        self.min_tokens = min_tokens
        self.observer = observer
        self._model_name = model_name
        self._runs: set[_RemotePrefill] = set()
        self._closed = False

    @property
    def healthy(self) -> bool:
        return (
            not self._closed and self.inner.healthy and (self.min_tokens is not None or self.pool.healthy(self.common))
        )

    @property
    def common(self) -> PrefillInfo:
        """Return the facts that a prefill replica must share with the local engine."""
        return prefill_info(self._model_name, self.inner.info)

    async def start(self) -> None:
        await all_of([self.pool.start(), self.inner.start()])

    def generate(self, request: GenerateRequest) -> DeltaStream:
        if self._closed or not self.inner.healthy:
            return DeltaStream.failed(EngineNotReady("the engine is starting, restarting or closing"))
        info = self.inner.info
        try:  # before a replica computes anything
            check_prompt(request, info.vocab_size, info.capacity or info.context_length)
        except InvalidRequest as error:
            return DeltaStream.failed(error)
        run = _RemotePrefill(self, request)
        self._runs.add(run)
        run.stream.when_done(lambda: self._runs.discard(run))
        return run.stream

    async def close(self) -> None:
        self._closed = True
        for run in list(self._runs):
            await run.fail(EngineNotReady("the engine is closing"))
        await self.inner.close()
        await self.pool.close()


class _LocalRun:
    """A request in the local engine, of which the engine may refuse the handoff. `put` gets its deltas and errors."""

    def __init__(self, engine: Engine, request: GenerateRequest, put: Callable[[Delta | Exception], None]) -> None:
        self.refusal: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        """Reason why the engine cannot go on from the handoff; empty once it has begun to answer."""
        self._engine = engine
        self._request_id = request.request_id
        self._early = request.handoff is not None and request.handoff.early
        if request.handoff is None:
            self.refusal.set_result("")
        self._put = put
        self._stream = engine.generate(request)
        self._stream.pipe(self._pass_on)

    async def go_on(self, handoff: Handoff) -> bool:
        """Pass on a handoff that follows an early one. Return False if the engine is not there to take it."""
        if self.refusal.done():
            return False
        self._early = handoff.early
        try:
            return await self._engine.continue_handoff(NextHandoff(self._request_id, handoff))
        except EngineError:
            return False

    def close(self) -> None:
        self._stream.close()

    def _pass_on(self, output: Delta | Exception) -> None:
        # What fails before the first token may be tried again.
        refused = not self.refusal.done() and (self._early or _is_about_handoff(output))
        if not self.refusal.done():
            self.refusal.set_result((str(output) or type(output).__name__) if refused else "")
        if not refused:
            self._put(output)


class _RemotePrefill:
    """One request. A task follows it until the local engine has begun to answer; from then on deltas are piped."""

    def __init__(self, engine: DisaggregatedEngine, request: GenerateRequest) -> None:
        self.stream = DeltaStream(self._abort)
        self._engine = engine
        self._request = request
        self._local: _LocalRun | None = None
        self._runs = 0
        self._task = asyncio.create_task(self._serve())

    async def fail(self, error: EngineError) -> None:
        """End with `error`, here and at the replica."""
        self.stream.fail(error)
        self._abort()
        await asyncio.wait([self._task])

    async def _serve(self) -> None:
        try:
            if self._is_short():
                self._compute("short")
            elif self._request.sampling.logprobs is not None and not self._engine.inner.info.handoff_logprobs:
                self._compute_logprobs()
            elif (lease := await self._prefilled()) is None:
                self._compute("no_peer")
            else:
                await self._go_on(lease)
        except EngineError as error:
            self._close_local()
            self.stream.fail(error)
        except Exception as error:  # a bug must not leave the consumer waiting
            log.exception("a remote prefill failed")
            self._close_local()
            self.stream.fail(EngineFailure(f"the handoff failed: {type(error).__name__}"))

    def _is_short(self) -> bool:
        shortest = self._engine.min_tokens
        return (
            shortest is not None
            and len(self._request.prompt_token_ids) < shortest
            and not isinstance(self._request.media, Unexpanded)
        )

    async def _prefilled(self) -> Lease | None:
        """Return the replica's answer; None if none could prefill and the prompt may be computed here."""
        try:
            return await self._engine.pool.prefill(self._request, self._engine.common, self._read_early)
        except EngineError as error:
            if self._engine.min_tokens is None or is_final(error):
                raise
            log.info("computing the prompt of %s here: %s", self._request.request_id, error)
            return None

    async def _read_early(self, handoff: Handoff | None) -> None:
        """Have the local engine read the KV blocks that are computed by now; None if they are lost."""
        if handoff is None:
            self._close_local()
        elif self._local is None:
            self._begin_reading(handoff)
        else:
            await self._local.go_on(handoff)

    async def _go_on(self, lease: Lease) -> None:
        """Pass on the first token, and have the local engine go on from the handoff."""
        first = lease.handoff.first
        lost = ""
        ended = asyncio.create_task(lease.ended())
        reading: asyncio.Task[str] | None = None
        try:
            if first.finish_reason is None:
                reading = asyncio.create_task(self._read(lease.handoff, ended))
                await asyncio.sleep(0)  # the engine is told first: making a chunk of the token takes a while
            self.stream.put(first)
            if reading is not None:
                lost = await reading
            else:
                self._close_local()
                await asyncio.wait({ended}, timeout=_END_SECONDS)
        except asyncio.CancelledError:
            self._close_local()  # it may have begun after whoever cancelled this has closed what there was
            raise
        finally:
            ended.cancel()
            if reading is not None:
                reading.cancel()
            lease.close()  # without awaiting anything before it, for the task may be cancelled here too
        if lost:
            await self._recover(lease.handoff, lost)

    async def _read(self, handoff: Handoff, ended: "asyncio.Task[None]") -> str:
        """Have the local engine read the KV blocks, or what is left of them. Return why they are lost, or nothing at
        its first delta."""
        with trace.span("transfer"):
            local = self._local
            if local is None or not await local.go_on(handoff):
                self._close_local()
                local = self._begin_reading(handoff)
            either: list[asyncio.Future[Any]] = [ended, local.refusal]
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if local.refusal.done():
            return local.refusal.result()
        self._close_local()  # at once: its tokens would come twice
        return "prefill has ended the lease, or is lost"

    async def _recover(self, handoff: Handoff, reason: str) -> None:
        """Go on without the KV blocks."""
        log.warning("computing the prompt of %s again, here: %s", self._request.request_id, reason)
        self._engine.observer.computed_locally("lost")
        local = self._begin(replace(self._request, handoff=replace(handoff, state=b"")))
        with trace.span("recompute"):
            refusal = await local.refusal
        if refusal:
            raise EngineUnavailable(
                f"the KV blocks were lost on their way from prefill ({reason}), and cannot be made here: {refusal}"
            )

    def _compute_logprobs(self) -> None:
        if self._engine.min_tokens is None:
            raise InvalidRequest(
                f"the {self._engine.inner.info.backend} engine of this replica has no log-probabilities for prompts "
                "computed elsewhere, and PREFILL_FALLBACK does not let it compute them itself",
                "logprobs",
            )
        self._compute("logprobs")

    def _compute(self, reason: str) -> None:
        self._engine.observer.computed_locally(reason)
        self._begin(replace(self._request, handoff=None))

    def _begin_reading(self, handoff: Handoff) -> _LocalRun:
        # Embeddings stay: a preempted sequence computes its prompt again. Media of a backend's own were used up.
        media = None if isinstance(self._request.media, Unexpanded) else self._request.media
        return self._begin(replace(self._request, handoff=handoff, media=media))

    def _begin(self, request: GenerateRequest) -> _LocalRun:
        """Begin a request in the local engine, which may not have ended one that was given up before."""
        self._runs += 1
        if self._runs > 1:
            request = replace(request, request_id=f"{request.request_id}-{self._runs}")
        self._local = _LocalRun(self._engine.inner, request, self.stream.push)
        return self._local

    def _close_local(self) -> None:
        if self._local is not None:
            self._local.close()
            self._local = None

    def _abort(self) -> None:
        self._task.cancel()
        self._close_local()


def _is_about_handoff(output: Delta | Exception) -> bool:
    """Return whether the engine cannot go on from the handoff, for instance because its KV blocks do not fit."""
    return (isinstance(output, InvalidRequest) and output.param == "handoff") or type(output) is EngineUnavailable
