"""The task that takes an engine's KV-cache events and publishes them, one for a replica."""

import asyncio
import logging
import time
from collections.abc import Coroutine
from contextlib import aclosing
from typing import Any

import msgspec

from engine.base import Engine
from engine.errors import EngineFailure
from engine.kv_events import KvEvent
from engine.replicas.publisher.convert import Converter
from engine.replicas.publisher.messages import AllBlocksCleared, EventBatch, WireEvent, encode
from engine.replicas.publisher.nats_sink import NatsSink
from engine.replicas.publisher.zmq_channel import ZmqChannel, of_rank

MAX_EVENTS = 256
"""Of a message."""
MAX_BYTES = 512 << 10
"""Of a message with more than one event: half of what a NATS server takes if it is not told otherwise."""

log = logging.getLogger(__name__)


class PublisherConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Where events go; the fields mean what the settings of these names say."""

    endpoint: str
    replay_endpoint: str = ""
    topic: str = ""
    buffer: int = 10_000
    nats_url: str = ""
    nats_subject: str = "trellis.kv_events"


class Rank:
    """A data-parallel rank: its events and messages so far."""

    def __init__(self, converter: Converter, channel: ZmqChannel) -> None:
        self.converter = converter
        self.channel = channel
        self.events = 0
        """Published ones."""
        self.bytes = 0
        """Of their messages."""


class Publisher:
    """Publishes the events of a started engine, from `start` until `close`. An error ends it, and `failure` says so."""

    def __init__(self, engine: Engine, config: PublisherConfig) -> None:
        """Raises EngineFailure if NATS is wanted and cannot be."""
        self.failure: str | None = None
        """Why it publishes no more; None as long as it does."""
        self.ranks: list[Rank] = []
        self.nats = NatsSink(config.nats_url, config.nats_subject, config.buffer) if config.nats_url else None
        self.config = config
        self._engine = engine
        self._tasks: set[asyncio.Task[None]] = set()
        self._following: asyncio.Task[None]

    def start(self) -> None:
        """Raises EngineFailure if an address cannot be bound."""
        config, info = self.config, self._engine.info
        for rank in range(info.data_parallel_size):
            endpoint, replay = (
                of_rank(config.endpoint, rank),
                of_rank(config.replay_endpoint, rank) if config.replay_endpoint else "",
            )
            channel = ZmqChannel(endpoint, replay, config.topic, config.buffer, self._begin_anew)
            self.ranks.append(Rank(Converter(info.block_size), channel))
            log.info(
                "KV-cache events are published on %s%s",
                channel.endpoint,
                f", again on {channel.replay_endpoint}" if replay else "",
            )
        self._following = self._spawn(self._publish_all(), "kv-events")
        if self.nats is not None:
            self._spawn(self.nats.run(), "kv-events-nats")

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)
        for rank in self.ranks:
            rank.channel.close()

    def _begin_anew(self) -> None:
        """Have the engine tell of all that it holds, and everybody with it, for one who comes too late to learn it otherwise."""
        if self._following.cancel():
            for rank in self.ranks:
                rank.channel.whole_from = rank.channel.sequence
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
        """Publish what the engine has whenever it has something, which needs no polling here."""
        async with aclosing(self._engine.kv_events()) as batches:
            async for events in batches:
                for start in range(0, len(events), MAX_EVENTS):
                    self._publish(events[start : start + MAX_EVENTS])
                    await asyncio.sleep(0)

    def _publish(self, events: list[KvEvent]) -> None:
        """As one message for each rank."""
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
        """As one message, or several if it would be too large."""
        payload = encode(EventBatch(time.time(), events, number))
        if len(payload) > MAX_BYTES and len(events) > 1:
            middle = len(events) // 2
            self._send(number, events[:middle])
            self._send(number, events[middle:])
            return
        rank = self.ranks[number]
        if any(isinstance(event, AllBlocksCleared) for event in events):
            rank.channel.whole_from = rank.channel.sequence
        rank.events += len(events)
        rank.bytes += len(payload)
        if self.nats is not None:
            self.nats.send(payload, rank.channel.sequence, number)
        rank.channel.send(payload)
