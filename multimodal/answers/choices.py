"""One choice of an answer: deltas of token ids in, pieces with parts out.

Stop strings, finish reasons and hidden end tokens are handled here.
"""

from collections.abc import Sequence
from typing import Any

import msgspec

from engine.types import Delta, FinishReason, GenerateRequest, PromptReport, TokenLogprobs
from multimodal.answers.formats import PlainText
from multimodal.answers.parts import Parser, Part, Reasoning, ToolCall
from multimodal.request import Ask
from multimodal.text.tokenizer import Detokenizer, Tokenizer


class Piece(msgspec.Struct, frozen=True, gc=False):
    """The meaning of one delta for a client.

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


class StopMatcher:
    """Passes text on up to the first stop string, and holds back text that may become one. Of several matches the first
    to end wins, and of those the longest.
    """

    def __init__(self, stops: Sequence[str], include: bool) -> None:
        self._stops = sorted(stops, key=len, reverse=True)
        self._include = include
        self._held = ""

    def feed(self, text: str) -> tuple[str, str | None]:
        """Return text to send now, and the stop string once it is complete; later text is dropped."""
        buffer = self._held + text
        found = [
            (start + len(stop), index, stop)
            for index, stop in enumerate(self._stops)
            if (start := buffer.find(stop)) >= 0
        ]
        if found:
            end, _, stop = min(found)
            self._held = ""
            return buffer[:end] if self._include else buffer[: end - len(stop)], stop
        keep = self._partial(buffer)
        self._held = buffer[len(buffer) - keep :]
        return buffer[: len(buffer) - keep], None

    def flush(self) -> str:
        """Return the text that is held back, at the end of the output."""
        held, self._held = self._held, ""
        return held

    def _partial(self, buffer: str) -> int:
        """Return the length of the longest suffix of `buffer` that begins a stop string."""
        longest = max((len(stop) - 1 for stop in self._stops), default=0)
        lengths = range(min(longest, len(buffer)), 0, -1)
        return next((n for n in lengths if any(stop.startswith(buffer[-n:]) for stop in self._stops)), 0)


class Choice:
    """The state of one choice while it is generated."""

    def __init__(self, index: int, request: GenerateRequest, ask: Ask, tokenizer: Tokenizer, parser: Parser) -> None:
        self.index = index
        self.request = request
        self.prompt_index = index // ask.n
        """Index of the prompt that this choice answers."""
        self.prompt_tokens = len(request.prompt_token_ids)
        self.image_tokens = sum(span.rows for span in request.spans if span.kind != "audio")
        self.audio_tokens = sum(span.rows for span in request.spans if span.kind == "audio")
        self.completion_tokens = 0
        self.cached_tokens = 0
        self.drafted_tokens = 0
        self.accepted_tokens = 0
        """Number of tokens that speculation proposed, and of those that the model generated as well."""
        self.reasoning_tokens = 0
        self.tool_calls = 0
        self._include = ask.include_stop_str_in_output
        self._detokenizer = Detokenizer(tokenizer, ask.skip_special_tokens)
        self._stops = StopMatcher(ask.stop, self._include) if ask.stop else None
        self._parser = parser
        self._plain = type(self._parser) is PlainText
        self._single = ask.tools is not None and not ask.tools.parallel
        self._thinks_aloud = ask.include_reasoning
        self.predicted = ask.prediction is not None

    @property
    def malformed(self) -> int:
        """Calls that began and never completed."""
        return self._parser.malformed

    def feed(self, delta: Delta) -> Piece:
        """Return the piece of a delta. It has a finish reason if the engine or a stop string has ended the choice."""
        if delta.prompt is not None:
            self.cached_tokens = delta.prompt.cached_tokens
            self.prompt_tokens = delta.prompt.prompt_tokens or self.prompt_tokens
        self.drafted_tokens += delta.draft_tokens
        self.accepted_tokens += delta.accepted_tokens
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
        """Feed token by token, so that tokens behind a stop string are not counted."""
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
            parts = [part for part in parts if self._shows(part)]
        return Piece(self.index, parts, delta.token_ids[:count], delta.logprobs[:visible], finish, stop, delta.prompt)

    def _shows(self, part: Part) -> bool:
        """Count a part, and return whether the answer contains it."""
        if isinstance(part, Reasoning):
            self.reasoning_tokens += part.tokens
            return self._thinks_aloud and bool(part.text)
        if isinstance(part, ToolCall):
            if self._single and part.index:
                return False
            self.tool_calls = max(self.tool_calls, part.index + 1)
        return True


def usage(choices: Sequence[Choice]) -> dict[str, Any]:
    """Return OpenAI's `usage` so far. A prompt counts once, with the cached tokens of its first choice."""
    firsts = {choice.prompt_index: choice for choice in reversed(choices)}.values()
    prompt = sum(choice.prompt_tokens for choice in firsts)
    completion = sum(choice.completion_tokens for choice in choices)
    details = {"cached_tokens": sum(choice.cached_tokens for choice in firsts)}
    if images := sum(choice.image_tokens for choice in firsts):
        details["image_tokens"] = images
    if audio := sum(choice.audio_tokens for choice in firsts):
        details["audio_tokens"] = audio
    made = {"reasoning_tokens": sum(choice.reasoning_tokens for choice in choices)}
    if any(choice.predicted for choice in choices):
        made["accepted_prediction_tokens"] = accepted = sum(choice.accepted_tokens for choice in choices)
        made["rejected_prediction_tokens"] = sum(choice.drafted_tokens for choice in choices) - accepted
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": details,
        "completion_tokens_details": made,
    }
