"""One choice of an answer: deltas of token ids in, pieces with parts out.

Stop strings, finish reasons and hidden end tokens are handled here.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import msgspec

from engine.types import Delta, FinishReason, GenerateRequest, PromptReport, TokenLogprobs
from multimodal.answers.parsers.base import Parser, PlainText
from multimodal.answers.parts import Part, Reasoning, ToolCall
from multimodal.answers.stops import StopMatcher
from multimodal.text.tokenizer import Detokenizer, Tokenizer


@dataclass(frozen=True, slots=True)
class TextOptions:
    """How a request wants its text."""

    stops: tuple[str, ...] = ()
    include_stop: bool = False
    skip_special_tokens: bool = True


class Piece(msgspec.Struct, frozen=True, gc=False):
    """What one delta means for a client.

    The token that ended the sequence is the last of `token_ids`, but hidden from `parts` and `logprobs`, unless the
    request wants it.
    """

    index: int
    parts: list[Part]
    token_ids: Sequence[int]
    logprobs: Sequence[TokenLogprobs]
    finish_reason: FinishReason | None
    stop_reason: int | str | None
    prompt: PromptReport | None


class Choice:
    """The state of one choice while it is generated."""

    def __init__(
        self,
        index: int,
        request: GenerateRequest,
        prompt_index: int,
        tokenizer: Tokenizer,
        options: TextOptions,
        parser: Parser | None = None,
    ) -> None:
        self.index = index
        self.request = request
        self.prompt_index = prompt_index
        """Which of the request's prompts this choice answers."""
        self.prompt_tokens = len(request.prompt_token_ids)
        self.image_tokens = sum(image.rows for image in request.spans)
        self.completion_tokens = 0
        self.cached_tokens = 0
        self.reasoning_tokens = 0
        self.calls_tools = False
        self._include = options.include_stop
        self._detokenizer = Detokenizer(tokenizer, options.skip_special_tokens)
        self._stops = StopMatcher(options.stops, options.include_stop) if options.stops else None
        self._parser = parser or PlainText(tokenizer)
        self._plain = type(self._parser) is PlainText

    def feed(self, delta: Delta) -> Piece:
        """Return the piece of a delta. It has a finish reason if the engine or a stop string has ended the choice."""
        if delta.prompt is not None:
            self.cached_tokens = delta.prompt.cached_tokens
            self.prompt_tokens = delta.prompt.prompt_tokens or self.prompt_tokens
        visible = len(delta.token_ids)
        if delta.finish_reason == "stop" and not (self._include and delta.stop_reason is not None):
            visible -= 1
        if self._stops is not None:
            return self._feed_until_stop(delta, visible, self._stops)
        self.completion_tokens += len(delta.token_ids)
        text = self._detokenizer.feed(delta.token_ids[:visible])
        if delta.finish_reason is not None:
            text += self._detokenizer.flush()
        return self._piece(delta, visible, text, delta.finish_reason, delta.stop_reason)

    def _feed_until_stop(self, delta: Delta, visible: int, stops: StopMatcher) -> Piece:
        """Go token by token, so that those behind a stop string are not counted."""
        text = ""
        for count, token in enumerate(delta.token_ids[:visible], 1):
            ready, matched = stops.feed(self._detokenizer.feed((token,)))
            text += ready
            if matched is not None:
                self.completion_tokens += count
                return self._piece(delta, count, text, "stop", matched, count)
        self.completion_tokens += len(delta.token_ids)
        if delta.finish_reason is None:
            return self._piece(delta, visible, text, None, None)
        ready, matched = stops.feed(self._detokenizer.flush())
        text += ready
        if matched is not None:
            return self._piece(delta, visible, text, "stop", matched)
        return self._piece(delta, visible, text + stops.flush(), delta.finish_reason, delta.stop_reason)

    def _piece(
        self,
        delta: Delta,
        visible: int,
        text: str,
        finish: FinishReason | None,
        stop: int | str | None,
        count: int | None = None,
    ) -> Piece:
        parts = self._parser.feed(delta.token_ids[:visible], text)
        if finish is not None:
            parts += self._parser.finish()
        if not self._plain:
            self._note(parts)
        return Piece(self.index, parts, delta.token_ids[:count], delta.logprobs[:visible], finish, stop, delta.prompt)

    def _note(self, parts: Sequence[Part]) -> None:
        for part in parts:
            if isinstance(part, Reasoning):
                self.reasoning_tokens += part.tokens
            elif isinstance(part, ToolCall):
                self.calls_tools = True


class TokenCounts(NamedTuple):
    """Tokens of one answer."""

    prompt: int
    cached: int
    images: int
    completion: int
    reasoning: int


def counts(choices: Sequence[Choice]) -> TokenCounts:
    """Count tokens up to now. A prompt counts once, with the cached tokens of its first choice."""
    firsts = {choice.prompt_index: choice for choice in reversed(choices)}.values()
    return TokenCounts(
        prompt=sum(choice.prompt_tokens for choice in firsts),
        cached=sum(choice.cached_tokens for choice in firsts),
        images=sum(choice.image_tokens for choice in firsts),
        completion=sum(choice.completion_tokens for choice in choices),
        reasoning=sum(choice.reasoning_tokens for choice in choices),
    )
