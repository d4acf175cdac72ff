"""What prompts become, and the seam for images in them."""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from engine.media import PromptMedia
from multimodal.text.messages import MediaRef

Tokenise = Callable[[str], Awaitable[list[int]]]
"""Return the token ids of a prompt's text, within the limits of its request."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """What the engine is given of a prompt; the fields are those of `GenerateRequest`."""

    ids: list[int]
    media: PromptMedia | None = None


class MediaPrompts(Protocol):
    """Puts images into prompts, for a model that takes them. Raises RequestError and what encoding raises."""

    @property
    def marks(self) -> frozenset[str]:
        """Texts that stand for images, which messages must not have in texts of their own."""
        ...

    async def prompt(self, text: str, refs: Sequence[MediaRef], tokenise: Tokenise, choices: int) -> Prompt:
        """Return the prompt of a chat that the template has rendered as `text`; so many choices will read it."""
        ...

    async def tokens(self, text: str, refs: Sequence[MediaRef], tokenise: Tokenise) -> list[int]:
        """Return the token ids of that prompt, as far as they are known before the engine."""
        ...

    async def aclose(self) -> None: ...
