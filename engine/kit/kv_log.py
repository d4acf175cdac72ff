"""A feed of an engine's KV-cache events that first tells each new consumer what the cache contains.

A router thus learns the whole state from a publisher that starts long after the engine. Without consumers, only the
record of the cache's contents takes memory, proportional to its number of blocks.
"""

from array import array
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from engine.base import EventFeed
from engine.kv_events import Cleared, Created, EventDiff, KvEvent, Removed, Stored, StoredBlock, UniqueToken, Updated
from engine.media import MmKeys

EventData = Created | Stored | Removed | Updated | Cleared

_BATCH = 256


class _Block(NamedTuple):
    """A reusable block. Its tokens take a tenth of their memory in events."""

    block_hash: int
    parent: int | None
    tokens: "array[int]"
    mm_keys: MmKeys
    cache_salt: str
    cache_level: int

    def stored(self) -> Stored:
        tokens = tuple(map(UniqueToken, self.tokens))
        block = StoredBlock(self.block_hash, tokens, self.cache_level, mm_keys=self.mm_keys)
        return Stored(self.parent, (block,), self.cache_salt)


class _WindowLog:
    """The blocks of one attention window."""

    def __init__(self) -> None:
        self.created = Created(())
        self.blocks: dict[int, _Block] = {}

    def note(self, data: EventData) -> None:
        match data:
            case Created():
                self.created = data
            case Stored():
                parent = data.parent_hash
                for block in data.blocks:
                    tokens = array("i", [token.token_id for token in block.tokens])
                    self.blocks[block.block_hash] = _Block(
                        block.block_hash, parent, tokens, block.mm_keys, data.cache_salt, block.cache_level
                    )
                    parent = block.block_hash
            case Removed():
                for block_hash in data.block_hashes:
                    self.blocks.pop(block_hash, None)
            case Updated(block_hash, EventDiff(level)) if block_hash in self.blocks:
                self.blocks[block_hash] = self.blocks[block_hash]._replace(cache_level=level)
            case Cleared():
                self.blocks.clear()

    def parents_first(self) -> Iterator[_Block]:
        """Yield all blocks, parents before children.

        A parent can be younger than its children if it was evicted and stored again.
        """
        told: set[int] = set()
        for block_hash in self.blocks:
            chain: list[_Block] = []
            ancestor: int | None = block_hash
            while ancestor is not None and ancestor in self.blocks and ancestor not in told:
                chain.append(self.blocks[ancestor])
                told.add(ancestor)
                ancestor = self.blocks[ancestor].parent
            yield from reversed(chain)


def _content(windows: Mapping[int, _WindowLog]) -> list[tuple[int, Created | _Block]]:
    """Return pairs of attention window and content: first the creation of each window, then all blocks."""
    created: list[tuple[int, Created | _Block]] = [(window, pool.created) for window, pool in windows.items()]
    return created + [(window, block) for window, pool in windows.items() for block in pool.parents_first()]


class KvEventLog(EventFeed[KvEvent]):
    """The events of one engine from its start.

    Initial events get the ids just before those of the events that follow.
    """

    def __init__(self) -> None:
        super().__init__()
        self._last_ids: dict[int | None, int] = {}
        self._windows: defaultdict[int | None, defaultdict[int, _WindowLog]] = defaultdict(
            lambda: defaultdict(_WindowLog)
        )
        """The blocks of each data-parallel rank, by attention window."""

    def put(self, event: KvEvent) -> None:
        self._last_ids[event.attention_dp_rank] = event.event_id
        self._windows[event.attention_dp_rank][event.window_size].note(event.data)
        super().put(event)

    def _before(self) -> Iterator[list[KvEvent]]:
        now = [(rank, self._last_ids[rank], _content(windows)) for rank, windows in self._windows.items()]
        for rank, last_id, content in now:
            first = last_id + 1 - len(content)
            for start in range(0, len(content), _BATCH):
                yield [
                    KvEvent(event_id, part if isinstance(part, Created) else part.stored(), window, rank)
                    for event_id, (window, part) in enumerate(content[start : start + _BATCH], start=first + start)
                ]
