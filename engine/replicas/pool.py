"""The replicas that prefill, or encode, and which of them is asked: found by address or by DNS name, chosen by cost, tried in turn."""

import asyncio
import logging
import ssl
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Generic, TypeVar

import httpx
import msgspec

from engine.errors import ContextOverflow, EngineError, EngineUnavailable, InvalidRequest
from engine.media import Unexpanded
from engine.process.attachments import detach
from engine.replicas.ask import CONNECT_SECONDS, Lease
from engine.replicas.discovery import RESOLVE_SECONDS, Addresses, wait_for_first
from engine.replicas.http_transport import Transport
from engine.replicas.peers import Observer, Peer, PrefillPeer, block_keys, in_full
from engine.transfer.shared_bytes import Data, readable
from engine.types import GenerateRequest, Handoff
from protocol.internal import SILENCE_SECONDS, VERSION, PrefillInfo, PrefillRequest, pieces

P = TypeVar("P", bound=Peer[Any, Any])
T = TypeVar("T")

log = logging.getLogger(__name__)


class NoPeer(EngineUnavailable):
    """There is no replica to ask, or none that did what it was asked."""


def is_final(error: EngineError) -> bool:
    """Whether no replica would take the request: one that has room for less than another may have too little."""
    return isinstance(error, InvalidRequest) and not isinstance(error, ContextOverflow)


class Pool(Generic[P]):
    """The peers behind `urls`, asked with `secret`. `mine` says what a peer has to have in common with this replica."""

    def __init__(self, urls: Sequence[str], secret: str, attempts: int, observer: Observer, does: str) -> None:
        """`does`: the word for what they are for."""
        self._addresses = Addresses(urls, f"{does} replicas")
        self._attempts = attempts
        self._observer = observer
        self._does = does
        self._asked = 0
        self._peers: dict[str, P] = {}
        self._watchers: dict[str, asyncio.Task[None]] = {}
        self._resolving: asyncio.Task[None] | None = None
        self._http = httpx.AsyncClient(
            headers={"authorization": f"Bearer {secret}", "accept-encoding": "identity"},
            timeout=httpx.Timeout(None, connect=CONNECT_SECONDS),  # `client` knows how long the rest may take
            transport=Transport(
                limits=httpx.Limits(max_connections=None, max_keepalive_connections=256),
                verify=ssl.create_default_context(),
            ),
            trust_env=False,
        )

    async def start(self) -> None:
        """Find the peers, and wait a moment for each to say that it is there."""
        self._keep(await self._found())
        if self._addresses.change:
            self._resolving = asyncio.create_task(self._resolve(), name=f"{self._does}-discovery")
        await wait_for_first((peer.probed for peer in self._peers.values()), SILENCE_SECONDS)

    async def close(self) -> None:
        if self._resolving is not None:
            self._resolving.cancel()
            await asyncio.wait([self._resolving])
            self._resolving = None
        watchers = list(self._watchers.values())
        self._keep(set())
        if watchers:
            await asyncio.wait(watchers)
        await self._http.aclose()

    @property
    def counts(self) -> tuple[int, int]:
        """Peers that are known, and those of them that answer."""
        return len(self._peers), sum(peer.available for peer in self._peers.values())

    def healthy(self, mine: msgspec.Struct) -> bool:
        """Whether some peer would be asked now."""
        return any(not self._obstacle(peer, mine) for peer in self._peers.values())

    async def _ask(
        self, mine: msgspec.Struct, name: str, cost: Callable[[P], int], ask: Callable[[P], Awaitable[T]]
    ) -> T:
        """Have a peer do it, the cheapest first, then others. Raises what is wrong with the request, or why the last one asked did not do
        it; NoPeer if there is none. `name` is for the log.
        """
        tried: list[P] = []
        failure: EngineError | None = None
        while len(tried) < self._attempts and (peer := self._choose(cost, mine, tried)) is not None:
            if tried:
                self._observer.retried()
            tried.append(peer)
            try:
                return await ask(peer)
            except EngineError as error:
                if is_final(error):
                    raise
                log.info("%s replica %s does not %s %s: %s", self._does, peer.url, self._does, name, in_full(error))
                if failure is None or not isinstance(error, ContextOverflow):  # another attempt may succeed
                    failure = error
        raise failure or self._nobody(name, mine)

    def _peer(self, url: str) -> P:
        raise NotImplementedError

    def _choose(self, cost: Callable[[P], int], mine: msgspec.Struct, tried: Sequence[P]) -> P | None:
        """The peer with the least to do first; of equals the one that was asked longest ago."""
        candidates = [peer for peer in self._peers.values() if peer not in tried and not self._obstacle(peer, mine)]
        if not candidates:
            return None
        peer = min(candidates, key=lambda peer: (cost(peer), peer.last_asked))
        self._asked += 1
        peer.last_asked = self._asked
        return peer

    def _obstacle(self, peer: P, mine: msgspec.Struct) -> str:
        """Why `peer` cannot be asked; empty if it can."""
        if not peer.available or peer.info is None:
            return peer.reason
        pairs = ((name, getattr(peer.info, name), getattr(mine, name)) for name in mine.__struct_fields__)
        return "; ".join(
            f"one has {name} {theirs or 'none'}, this replica has {ours or 'none'}"
            for name, theirs, ours in pairs
            if theirs != ours
        )

    def _nobody(self, name: str, mine: msgspec.Struct) -> NoPeer:
        """Why there is nobody to ask: to the log with addresses, which are not for clients."""
        found = {url: self._obstacle(peer, mine) for url, peer in self._peers.items()}
        log.info("no %s replica for %s: %s", self._does, name, found)
        reasons = "; ".join(sorted(set(found.values()))) or "none is known"
        return NoPeer(f"no {self._does} replica can take the request: {reasons}")

    def _keep(self, urls: set[str]) -> None:
        """Have the peers at `urls`, and no others. Requests that are with one that goes are not touched."""
        for url in self._peers.keys() - urls:
            log.info("%s replica %s is one no more", self._does, url)
            del self._peers[url]
            self._watchers.pop(url).cancel()
        for url in urls - self._peers.keys():
            peer = self._peers[url] = self._peer(url)
            self._watchers[url] = asyncio.create_task(peer.watch(), name=f"{self._does}-peer-{url}")

    async def _resolve(self) -> None:
        while True:
            await asyncio.sleep(RESOLVE_SECONDS)
            self._keep(await self._found())

    async def _found(self) -> set[str]:
        return set(await self._addresses.find(self._peers.keys()))


