"""The engine seam: token ids in, deltas out."""

from collections.abc import AsyncGenerator, AsyncIterator
from typing import Protocol

from engine.kit.stream import DeltaStream
from engine.kv_events import KvEvent
from engine.stats import IterationStats
from engine.types import EngineInfo, GenerateRequest


class Engine(Protocol):
    """One model that generates tokens. Everything runs on the event loop that called `start`; no call blocks it.

    Call `start` once, then `generate` any number of times concurrently, then `close` once; `close` is safe before and
    after a failed start.
    """

    @property
    def info(self) -> EngineInfo:
        """Facts fixed at start. Raises EngineNotReady before the engine has started for the first time."""
        ...

    @property
    def healthy(self) -> bool:
        """Whether a request made now would be accepted. Cheap: no call into the engine."""
        ...

    async def start(self) -> None:
        """Load the model and become ready. Raises EngineFailure, with nothing left running, if it cannot."""
        ...

    def generate(self, request: GenerateRequest) -> DeltaStream:
        """Generate one sequence.

        The stream yields at least one delta and ends after the one with a `finish_reason`. Tokens that became ready
        while the consumer was busy arrive in one delta. It raises InvalidRequest before the first delta or never, and
        EngineUnavailable or EngineFailure at any time. Closing the stream, or cancelling the task that awaits it, is
        the only way to abort: the engine stops within one step and frees the sequence's KV blocks.

        A `prefill_only` request yields one delta. If that has no `finish_reason` it has `held`, and the stream then
        stays open: the KV blocks are kept until it is closed. A request with a `handoff` continues from there: the
        engine reads the blocks, and its first delta says that it no longer needs them. If it cannot read them it
        computes the prompt itself.
        """
        ...

    def kv_events(self) -> AsyncGenerator[list[KvEvent], None]:
        """Yield KV-cache events in order, in batches.

        The first are Created and Stored events for what the cache contains already; then come the changes. Any number
        of consumers; ends when the engine closes.
        """
        ...

    def stats(self) -> AsyncIterator[IterationStats]:
        """Yield the latest iteration statistics whenever they change; slow consumers skip to the newest.

        Any number of consumers.
        """
        ...

    async def close(self) -> None:
        """Abort running requests, stop the engine and free its resources."""
        ...


class EngineAround:
    """Base of an engine that decides which requests reach the engine `inner`, and passes on everything else."""

    def __init__(self, inner: Engine) -> None:
        self.inner = inner

    @property
    def info(self) -> EngineInfo:
        return self.inner.info

    @property
    def healthy(self) -> bool:
        return self.inner.healthy

    async def start(self) -> None:
        await self.inner.start()

    def kv_events(self) -> AsyncGenerator[list[KvEvent], None]:
        return self.inner.kv_events()

    def stats(self) -> AsyncIterator[IterationStats]:
        return self.inner.stats()
