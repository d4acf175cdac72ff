"""Handoffs through Dynamo's frontend, which passes the prefill worker's answer on to the decode worker without reading
it.

The prefill worker's answer has ended by then, so it cannot be the lease of the KV blocks, as it is over HTTP. Another
endpoint, `lease`, provides it: the decode worker calls it at the worker that holds the blocks, and the open call is the
lease. Unclaimed blocks are freed after `lease_seconds`.
"""

import asyncio
import base64
import binascii
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import msgspec
from msgspec.structs import replace

from engine.base import DeltaStream
from engine.errors import EngineError, EngineUnavailable, InvalidRequest
from engine.kit.handoff import decode_bounded, decode_handoff, encode
from engine.kit.tasks import cancel
from engine.replicas.pool import NoReplica
from engine.types import GenerateRequest, Handoff
from multimodal.errors import RequestError
from protocol.internal import PrefillInfo
from routers.internal.leased import GRACE_SECONDS

if TYPE_CHECKING:
    from dynamo.runtime import Context

FIELD = "trellis_handoffs"
"""The field of `disaggregated_params` that holds the handoffs of a request, one for each choice, in base64."""
_TICKET_BYTES = 1 << 16
_CLAIM_SECONDS = 5.0
"""Seconds that claiming a lease may take: the runtime would wait forever for a worker that has left discovery."""

log = logging.getLogger(__name__)


class Claim(msgspec.Struct, frozen=True, kw_only=True):
    """Location of the lease on resources that a worker holds."""

    endpoint: str
    """namespace.component.endpoint of the calls that are leases."""
    instance: int
    lease: str
    """Empty if nothing is held."""


class Ticket(Claim, frozen=True, kw_only=True):
    """Location of the lease on a handoff's KV blocks. The handoff has it as its `lease`, in msgpack."""

    info: PrefillInfo
    """Facts that the decode replica must share."""


_tickets = msgspec.msgpack.Decoder(Ticket)


def packed(handoffs: Sequence[tuple[Handoff, Ticket]], dp_rank: int) -> dict[str, Any]:
    """Return the `disaggregated_params` of a request's handoffs. The router reads the worker that has computed them in
    these.
    """
    payloads = [encode(replace(handoff, lease=msgspec.msgpack.encode(ticket))) for handoff, ticket in handoffs]
    return {
        FIELD: [base64.b64encode(payload).decode() for payload in payloads],
        "worker_id": {"prefill_worker_id": handoffs[0][1].instance, "prefill_dp_rank": dp_rank},
    }


def unpacked(params: Mapping[str, Any]) -> list[Handoff]:
    """Return the handoffs of `disaggregated_params`; none for those of another kind of worker. Raises RequestError."""
    found = params.get(FIELD)
    if found is None:
        log.warning("the prefill worker is not a Trellis worker: computing the prompt here")
        return []
    try:
        return [decode_handoff(base64.b64decode(payload, validate=True)) for payload in found]
    except (binascii.Error, TypeError, ValueError, InvalidRequest) as error:
        raise RequestError(f"The handoff cannot be read: {error}", "prefill_result") from None


class HeldBlocks:
    """The KV blocks that a prefill worker keeps for decode workers, each by its lease. `held` is called with 1 when
    blocks are kept, and with -1 when they are freed.
    """

    def __init__(self, lease_seconds: float, held: Callable[[int], None]) -> None:
        self._seconds = lease_seconds
        self._held = held
        self._unclaimed: dict[str, tuple[DeltaStream, asyncio.TimerHandle]] = {}

    def keep(self, stream: DeltaStream) -> str:
        """Hold the blocks of an open stream until they are claimed or the time is over. Return the lease."""
        lease = uuid4().hex
        self._held(1)
        timer = asyncio.get_running_loop().call_later(self._seconds, self._expire, lease)
        self._unclaimed[lease] = stream, timer
        return lease

    async def claim(self, lease: str, context: "Context") -> AsyncGenerator[dict[str, Any], None]:
        """Yield once, and then hold the blocks until the call is stopped, or the lease is over, or they are lost."""
        if (found := self._unclaimed.pop(lease, None)) is None:
            raise InvalidRequest("nothing is held under this lease", "lease")
        stream, timer = found
        timer.cancel()
        lost = asyncio.ensure_future(_end(stream))
        stopped = context.async_killed_or_stopped()
        either: list[asyncio.Future[Any]] = [lost, stopped]
        grace = 0.0
        try:
            yield {"held": True}
            done, _ = await asyncio.wait(either, timeout=self._seconds, return_when=asyncio.FIRST_COMPLETED)
            if not done:
                log.warning("the lease %s is over: not read in %g s", lease, self._seconds)
                grace = GRACE_SECONDS  # the reader discards what it has not read by the end of the call
        finally:
            lost.cancel()
            stopped.cancel()
            asyncio.get_running_loop().call_later(grace, self._free, stream)

    def close(self) -> None:
        for lease in list(self._unclaimed):
            self._expire(lease)

    def _expire(self, lease: str) -> None:
        stream, timer = self._unclaimed.pop(lease)
        timer.cancel()
        log.warning("the lease %s was never claimed: its KV blocks are freed", lease)
        self._free(stream)

    def _free(self, stream: DeltaStream) -> None:
        stream.close()
        self._held(-1)


