"""An `Engine` that has its prompts computed by other replicas: prefill there, decode by the engine here.

The first token comes with the handoff, and goes to the consumer at once. The local engine then reads the KV blocks;
until its first delta the replica's answer stays open and keeps them in place. If it ends too early, nothing that was
read is trusted: the engine computes the prompt itself and goes on, with no token repeated and none lost.

Images go to prefill as embeddings; the local engine uses these only if it has to compute the prompt itself.
"""

import asyncio
import logging
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
from engine.types import Delta, GenerateRequest, Handoff
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

    async def prefill(self, request: GenerateRequest, mine: PrefillInfo) -> Lease:
        """Return the computed prompt of a request; the caller closes the lease. Raises EngineError."""
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


class _RemotePrefill:
    """One request. A task follows it until the local engine has begun to answer; from then on deltas are piped."""

    def __init__(self, engine: DisaggregatedEngine, request: GenerateRequest) -> None:
        self.stream = DeltaStream(self._abort)
        self._engine = engine
        self._request = request
        self._local: DeltaStream | None = None
        self._verdict: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        """The local engine's on the handoff: empty once it has begun to answer, else why it cannot go on."""
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
            self.stream.fail(error)
        except Exception as error:  # a bug must not leave the consumer waiting
            log.exception("a remote prefill failed")
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
            return await self._engine.pool.prefill(self._request, self._engine.common)
        except EngineError as error:
            if self._engine.min_tokens is None or is_final(error):
                raise
            log.info("computing the prompt of %s here: %s", self._request.request_id, error)
            return None

    async def _go_on(self, lease: Lease) -> None:
        """Pass on the first token, then have the local engine go on from the handoff."""
        first = lease.handoff.first
        lost = ""
        ended = asyncio.create_task(lease.ended())
        try:
            self.stream.put(first)
            if first.finish_reason is None:
                lost = await self._read(lease.handoff, ended)
            else:
                await asyncio.wait({ended}, timeout=_END_SECONDS)
        finally:
            ended.cancel()
            lease.close()  # without awaiting anything before it, for the task may be cancelled here too
        if lost:
            await self._recover(lease.handoff, lost)

    async def _read(self, handoff: Handoff, ended: "asyncio.Task[None]") -> str:
        """Have the local engine read the KV blocks. Return why they are lost, or nothing at its first delta."""
        # Embeddings stay: a preempted sequence computes its prompt again. Media of a backend's own were used up.
        media = None if isinstance(self._request.media, Unexpanded) else self._request.media
        local = self._generate(replace(self._request, handoff=handoff, media=media))
        either: list[asyncio.Future[Any]] = [ended, self._verdict]
        with trace.span("transfer"):
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if self._verdict.done():
            return self._verdict.result()
        local.close()  # at once: its tokens would come twice
        return "prefill has ended the lease, or is lost"

    async def _recover(self, handoff: Handoff, reason: str) -> None:
        """Go on without the KV blocks."""
        log.warning("computing the prompt of %s again, here: %s", self._request.request_id, reason)
        self._verdict = asyncio.get_running_loop().create_future()
        self._engine.observer.computed_locally("lost")
        again = f"{self._request.request_id}-again"  # the engine may not have ended the aborted request yet
        self._generate(replace(self._request, request_id=again, handoff=replace(handoff, state=b"")))
        with trace.span("recompute"):
            refusal = await self._verdict
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
        self._verdict.set_result("")  # no handoff is used
        self._generate(replace(self._request, handoff=None))

    def _generate(self, request: GenerateRequest) -> DeltaStream:
        local = self._engine.inner.generate(request)
        self._local = local
        local.pipe(self._pass_on)
        return local

    def _pass_on(self, output: Delta | Exception) -> None:
        refused = not self._verdict.done() and _is_about_handoff(output)
        if not self._verdict.done():
            self._verdict.set_result((str(output) or type(output).__name__) if refused else "")
        if isinstance(output, Delta):
            self.stream.put(output)
        elif not refused:
            self.stream.fail(output)

    def _abort(self) -> None:
        self._task.cancel()
        if self._local is not None:
            self._local.close()


def _is_about_handoff(output: Delta | Exception) -> bool:
    """Return whether the engine cannot go on from the handoff, for instance because its KV blocks do not fit."""
    return (isinstance(output, InvalidRequest) and output.param == "handoff") or type(output) is EngineUnavailable
