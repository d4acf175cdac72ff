"""A worker of a Dynamo graph: its model card, endpoints, events and load, over Dynamo's runtime. Errors become Dynamo's
here: the frontend answers an invalid request with 400, and migrates requests that another worker may serve.
"""

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Iterable, Iterator, Mapping
from contextlib import aclosing, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import Any, Literal, Self, TypeVar
from uuid import uuid4

from dynamo._core import get_reasoning_parser_names, get_tool_parser_names
from dynamo.llm import (
    KvEventPublisher,
    ModelInput,
    ModelRuntimeConfig,
    ModelType,
    WorkerMetricsPublisher,
    WorkerType,
    register_model,
    unregister_model,
)
from dynamo.llm.exceptions import EngineShutdown, HttpError, InvalidArgument, Unknown
from dynamo.runtime import Client, Context, DistributedRuntime, Endpoint

from engine.admission import AdmissionEngine
from engine.base import DeltaStream
from engine.errors import EngineError, EngineFailure, EngineUnavailable, InvalidRequest, QueueFull, QueueTimeout
from engine.handoff import handoff_of, prefill_info
from engine.kit.tasks import all_of, cancel
from engine.kv_events import KvEvent
from engine.replicas.publisher.convert import Converter
from engine.replicas.publisher.messages import AllBlocksCleared, BlockRemoved, BlockStored
from engine.types import Delta, EngineInfo, GenerateRequest, Handoff
from multimodal.errors import RequestError
from multimodal.media.prompts import Keyed
from multimodal.metrics import ChoiceTimer, GenerationMetrics
from multimodal.request import Limits, SamplingDefaults
from multimodal.text.prompts import Prompt
from protocol.dynamo import DynamoRequest
from routers.dynamo.convert import CANCELLED, GraphOutputs, engine_requests, read_request
from routers.dynamo.handoffs import Call, Claim, DynamoPrefills, HeldBlocks, Ticket, packed, unpacked
from routers.dynamo.images import BackendImages, GraphImages, OfferedEmbeddings
from routers.state import ReplicaState

T = TypeVar("T")
WorkerRole = Literal["aggregated", "prefill", "decode", "encode"]
LEASE = "lease"
"""Name of the endpoint, beside `generate`, whose calls are leases of KV blocks, or give embeddings up."""
CACHE_SALT = "dynamo-health-check"
"""Cache salt of Dynamo's health checks, so that no other request can reuse their KV blocks."""
_HEALTH_SECONDS = 0.5
"""Pause between looks at the replica's readiness."""
_TAKES_ENCODINGS = "encoder_result_handoff"
"""A worker whose card says so is sent what encode workers have encoded."""
PROBE = "_HEALTH_CHECK"
"""Dynamo marks its health checks so."""
_TYPES: Mapping[WorkerRole, tuple[WorkerType, list[list[WorkerType]]]] = {
    "aggregated": (WorkerType.Aggregated, []),
    "prefill": (WorkerType.Prefill, [[WorkerType.Decode]]),
    "decode": (WorkerType.Decode, [[WorkerType.Prefill]]),
    "encode": (WorkerType.Encode, [[WorkerType.Prefill, WorkerType.Decode], [WorkerType.Aggregated]]),
}
"""The type of a worker with each role, and the other types that the graph needs."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class GraphConfig:
    """Location of the graph, and how its workers are found and asked. Fields mean the same as the settings."""

    namespace: str
    component: str
    endpoint: str
    discovery: str
    request_plane: str
    event_plane: str


@dataclass(frozen=True, kw_only=True)
class Card:
    """Facts of the model card that do not come from the engine."""

    folder: Path
    name: str
    chat_template: Path | None
    tool_parser: str
    reasoning_parser: str
    kv_events: bool


class DynamoGraph:
    """The runtime of this process in a graph. One for each process: Dynamo's threads end with it."""

    def __init__(self, config: GraphConfig, runtime: DistributedRuntime) -> None:
        self.config = config
        self.runtime = runtime
        self.generate = self.endpoint(config.endpoint)
        self._clients: dict[str, Client] = {}

    @classmethod
    def open(cls, config: GraphConfig) -> Self:
        """Return the runtime, connected. Raises EngineFailure if the graph's services cannot be reached."""
        loop = asyncio.get_running_loop()
        try:
            return cls(
                config,
                DistributedRuntime(loop, config.discovery, config.request_plane, event_plane=config.event_plane),
            )
        except Exception as error:  # the runtime raises Exception itself
            raise EngineFailure(f"cannot join the Dynamo graph by {config.discovery}: {error}") from error

    def endpoint(self, name: str) -> Endpoint:
        return self.runtime.endpoint(self.path(name))

    def path(self, name: str) -> str:
        return f"{self.config.namespace}.{self.config.component}.{name}"

    async def call(self, claim: Claim, context: Context) -> AsyncIterator[Any]:
        """Claim a lease."""
        client = self._clients.get(claim.endpoint)
        if client is None:
            client = self._clients[claim.endpoint] = await self.runtime.endpoint(claim.endpoint).client()
        if claim.instance not in client.instance_ids():
            await client.wait_for_instances()
        asked = {"lease": claim.lease}
        async for item in await client.direct(asked, claim.instance, annotated=False, context=context):
            yield item

    async def give_up(self, claim: Claim) -> None:
        """Report that held embeddings have been read."""
        async for _ in self.call(claim, Context()):
            pass

    def prefills(self) -> DynamoPrefills:
        """Return the source of computed prompts of a decode worker."""
        call: Call = self.call
        return DynamoPrefills(call, Context)


