"""Answers that consist of `choices`, as in OpenAI's chat and completions: pieces in, JSON out, streamed or whole.

A token of plain text takes the fast path: its chunk is a template, split where the text goes. The slow path builds a
chunk through dicts, and gives the same bytes.
"""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import orjson

from engine.types import PromptReport, TokenLogprobs
from multimodal.answers.choices import Choice, Piece, counts
from multimodal.answers.logprobs import prompt_logprobs
from multimodal.answers.parts import Part, Text
from multimodal.request import Ask
from multimodal.text.tokenizer import Tokenizer

_TEXT = "\x00text\x00"
_ENCODED_TEXT = orjson.dumps(_TEXT)


@dataclass(frozen=True, slots=True)
class AnswerContext:
    """What an answer is made from."""

    ask: Ask
    choices: Sequence[Choice]
    tokenizer: Tokenizer
    request_id: str
    model: str
    fingerprint: str
    """Of this server's configuration (`system_fingerprint`)."""


class Shape(Protocol):
    """Turns the pieces of one answer into the JSON of one API. Use `stream` and `end`, or `add` and `whole`."""

    operation: str
    """The API's name in traces."""
    id: str

    def stream(self, piece: Piece) -> list[bytes]:
        """Return the chunks for a piece, each a JSON document; none if it has nothing to show."""
        ...

    def end(self) -> list[bytes]:
        """Return the chunks after the last choice has finished."""
        ...

    def add(self, piece: Piece) -> None:
        """Take a piece into the whole answer."""
        ...

    def whole(self) -> bytes:
        """Return the answer as one JSON document, once every choice has finished."""
        ...


ShapeFactory = Callable[[AnswerContext], Shape]


@dataclass(slots=True)
class _Whole:
    """A choice as far as it has come, for an answer that is not streamed."""

    parts: list[Part] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[dict[str, Any]] = field(default_factory=list)
    fields: dict[str, Any] = field(default_factory=dict)
    last: Piece | None = None


