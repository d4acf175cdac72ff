"""Prompts: chats rendered by the model's template, texts tokenised."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from engine.errors import ContextOverflow
from engine.media import PromptMedia
from engine.types import EngineInfo
from multimodal.errors import RequestError
from multimodal.request import Ask
from multimodal.sampling import Limits
from multimodal.text.control import unmarked
from multimodal.text.messages import Conversation, MediaRef, check_forged, template_variables
from multimodal.text.templates import ChatTemplate
from multimodal.text.tokenizer import Tokenizer

T = TypeVar("T")
Tokenise = Callable[[str], Awaitable[list[int]]]
"""Return the token ids of a prompt's text, within the limits of its request."""

INLINE_CHARACTERS = 2000
"""Longer texts are tokenised in a thread: `Tokenizer.encode` releases the GIL, so the event loop goes on."""
_OWN_TOKENS = 64
"""Tokens that a tokenizer may add to a text."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt as the engine is given it; the fields are those of `GenerateRequest`."""

    ids: list[int]
    media: PromptMedia | None = None


class MediaPrompts(Protocol):
    """Puts images into prompts, for a model that takes them. Raises RequestError and what encoding raises."""

    async def prompt(self, text: str, refs: Sequence[MediaRef], tokenise: Tokenise, choices: int) -> Prompt:
        """Return the prompt of a chat that the template has rendered as `text`, with the marks of its control tokens;
        so many choices will read it.
        """
        ...

    async def tokens(self, text: str, refs: Sequence[MediaRef], tokenise: Tokenise) -> list[int]:
        """Return the token ids of that prompt, as far as they are known before the engine."""
        ...

    async def aclose(self) -> None: ...


@dataclass(frozen=True)
class Prompts:
    """Makes the prompts of one model. Without a `template` it has no chat, without `images` it takes none."""

    tokenizer: Tokenizer
    template: ChatTemplate | None
    images: MediaPrompts | None = None

    async def of(self, ask: Ask, info: EngineInfo, limits: Limits) -> list[Prompt]:
        """Return the prompts of a request: messages rendered, their images fetched and encoded, text tokenised.

        Raises RequestError, and the encoder's errors.
        """
        if not isinstance(ask.prompt, Conversation):
            return [await self._of_text(prompt, ask, info) for prompt in ask.prompt]
        text, tokenise = await self._rendered(ask, ask.prompt, info, limits)
        if self.images is not None and ask.prompt.media:
            return [await self.images.prompt(text, ask.prompt.media, tokenise, ask.n)]
        return [Prompt(await tokenise(text))]

    async def tokens(self, ask: Ask, info: EngineInfo, limits: Limits) -> list[int]:
        """Return the token ids of a request's one prompt. Raises as `of` does."""
        if not isinstance(ask.prompt, Conversation):
            (prompt,) = ask.prompt
            return await self._encoded(prompt, ask) if isinstance(prompt, str) else prompt
        text, tokenise = await self._rendered(ask, ask.prompt, info, limits)
        if self.images is not None and ask.prompt.media:
            return await self.images.tokens(text, ask.prompt.media, tokenise)
        return await tokenise(text)

    async def _rendered(self, ask: Ask, chat: Conversation, info: EngineInfo, limits: Limits) -> tuple[str, Tokenise]:
        """Return the text of a chat, and what tokenises it, with its images expanded or without."""
        template = self.template
        if template is None:
            raise RequestError("This model has no chat template; use /v1/completions.", "messages")
        if len(chat.messages) > limits.max_messages:
            raise RequestError(f"'messages' may have {limits.max_messages} entries at most.", "messages")
        if self.images is None and chat.media:
            raise RequestError("This model takes text only; a message has an image.", "messages", "unsupported_content")
        variables = template_variables(chat, limits.chat_template_kwargs)
        control = template.control

        def render() -> str:
            text = template.render(chat.messages, **variables)
            if limits.special_tokens_in_content == "refuse" and control is not None:
                check_forged(chat.messages, control.forged(text))
            return text

        def encode(text: str) -> list[int]:
            self._check_length(unmarked(text), ask, info)
            return (control or self.tokenizer).encode(text, ask.add_special_tokens)

        async def tokenise(text: str) -> list[int]:
            return _truncated(await off_loop(len(text), lambda: encode(text)), ask, info)

        return await off_loop(chat.characters, render), tokenise

    async def _of_text(self, prompt: str | list[int], ask: Ask, info: EngineInfo) -> Prompt:
        """Tokenise a text, or check token ids."""
        if isinstance(prompt, str):
            self._check_length(prompt, ask, info)
            return Prompt(_truncated(await self._encoded(prompt, ask), ask, info))
        ids = _truncated(prompt, ask, info)
        if max(ids, default=0) >= info.vocab_size:
            raise RequestError(f"'prompt' must have token ids from 0 to {info.vocab_size - 1}.", "prompt")
        return Prompt(ids)

    async def _encoded(self, text: str, ask: Ask) -> list[int]:
        return await off_loop(len(text), lambda: self.tokenizer.encode(text, ask.add_special_tokens))

    def _check_length(self, text: str, ask: Ask, info: EngineInfo) -> None:
        """Refuse a text that exceeds the context however it is tokenised, before that takes its time."""
        context = info.context_length
        if ask.truncate_prompt_tokens is None and len(text) > (context + _OWN_TOKENS) * self.tokenizer.longest_token:
            raise ContextOverflow(
                f"This model's context is {context} tokens; "
                f"the prompt's {len(text)} characters are more than that at any rate.",
                ask.spelled("prompt"),
            )


def _truncated(prompt: list[int], ask: Ask, info: EngineInfo) -> list[int]:
    """Return the last `truncate_prompt_tokens` tokens. The others are not looked at."""
    keep = ask.truncate_prompt_tokens
    if keep is None:
        return prompt
    if keep == -1:
        keep = info.context_length - (ask.max_tokens or ask.default_max_tokens or 1)
    if not 1 <= keep <= info.context_length:
        raise RequestError(
            f"'truncate_prompt_tokens' must be -1 or from 1 to {info.context_length}.", "truncate_prompt_tokens"
        )
    return prompt[-keep:]


async def off_loop(size: int, work: Callable[[], T]) -> T:
    """Do short work here and long work in a thread."""
    return work() if size <= INLINE_CHARACTERS else await asyncio.to_thread(work)
