"""Prompts for a router: only their beginning must be known, and nothing is refused, since replicas do that."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from engine.kit.work import off_loop
from engine.replicas.routing.fleet import RoutedPrompt
from engine.replicas.routing.load import UNKNOWN_TOKENS
from multimodal.errors import RequestError
from multimodal.request import Ask, Conversation
from multimodal.text.templates import ChatTemplate, template_variables
from multimodal.text.tokenizer import Tokenizer, encoded

_FIRST_IMAGE = "FIRST_IMAGE_OF_THE_PROMPT"
_MOST_CHARACTERS = 1 << 20
"""Longer prompts exceed most contexts; they go to the replica with the least load."""


@dataclass(frozen=True)
class RoutedPrompts:
    """Makes the prompts of one model, `model_name` in requests. Another name is that of a LoRA adapter. `variables` are
    the template variables that requests may set.
    """

    model_name: str
    tokenizer: Tokenizer
    template: ChatTemplate | None
    variables: Sequence[str]

    async def of(self, ask: Ask) -> RoutedPrompt:
        """Return the first prompt of a request, up to its first image. Unknown if a replica will refuse it."""
        if isinstance(ask.prompt, Conversation):
            return await self._of_chat(ask, ask.prompt)
        prompt = ask.prompt[0]
        if isinstance(prompt, str):
            return await self._of_text(prompt, ask, False, self.tokenizer.encode)
        return self._known(prompt, ask, False)

    async def _of_chat(self, ask: Ask, chat: Conversation) -> RoutedPrompt:
        template = self.template
        if template is None or chat.characters > _MOST_CHARACTERS:
            return RoutedPrompt()
        messages, has_image = _until_image(chat.messages)
        try:
            variables = template_variables(chat, self.variables)
            if has_image:
                variables |= {"add_generation_prompt": False, "continue_final_message": False}
            text = await off_loop(chat.characters, lambda: template.render(messages, **variables))
        except RequestError:
            return RoutedPrompt()
        before, mark, _ = text.partition(_FIRST_IMAGE)
        encode = (template.control or self.tokenizer).encode
        return await self._of_text(before if has_image and mark else text, ask, has_image, encode)

    async def _of_text(
        self, text: str, ask: Ask, has_image: bool, encode: Callable[[str, bool], list[int]]
    ) -> RoutedPrompt:
        if len(text) > _MOST_CHARACTERS:
            return RoutedPrompt()
        tokens = await encoded(self.tokenizer, text, ask.add_special_tokens, encode=encode)
        return self._known(tokens, ask, has_image)

    def _known(self, tokens: list[int], ask: Ask, has_image: bool) -> RoutedPrompt:
        keep = ask.truncate_prompt_tokens
        if keep is not None and keep < 1:  # as much as fits, which replicas know
            return RoutedPrompt()
        tokens = tokens if keep is None or has_image else tokens[-keep:]
        lora = "" if ask.model in (None, "", self.model_name) else str(ask.model)
        return RoutedPrompt(tokens, (ask.cache_salt, lora), max(1, len(tokens) + has_image * UNKNOWN_TOKENS))


def _until_image(messages: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], bool]:
    """Return the messages with a mark in place of the first image and nothing after it, and whether there is one."""
    for place, message in enumerate(messages):
        content = message["content"]
        if not isinstance(content, list):
            continue
        index = next((i for i, part in enumerate(content) if part["type"] == "image"), None)
        if index is not None:
            marked = [*content[:index], {"type": "text", "text": _FIRST_IMAGE}]
            return [*messages[:place], {**message, "content": marked}], True
    return messages, False
