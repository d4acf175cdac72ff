"""The life of a request: its prompts and parameters are made, and its choices started, followed and closed."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from uuid import uuid4

from blake3 import blake3

from engine import trace
from engine.base import DeltaStream, Engine
from engine.errors import EngineFailure, InvalidRequest
from engine.kit.work import NATIVE, off_loop
from engine.types import EngineInfo, GenerateRequest, SamplingParams
from multimodal.answers.choices import Choice, Piece, usage
from multimodal.answers.formats import AnswerFormat
from multimodal.answers.shapes import AnswerContext, Shape
from multimodal.errors import DeadlineExceeded, RequestError
from multimodal.metrics import ChoiceTimer, GenerationMetrics
from multimodal.remote_media import RemoteMediaRun
from multimodal.request import Ask, Conversation, Limits, Sampling, SamplingDefaults, check_tools
from multimodal.text.prompts import MediaPrompts, Prompt, Prompts


def fingerprint(release: str, model_name: str, info: EngineInfo) -> str:
    """Return `system_fingerprint`: equal for all replicas of a release that compute a model of this name in the same
    way. To a client who names a seed, another one says that answers may differ; other weights of the same name do not
    show."""
    how = info.dtype, info.quantization, info.device, info.tensor_parallel_size, info.compute_path, info.instruction_set
    return f"fp_{blake3(repr((release, model_name, Path(info.model).name, info.backend, *how)).encode()).hexdigest(5)}"


@dataclass(eq=False)
class Processor:
    """Prepares requests for one engine. Every request names the logits processors `logits`. `format` is the output
    format of chats; other answers are plain text. `defaults` are sampling parameters.
    """

    engine: Engine
    prompts: Prompts
    limits: Limits
    model_name: str
    metrics: GenerationMetrics
    logits: tuple[str, ...] = ()
    format: AnswerFormat = field(default_factory=AnswerFormat)
    defaults: SamplingDefaults = field(default_factory=SamplingDefaults)
    release: str = ""
    """Version of the server."""

    async def prepare(
        self, ask: Ask, shape: Callable[[AnswerContext], Shape], request_id: str, dp_rank: int | None = None
    ) -> "Generation":
        """Prepare a request, whose answer has this shape, for a data-parallel rank. Starts nothing in the engine.
        Raises RequestError, ContextOverflow, DeadlineExceeded, EngineNotReady and the errors of encoding images.
        """
        self._check_count(ask)  # before images are fetched
        info = self.engine.info
        self.format.check(ask, info.guides, info.text_grammars)
        schemas = ask.schema_length
        async with self._in_time():
            await off_loop(schemas, lambda: check_tools(ask, self.limits))
            prompts = await self.prompts.of(ask, info, self.limits)
        try:
            return await self._generation(ask, shape, request_id, dp_rank, prompts)
        except BaseException:  # the request is refused, or its client has left
            if self.prompts.images is not None:
                for prompt in prompts:
                    self.prompts.images.release(prompt.media)
            raise

    async def _generation(
        self,
        ask: Ask,
        shape: Callable[[AnswerContext], Shape],
        request_id: str,
        dp_rank: int | None,
        prompts: Sequence[Prompt],
    ) -> "Generation":
        info, schemas = self.engine.info, ask.schema_length
        if not all(prompt.ids for prompt in prompts):
            raise RequestError("The prompt is empty.", ask.spelled("prompt"))
        tokenizer = self.prompts.tokenizer
        sampling = Sampling(info, tokenizer, self.limits, self.logits, self.defaults)
        lengths = [len(prompt.ids) for prompt in prompts]
        asked, first = ask, self.format.parser(ask, info.guides, tokenizer, prompts[0].opening)

        def with_params() -> tuple[Ask, list[SamplingParams], tuple[int, ...]]:
            guided = self.format.guided(asked, info.guides, first, info.text_grammars)
            budget = self.format.budget(asked, guided, first, tokenizer, dict(info.refused_parameters))
            predicted = tokenizer.encode(asked.prediction) if asked.prediction else ()
            return guided, sampling.params(guided, lengths, budget), tuple(predicted[: info.context_length])

        # The first budget takes as long as reading the vocabulary does.
        work = schemas + sum(map(len, ask.bad_words)) + self.format.limits(ask) * tokenizer.vocab_size
        work += len(ask.prediction or "")
        ask, params, predicted = await off_loop(work, with_params)
        sampling.check_stops(ask)
        unique = uuid4().hex
        choices: list[Choice] = []
        for index, sampled in enumerate(params):
            prompt = prompts[index // ask.n]
            request = GenerateRequest(
                request_id=f"{unique}-{index}",
                prompt_token_ids=tuple(prompt.ids),
                media=prompt.media,
                sampling=sampled,
                group=unique if len(params) > 1 else "",
                group_size=len(params),
                priority=max(ask.priority, self.limits.min_priority),
                cache_salt=ask.cache_salt,
                skip_save=ask.skip_save,
                prediction=predicted,
                dp_rank=dp_rank,
                trace=trace.headers(),
            )
            parser = self.format.parser(asked, info.guides, tokenizer, prompt.opening) if index else first
            choices.append(Choice(index, request, ask, tokenizer, parser))
        answer = shape(
            AnswerContext(
                ask,
                choices,
                tokenizer,
                ask.request_id or request_id,
                self.model_name,
                fingerprint(self.release, self.model_name, info),
            )
        )
        _describe(answer.operation, self.model_name, answer.id, params)
        return Generation(
            self.engine,
            ask,
            choices,
            answer,
            self.metrics,
            self.limits.request_timeout_seconds,
            self.prompts.images,
            lambda: self._prompt_again(asked),
        )

    async def tokenize(self, ask: Ask) -> list[int]:
        """Return the token ids of a request's one prompt."""
        async with self._in_time():
            return await self.prompts.tokens(ask, self.engine.info, self.limits)

    async def strings(self, ids: Sequence[int]) -> list[str]:
        """Return the text of each token by itself."""
        bytes_of = self.prompts.tokenizer.bytes_of
        return await off_loop(len(ids), lambda: [bytes_of(token).decode(errors="replace") for token in ids])

    async def detokenize(self, ids: Sequence[int]) -> str:
        """Return the text of token ids, special tokens included. Raises RequestError."""
        if len(ids) > (most := self.limits.tokens(self.engine.info)):
            raise RequestError(f"'tokens' may have {most} entries at most; it has {len(ids)}.", "tokens")
        size = max(self.prompts.tokenizer.vocab_size, self.engine.info.vocab_size)  # ids that pad a model have no text
        if max(ids, default=0) >= size:
            raise RequestError(f"'tokens' must be ids from 0 to {size - 1}.", "tokens")
        return await NATIVE.run(lambda: self.prompts.tokenizer.decode(ids))

    async def _prompt_again(self, ask: Ask) -> Prompt:
        """Return the prompt of a chat once more, with the embeddings that an engine could not read elsewhere."""
        (prompt,) = await self.prompts.of(ask, self.engine.info, self.limits)
        return prompt

    @asynccontextmanager
    async def _in_time(self) -> AsyncIterator[None]:
        """Limit the time for making prompts: images may be slow to fetch and to encode."""
        seconds = self.limits.request_timeout_seconds
        try:
            async with asyncio.timeout(seconds):
                with trace.span("prompt"):
                    yield
        except TimeoutError as error:
            raise DeadlineExceeded(seconds) from error

    def _check_count(self, ask: Ask) -> None:
        prompts = 1 if isinstance(ask.prompt, Conversation) else len(ask.prompt)
        if not 1 <= ask.n <= self.limits.max_n or ask.n * prompts > self.limits.max_n:
            raise RequestError(
                f"'n' must be at least 1, and n times the number of prompts at most {self.limits.max_n}.", "n"
            )


