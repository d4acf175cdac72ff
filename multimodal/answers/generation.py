"""A request in the engine: starts its choices, follows them, and closes every one of them whatever happens."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field

from engine import trace
from engine.base import Engine
from engine.errors import EngineFailure, InvalidRequest
from engine.kit.stream import DeltaStream
from multimodal.answers.choices import Choice, Piece, usage
from multimodal.answers.shapes import Shape
from multimodal.errors import DeadlineExceeded
from multimodal.metrics import ChoiceTimer, GenerationMetrics
from multimodal.request import Ask


@dataclass(eq=False)
class Generation:
    """A prepared request. Nothing has reached the engine yet; use `stream` or `complete`, once.

    Both raise engine errors and DeadlineExceeded, and abort what still runs when they are closed or cancelled. Errors
    name fields as the request does.
    """

    engine: Engine
    ask: Ask
    choices: Sequence[Choice]
    shape: Shape
    metrics: GenerationMetrics
    timeout: float
    """Seconds for the whole answer."""
    _span: trace.Span | None = field(default_factory=trace.current.get, init=False)
    _reasons: list[str] = field(default_factory=list, init=False)
    _expired: bool = field(default=False, init=False)
    _closing: list[asyncio.Future[None]] = field(default_factory=list, init=False)

    async def stream(self) -> AsyncGenerator[bytes]:
        """Yield the chunks of the answer, each a JSON document, the first not before the engine's first delta."""
        async with aclosing(self._pieces()) as pieces:
            async for piece in pieces:
                for chunk in self.shape.stream(piece):
                    yield chunk
        for chunk in self.shape.end():
            yield chunk

    async def complete(self) -> bytes:
        """Return the whole answer as a JSON document."""
        async with aclosing(self._pieces()) as pieces:
            async for piece in pieces:
                self.shape.add(piece)
        return self.shape.whole()

    async def _pieces(self) -> AsyncGenerator[Piece]:
        self.metrics.requested(self.choices[0].request)
        streams = [self.engine.generate(choice.request) for choice in self.choices]
        timer = asyncio.get_running_loop().call_later(self.timeout, self._expire, streams)
        source = self._follow(self.choices[0], streams[0]) if len(streams) == 1 else self._merge(streams)
        try:
            async with aclosing(source) as pieces:
                async for piece in pieces:
                    yield piece
        finally:
            timer.cancel()
            for stream in streams:
                await stream.aclose()
            if self._span is not None:
                self._describe(self._span)

    async def _follow(self, choice: Choice, stream: DeltaStream) -> AsyncGenerator[Piece]:
        """Follow one choice to its end, and measure it."""
        timer, stages = ChoiceTimer(self.metrics), trace.Stages(choice.index)
        try:
            async for delta in stream:
                piece = choice.feed(delta)
                if delta.prompt is not None:
                    timer.prompt(choice.prompt_tokens, delta.prompt.cached_tokens, delta.prompt.queue_seconds)
                    stages.begun(delta.prompt, choice.prompt_tokens)
                timer.tokens(len(delta.token_ids))
                if delta.performance is not None:
                    timer.measured(delta.performance)
                if piece.finish_reason is not None:
                    await stream.aclose()
                    timer.finish(piece.finish_reason)
                    stages.end(choice.completion_tokens)
                    self._reasons.append(piece.finish_reason)
                    yield piece
                    return
                yield piece
            if self._expired:
                raise DeadlineExceeded(self.timeout)
            raise EngineFailure("the engine ended the request without a reason")
        except Exception as error:
            timer.fail()
            stages.end(choice.completion_tokens, error)
            if isinstance(error, InvalidRequest):
                raise error.at(self.ask.spelled(error.param)) from error
            raise
        finally:
            timer.stop()
            stages.stop(choice.completion_tokens)

    async def _merge(self, streams: Sequence[DeltaStream]) -> AsyncGenerator[Piece]:
        """Follow several choices, their pieces in order of arrival; the first error ends them all."""
        queue: asyncio.Queue[Piece | None] = asyncio.Queue(maxsize=len(streams))

        async def pump(choice: Choice, stream: DeltaStream) -> None:
            async with aclosing(self._follow(choice, stream)) as pieces:
                async for piece in pieces:
                    await queue.put(piece)

        async def pump_all() -> None:
            try:
                async with asyncio.TaskGroup() as group:
                    for choice, stream in zip(self.choices, streams, strict=True):
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

    def _describe(self, span: trace.Span) -> None:
        """Note on the request's span what came of it, by OpenTelemetry's attributes, new and old."""
        count = usage(self.choices)
        span.set(
            {
                "gen_ai.usage.input_tokens": count["prompt_tokens"],
                "gen_ai.usage.prompt_tokens": count["prompt_tokens"],
                "gen_ai.usage.output_tokens": count["completion_tokens"],
                "gen_ai.usage.completion_tokens": count["completion_tokens"],
                "gen_ai.usage.cache_read.input_tokens": count["prompt_tokens_details"]["cached_tokens"],
                "gen_ai.response.finish_reasons": self._reasons,
            }
        )
