"""What prompts come to, and the seam for images in them."""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from engine.media import PromptMedia
from multimodal.text.messages import MediaRef

Tokenise = Callable[[str], Awaitable[list[int]]]
"""Token ids of a prompt's text, within the limits of its request."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """What the engine is given of a prompt; the fields are those of `GenerateRequest`."""

    ids: list[int]
    media: PromptMedia | None = None


class MediaPrompts(Protocol):
    """What a model that takes images does with a rendered chat that has some."""

    @property
    def marks(self) -> frozenset[str]:
        """Texts that stand for images, which messages must not have in texts of their own."""
        ...

    async def prompt(self, text: str, refs: Sequence[MediaRef], tokenise: Tokenise, choices: int) -> Prompt:
        """The prompt of a chat that the template has rendered as `text`, for so many requests to the engine; none if its tokens are wanted
        alone. Raises RequestError and what encoding raises.
        """
        ...

    async def aclose(self) -> None: ...
