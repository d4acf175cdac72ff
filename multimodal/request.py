"""The neutral request: what a client asks for, whichever API spelled it.

The routers convert wire bodies into it; nothing below them sees a wire type. Defaults are written here, once.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from engine.types import GuideKind
from multimodal.text.messages import Conversation


class AskedGuide(NamedTuple):
    """One way in which a request constrains its output."""

    field: str
    """The request's name for it."""
    kind: GuideKind
    value: Any
    """The schema, expression, grammar or choices."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """A client's request. Values are typed but not checked for range: `Sampling` does that.

    `fields` translates names of this class into the request's own, for errors: `prompt`, say, into `messages`.
    """

    prompt: Conversation | Sequence[str | list[int]]
    """A chat, or one or several texts to continue, as text or token ids."""
    fields: Mapping[str, str] = field(default_factory=dict)
    model: str | None = None
    request_id: str | None = None
    stream: bool = False
    include_usage: bool = False
    continuous_usage: bool = False
    n: int = 1
    """Choices for each prompt."""

    # The prompt.
    add_special_tokens: bool = False
    truncate_prompt_tokens: int | None = None
    """Keep so many of the last tokens; -1 keeps what leaves room for the output."""
    echo: bool = False
    """Repeat the prompt before the output."""
    cache_salt: str = ""
    priority: int = 0

    # Sampling.
    max_tokens: int | None = None
    default_max_tokens: int | None = None
    """In place of `max_tokens`, as far as there is room; None fills the context."""
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    logit_bias: Mapping[str, float] = field(default_factory=dict)
    allowed_token_ids: Sequence[int] = ()
    bad_words: Sequence[str] = ()
    guides: Sequence[AskedGuide] = ()
    """At most one is allowed."""

    # Stopping.
    ignore_eos: bool = False
    stop: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    include_stop_str_in_output: bool = False

    # The answer.
    logprobs: int | None = None
    """Alternatives for each token; None is off."""
    prompt_logprobs: int | None = None
    return_token_ids: bool = False
    skip_special_tokens: bool = True

    def spelled(self, name: str | None) -> str | None:
        """Return the request's own name for a field."""
        return None if name is None else self.fields.get(name, name)
