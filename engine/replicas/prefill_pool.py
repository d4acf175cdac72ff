"""Prefill replicas, chosen by what they would have to compute before the first token."""

from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence

import msgspec
from msgspec.structs import replace

from engine.errors import EngineError
from engine.kit.work import PYTHON
from engine.media import Unexpanded, overlaps_of
from engine.replicas.ask import PREFILL, RemoteAnswer
from engine.replicas.block_keys import block_keys, root_key
from engine.replicas.client import Header
from engine.replicas.remote import RemoteObserver, RemotePool, RemoteReplica
from engine.transfer.shared_bytes import readable
from engine.types import GenerateRequest, Handoff
from protocol.internal import VERSION, PrefillInfo, PrefillRequest, pieces

Announce = Callable[[Handoff | None], Awaitable[None]]
MAX_KEYS = 1 << 16
"""Blocks remembered for one replica."""


class Prefixes:
    """Keys of the blocks that a replica has computed, some of which it may have evicted since.

    The least recently used are forgotten first.
    """

    def __init__(self, max_keys: int = MAX_KEYS) -> None:
        self._max_keys = max_keys
        self._keys: OrderedDict[int, None] = OrderedDict()

    def known(self, keys: Sequence[int]) -> int:
        """Return how many blocks from the start are known."""
        return next((count for count, key in enumerate(keys) if key not in self._keys), len(keys))

    def add(self, keys: Sequence[int]) -> None:
        for key in reversed(keys):  # the start of a prefix is of use for longest
            self._keys[key] = None
            self._keys.move_to_end(key)
        while len(self._keys) > self._max_keys:
            self._keys.popitem(last=False)

    def clear(self) -> None:
        self._keys.clear()


class PrefillReplica(RemoteReplica[PrefillInfo, Handoff]):
    """A prefill replica, and the prefixes that it has computed."""

    service = PREFILL

    def __init__(self, url: str, headers: Sequence[Header], observer: RemoteObserver) -> None:
        super().__init__(url, headers, observer)
        self.prefixes = Prefixes()

    def set_unready(self, error: EngineError) -> None:
        """Forget its cache: the replica that comes back may be another process."""
        super().set_unready(error)
        self.prefixes.clear()


class PrefillPool(RemotePool[PrefillReplica]):
    """The prefill replicas of a decode replica."""

    kind = PrefillReplica

    async def prefill(self, request: GenerateRequest, mine: PrefillInfo, announce: Announce) -> RemoteAnswer[Handoff]:
        """Have the replica with the least to compute prefill the prompt. The caller closes the answer. `announce` is
        called with each early handoff, and with None if the blocks of those before are lost.

        Raises as `try_in_turn` does.
        """
        keys = prompt_keys(request, mine.block_size)
        bare, data = request.detach()
        parts = await PYTHON.run(lambda: [bytes(readable(part)) for part in data]) if data else []
        bare = replace(bare, dp_rank=None, early_handoff=True)  # the rank is one of this replica
        raw = msgspec.Raw(msgspec.msgpack.encode(bare))
        body = pieces(PrefillRequest(VERSION, mine.model, raw, [*map(len, parts)]), parts)

        def uncached(replica: PrefillReplica) -> int:
            """Prompt tokens that the replica has to compute."""
            return len(request.prompt_token_ids) - replica.prefixes.known(keys) * mine.block_size

        async def take(handoff: Handoff) -> bool:
            if handoff.early:
                await announce(handoff if handoff.state else None)
            return not handoff.early

        async def ask(replica: PrefillReplica) -> RemoteAnswer[Handoff]:
            try:
                answer = await replica.ask(body, request.request_id, uncached(replica), take)
            except EngineError:
                await announce(None)
                raise
            replica.prefixes.add(keys)
            return answer

        return await self.try_in_turn(
            mine, request.request_id, lambda replica: replica.in_flight + uncached(replica), ask
        )


def prompt_keys(request: GenerateRequest, block_size: int) -> list[int]:
    """Keys of the blocks of a prompt that need not be computed where they are cached: its last token always is.

    Empty if log-probabilities of the prompt are wanted, since every token is computed then, or if the backend expands
    the prompt.
    """
    if request.sampling.prompt_logprobs is not None or isinstance(request.media, Unexpanded):
        return []
    tokens = request.prompt_token_ids[:-1]
    shown = (overlaps_of(request.spans, start, block_size) for start in range(0, len(tokens), block_size))
    return list(block_keys(tokens, block_size, root_key(request.cache_salt), shown))
