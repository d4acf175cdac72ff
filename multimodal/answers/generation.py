"""A request on its way through the engine: starts its choices, follows them, and closes every one of them whatever happens."""

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing

from engine import trace
from engine.base import Engine
from engine.errors import EngineFailure, InvalidRequest
from engine.kit.stream import DeltaStream
from multimodal.answers.choices import Choice, Piece
from multimodal.answers.chunks import ChunkBuilder
from multimodal.errors import DeadlineExceeded
from multimodal.genai import describe_answer
from multimodal.metrics import GenerationMetrics


class Generation:
    """A prepared request. Nothing has reached the engine yet; use `stream` or `complete`, once.

    Both raise engine errors and DeadlineExceeded, and abort what still runs when they are closed or cancelled. `fields` names what the
    engine calls `prompt` and `guide` as the request does, for its errors.
    """

    def __init__(
        self,
        engine: Engine,
        choices: Sequence[Choice],
        builder: ChunkBuilder,
        metrics: GenerationMetrics,
        timeout: float,
        fields: Mapping[str, str | None],
    ) -> None:
        self._engine = engine
        self._choices = choices
        self._builder = builder
        self._metrics = metrics
        self._timeout = timeout
        self._fields = fields
        self._span = trace.current.get()
        self._reasons: list[str] = []
        self._expired = False
        self._closing: list[asyncio.Future[None]] = []

    async def stream(self) -> AsyncGenerator[bytes]:
        """The chunks of the answer, each a JSON document, the first not before the engine's first delta."""
        async with aclosing(self._pieces()) as pieces:
            async for piece in pieces:
                for chunk in self._builder.stream(piece):
                    yield chunk
        if (usage := self._builder.usage_chunk()) is not None:
            yield usage

    async def complete(self) -> bytes:
        """The whole answer as a JSON document."""
        async with aclosing(self._pieces()) as pieces:
            async for piece in pieces:
                self._builder.add(piece)
        return self._builder.whole()

    async def _pieces(self) -> AsyncGenerator[Piece]:
        self._metrics.requested(self._choices[0].request)
        streams = [self._engine.generate(choice.request) for choice in self._choices]
        timer = asyncio.get_running_loop().call_later(self._timeout, self._expire, streams)
        try:
            if len(streams) == 1:
                async with aclosing(self._follow(self._choices[0], streams[0])) as pieces:
                    async for piece in pieces:
                        yield piece
            else:
                async with aclosing(self._merge(streams)) as pieces:
                    async for piece in pieces:
                        yield piece
        finally:
            timer.cancel()
            for stream in streams:
                await stream.aclose()
            if self._span is not None:
                describe_answer(self._span, self._builder.usage(), self._reasons)

    async def _follow(self, choice: Choice, stream: DeltaStream) -> AsyncGenerator[Piece]:
        """One choice to its end, with its measurements."""
        timer, stages = self._metrics.track(), trace.Stages(choice.index)
        try:
            async for delta in stream:
                piece = choice.feed(delta)
                if delta.prompt is not None:
                    timer.prompt(choice.prompt_tokens, delta.prompt.cached_tokens, delta.prompt.queue_seconds)
                    stages.begun(delta.prompt, choice.prompt_tokens)
                timer.tokens(len(delta.token_ids))
                if piece.finish_reason is not None:
                    await stream.aclose()
                    timer.finish(piece.finish_reason)
                    stages.end(choice.completion_tokens)
                    self._reasons.append(piece.finish_reason)
                    yield piece
                    return
                yield piece
            if self._expired:
                raise DeadlineExceeded(self._timeout)
            raise EngineFailure("the engine ended the request without a reason")
        except Exception as error:
            timer.fail()
            stages.end(choice.completion_tokens, error)
            if isinstance(error, InvalidRequest) and error.param is not None:
                error.param = self._fields.get(error.param, error.param)
            raise
        finally:
            timer.stop()
            stages.stop(choice.completion_tokens)

    async def _merge(self, streams: Sequence[DeltaStream]) -> AsyncGenerator[Piece]:
        """Several choices, their pieces in order of arrival; the first error ends them all."""
        queue: asyncio.Queue[Piece | None] = asyncio.Queue(maxsize=len(streams))

        async def pump(choice: Choice, stream: DeltaStream) -> None:
            async with aclosing(self._follow(choice, stream)) as pieces:
                async for piece in pieces:
                    await queue.put(piece)

        async def pump_all() -> None:
            try:
                async with asyncio.TaskGroup() as group:
                    for choice, stream in zip(self._choices, streams, strict=True):
                        group.create_task(pump(choice, stream))
            except* Exception as errors:
                raise errors.exceptions[0] from None
            finally:
                if not closing:
                    await queue.put(None)

        closing = False
        pumping = asyncio.create_task(pump_all())
        try:
            while (piece := await queue.get()) is not None:
                yield piece
            await pumping
        finally:
            closing = True
            pumping.cancel()
            await asyncio.wait([pumping])

    def _expire(self, streams: Sequence[DeltaStream]) -> None:
        self._expired = True
        self._closing = [asyncio.ensure_future(stream.aclose()) for stream in streams]
