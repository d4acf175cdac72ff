"""The task that publishes an engine's KV-cache events, one in a replica."""

import asyncio
import logging
import time
from collections.abc import Coroutine, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

import msgspec

from engine.base import Engine
from engine.errors import EngineFailure
from engine.kit.tasks import cancel
from engine.kv_events import KvEvent
from engine.replicas.publisher.convert import Converter
from engine.replicas.publisher.messages import AllBlocksCleared, EventBatch, WireEvent, encode
from engine.replicas.publisher.sink import Message, Sink
from engine.replicas.publisher.zmq_sink import ZmqSink

MAX_EVENTS = 256
"""Maximum events of a message."""
MAX_BYTES = 512 << 10
"""Maximum bytes of a message with more than one event: half of what a NATS server takes by default."""

log = logging.getLogger(__name__)


class PublisherConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Configuration of publishing over ZMQ. Each field means the same as the setting of its name."""

    endpoint: str
    replay_endpoint: str = ""
    topic: str = ""
    buffer: int = 10_000


@dataclass
class PublishedRank:
    """A data-parallel rank, and what of it was published."""

    converter: Converter
    messages: int = 0
    events: int = 0
    bytes: int = 0


class Publisher:
    """Publishes the events of a started engine from `start` to `close`, over ZMQ and `buses`.

    An error ends it, and `failure` says why.
    """

    def __init__(self, engine: Engine, config: PublisherConfig, buses: Sequence[Sink] = ()) -> None:
        """Raises EngineFailure if an address cannot be bound."""
        self.failure: str | None = None
        """Reason why nothing is published any more; None while it is."""
        self.config = config
        self.buses = buses
        self.ranks = [PublishedRank(Converter(engine.info.block_size)) for _ in range(engine.info.data_parallel_size)]
        self.zmq = ZmqSink(
            config.endpoint, config.replay_endpoint, config.topic, config.buffer, len(self.ranks), self._start_over
        )
        self._engine = engine
        self._sinks: list[Sink] = [self.zmq, *buses]
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self) -> None:
        self._following = self._spawn(self._publish_all(), "kv-events")
        for sink in self._sinks:
            self._spawn(sink.run(), f"kv-events-{sink.name}")

    async def close(self) -> None:
        await cancel(self._tasks)
        self.zmq.close()

    def _start_over(self) -> None:
        """Have the engine tell of all its blocks again, for a consumer that is too late to learn of them otherwise."""
        if self._following.cancel():
            self._following = self._spawn(self._publish_all(), "kv-events")

    def _spawn(self, work: Coroutine[Any, Any, None], name: str) -> "asyncio.Task[None]":
        task = asyncio.create_task(work, name=name)
        task.add_done_callback(self._ended)
        self._tasks.add(task)
        return task

    def _ended(self, task: "asyncio.Task[None]") -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            reason = str(error) if isinstance(error, EngineFailure) else f"{type(error).__name__}: {error}"
            self.failure = self.failure or reason
            log.error("KV-cache events are no longer published", exc_info=error)

    async def _publish_all(self) -> None:
        """Publish the engine's events as they come."""
        async with aclosing(self._engine.kv_events()) as batches:
            async for events in batches:
                for start in range(0, len(events), MAX_EVENTS):
                    self._publish(events[start : start + MAX_EVENTS])
                    await asyncio.sleep(0)

    def _publish(self, events: list[KvEvent]) -> None:
        """Send the events of each rank."""
        batches: dict[int, list[WireEvent]] = {}
        for event in events:
            number = event.attention_dp_rank or 0
            if number >= len(self.ranks):
                raise EngineFailure(f"an event is of data-parallel rank {number}, of {len(self.ranks)}")
            batches.setdefault(number, []).extend(self.ranks[number].converter.convert(event))
        for number, batch in batches.items():
            if batch:
                self._send(number, batch)

    def _send(self, number: int, events: list[WireEvent]) -> None:
        """Send events of one rank as one message, or as several if it would be too large."""
        payload = encode(EventBatch(time.time(), events, number))
        if len(payload) > MAX_BYTES and len(events) > 1:
            middle = len(events) // 2
            self._send(number, events[:middle])
            self._send(number, events[middle:])
            return
        rank = self.ranks[number]
        is_whole = any(isinstance(event, AllBlocksCleared) for event in events)
        message = Message(payload, number, rank.messages, is_whole)
        rank.messages += 1
        rank.events += len(events)
        rank.bytes += len(payload)
        for sink in self._sinks:
            sink.send(message)
