"""Prompts: chats rendered by the model's template, texts tokenised."""

from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Any, Protocol

from engine.errors import ContextOverflow
from engine.kit.work import off_loop
from engine.media import MediaKind, PromptMedia
from engine.types import EngineInfo
from multimodal.errors import RequestError
from multimodal.request import CONTEXT_LENGTH, Ask, Conversation, Limits, MediaRef
from multimodal.text.control import unmarked
from multimodal.text.templates import ChatTemplate, check_forged, template_variables
from multimodal.text.tokenizer import Encode, Tokenizer, encoded

Tokenise = Callable[[str], Awaitable[list[int]]]
"""Return the token ids of a prompt's text, within the limits of its request."""

_OWN_TOKENS = 64
"""Tokens that a tokenizer may add to a text."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt for the engine; the fields are those of `GenerateRequest`."""

    ids: list[int]
    media: PromptMedia | None = None
    opening: str = ""
    """The end of a chat's prompt, if asked for: the text after the last message, or a message that is continued."""


class MediaPrompts(Protocol):
    """Inserts images into prompts, for a model that takes them. Raises RequestError and the errors of encoding."""

    async def prompt(self, text: str, refs: Sequence[MediaRef], tokenise: Tokenise, choices: int) -> Prompt:
        """Return the prompt of a chat that the template has rendered as `text`, with the marks of its control tokens;
        this many choices will read it.
        """
        ...

    async def tokens(self, text: str, refs: Sequence[MediaRef], tokenise: Tokenise) -> list[int]:
        """Return the token ids of that prompt, as far as they are known outside the engine."""
        ...

    def release(self, media: PromptMedia | None, *, lost: bool = False) -> None:
        """Give up a prompt's embeddings that stayed where they were made, because an engine has read them, or could not
        (`lost`)."""
        ...

    @property
    def kinds(self) -> Sequence[MediaKind]:
        """Kinds of media that requests may bring."""
        ...

    @property
    def video_part(self) -> str:
        """Type of the content part for videos in templates."""
        ...

    async def aclose(self) -> None: ...