async def _end(stream: DeltaStream) -> None:
    """Return when the engine no longer holds the blocks."""
    try:
        await anext(stream, None)
    except EngineError as error:
        log.warning("held KV blocks are lost: %s", error)


Call = Callable[[Claim, "Context"], AsyncIterator[Any]]
"""Calls the endpoint of a claim, and yields its outputs until the call's context stops it."""


class ClaimedLease:
    """The lease of a handoff's KV blocks: a call that stays open, in a task."""

    def __init__(self, handoff: Handoff, ticket: Ticket, call: Call, context: "Context") -> None:
        self.handoff = handoff
        self._context = context
        self._held = asyncio.Event()
        self._closed = False
        self.task = asyncio.create_task(self._hold(ticket, call), name="lease")

    async def held(self) -> None:
        """Wait until the blocks are held for this replica: bytes read before that may belong to another prompt. Raises
        EngineUnavailable if they are not held.
        """
        held = asyncio.create_task(self._held.wait())
        try:
            await asyncio.wait({held, self.task}, timeout=_CLAIM_SECONDS, return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            self.close()
            raise
        finally:
            held.cancel()
        if not self._held.is_set():
            self.close()
            self.task.cancel()
            raise EngineUnavailable("the prefill worker no longer holds the KV blocks, or cannot be reached")

    async def ended(self) -> None:
        """Return when the prefill worker has ended the lease, or is lost."""
        await asyncio.wait({self.task})

    def close(self) -> None:
        """End the lease; a call that has not reached the worker yet ends on arrival. Idempotent."""
        self._closed = True
        if self._held.is_set():
            self._context.stop_generating()

    async def _hold(self, ticket: Ticket, call: Call) -> None:
        try:
            async for _ in call(ticket, self._context):
                self._held.set()
                if self._closed:
                    self._context.stop_generating()
        except Exception as error:  # whatever it was, the blocks are not ours
            if not self._closed:
                log.warning("the lease of KV blocks is lost: %s", error)


class DynamoPrefills:
    """The handoffs that come with requests: prompts were computed by the workers that Dynamo's router has chosen.

    A source of `DisaggregatedEngine`. A request without a handoff has its prompt computed here.
    """

    def __init__(self, call: Call, new_context: Callable[[], "Context"]) -> None:
        self._call = call
        self._new_context = new_context
        self._leases: set[asyncio.Task[None]] = set()

    def healthy(self, mine: PrefillInfo) -> bool:
        return True

    async def start(self) -> None:
        """Do nothing: each handoff names the location of its lease."""

    async def close(self) -> None:
        await cancel(self._leases)

    async def prefill(
        self,
        request: GenerateRequest,
        mine: PrefillInfo,
        announce: Callable[[Handoff | None], Awaitable[None]],
    ) -> ClaimedLease:
        """Return the lease of the request's handoff, claimed. Raises NoReplica if it has none, and EngineUnavailable if
        this replica cannot use it.
        """
        handoff = request.handoff
        if handoff is None:
            raise NoReplica("Dynamo's router has chosen no prefill worker")
        ticket = decode_bounded(_tickets, handoff.lease, _TICKET_BYTES, "ticket", "handoff")
        if ticket.info != mine:
            raise EngineUnavailable(f"the prefill worker has {ticket.info}, this replica {mine}")
        first = handoff.first
        if first.finish_reason is None and len(first.token_ids) >= request.sampling.max_tokens:
            handoff = replace(handoff, first=replace(first, finish_reason="length", held=None))
        lease = ClaimedLease(handoff, ticket, self._call if ticket.lease else _nothing, self._new_context())
        self._leases.add(lease.task)
        lease.task.add_done_callback(self._leases.discard)
        if handoff.first.finish_reason is None:
            await lease.held()
        else:
            lease.close()
        return lease


async def _nothing(_: Claim, __: "Context") -> AsyncIterator[Any]:
    nothing: list[Any] = []
    for each in nothing:
        yield each