def tool_parser(asked: str, own: str) -> str:
    """Return the frontend's parser of tool calls: the one asked for, with `auto` our `own` if Dynamo has it."""
    return _parser(asked, own, get_tool_parser_names(), "tool calls")


def reasoning_parser(asked: str, own: str) -> str:
    """Return the frontend's parser of reasoning: the one asked for, with `auto` our `own` if Dynamo has it."""
    return _parser(asked, own, get_reasoning_parser_names(), "reasoning")


def _parser(asked: str, own: str, known: list[str], what: str) -> str:
    if asked == "auto":
        return own if own in known else ""
    if asked and asked not in known:
        raise EngineFailure(f"Dynamo has no parser of {what} named {asked}; it has {', '.join(sorted(known))}")
    return asked


Served = tuple[Endpoint, Callable[..., AsyncGenerator[Any, None]], dict[str, Any] | None]
"""An endpoint, its handler, and the request that checks its health."""
Duty = tuple[str, Coroutine[Any, Any, None]]
"""A background task of a worker, and its name."""


class GraphWorker(ABC):
    """One replica in a graph, from `start` to `close`. It is found there while the replica is ready.

    When the replica drains, it leaves discovery at once, takes requests for `drain_seconds` more, from frontends that
    have not noticed yet, and lets them end.
    """

    def __init__(
        self, graph: DynamoGraph, role: WorkerRole, replica: ReplicaState, card: Card, drain_seconds: float
    ) -> None:
        self._graph = graph
        self._role = role
        self._replica = replica
        self._card = card
        self._drain_seconds = drain_seconds
        self._closed = False
        self._registered = False
        self._served: list[asyncio.Future[Any]] = []
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Register the model and serve. Raises EngineFailure."""
        graph = self._graph
        try:
            await self._register()
            for endpoint, handler, probe in ((graph.generate, self._generate, self._probe()), *self._further()):
                served = endpoint.serve_endpoint(handler, graceful_shutdown=True, health_check_payload=probe)
                self._served.append(asyncio.ensure_future(served))
            await asyncio.sleep(0)
        except Exception as error:  # the runtime raises Exception itself
            raise EngineFailure(f"cannot serve in the Dynamo graph: {error}") from error
        self._registered = self._replica.registered = True
        for name, duty in (("dynamo-discovery", self._follow()), *self._duties()):
            self._tasks.append(asyncio.create_task(duty, name=name))
        config = graph.config
        log.info(
            "serves %s in the Dynamo graph at %s as %s (%s, %s, %s), instance %d",
            self._card.name,
            graph.path(config.endpoint),
            self._role,
            config.discovery,
            config.request_plane,
            config.event_plane,
            graph.generate.connection_id(),
        )

    @abstractmethod
    def _generate(self, body: Any, context: Context) -> AsyncGenerator[Mapping[str, Any], None]:
        """Serve `generate`."""

    @abstractmethod
    def _probe(self) -> dict[str, Any]:
        """Return the request that Dynamo's runtime sends as a health check."""

    @abstractmethod
    def _facts(self, facts: ModelRuntimeConfig) -> tuple[ModelType, int | None]:
        """Fill in the model card; return the kinds of requests that the model serves, and the tokens of a KV block."""

    def _further(self) -> tuple[Served, ...]:
        """Return the endpoints other than `generate`."""
        return ()

    def _duties(self) -> tuple[Duty, ...]:
        """Return the background tasks."""
        return ()

    @abstractmethod
    async def _release(self) -> None:
        """Release resources that are held for other workers, and those of this one."""

    async def close(self) -> None:
        """Leave the graph and end the runtime."""
        self._closed = True
        await cancel(self._tasks)
        await self._leave()
        await self._release()
        self._graph.runtime.shutdown()
        if self._served:
            await asyncio.wait(self._served, timeout=self._drain_seconds)

    def failure(self) -> str:
        """Return the reason why the graph can no longer use the worker; empty if it can."""
        for task in self._tasks:
            if task.done() and not task.cancelled() and (error := task.exception()) is not None:
                return f"{task.get_name()} has ended: {error}"
        if not self._closed and any(served.done() for served in self._served):
            return "Dynamo's runtime has ended."
        return ""

    async def _register(self) -> None:
        card, facts = self._card, ModelRuntimeConfig()
        model_type, block_size = self._facts(facts)
        worker_type, needs = _TYPES[self._role]
        await register_model(
            ModelInput.Tokens,
            model_type,
            self._graph.generate,
            str(card.folder),
            card.name,
            worker_type=worker_type,
            kv_cache_block_size=block_size,
            runtime_config=facts,
            custom_template_path=None if card.chat_template is None else str(card.chat_template),
            needs=needs,
        )

    def _read(self, body: Any) -> tuple[DynamoRequest, bool]:
        """Return the request, and whether it is a health check."""
        return self._wrong(read_request, body), isinstance(body, dict) and body.get(PROBE) is True

    @staticmethod
    def _wrong(work: Callable[..., T], *arguments: Any) -> T:
        """Return the result of `work`; its errors become Dynamo's."""
        try:
            return work(*arguments)
        except EngineError as error:
            raise translated(error) from None  # Dynamo logs the whole chain

    def _count(self, more: int) -> None:
        self._replica.running += more

    @contextmanager
    def _counted(self) -> Iterator[None]:
        """Count a request that a shutdown waits for. Raises EngineShutdown once the time for stragglers is over."""
        if self._replica.draining and not self._replica.registered:
            raise EngineShutdown("the replica is shutting down")
        self._count(1)
        try:
            yield
        finally:
            self._count(-1)

    async def _follow(self) -> None:
        """Stay in discovery while the replica is ready, and leave for good when it drains."""
        drain = asyncio.create_task(self._replica.stopping.wait())
        try:
            while not drain.done():
                await self._set_registered(self._replica.ready)
                await asyncio.wait({drain}, timeout=_HEALTH_SECONDS)
            await self._leave()
            await asyncio.sleep(self._drain_seconds)
        finally:
            drain.cancel()
            self._replica.registered = False

    async def _set_registered(self, registered: bool) -> None:
        """Enter or leave discovery; what fails is tried again."""
        if registered == self._registered:
            return
        endpoint = self._graph.generate
        try:
            await (endpoint.register_endpoint_instance() if registered else endpoint.unregister_endpoint_instance())
            self._graph.runtime.set_health_status(registered)
        except Exception as error:  # the runtime raises Exception itself
            log.warning("the registry of the Dynamo graph does not answer: %s", error)
            return
        self._registered = registered
        reasons = "; ".join(reason for _, reason in self._replica.missing)
        log.warning(
            "%s the Dynamo graph%s", "joined" if registered else "left", f": {reasons}" if reasons else " again"
        )

    async def _leave(self) -> None:
        if self._registered:
            self._registered = False
            with suppress(Exception):  # the registry may be gone
                self._graph.runtime.set_health_status(False)
                await self._graph.generate.unregister_endpoint_instance()
                await unregister_model(self._graph.generate)


