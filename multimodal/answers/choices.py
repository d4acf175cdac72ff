"""One choice of an answer: deltas of token ids in, pieces of text out. Stop strings, finish reasons and hidden end tokens live here."""

from collections.abc import Sequence
from dataclasses import dataclass

from engine.types import Delta, FinishReason, GenerateRequest, PromptReport, TokenLogprobs
from multimodal.answers.stops import StopMatcher
from multimodal.text.detokenizer import Detokenizer
from multimodal.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class TextOptions:
    """How a request wants its text."""

    stops: tuple[str, ...] = ()
    include_stop: bool = False
    skip_special_tokens: bool = True


@dataclass(slots=True)
class Piece:
    """What one delta means for a client. The token that ended the sequence is the last of `token_ids`, but hidden from `text` and
    `logprobs`, unless the request wants it."""

    index: int
    text: str
    token_ids: Sequence[int]
    logprobs: Sequence[TokenLogprobs]
    finish_reason: FinishReason | None
    stop_reason: int | str | None
    prompt: PromptReport | None


class Choice:
    """The state of one choice while it is generated."""

    def __init__(
        self, index: int, request: GenerateRequest, prompt_index: int, tokenizer: Tokenizer, options: TextOptions
    ) -> None:
        self.index = index
        self.request = request
        self.prompt_index = prompt_index
        """Which of the request's prompts this choice answers."""
        self.prompt_tokens = len(request.prompt_token_ids)
        self.image_tokens = sum(image.rows for image in request.spans)
        self.completion_tokens = 0
        self.cached_tokens = 0
        self._include = options.include_stop
        self._detokenizer = Detokenizer(tokenizer, options.skip_special_tokens)
        self._stops = StopMatcher(options.stops, options.include_stop) if options.stops else None

    def feed(self, delta: Delta) -> Piece:
        """The piece for a delta. It has a finish reason if the engine or a stop string has ended the choice."""
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
        """Token by token, so that those behind a stop string are not counted."""
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
        return Piece(self.index, text, delta.token_ids[:count], delta.logprobs[:visible], finish, stop, delta.prompt)
