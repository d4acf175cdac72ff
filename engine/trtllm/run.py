"""One request while TensorRT-LLM has it."""

import asyncio
from typing import Any

from engine.kit.stream import DeltaStream
from engine.trtllm.disaggregation import held_of
from engine.types import Delta, GenerateRequest


class Run:
    """One request in the engine. While KV blocks are on their way to it, an abort waits: it could take as long as the transfer's own limit,
    and leave the blocks held on the other side.
    """

    stream: DeltaStream

    def __init__(self, result: Any, *, context_only: bool, transferring: bool) -> None:
        self.result = result
        self._context_only = context_only
        self._transferring = transferring
        self._aborted = False

    async def deliver(self, delta: Delta, request: GenerateRequest) -> None:
        """Pass on a delta. With that of a context-only request its KV blocks are held until the stream ends, and so long this waits; the
        engine has finished with the request by then and frees them itself, when they have been read or after its transceiver's time limit.
        """
        if self._context_only:
            delta = held_of(self.result, delta, request)
        self.stream.put(delta)
        if delta.held is not None:
            over = asyncio.Event()
            self.stream.when_done(over.set)
            await over.wait()

    def abort(self) -> None:
        self._aborted = True
        if not self._transferring:
            self.result.abort()

    def abandon(self) -> None:
        """Nobody follows the result any more."""
        if not self.result.finished:
            self.result.abort()

    def transferred(self) -> None:
        """The engine has answered, so that the blocks are here."""
        waited, self._transferring = self._transferring, False
        if waited and self._aborted:
            self.result.abort()