class EngineWorker(GraphWorker):
    """A worker that computes tokens: aggregated, prefill or decode. `images` puts images into prompts, if the model
    takes any; `offered` holds what a prefill worker has encoded for decode workers.
    """

    def __init__(
        self,
        graph: DynamoGraph,
        role: WorkerRole,
        engine: AdmissionEngine,
        replica: ReplicaState,
        card: Card,
        *,
        limits: Limits,
        images: GraphImages | BackendImages | None = None,
        offered: OfferedEmbeddings | None = None,
        processors: tuple[str, ...] = (),
        defaults: SamplingDefaults,
        metrics: GenerationMetrics | None = None,
        lease_seconds: float,
        drain_seconds: float,
    ) -> None:
        super().__init__(graph, role, replica, card, drain_seconds)
        self._engine = engine
        self._limits = limits
        self._images = images
        self._offered = offered
        self._processors = processors
        self._defaults = defaults
        self._metrics = metrics
        self._held = HeldBlocks(lease_seconds, self._count)

    async def _release(self) -> None:
        self._held.close()
        if self._offered is not None:
            self._offered.close()
        if self._images is not None:
            await self._images.close()

    def _further(self) -> tuple[Served, ...]:
        return ((self._graph.endpoint(LEASE), self._lease, None),) if self._role == "prefill" else ()

    def _duties(self) -> tuple[Duty, ...]:
        events: tuple[Duty, ...] = (("dynamo-kv-events", self._publish_events()),) if self._card.kv_events else ()
        return ("dynamo-load", self._publish_load()), *events

    @property
    def _answers_routers(self) -> bool:
        """Whether routers that have missed events ask this worker for its blocks; those of decode are not asked."""
        return self._role != "decode"

    def _facts(self, facts: ModelRuntimeConfig) -> tuple[ModelType, int | None]:
        card, info = self._card, self._engine.info
        facts.context_length = info.context_length
        facts.total_kv_blocks = info.num_blocks
        facts.max_num_seqs = info.max_num_seqs
        facts.max_num_batched_tokens = info.max_num_tokens
        facts.data_parallel_size = info.data_parallel_size
        facts.tool_call_parser = card.tool_parser or None
        facts.reasoning_parser = card.reasoning_parser or None
        facts.kv_event_publishing_enabled = card.kv_events
        facts.enable_local_indexer = card.kv_events and self._answers_routers
        if isinstance(self._images, GraphImages):
            facts.set_engine_specific(_TAKES_ENCODINGS, "true")
        chats = ModelType.Chat | ModelType.Completions
        return ModelType.Prefill if self._role == "prefill" else chats, info.block_size

    def _probe(self) -> dict[str, Any]:
        return _probe_of(self._engine.info)

    async def _generate(self, body: Any, context: Context) -> AsyncGenerator[Mapping[str, Any], None]:
        serve = self._prefill if self._role == "prefill" else self._answer
        async with aclosing(serve(body, context)) as outputs:
            async for output in outputs:
                yield output

    async def _answer(self, body: Any, context: Context) -> AsyncGenerator[Mapping[str, Any], None]:
        """Serve `generate` of an aggregated or decode worker."""
        with self._counted():
            asked, probe = self._read(body)
            handoffs: list[Handoff] = []
            if asked.prefill_result is not None and self._role == "decode" and not probe:
                handoffs = self._wrong(unpacked, asked.prefill_result.disaggregated_params)
            prompt, _ = await self._prompt(asked)
            requests = self._requests(asked, context, prompt=prompt, handoffs=handoffs)
            outputs = GraphOutputs(asked, len(prompt.ids), len(requests))
            clock = _Clock(self._metrics, requests)
            streams = [self._engine.generate(request) for request in requests]
            stopped = _closing_with(context, streams)
            try:
                async with aclosing(_merged(streams)) as deltas:
                    async for index, delta in deltas:
                        clock.note(index, delta)
                        yield outputs.of(delta, index)
                if not outputs.ended:
                    if not stopped.done():
                        raise EngineFailure("the engine ended the request without a reason")
                    yield CANCELLED
            except EngineError as error:
                clock.fail()
                raise translated(error) from None  # Dynamo logs the whole chain
            finally:
                clock.stop()
                stopped.cancel()
                _close(streams)

    async def _prefill(self, body: Any, context: Context) -> AsyncGenerator[Mapping[str, Any], None]:
        """Serve `generate` of a prefill worker: one output, with the handoffs of all choices."""
        with self._counted():
            asked, probe = self._read(body)
            prompt, encoded = await self._prompt(asked)
            requests = self._requests(asked, context, prompt=prompt, prefill_only=True)
            streams = [self._engine.generate(request) for request in requests]
            stopped = _closing_with(context, streams)
            kept: list[str] = []
            try:
                deltas = await all_of(_first(stream) for stream in streams)
                firsts = [delta for delta in deltas if delta is not None]
                if len(firsts) < len(deltas) or stopped.done():
                    yield CANCELLED
                    return
                output = GraphOutputs(asked, len(prompt.ids), 1).of(firsts[0])
                offer = await self._offered.offer(encoded) if self._offered is not None and encoded else {}
                if not probe:
                    pairs = zip(streams, firsts, strict=True)
                    kept = [self._held.keep(stream) if first.held else "" for stream, first in pairs]
                output["disaggregated_params"] = offer | self._handoffs(requests, firsts, kept)
                yield output
            except EngineError as error:
                raise translated(error) from None  # Dynamo logs the whole chain
            finally:
                stopped.cancel()
                _close(stream for stream, lease in zip_longest(streams, kept) if not lease)

    def _handoffs(self, requests: list[GenerateRequest], firsts: list[Delta], kept: list[str]) -> dict[str, Any]:
        backend = self._engine.info.backend
        claim = partial(
            Ticket,
            info=prefill_info(self._card.name, self._engine.info),
            endpoint=self._graph.path(LEASE),
            instance=self._graph.generate.connection_id(),
        )
        pairs = [(handoff_of(backend, first), claim(lease=lease or "")) for first, lease in zip_longest(firsts, kept)]
        return packed(pairs, requests[0].dp_rank or 0)

    async def _lease(self, body: Any, context: Context) -> AsyncGenerator[Mapping[str, Any], None]:
        """Serve `lease` of a prefill worker."""
        lease = str(body.get("lease")) if isinstance(body, dict) else ""
        if self._offered is not None and self._offered.free(lease):
            yield {"held": False}
            return
        try:
            async with aclosing(self._held.claim(lease, context)) as items:
                async for item in items:
                    yield item
        except EngineError as error:
            raise translated(error) from None  # Dynamo logs the whole chain

    async def _prompt(self, asked: DynamoRequest) -> tuple[Prompt, list[Keyed]]:
        """Return the prompt, with its images in place, and those of them that were encoded here."""
        if not any((asked.multi_modal_data or {}).values()):
            return Prompt(asked.token_ids), []
        try:
            if self._images is None:
                raise RequestError("This model takes text only; a message has an image.", "messages")
            async with asyncio.timeout(self._limits.request_timeout_seconds):
                return await self._images.prompt(asked)
        except EngineError as error:
            raise translated(error) from None  # Dynamo logs the whole chain
        except TimeoutError:
            raise HttpError(504, "the images were not ready in time") from None

    def _requests(self, asked: DynamoRequest, context: Context, **more: Any) -> list[GenerateRequest]:
        unique = f"{context.id()}-{uuid4().hex[:8]}"  # a request that migrates may come back
        make = partial(
            engine_requests,
            processors=self._processors,
            defaults=self._defaults,
            trace=_trace(context.trace_headers()),
            **more,
        )
        return self._wrong(make, asked, self._engine.info, self._limits, unique)

    async def _publish_load(self) -> None:
        publisher = WorkerMetricsPublisher()
        await publisher.create_endpoint(self._graph.generate)
        publisher.publish(0, kv_used_blocks=0)
        async for stats in self._engine.stats():
            for rank in stats.ranks:
                publisher.publish(rank.rank, kv_used_blocks=rank.kv_cache_stats.used_num_blocks)
            if not stats.ranks:
                publisher.publish(0, kv_used_blocks=stats.kv_cache_stats.used_num_blocks)

    async def _publish_events(self) -> None:
        info = self._engine.info
        publishers = [
            KvEventPublisher(
                self._graph.generate,
                kv_block_size=info.block_size,
                dp_rank=rank,
                enable_local_indexer=self._answers_routers,
            )
            for rank in range(info.data_parallel_size)
        ]
        ranks = [_EventRank(publisher, info.block_size) for publisher in publishers]
        try:
            async with aclosing(self._engine.kv_events()) as batches:
                async for events in batches:
                    for event in events:
                        ranks[event.attention_dp_rank or 0].add(event)
                    for rank in ranks:
                        rank.send()
        finally:
            for publisher in publishers:
                publisher.shutdown()


