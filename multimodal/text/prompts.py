"""Prompts: chats rendered by the model's template, texts tokenised."""

import asyncio
from collections.abc import Callable
from typing import TypeVar

from engine.types import EngineInfo
from multimodal.errors import RequestError
from multimodal.sampling import COMPLETION_MAX_TOKENS, Limits, tokens_asked_for
from multimodal.text.messages import check_marks, media_refs, template_variables, to_template
from multimodal.text.prompt import MediaPrompts, Prompt
from multimodal.text.templates import ChatTemplate
from multimodal.text.tokenizer import Tokenizer
from protocol.chat import ChatCompletionRequest
from protocol.common import GenerationFields
from protocol.completions import CompletionRequest

T = TypeVar("T")

INLINE_CHARACTERS = 2000
"""Longer texts are tokenised in a thread: `Tokenizer.encode` lets go of the GIL, so the event loop goes on."""
_OWN_TOKENS = 64
"""Tokens that a tokenizer may add to a text."""


class Prompts:
    """Makes the prompts of one model. Without a `template` it has no chat, without `images` it takes none."""

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate | None, images: MediaPrompts | None = None) -> None:
        self.tokenizer = tokenizer
        self._template = template
        self._images = images

    async def of_chat(self, body: ChatCompletionRequest, info: EngineInfo, limits: Limits, choices: int) -> Prompt:
        """Render messages, fetch and encode their images, and tokenise, for so many requests to the engine (`MediaPrompts`). Raises
        RequestError, and the encoder's errors.
        """
        template, images = self._template, self._images
        if template is None:
            raise RequestError("This model has no chat template; use /v1/completions.", "messages")
        if len(body.messages) > limits.max_messages:
            raise RequestError(f"'messages' may have {limits.max_messages} entries at most.", "messages")
        messages = [to_template(message, images is not None) for message in body.messages]
        if images is not None:
            check_marks(messages, images.marks)
        variables = template_variables(body, limits.chat_template_kwargs)
        size = sum(len(str(message["content"])) for message in messages)
        text = await off_loop(size, lambda: template.render(messages, **variables))

        async def tokenised(text: str) -> list[int]:
            self._check_length(text, body, info, "messages")
            return _truncated(await self.encoded(text, body.add_special_tokens is True), body, info)

        if images is not None and (refs := media_refs(body.messages)):
            return await images.prompt(text, refs, tokenised, choices)
        return Prompt(await tokenised(text))

    async def of_completion(self, prompt: str | list[int], body: CompletionRequest, info: EngineInfo) -> Prompt:
        """Tokenise a text, or check token ids. Raises RequestError."""
        if isinstance(prompt, str):
            self._check_length(prompt, body, info, "prompt")
            return Prompt(_truncated(await self.encoded(prompt, body.add_special_tokens is not False), body, info))
        ids = _truncated(prompt, body, info)
        if max(ids, default=0) >= info.vocab_size:
            raise RequestError(f"'prompt' must have token ids from 0 to {info.vocab_size - 1}.", "prompt")
        return Prompt(ids)

    async def encoded(self, text: str, add_special_tokens: bool) -> list[int]:
        return await off_loop(len(text), lambda: self.tokenizer.encode(text, add_special_tokens))

    def _check_length(self, text: str, body: GenerationFields, info: EngineInfo, param: str) -> None:
        """Refuse a text that exceeds the context however it is tokenised, before that takes its time."""
        context = info.context_length
        if body.truncate_prompt_tokens is None and len(text) > (context + _OWN_TOKENS) * self.tokenizer.longest_token:
            message = f"This model's context is {context} tokens; the prompt's {len(text)} characters are more than that at any rate."
            raise RequestError(message, param, "context_length_exceeded")


def _truncated(prompt: list[int], body: GenerationFields, info: EngineInfo) -> list[int]:
    """The last `truncate_prompt_tokens` tokens; -1 keeps what leaves room for the output. The others are not looked at."""
    keep = body.truncate_prompt_tokens
    if keep is None:
        return prompt
    if keep == -1:
        _, asked = tokens_asked_for(body)
        keep = info.context_length - (asked or (COMPLETION_MAX_TOKENS if isinstance(body, CompletionRequest) else 1))
    if not 1 <= keep <= info.context_length:
        raise RequestError(
            f"'truncate_prompt_tokens' must be -1 or from 1 to {info.context_length}.", "truncate_prompt_tokens"
        )
    return prompt[-keep:]


async def off_loop(size: int, work: Callable[[], T]) -> T:
    """Do short work here and long work in a thread."""
    return work() if size <= INLINE_CHARACTERS else await asyncio.to_thread(work)