@dataclass(frozen=True)
class Prompts:
    """Makes the prompts of one model. Without a `template` chats are refused, without `images` images are."""

    tokenizer: Tokenizer
    template: ChatTemplate | None
    images: MediaPrompts | None = None
    openings: bool = False
    """Whether to find the openings of prompts, for which chats are rendered twice."""

    async def of(self, ask: Ask, info: EngineInfo, limits: Limits) -> list[Prompt]:
        """Return the prompts of a request: messages rendered, their images fetched and encoded, text tokenised.

        Raises RequestError, and the encoder's errors.
        """
        if not isinstance(ask.prompt, Conversation):
            return [await self._of_text(prompt, ask, info) for prompt in ask.prompt]
        text, opening = await self._rendered(ask, ask.prompt, limits)

        async def tokenise(text: str) -> list[int]:
            return await self._encoded(text, ask, info)

        if self.images is not None and ask.prompt.media:
            prompt = await self.images.prompt(text, ask.prompt.media, tokenise, ask.n)
            return [replace(prompt, opening=opening)]
        return [Prompt(await tokenise(text), opening=opening)]

    async def tokens(self, ask: Ask, info: EngineInfo, limits: Limits) -> list[int]:
        """Return the token ids of a request's one prompt, up to the limit for them. Raises as `of` does."""
        most = limits.tokens(info)

        async def tokenise(text: str) -> list[int]:
            if length := self._excess(text, most, ask):
                raise _too_long(f"its {length} characters are always more", most, ask)
            ids = await encoded(self.tokenizer, text, ask.add_special_tokens, encode=self._encode_of(ask), most=most)
            if len(ids) > most:
                raise _too_long("it has more", most, ask)
            return ids

        if not isinstance(ask.prompt, Conversation):
            (prompt,) = ask.prompt
            return await tokenise(prompt) if isinstance(prompt, str) else prompt
        text, _ = await self._rendered(ask, ask.prompt, limits)
        if self.images is not None and ask.prompt.media:
            return await self.images.tokens(text, ask.prompt.media, tokenise)
        return await tokenise(text)

    async def _rendered(self, ask: Ask, chat: Conversation, limits: Limits) -> tuple[str, str]:
        """Return the text of a chat, and its opening. Raises RequestError."""
        template = self.template
        name = ask.fields.get("prompt", "messages")
        if template is None:
            raise RequestError("This model has no chat template; use /v1/completions.", name)
        if len(chat.messages) > limits.max_messages:
            raise RequestError(f"{name!r} may have {limits.max_messages} entries at most.", name)
        if self.images is None and chat.media:
            raise RequestError(
                f"This model takes text only; a message has {chat.media[0].kind}s.", name, "unsupported_content"
            )
        variables = template_variables(chat, limits.chat_template_kwargs)
        control = template.control
        if self.images is not None and any(ref.kind == "video" for ref in chat.media):
            chat = replace(chat, messages=[_with_videos_as(self.images.video_part, entry) for entry in chat.messages])

        def render() -> tuple[str, str]:
            text = template.render(chat.messages, **variables)
            if limits.special_tokens_in_content == "refuse" and control is not None:
                check_forged(chat, control.forged(text), name)
            return text, _opening(template, text, chat, variables) if self.openings else ""

        try:
            return await off_loop(chat.characters, render)
        except RequestError as error:
            raise error if chat.as_sent or error.code else error.at(name) from error

    async def _of_text(self, prompt: str | list[int], ask: Ask, info: EngineInfo) -> Prompt:
        """Tokenise a text, or check token ids."""
        if isinstance(prompt, str):
            return Prompt(await self._encoded(prompt, ask, info))
        ids = _last(prompt, _kept(ask, info))
        if max(ids, default=0) >= info.vocab_size:
            raise RequestError(f"'prompt' must have token ids from 0 to {info.vocab_size - 1}.", "prompt")
        return Prompt(ids)

    async def _encoded(self, text: str, ask: Ask, info: EngineInfo) -> list[int]:
        """Return the token ids of a prompt, truncated as the request says."""
        keep = _kept(ask, info)
        if keep is None:
            self._check_length(text, ask, info)
        encode = self._encode_of(ask)
        return _last(await encoded(self.tokenizer, text, ask.add_special_tokens, encode=encode, last=keep), keep)

    def _encode_of(self, ask: Ask) -> Encode:
        """Return the function that tokenises the prompt: a chat's prompt has marks around its control tokens."""
        control = self.template.control if self.template is not None else None
        return (control if control is not None and isinstance(ask.prompt, Conversation) else self.tokenizer).encode

    def _check_length(self, text: str, ask: Ask, info: EngineInfo) -> None:
        """Refuse a text that exceeds the context however it is tokenised, without tokenising it."""
        context = info.context_length
        if length := self._excess(text, context, ask):
            raise ContextOverflow(
                f"{CONTEXT_LENGTH} {context} tokens. However, the prompt's {length} characters are always more.",
                ask.spelled("prompt"),
            )

    def _excess(self, text: str, most: int, ask: Ask) -> int:
        """Return the length of a text that has more than `most` tokens however it is tokenised; 0 for others."""
        length = len(unmarked(text) if isinstance(ask.prompt, Conversation) else text)  # a chat's may have marks
        return length if length > (most + _OWN_TOKENS) * self.tokenizer.longest_token else 0


def _with_videos_as(part: str, message: dict[str, Any]) -> dict[str, Any]:
    """Return a message in which the parts of videos have another type."""
    content = message.get("content")
    if not isinstance(content, list):
        return message
    return message | {"content": [{"type": part} if one["type"] == "video" else one for one in content]}


def _opening(template: ChatTemplate, text: str, chat: Conversation, variables: dict[str, Any]) -> str:
    """Return the text that begins the answer in a rendered chat."""
    messages = chat.messages[:-1] if chat.continue_final_message else chat.messages
    before = ""
    if messages:
        without = {**variables, "add_generation_prompt": False, "continue_final_message": False}
        with suppress(RequestError):  # it refuses such a chat, say one that ends so
            before = template.render(messages, **without)
    if not text.startswith(before):
        same = takewhile(lambda pair: pair[0] == pair[1], zip(text, before, strict=False))
        before = text[: sum(1 for _ in same)]
    return unmarked(text[len(before) :])


def _kept(ask: Ask, info: EngineInfo) -> int | None:
    """Return how many of the last tokens `truncate_prompt_tokens` keeps; None without it."""
    keep = ask.truncate_prompt_tokens
    if keep == -1:
        keep = info.context_length - (ask.max_tokens or ask.default_max_tokens or 1)
    if keep is not None and not 1 <= keep <= info.context_length:
        raise RequestError(
            f"'truncate_prompt_tokens' must be -1 or from 1 to {info.context_length}.", "truncate_prompt_tokens"
        )
    return keep


def _last(ids: list[int], keep: int | None) -> list[int]:
    return ids if keep is None else ids[-keep:]


def _too_long(found: str, most: int, ask: Ask) -> RequestError:
    message = f"The text is too long to tokenise: {found} than {most} tokens (MAX_TOKENIZE_TOKENS)."
    return RequestError(message, ask.spelled("prompt"))