class _EventRank:
    """Publishes the events of one data-parallel rank: which blocks are on the device."""

    def __init__(self, publisher: KvEventPublisher, block_size: int) -> None:
        self._publisher = publisher
        self._converter = Converter(block_size)
        self._block_size = block_size
        self._known: set[int] = set()
        self._batch: list[Any] = []

    def add(self, event: KvEvent) -> None:
        for found in self._converter.convert(event):
            match found:
                case BlockStored() if found.medium is None:
                    self._store(found)
                case BlockRemoved() if found.medium is None:
                    self._remove(found.block_hashes)
                case AllBlocksCleared():  # Dynamo's publisher has no such event
                    self._remove([*self._known])

    def send(self) -> None:
        if self._batch:
            batch, self._batch = self._batch, []
            self._publisher.publish_batch(batch)

    def _store(self, stored: BlockStored) -> None:
        if not stored.token_ids:
            return  # a block that came back from a lower tier: its tokens are not told again
        self._known.update(stored.block_hashes)
        event: dict[str, Any] = {
            "type": "stored",
            "token_ids": stored.token_ids,
            "num_block_tokens": [self._block_size] * len(stored.block_hashes),
            "block_hashes": stored.block_hashes,
            "parent_hash": stored.parent_block_hash,
        }
        if stored.cache_salt:
            event["cache_salt"] = stored.cache_salt
        self._batch.append(event)

    def _remove(self, hashes: list[int]) -> None:
        gone = [each for each in hashes if each in self._known]
        self._known.difference_update(gone)
        if gone:
            self._batch.append({"type": "removed", "block_hashes": gone})