@dataclass(eq=False)
class Generation:
    """A prepared request. Nothing has reached the engine yet; use `stream` or `complete`, once.

    Both raise engine errors and DeadlineExceeded, and abort running choices when they are closed or cancelled. Errors
    name fields as the request does.
    """

    engine: Engine
    ask: Ask
    choices: Sequence[Choice]
    shape: Shape
    metrics: GenerationMetrics
    timeout: float
    """Seconds for the whole answer."""
    images: MediaPrompts | None
    prompt_again: Callable[[], Awaitable[Prompt]]
    """Returns the request's one prompt once more, for media that were lost on their way to the engine."""
    _span: trace.Span | None = field(default_factory=trace.current.get, init=False)
    _reasons: list[str] = field(default_factory=list, init=False)
    _expired: bool = field(default=False, init=False)
    _closing: list[asyncio.Future[None]] = field(default_factory=list, init=False)

    async def stream(self) -> AsyncGenerator[bytes]:
        """Yield the chunks of the answer, each a JSON document, from the engine's first delta on."""
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
        streams = [self._start(choice.request) for choice in self.choices]
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

    def _start(self, request: GenerateRequest) -> DeltaStream:
        if self.images is None or not request.has_remote:
            return self.engine.generate(request)
        return RemoteMediaRun(self.engine, request, self.images, self.prompt_again).stream

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
                    self.metrics.parsed(self.shape.api, choice.tool_calls, choice.malformed, choice.reasoning_tokens)
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
        """Record the outcome in the request's span, with OpenTelemetry's new and old attributes."""
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


def _describe(operation: str, model: str, answer_id: str, params: Sequence[SamplingParams]) -> None:
    """Record the request's parameters in its span, with OpenTelemetry's new and old attributes."""
    if (span := trace.current.get()) is None:
        return
    first, plain = params[0], SamplingParams(max_tokens=0)
    attributes: dict[str, trace.Value] = {
        "gen_ai.operation.name": operation,
        "gen_ai.provider.name": "trellis",
        "gen_ai.system": "trellis",
        "gen_ai.request.model": model,
        "gen_ai.response.model": model,
        "gen_ai.response.id": answer_id,
        "gen_ai.request.max_tokens": first.max_tokens,
    }
    for name in ("temperature", "top_p", "top_k", "frequency_penalty", "presence_penalty", "seed"):
        if (value := getattr(first, name)) != getattr(plain, name):
            attributes[f"gen_ai.request.{name}"] = value
    if len(params) > 1:
        attributes["gen_ai.request.choice.count"] = len(params)
    span.set(attributes)