class PeerPool(Pool[PrefillPeer]):
    """Prefill replicas, asked for prompts."""

    def __init__(self, urls: Sequence[str], secret: str, attempts: int, observer: Observer) -> None:
        super().__init__(urls, secret, attempts, observer, "prefill")

    async def prefill(self, request: GenerateRequest, mine: PrefillInfo) -> Lease[Handoff]:
        """Have a peer prefill, the one with the least to compute before the first token. Raises as it does. The caller closes the lease."""
        prompt = request.prompt_token_ids
        reuses = request.sampling.prompt_logprobs is None and not isinstance(request.media, Unexpanded)
        keys = block_keys(prompt, mine.block_size, request.cache_salt, request.spans) if reuses else []
        bare, data = detach(request)
        parts = await asyncio.to_thread(_copied, data) if data else []
        raw = msgspec.Raw(msgspec.msgpack.encode(bare))
        body = pieces(PrefillRequest(VERSION, mine.model, raw, [*map(len, parts)]), parts)

        def cost(peer: PrefillPeer) -> int:
            return peer.cost(keys, len(prompt), mine.block_size)

        async def ask(peer: PrefillPeer) -> Lease[Handoff]:
            computed = len(prompt) - peer.prefixes.known(keys) * mine.block_size
            return await peer.prefill(body, request.request_id, keys, computed)

        return await self._ask(mine, request.request_id, cost, ask)

    def _peer(self, url: str) -> PrefillPeer:
        return PrefillPeer(url, self._http, self._observer)


def _copied(parts: Sequence[Data]) -> list[bytes]:
    return [bytes(readable(part)) for part in parts]
