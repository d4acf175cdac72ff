"""Requests to generations: templates rendered, text tokenised, sampling parameters made."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from uuid import uuid4

from engine import trace
from engine.base import Engine
from engine.kit.work import NATIVE, off_loop
from engine.types import GenerateRequest, SamplingParams
from multimodal.answers.choices import Choice
from multimodal.answers.generation import Generation
from multimodal.answers.parts import ParserFactory, PlainText
from multimodal.answers.shapes import AnswerContext, Shape
from multimodal.errors import DeadlineExceeded, RequestError
from multimodal.metrics import GenerationMetrics
from multimodal.request import Ask
from multimodal.sampling import Limits, Sampling
from multimodal.text.messages import Conversation
from multimodal.text.prompts import Prompts


@dataclass(eq=False)
class Processor:
    """Prepares requests for one engine.

    Every request names the logits processors `logits`. `parser` finds the parts in answers to chats; other answers are
    plain text.
    """

    engine: Engine
    prompts: Prompts
    limits: Limits
    model_name: str
    metrics: GenerationMetrics
    logits: tuple[str, ...] = ()
    parser: ParserFactory = PlainText
    _fingerprint: str = field(default_factory=lambda: f"fp_{uuid4().hex[:10]}", init=False)

    async def prepare(self, ask: Ask, shape: type[Shape], request_id: str, dp_rank: int | None = None) -> Generation:
        """Prepare a request, whose answer has this shape, for a data-parallel rank. Nothing has been started in the
        engine.

        Raises RequestError, ContextOverflow, DeadlineExceeded, EngineNotReady and what encoding images raises.
        """
        self._check_count(ask)  # before images are fetched
        info = self.engine.info
        async with self._in_time():
            prompts = await self.prompts.of(ask, info, self.limits)
        if not all(prompt.ids for prompt in prompts):
            raise RequestError("The prompt is empty.", ask.spelled("prompt"))
        tokenizer = self.prompts.tokenizer
        sampling = Sampling(info, tokenizer, self.limits, self.logits)
        lengths = [len(prompt.ids) for prompt in prompts]
        params = await off_loop(sum(map(len, ask.bad_words)), lambda: sampling.params(ask, lengths))
        sampling.check_stops(ask)
        parser = self.parser if isinstance(ask.prompt, Conversation) else PlainText
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
                dp_rank=dp_rank,
                trace=trace.headers(),
            )
            choices.append(Choice(index, request, ask, tokenizer, parser(tokenizer)))
        answer = shape(
            AnswerContext(ask, choices, tokenizer, ask.request_id or request_id, self.model_name, self._fingerprint)
        )
        _describe(answer.operation, self.model_name, answer.id, params)
        return Generation(self.engine, ask, choices, answer, self.metrics, self.limits.request_timeout_seconds)

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

    @asynccontextmanager
    async def _in_time(self) -> AsyncIterator[None]:
        """Limit the time that prompts take: images may be slow to fetch and to encode."""
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


def _describe(operation: str, model: str, answer_id: str, params: Sequence[SamplingParams]) -> None:
    """Note on the request's span what was asked for, by OpenTelemetry's attributes, new and old."""
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
