"""Prompts as a router sees them: only their start has to be known, and nothing is refused, since replicas do that."""

from collections.abc import Sequence
from typing import Any

from engine.replicas.routing.fleet import RoutedPrompt
from engine.replicas.routing.load import UNKNOWN_TOKENS
from multimodal.errors import RequestError
from multimodal.text.messages import template_variables, to_template
from multimodal.text.prompts import off_loop
from multimodal.text.templates import ChatTemplate
from multimodal.text.tokenizer import Tokenizer
from protocol.chat import ChatCompletionRequest
from protocol.common import GenerationFields
from protocol.completions import CompletionRequest

_FIRST_IMAGE = "FIRST_IMAGE_OF_THE_PROMPT"
_MOST_CHARACTERS = 1 << 20
"""Longer prompts exceed most contexts; they go to the replica that has least to do."""


class RoutedPrompts:
    """Makes the prompts of one model, `model_name` in requests. Another name is that of a LoRA adapter."""

    def __init__(
        self, model_name: str, tokenizer: Tokenizer, template: ChatTemplate | None, variables: Sequence[str]
    ) -> None:
        """`variables`: those of the template that requests may set."""
        self._model_name, self._tokenizer, self._template, self._variables = model_name, tokenizer, template, variables

    async def of_chat(self, body: ChatCompletionRequest) -> RoutedPrompt:
        """Rendered and tokenised, up to the first image. Unknown if a replica will refuse it."""
        if self._template is None:
            return RoutedPrompt()
        try:
            messages, has_image = _until_image([to_template(message, vision=True) for message in body.messages])
            variables = template_variables(body, self._variables)
            if has_image:
                variables |= {"add_generation_prompt": False, "continue_final_message": False}
            template, size = self._template, sum(len(str(message["content"])) for message in messages)
            if size > _MOST_CHARACTERS:
                return RoutedPrompt()
            text = await off_loop(size, lambda: template.render(messages, **variables))
        except RequestError:
            return RoutedPrompt()
        before, mark, _ = text.partition(_FIRST_IMAGE)
        return await self._prompt(
            before if has_image and mark else text, body, body.add_special_tokens is True, has_image
        )

    async def of_completion(self, body: CompletionRequest) -> RoutedPrompt:
        """Of several prompts the first."""
        prompt = body.prompt
        if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int):
            prompt = prompt[0]
        if isinstance(prompt, str):
            return await self._prompt(prompt, body, body.add_special_tokens is not False, False)
        return self._known([token for token in prompt if isinstance(token, int)], body, False)

    async def _prompt(
        self, text: str, body: GenerationFields, add_special_tokens: bool, has_image: bool
    ) -> RoutedPrompt:
        if len(text) > _MOST_CHARACTERS:
            return RoutedPrompt()
        tokens = await off_loop(len(text), lambda: self._tokenizer.encode(text, add_special_tokens))
        return self._known(tokens, body, has_image)

    def _known(self, tokens: list[int], body: GenerationFields, has_image: bool) -> RoutedPrompt:
        keep = body.truncate_prompt_tokens
        if keep is not None and keep < 1:  # as much as fits, which replicas know
            return RoutedPrompt()
        tokens = tokens if keep is None or has_image else tokens[-keep:]
        lora = "" if body.model in (None, "", self._model_name) else str(body.model)
        return RoutedPrompt(tokens, (body.cache_salt or "", lora), max(1, len(tokens) + has_image * UNKNOWN_TOKENS))


def _until_image(messages: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], bool]:
    """The messages with a mark in the place of the first image and nothing after it; and whether there is one."""
    for place, message in enumerate(messages):
        content = message["content"]
        index = (
            next((i for i, part in enumerate(content) if part["type"] == "image"), None)
            if isinstance(content, list)
            else None
        )
        if index is not None:
            marked = [*content[:index], {"type": "text", "text": _FIRST_IMAGE}]
            return [*messages[:place], {**message, "content": marked}], True
    return messages, False