class ChoicesShape(ABC):
    """A `Shape` with `choices`. Its subclasses spell one choice; their methods return JSON objects."""

    operation: str
    object: str
    chunk_object: str
    id_prefix: str

    def __init__(self, context: AnswerContext) -> None:
        ask = context.ask
        self.id = f"{self.id_prefix}-{context.request_id}"
        self._header = {
            "id": self.id,
            "created": int(time.time()),
            "model": context.model,
            "system_fingerprint": context.fingerprint,
        }
        self._tokenizer = context.tokenizer
        self._choices = context.choices
        self._include_usage = ask.include_usage
        self._continuous = ask.continuous_usage
        self._token_ids = ask.return_token_ids
        self._prompt_logprobs = ask.prompt_logprobs is not None
        self._templates: dict[int, tuple[bytes, bytes]] = {}
        self._wholes = [_Whole() for _ in context.choices]
        self._fields: dict[str, Any] = {}

    @abstractmethod
    def delta(self, parts: Sequence[Part]) -> dict[str, Any]:
        """Spell new parts in a chunk's choice."""

    @abstractmethod
    def opening(self, choice: Choice, report: PromptReport) -> dict[str, Any] | None:
        """Spell the first chunk's choice, before any part; None if there is none."""

    @abstractmethod
    def closing(self) -> dict[str, Any]:
        """Spell the content of the last chunk's choice, which has no parts."""

    @abstractmethod
    def message(self, parts: Sequence[Part]) -> dict[str, Any]:
        """Spell all parts of a choice that is not streamed."""

    @abstractmethod
    def logprobs(self, index: int, token_ids: Sequence[int], entries: Sequence[TokenLogprobs]) -> dict[str, Any]:
        """Spell log-probabilities of the next tokens of a choice."""

    def prefix(self, choice: Choice, report: PromptReport) -> tuple[list[Part], dict[str, Any] | None]:
        """Return what a choice repeats of its prompt, and the log-probabilities of that."""
        return [], None

    def finish_reason(self, piece: Piece) -> str | None:
        """Spell why a choice has ended."""
        return piece.finish_reason

    def place(self, fields: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """Divide what is said of the prompt into fields of the answer and fields of the choice."""
        return fields, {}

    def stream(self, piece: Piece) -> list[bytes]:
        chunks = []
        parts = piece.parts
        if piece.prompt is not None:
            chunks += self._open(piece.index, piece.prompt)
        if piece.logprobs or (self._token_ids and piece.token_ids) or (self._continuous and parts):
            choice = self.choice(piece.index, self.delta(parts), self._logprobs(piece) if piece.logprobs else None)
            if self._token_ids:
                choice["token_ids"] = piece.token_ids
            chunks.append(self._chunk([choice]))
        elif parts:
            part = parts[0]
            if len(parts) == 1 and type(part) is Text:
                before, after = self._templates.get(piece.index) or self._template(piece.index)
                chunks.append(b"".join((before, orjson.dumps(part.text), after)))
            else:
                chunks.append(self._chunk([self.choice(piece.index, self.delta(parts))]))
        if piece.finish_reason is not None:
            chunks.append(self._chunk([self.choice(piece.index, self.closing(), last=piece)]))
        return chunks

    def end(self) -> list[bytes]:
        return [self._chunk([], self._usage())] if self._include_usage else []

    def add(self, piece: Piece) -> None:
        whole = self._wholes[piece.index]
        if piece.prompt is not None:
            choice = self._choices[piece.index]
            answer_fields, whole.fields = self.place(self._prompt_fields(choice, piece.prompt))
            self._fields |= answer_fields
            parts, logprobs = self.prefix(choice, piece.prompt)
            whole.parts += parts
            whole.logprobs += [logprobs] if logprobs else []
        whole.parts += piece.parts
        whole.token_ids += piece.token_ids
        if piece.logprobs:
            whole.logprobs.append(self._logprobs(piece))
        whole.last = piece

    def whole(self) -> bytes:
        choices = []
        for index, whole in enumerate(self._wholes):
            assert whole.last is not None, "a choice ended without a piece"
            message = self.message(whole.parts)
            choice = self.choice(index, message, _joined(whole.logprobs), whole.last) | whole.fields
            if self._token_ids:
                choice["token_ids"] = whole.token_ids
            choices.append(choice)
        return orjson.dumps(
            {**self._header, "object": self.object, "choices": choices, "usage": self._usage(), **self._fields}
        )

    def choice(
        self, index: int, content: dict[str, Any], logprobs: dict[str, Any] | None = None, last: Piece | None = None
    ) -> dict[str, Any]:
        """Spell one of the `choices`; `last` is its last piece, if it has ended."""
        choice = {"index": index, **content, "logprobs": logprobs, "finish_reason": None}
        if last is not None:
            choice["finish_reason"] = self.finish_reason(last)
            choice["stop_reason"] = last.stop_reason
        return choice

    def _open(self, index: int, report: PromptReport) -> list[bytes]:
        choice = self._choices[index]
        answer_fields, choice_fields = self.place(self._prompt_fields(choice, report))
        opening = self.opening(choice, report)
        if opening is None and choice_fields:
            opening = self.choice(index, self.delta([]))
        return [] if opening is None else [self._chunk([opening | choice_fields], **answer_fields)]

    def _prompt_fields(self, choice: Choice, report: PromptReport) -> dict[str, Any]:
        """Return what is said of the prompt when asked for."""
        fields: dict[str, Any] = {}
        if self._token_ids:
            fields["prompt_token_ids"] = choice.request.prompt_token_ids
        if self._prompt_logprobs and report.logprobs is not None:
            fields["prompt_logprobs"] = prompt_logprobs(report.logprobs, self._tokenizer)
        return fields

    def _logprobs(self, piece: Piece) -> dict[str, Any]:
        return self.logprobs(piece.index, piece.token_ids[: len(piece.logprobs)], piece.logprobs)

    def _usage(self) -> dict[str, Any]:
        count = counts(self._choices)
        details = {"cached_tokens": count.cached}
        if count.images:
            details["image_tokens"] = count.images
        return {
            "prompt_tokens": count.prompt,
            "completion_tokens": count.completion,
            "total_tokens": count.prompt + count.completion,
            "prompt_tokens_details": details,
            "completion_tokens_details": {"reasoning_tokens": count.reasoning},
        }

    def _chunk(self, choices: list[dict[str, Any]], usage: dict[str, Any] | None = None, **fields: Any) -> bytes:
        chunk = {**self._header, "object": self.chunk_object, "choices": choices, **fields}
        if self._include_usage or self._continuous:
            chunk["usage"] = self._usage() if self._continuous and choices else usage
        return orjson.dumps(chunk)

    def _template(self, index: int) -> tuple[bytes, bytes]:
        """Return a plain chunk around its text."""
        before, after = self._chunk([self.choice(index, self.delta([Text(_TEXT)]))]).split(_ENCODED_TEXT)
        self._templates[index] = before, after
        return before, after


def _joined(parts: list[dict[str, Any]]) -> dict[str, Any] | None:
    """Join the log-probabilities of a choice's pieces: their lists, one after the other."""
    if not parts:
        return None
    return {
        key: None if value is None else [item for part in parts for item in part[key]]
        for key, value in parts[0].items()
    }