async def _first(stream: DeltaStream) -> Delta | None:
    return await anext(stream, None)


async def _merged(streams: list[DeltaStream]) -> AsyncGenerator[tuple[int, Delta], None]:
    """Yield the deltas of all streams as they come, each with its stream's index."""
    if len(streams) == 1:
        async for delta in streams[0]:
            yield 0, delta
        return
    waiting = {asyncio.ensure_future(anext(stream, None)): index for index, stream in enumerate(streams)}
    try:
        while waiting:
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for each in done:
                index = waiting.pop(each)
                if (found := each.result()) is not None:
                    waiting[asyncio.ensure_future(anext(streams[index], None))] = index
                    yield index, found
    finally:
        await cancel(waiting)


def _closing_with(context: Context, streams: list[DeltaStream]) -> "asyncio.Future[bool]":
    """Close streams when the frontend stops the request. Return the future that does so; cancel it at the end."""
    stopped: asyncio.Future[bool] = context.async_killed_or_stopped()
    stopped.add_done_callback(lambda done: None if done.cancelled() else _close(streams))
    return stopped


def _close(streams: Iterable[DeltaStream]) -> None:
    for stream in streams:
        stream.close()


class _Clock:
    """Measures the choices of one request, as those over HTTP are."""

    def __init__(self, metrics: GenerationMetrics | None, requests: list[GenerateRequest]) -> None:
        self._prompt_tokens = len(requests[0].prompt_token_ids)
        self._timers: list[ChoiceTimer] = []
        if metrics is not None:
            metrics.requested(requests[0])
            self._timers = [ChoiceTimer(metrics) for _ in requests]

    def note(self, index: int, delta: Delta) -> None:
        if not self._timers:
            return
        timer, report = self._timers[index], delta.prompt
        if report is not None:
            timer.prompt(report.prompt_tokens or self._prompt_tokens, report.cached_tokens, report.queue_seconds)
        timer.tokens(len(delta.token_ids))
        if delta.performance is not None:
            timer.measured(delta.performance)
        if delta.finish_reason is not None:
            timer.finish(delta.finish_reason)

    def fail(self) -> None:
        for timer in self._timers:
            timer.fail()

    def stop(self) -> None:
        for timer in self._timers:
            timer.stop()


def translated(error: EngineError) -> Exception:
    """Return Dynamo's error for one of ours. The frontend makes a 400 of InvalidArgument, its answer to overload of a
    503, and migrates that and EngineShutdown to other workers as far as it may.
    """
    text = str(error) or type(error).__name__
    if isinstance(error, InvalidRequest):
        return InvalidArgument(text)
    if isinstance(error, QueueFull | QueueTimeout):
        return HttpError(503, text)
    if isinstance(error, EngineUnavailable):
        return EngineShutdown(text)
    return Unknown(text)


def _probe_of(info: EngineInfo) -> dict[str, Any]:
    """Return the request that Dynamo's runtime sends as a health check."""
    return {
        "token_ids": [1 % info.vocab_size],
        "stop_conditions": {"max_tokens": 1, "ignore_eos": True},
        "sampling_options": {"temperature": 0.0},
        "routing": {"cache_salt": CACHE_SALT},
        PROBE: True,
    }


def _trace(headers: Mapping[str, str] | None) -> dict[str, str]:
    return {name: value for name, value in (headers or {}).items() if name in ("traceparent", "tracestate")}
