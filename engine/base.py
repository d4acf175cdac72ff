"""The engine seam: token ids in, deltas out. Everything above it speaks HTTP and text; nothing below it does."""

from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from typing import Protocol, Self

from engine.kv_events import KvEvent
from engine.stats import IterationStats
from engine.types import Delta, EngineInfo, GenerateRequest


class DeltaIterator(Protocol):
    """What `generate` returns: an iterator that can be closed (`contextlib.aclosing`). `engine.kit.stream.DeltaStream` is one."""

    def __aiter__(self) -> Self: ...

    def __anext__(self) -> Awaitable[Delta]: ...

    def aclose(self) -> Awaitable[None]: ...

    def when_done(self, callback: Callable[[], object]) -> None:
        """Have `callback` called, once and soon, when the engine is done with the request: finished, failed or aborted, however much
        of it the consumer has still to read."""
        ...


class Engine(Protocol):
    """One model, ready to generate. Everything runs on the event loop that called `start`; no call blocks it.

    Life: `start` once, then any number of `generate` at once, then `close` once; `close` is safe before and after a failed start.
    """

    @property
    def info(self) -> EngineInfo:
        """Facts fixed at start. Raises EngineNotReady before the engine has started for the first time."""
        ...

    @property
    def healthy(self) -> bool:
        """Whether a request made now would be taken. Cheap: no call into the engine."""
        ...

    async def start(self) -> None:
        """Load the model and become ready. Raises EngineFailure, with nothing left running, if it cannot."""
        ...

    def generate(self, request: GenerateRequest) -> DeltaIterator:
        """Generate one sequence.

        Yields at least one delta and ends after the one with a `finish_reason`. Tokens that became ready while the consumer was
        busy arrive in one delta. Raises InvalidRequest before the first delta or never; EngineUnavailable or EngineFailure at
        any time. Closing the iterator (`aclose`, or cancelling the task that awaits it) is the one way to abort: the engine
        stops within one step and frees the sequence's KV blocks.

        A request that is `prefill_only` yields one delta. If that has no `finish_reason` it has `held`, and the iterator then waits
        for good: the KV blocks stay as they are until it is closed. A request with a `handoff` goes on from there: the engine reads
        the blocks, and its first delta says that it needs them no more. If it cannot read them it computes the prompt itself.
        """
        ...

    def kv_events(self) -> AsyncGenerator[list[KvEvent], None]:
        """KV-cache events in order, in batches: first Created and Stored ones that say what the engine holds already, however it came
        about, then each change. Any number of consumers; ends when the engine closes."""
        ...

    def stats(self) -> AsyncIterator[IterationStats]:
        """The latest iteration statistics, whenever they change; slow consumers skip to the newest. Any number of consumers."""
        ...

    async def close(self) -> None:
        """Abort what runs, stop the engine and free everything it holds."""
        ...
