"""Requests to generations: templates rendered, text tokenised, sampling parameters made."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from uuid import uuid4

from engine import trace
from engine.base import Engine
from engine.types import GenerateRequest
from multimodal.answers.choices import Choice, TextOptions
from multimodal.answers.chunks import AnswerContext, ShapeFactory
from multimodal.answers.generation import Generation
from multimodal.answers.parsers.base import ParserFactory, PlainText
from multimodal.errors import DeadlineExceeded, RequestError
from multimodal.genai import describe_request
from multimodal.metrics import GenerationMetrics
from multimodal.request import Ask
from multimodal.sampling import Limits, Sampling
from multimodal.text.messages import Conversation
from multimodal.text.prompts import Prompts, off_loop


class Processor:
    """Prepares requests for one engine.

    Every request names the logits processors `logits`. `parser` finds the parts in answers to chats; other answers are
    plain text.
    """

    def __init__(
        self,
        engine: Engine,
        prompts: Prompts,
        limits: Limits,
        model_name: str,
        metrics: GenerationMetrics,
        logits: tuple[str, ...] = (),
        parser: ParserFactory = PlainText,
    ) -> None:
        self._engine = engine
        self._prompts = prompts
        self._tokenizer = prompts.tokenizer
        self._limits = limits
        self._model_name = model_name
        self._metrics = metrics
        self._logits = logits
        self._parser = parser
        self._fingerprint = f"fp_{uuid4().hex[:10]}"

    async def prepare(self, ask: Ask, shape: ShapeFactory, request_id: str) -> Generation:
        """Prepare a request, whose answer has this shape. Nothing has been started in the engine.

        Raises RequestError, ContextOverflow, DeadlineExceeded, EngineNotReady and what encoding images raises.
        """
        self._check_count(ask)  # before images are fetched
        info = self._engine.info
        async with self._in_time():
            prompts = await self._prompts.of(ask, info, self._limits)
        if not all(prompt.ids for prompt in prompts):
            raise RequestError("The prompt is empty.", ask.spelled("prompt"))
        sampling = Sampling(info, self._tokenizer, self._limits, self._logits)
        lengths = [len(prompt.ids) for prompt in prompts]
        params = await off_loop(sum(map(len, ask.bad_words)), lambda: sampling.params(ask, lengths))
        options = TextOptions(sampling.stop_strings(ask), ask.include_stop_str_in_output, ask.skip_special_tokens)
        parser = self._parser if isinstance(ask.prompt, Conversation) else PlainText
        unique = uuid4().hex
        choices: list[Choice] = []
        for index, sampled in enumerate(params):
            prompt = prompts[index // ask.n]
            request = GenerateRequest(
                request_id=f"{unique}-{index}",
                prompt_token_ids=tuple(prompt.ids),
                media=prompt.media,
                sampling=sampled,
                priority=ask.priority,
                cache_salt=ask.cache_salt,
                trace=trace.headers(),
            )
            choices.append(Choice(index, request, index // ask.n, self._tokenizer, options, parser(self._tokenizer)))
        answer = shape(
            AnswerContext(
                ask, choices, self._tokenizer, ask.request_id or request_id, self._model_name, self._fingerprint
            )
        )
        describe_request(answer.operation, self._model_name, answer.id, params)
        return Generation(self._engine, ask, choices, answer, self._metrics, self._limits.request_timeout_seconds)

    async def tokenize(self, ask: Ask) -> list[int]:
        """Return the token ids of a request's one prompt."""
        async with self._in_time():
            return await self._prompts.tokens(ask, self._engine.info, self._limits)

    async def strings(self, ids: Sequence[int]) -> list[str]:
        """Return the text of each token by itself."""
        bytes_of = self._tokenizer.bytes_of
        return await off_loop(len(ids), lambda: [bytes_of(token).decode(errors="replace") for token in ids])

    async def detokenize(self, ids: Sequence[int]) -> str:
        """Return the text of token ids, special tokens included. Raises RequestError."""
        if any(token >= self._tokenizer.vocab_size for token in ids):
            raise RequestError(f"'tokens' must be ids from 0 to {self._tokenizer.vocab_size - 1}.", "tokens")
        return await off_loop(len(ids), lambda: self._tokenizer.decode(ids))

    @asynccontextmanager
    async def _in_time(self) -> AsyncIterator[None]:
        """Limit the time that prompts take: images may be slow to fetch and to encode."""
        seconds = self._limits.request_timeout_seconds
        try:
            async with asyncio.timeout(seconds):
                with trace.span("prompt"):
                    yield
        except TimeoutError as error:
            raise DeadlineExceeded(seconds) from error

    def _check_count(self, ask: Ask) -> None:
        prompts = 1 if isinstance(ask.prompt, Conversation) else len(ask.prompt)
        if not 1 <= ask.n <= self._limits.max_n or ask.n * prompts > self._limits.max_n:
            raise RequestError(
                f"'n' must be at least 1, and n times the number of prompts at most {self._limits.max_n}.", "n"
            )
