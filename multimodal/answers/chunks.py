"""The response-chunk builder: pieces of text in, JSON out, for streams and whole answers alike."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson

from multimodal.answers.choices import Choice, Piece
from multimodal.answers.shapes import Shape

_TEXT = "\x00text\x00"
_ENCODED_TEXT = orjson.dumps(_TEXT)


@dataclass(frozen=True, kw_only=True)
class Header:
    """What all chunks of an answer share."""

    id: str
    created: int
    model: str
    system_fingerprint: str


@dataclass(slots=True)
class _Whole:
    """A choice as far as it has come, for an answer that is not streamed."""

    texts: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[dict[str, Any]] = field(default_factory=list)
    fields: dict[str, Any] = field(default_factory=dict)
    last: Piece | None = None


class ChunkBuilder:
    """Builds one answer. Use `stream` and `usage_chunk`, or `add` and `whole`."""

    def __init__(
        self,
        shape: Shape,
        header: Header,
        choices: Sequence[Choice],
        *,
        include_usage: bool,
        continuous: bool,
        token_ids: bool,
    ) -> None:
        self._shape = shape
        self._header = {
            "id": header.id,
            "created": header.created,
            "model": header.model,
            "system_fingerprint": header.system_fingerprint,
        }
        self._choices = choices
        self._include_usage = include_usage
        self._continuous = continuous
        self._token_ids = token_ids
        self._templates: dict[int, tuple[bytes, bytes]] = {}
        self._wholes = [_Whole() for _ in choices]
        self._fields: dict[str, Any] = {}

    def stream(self, piece: Piece) -> list[bytes]:
        """The chunks for a piece, each a JSON document; none if it has nothing to show."""
        chunks = []
        if piece.prompt is not None:
            chunks += self._open(piece)
        if piece.logprobs or (self._token_ids and piece.token_ids) or (self._continuous and piece.text):
            choice = self._shape.delta(piece.index, piece.text, self._logprobs(piece))
            if self._token_ids:
                choice["token_ids"] = piece.token_ids
            chunks.append(self._chunk([choice]))
        elif piece.text:
            before, after = self._templates.get(piece.index) or self._template(piece.index)
            chunks.append(b"".join((before, orjson.dumps(piece.text), after)))
        if piece.finish_reason is not None:
            chunks.append(self._chunk([self._shape.closing(piece)]))
        return chunks

    def usage_chunk(self) -> bytes | None:
        """The chunk after the last choice has finished, if the request asked for it."""
        return self._chunk([], self.usage()) if self._include_usage else None

    def add(self, piece: Piece) -> None:
        """Take a piece into the whole answer."""
        whole = self._wholes[piece.index]
        if piece.prompt is not None:
            choice = self._choices[piece.index]
            answer_fields, whole.fields = self._shape.prompt_fields(choice, piece.prompt)
            self._fields |= answer_fields
            if (opening := self._shape.opening(choice, piece.prompt)) and "text" in opening:
                whole.texts.append(opening["text"])
                whole.logprobs += [opening["logprobs"]] if opening["logprobs"] else []
        whole.texts.append(piece.text)
        whole.token_ids += piece.token_ids
        if piece.logprobs:
            whole.logprobs.append(
                self._shape.logprobs(piece.index, piece.token_ids[: len(piece.logprobs)], piece.logprobs)
            )
        whole.last = piece

    def whole(self) -> bytes:
        """The answer as one JSON document, once every choice has finished."""
        choices = []
        for whole in self._wholes:
            assert whole.last is not None, "a choice ended without a piece"
            choice = self._shape.whole(whole.last, "".join(whole.texts), _joined(whole.logprobs)) | whole.fields
            if self._token_ids:
                choice["token_ids"] = whole.token_ids
            choices.append(choice)
        return orjson.dumps(
            {**self._header, "object": self._shape.object, "choices": choices, "usage": self.usage(), **self._fields}
        )

    def usage(self) -> dict[str, Any]:
        """Token counts up to now. A prompt counts once, with the cached tokens of its first choice."""
        firsts = [next(group) for _, group in itertools.groupby(self._choices, key=lambda choice: choice.prompt_index)]
        prompt = sum(choice.prompt_tokens for choice in firsts)
        completion = sum(choice.completion_tokens for choice in self._choices)
        details = {"cached_tokens": sum(choice.cached_tokens for choice in firsts)}
        if images := sum(choice.image_tokens for choice in firsts):
            details["image_tokens"] = images
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": details,
            "completion_tokens_details": {"reasoning_tokens": 0},
        }

    def _open(self, piece: Piece) -> list[bytes]:
        assert piece.prompt is not None
        choice = self._choices[piece.index]
        answer_fields, choice_fields = self._shape.prompt_fields(choice, piece.prompt)
        opening = self._shape.opening(choice, piece.prompt)
        if opening is None and choice_fields:
            opening = self._shape.delta(piece.index, "", None)
        return [] if opening is None else [self._chunk([opening | choice_fields], **answer_fields)]

    def _logprobs(self, piece: Piece) -> dict[str, Any] | None:
        return (
            self._shape.logprobs(piece.index, piece.token_ids[: len(piece.logprobs)], piece.logprobs)
            if piece.logprobs
            else None
        )

    def _chunk(self, choices: list[dict[str, Any]], usage: dict[str, Any] | None = None, **fields: Any) -> bytes:
        chunk = {**self._header, "object": self._shape.chunk_object, "choices": choices, **fields}
        if self._include_usage or self._continuous:
            chunk["usage"] = self.usage() if self._continuous and choices else usage
        return orjson.dumps(chunk)

    def _template(self, index: int) -> tuple[bytes, bytes]:
        """A plain chunk around its text: building one per token through dicts would cost ten times as much."""
        before, after = self._chunk([self._shape.delta(index, _TEXT, None)]).split(_ENCODED_TEXT)
        self._templates[index] = before, after
        return before, after


def _joined(parts: list[dict[str, Any]]) -> dict[str, Any] | None:
    """Log-probabilities of a whole choice: the lists of its pieces, one after the other."""
    if not parts:
        return None
    return {
        key: None if value is None else [item for part in parts for item in part[key]]
        for key, value in parts[0].items()
    }
