"""A worker of a Dynamo graph that computes tokens: its requests, leases of KV blocks, KV events and load."""

import asyncio
from collections.abc import AsyncGenerator, Iterable, Mapping
from contextlib import aclosing
from functools import partial
from itertools import zip_longest
from typing import Any
from uuid import uuid4

from dynamo.llm import KvEventPublisher, ModelRuntimeConfig, ModelType, WorkerMetricsPublisher
from dynamo.llm.exceptions import HttpError
from dynamo.runtime import Context

from engine.admission import AdmissionEngine
from engine.base import DeltaStream
from engine.errors import EngineError, EngineFailure
from engine.kit.handoff import handoff_of, prefill_info
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
from routers.dynamo.convert import CANCELLED, GraphOutputs, engine_requests
from routers.dynamo.handoffs import HeldBlocks, Ticket, packed, unpacked
from routers.dynamo.images import BackendImages, GraphImages, OfferedEmbeddings
from routers.dynamo.worker import LEASE, PROBE, Card, Duty, DynamoGraph, GraphWorker, Served, WorkerRole, translated
from routers.state import ReplicaState

CACHE_SALT = "dynamo-health-check"
"""Cache salt of Dynamo's health checks, so that no other request can reuse their KV blocks."""
_TAKES_ENCODINGS = "encoder_result_handoff"
"""Key of the model card of a worker to which the frontend passes the results of encode workers."""


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
