"""Consumers of KV-cache events: one follows the messages, one keeps hashes, one asks Dynamo's own tree."""

import asyncio
import json
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import zmq
import zmq.asyncio

from engine.base import Engine
from engine.kv_events import KvEvent, Stored, StoredBlock, UniqueToken
from engine.media import MediaSpan, MediaSpans
from engine.replicas.publisher.publisher import Publisher, PublisherConfig
from engine.replicas.publisher.sink import Sink
from engine.types import GenerateRequest, SamplingParams

ANYWHERE = "tcp://127.0.0.1:0"
BLOCK = 4


def block(block_hash: int, tokens: Sequence[int] = (1, 2, 3, 4), **more: Any) -> StoredBlock:
    return StoredBlock(block_hash, tuple(map(UniqueToken, tokens)), **more)


def stored(
    event_id: int, *hashes: int, parent: int | None = None, window: int = 512, rank: int | None = None
) -> KvEvent:
    return KvEvent(event_id, Stored(parent, tuple(map(block, hashes))), window, rank)


async def generate(
    engine: Engine, name: str, tokens: Iterable[int], max_tokens: int = 1, salt: str = "", images: Any = ()
) -> int:
    """Run a request; how many tokens of its prompt the engine had."""
    sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True, temperature=0.0)
    request = GenerateRequest(
        request_id=name,
        prompt_token_ids=tuple(tokens),
        sampling=sampling,
        cache_salt=salt,
        media=MediaSpans(tuple(images)),
    )
    cached = 0
    async for delta in engine.generate(request):
        cached = delta.prompt.cached_tokens if delta.prompt is not None else cached
    return cached


def image(key: str, start: int, length: int) -> MediaSpan:
    return MediaSpan(key=key * 64, start=start, length=length, rows=length, dtype="float32", data=bytes(4 * length))


@asynccontextmanager
async def publishing(engine: Engine, buses: Sequence[Sink] = (), **config: Any) -> AsyncIterator[Publisher]:
    """A publisher of a started engine, on free ports."""
    given = {"endpoint": ANYWHERE, "replay_endpoint": ANYWHERE, **config}
    publisher = Publisher(engine, PublisherConfig(**given), buses)
    try:
        publisher.start()
        yield publisher
    finally:
        await publisher.close()


class Follower:
    """Subscribes to one rank and keeps every payload by its sequence number; asks for what it has missed."""

    def __init__(self, endpoint: str, replay: str = "", topic: bytes = b"") -> None:
        self.payloads: dict[int, bytes] = {}
        self._socket = zmq.asyncio.Context.instance().socket(zmq.SUB)
        self._socket.setsockopt(zmq.SUBSCRIBE, topic)
        self._socket.connect(endpoint)
        self._replay = replay

    def close(self) -> None:
        self._socket.close(linger=0)

    @property
    def events(self) -> list[dict[str, Any]]:
        """All events in order."""
        return self.events_from(0)

    def events_from(self, start: int) -> list[dict[str, Any]]:
        """Those of the messages from a number on."""
        payloads = [self.payloads[number] for number in range(start, len(self.payloads))]
        return [event for payload in payloads for event in msgspec.msgpack.decode(payload)[1]]

    async def follow(self, seconds: float = 0.3) -> None:
        """Take what comes, until nothing has come for a while."""
        while await self._socket.poll(seconds * 1e3):
            _, number, payload = await self._socket.recv_multipart()
            sequence = int.from_bytes(number, "big")
            if sequence > len(self.payloads):
                await self.catch_up(len(self.payloads))
            self.payloads.setdefault(sequence, payload)

    async def catch_up(self, start: int) -> int:
        """Have messages from `start` on sent again; how many were."""
        again = await asyncio.wait_for(replayed(self._replay, start), 10)
        self.payloads |= dict(again)
        return len(again)


async def replayed(endpoint: str, start: int) -> list[tuple[int, bytes]]:
    dealer = zmq.asyncio.Context.instance().socket(zmq.DEALER)
    dealer.setsockopt(zmq.RCVHWM, 0)
    messages: list[tuple[int, bytes]] = []
    try:
        dealer.connect(endpoint)
        await dealer.send_multipart([b"", start.to_bytes(8, "big")])
        while True:
            empty, number, payload = await dealer.recv_multipart()
            assert empty == b""
            if number == b"\xff" * 8:
                assert payload == b""
                return messages
            messages.append((int.from_bytes(number, "big"), payload))
    finally:
        dealer.close(linger=0)


@asynccontextmanager
async def followers(publisher: Publisher, topic: bytes = b"") -> AsyncIterator[list[Follower]]:
    """One for each rank."""
    following = [Follower(channel.endpoint, channel.replay_endpoint, topic) for channel in publisher.zmq.channels]
    try:
        yield following
    finally:
        for follower in following:
            follower.close()


class Books:
    """The hashes of the blocks that a replica has, by its events."""

    def __init__(self) -> None:
        self.hashes: set[int] = set()

    def apply(self, event: dict[str, Any]) -> None:
        if event["type"] == "BlockStored":
            assert len(event["token_ids"]) == len(event["block_hashes"]) * event["block_size"]
            new = set(event["block_hashes"])
            assert len(new) == len(event["block_hashes"]), "a block twice in one event"
            assert not new & self.hashes, "a block is stored that is there already"
            self.hashes |= new
        elif event["type"] == "BlockRemoved":
            gone = set(event["block_hashes"])
            assert gone, "an event that says nothing"
            assert gone <= self.hashes, "a block is removed that is not there"
            self.hashes -= gone
        else:
            assert event["type"] == "AllBlocksCleared"
            self.hashes.clear()


class DynamoTree:
    """ai-dynamo-runtime's RadixTree, given our events the way that its router gives them."""

    def __init__(self, block_size: int) -> None:
        from dynamo.llm import RadixTree  # noqa: PLC0415 - tests that use it skip without it

        self._tree = RadixTree()
        self._block_size = block_size
        self._number = 0

    def apply(self, event: dict[str, Any]) -> None:
        data: Any = "cleared"
        if event["type"] == "BlockStored":
            hashes = self._hashes(event["token_ids"], event.get("cache_salt"), event.get("block_mm_infos"))
            names = [value % (1 << 64) for value in event["block_hashes"]]
            blocks = [{"block_hash": name, "tokens_hash": tokens} for name, tokens in zip(names, hashes, strict=True)]
            parent = event["parent_block_hash"]
            data = {"stored": {"parent_hash": None if parent is None else parent % (1 << 64), "blocks": blocks}}
        elif event["type"] == "BlockRemoved":
            data = {"removed": {"block_hashes": [value % (1 << 64) for value in event["block_hashes"]]}}
        self._tree.apply_event(1, json.dumps({"event_id": self._number, "data": data}).encode())
        self._number += 1

    def blocks_of(self, tokens: Sequence[int], salt: str = "", mm_infos: Any = None) -> int:
        """How many leading blocks of a prompt it finds."""
        scores = self._tree.find_matches(self._hashes(tokens, salt or None, mm_infos)).scores
        return max(scores.values(), default=0)

    def _hashes(self, tokens: Sequence[int], salt: str | None, mm_infos: Any) -> list[int]:
        from dynamo.llm import compute_block_hash_for_seq  # noqa: PLC0415

        return compute_block_hash_for_seq(list(tokens), self._block_size, block_mm_infos=mm_infos, cache_namespace=salt)
