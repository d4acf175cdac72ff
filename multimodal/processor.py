"""Requests to generations: fields checked, templates rendered, text tokenised, sampling parameters made."""

import asyncio
import time
from collections.abc import Sequence
from uuid import uuid4

from engine import trace
from engine.base import Engine
from engine.types import EngineInfo, GenerateRequest
from multimodal.answers.choices import Choice, TextOptions
from multimodal.answers.chunks import ChunkBuilder, Header
from multimodal.answers.generation import Generation
from multimodal.answers.shapes import ChatShape, CompletionShape, Shape
from multimodal.errors import DeadlineExceeded, ModelNotFound, RequestError
from multimodal.fields import check_fields
from multimodal.genai import describe_request
from multimodal.guides import guide_field
from multimodal.metrics import GenerationMetrics
from multimodal.sampling import Limits, Sampling
from multimodal.text.prompt import Prompt
from multimodal.text.prompts import Prompts, off_loop
from protocol.chat import ChatCompletionRequest
from protocol.common import GenerationFields
from protocol.completions import CompletionRequest
from protocol.tokenize import DetokenizeRequest, DetokenizeResponse, TokenizeRequest, TokenizeResponse


class Processor:
    """Prepares requests for one engine. Every request names the logits `processors`."""

    def __init__(
        self,
        engine: Engine,
        prompts: Prompts,
        limits: Limits,
        model_name: str,
        metrics: GenerationMetrics,
        processors: tuple[str, ...] = (),
    ) -> None:
        self.model_name = model_name
        self._engine = engine
        self._prompts = prompts
        self._tokenizer = prompts.tokenizer
        self._limits = limits
        self._metrics = metrics
        self._processors = processors
        self._fingerprint = f"fp_{uuid4().hex[:10]}"

    async def chat(self, body: ChatCompletionRequest, request_id: str) -> Generation:
        """Prepare a chat; raises RequestError, DeadlineExceeded and what encoding images raises, and has started nothing in the engine."""
        info = self._check(body)
        choices = self._count(body, 1)  # before images are fetched
        prompt = await self._chat_prompt(body, info, choices)
        shape = ChatShape(
            self._tokenizer,
            return_token_ids=bool(body.return_token_ids),
            prompt_logprobs=body.prompt_logprobs is not None,
        )
        return await self._generation(
            body, [prompt], info, shape, f"chatcmpl-{body.request_id or request_id}", "messages"
        )

    async def completion(self, body: CompletionRequest, request_id: str) -> Generation:
        """Prepare completions of one or several prompts; raises RequestError and EngineNotReady, and has started nothing."""
        info = self._check(body)
        parts = _prompts(body.prompt)
        self._count(body, len(parts))
        with trace.span("prompt"):
            prompts = [await self._prompts.of_completion(part, body, info) for part in parts]
        shape = CompletionShape(
            self._tokenizer,
            return_token_ids=bool(body.return_token_ids),
            prompt_logprobs=body.prompt_logprobs is not None,
            logprobs=body.logprobs is not None,
            echo=[self._tokenizer.decode(prompt.ids) for prompt in prompts] if body.echo else None,
        )
        return await self._generation(body, prompts, info, shape, f"cmpl-{body.request_id or request_id}", "prompt")

    async def tokenize(self, body: TokenizeRequest) -> TokenizeResponse:
        """Token ids of a prompt, or of messages as the chat template renders them."""
        self._check_model(body.model)
        if (body.prompt is None) == (body.messages is None):
            raise RequestError("Give either 'prompt' or 'messages'.", "prompt")
        if body.prompt is not None:
            ids = await self._prompts.encoded(body.prompt, body.add_special_tokens is not False)
        else:
            chat = ChatCompletionRequest.model_validate(body.model_dump(include=_CHAT_FIELDS, exclude_none=True))
            ids = (await self._chat_prompt(chat, self._engine.info, 0)).ids
        strings = await off_loop(len(ids), lambda: self._strings(ids)) if body.return_token_strs else None
        return TokenizeResponse(
            count=len(ids), max_model_len=self._engine.info.context_length, tokens=ids, token_strs=strings
        )

    async def detokenize(self, body: DetokenizeRequest) -> DetokenizeResponse:
        """The text of token ids, special tokens included."""
        self._check_model(body.model)
        if any(token >= self._tokenizer.vocab_size for token in body.tokens):
            raise RequestError(f"'tokens' must be ids from 0 to {self._tokenizer.vocab_size - 1}.", "tokens")
        return DetokenizeResponse(prompt=await off_loop(len(body.tokens), lambda: self._tokenizer.decode(body.tokens)))

    async def _chat_prompt(self, body: ChatCompletionRequest, info: EngineInfo, choices: int) -> Prompt:
        """Images may take long, to come or to be encoded: no longer than the request may."""
        seconds = self._limits.request_timeout_seconds
        try:
            async with asyncio.timeout(seconds):
                with trace.span("prompt"):
                    return await self._prompts.of_chat(body, info, self._limits, choices)
        except TimeoutError as error:
            raise DeadlineExceeded(seconds) from error

    def _check(self, body: GenerationFields) -> EngineInfo:
        self._check_model(body.model)
        check_fields(body, strict=self._limits.strict_fields)
        if body.stream_options is not None and not body.stream:
            raise RequestError("'stream_options' needs 'stream': true.", "stream_options")
        return self._engine.info

    def _check_model(self, name: str | None) -> None:
        if name and name != self.model_name:
            raise ModelNotFound(self.model_name)

    def _strings(self, ids: Sequence[int]) -> list[str]:
        return [self._tokenizer.bytes_of(token).decode(errors="replace") for token in ids]

    def _count(self, body: GenerationFields, prompts: int) -> int:
        """Choices for each prompt."""
        count = body.n if body.n is not None else 1
        if not 1 <= count <= self._limits.max_n or count * prompts > self._limits.max_n:
            raise RequestError(
                f"'n' must be at least 1, and n times the number of prompts at most {self._limits.max_n}.", "n"
            )
        return count

    async def _generation(
        self,
        body: GenerationFields,
        prompts: Sequence[Prompt],
        info: EngineInfo,
        shape: Shape,
        answer_id: str,
        param: str,
    ) -> Generation:
        count = self._count(body, len(prompts))
        if not all(prompt.ids for prompt in prompts):
            raise RequestError("The prompt is empty.", param)
        sampling = Sampling(info, self._tokenizer, self._limits, self._processors)
        lengths = [len(prompt.ids) for prompt in prompts]
        params = await off_loop(sum(map(len, body.bad_words or ())), lambda: sampling.params(body, lengths, count))
        text = TextOptions(
            sampling.stop_strings(body), bool(body.include_stop_str_in_output), body.skip_special_tokens is not False
        )
        describe_request("chat" if param == "messages" else "text_completion", self.model_name, answer_id, params)
        unique, choices = uuid4().hex, list[Choice]()
        for index, sampled in enumerate(params):
            prompt = prompts[index // count]
            request = GenerateRequest(
                request_id=f"{unique}-{index}",
                prompt_token_ids=tuple(prompt.ids),
                media=prompt.media,
                sampling=sampled,
                priority=body.priority or 0,
                cache_salt=body.cache_salt or "",
                trace=trace.headers(),
            )
            choices.append(Choice(index, request, index // count, self._tokenizer, text))
        options = body.stream_options
        builder = ChunkBuilder(
            shape,
            Header(id=answer_id, created=int(time.time()), model=self.model_name, system_fingerprint=self._fingerprint),
            choices,
            include_usage=bool(options and options.include_usage),
            continuous=bool(options and options.continuous_usage_stats),
            token_ids=bool(body.return_token_ids),
        )
        fields = {"prompt": param, "guide": guide_field(body)}
        return Generation(self._engine, choices, builder, self._metrics, self._limits.request_timeout_seconds, fields)


_CHAT_FIELDS = {
    "messages",
    "add_special_tokens",
    "add_generation_prompt",
    "continue_final_message",
    "chat_template_kwargs",
}


def _prompts(prompt: str | list[str] | list[int] | list[list[int]]) -> list[str | list[int]]:
    """One prompt or several, as several."""
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise RequestError("'prompt' is empty.", "prompt")
    if isinstance(prompt[0], int):
        return [[token for token in prompt if isinstance(token, int)]]
    return [part for part in prompt if isinstance(part, (str, list))]
