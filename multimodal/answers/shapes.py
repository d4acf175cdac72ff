"""The answers of OpenAI's chat and completions: pieces in, JSON out, streamed or whole.

A token of plain text takes the fast path: its chunk is a template, split at the place of the text. The slow path builds
a chunk from dicts, with the same bytes.
"""

import time
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson

from engine.types import Logprob, PromptReport, TokenLogprobs
from multimodal.answers.choices import Choice, Piece, usage
from multimodal.answers.parts import Part, Reasoning, Text, ToolCall
from multimodal.metrics import Api
from multimodal.request import Ask
from multimodal.text.tokenizer import Detokenizer, Tokenizer

_TEXT = "\x00text\x00"
_ENCODED_TEXT = orjson.dumps(_TEXT)


@dataclass(frozen=True, slots=True)
class AnswerContext:
    """Facts of an answer, such as its model and its requested fields."""

    ask: Ask
    choices: Sequence[Choice]
    tokenizer: Tokenizer
    request_id: str
    model: str
    fingerprint: str
    """`system_fingerprint`: see `fingerprint` in `multimodal/processor.py`."""


@dataclass(slots=True)
class _Whole:
    """The contents of a choice so far, for an answer that is not streamed."""

    parts: list[Part] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[dict[str, Any]] = field(default_factory=list)
    fields: dict[str, Any] = field(default_factory=dict)
    last: Piece | None = None


class Shape(ABC):
    """Turns the pieces of one answer into the JSON of one API. Use `stream` and `end`, or `add` and `whole`."""

    operation: str
    """The API's name in traces."""
    api: Api
    """Its name in metrics."""
    id: str
    """The answer's id."""

    @abstractmethod
    def __init__(self, context: AnswerContext) -> None: ...

    @abstractmethod
    def stream(self, piece: Piece) -> list[bytes]:
        """Return the chunks for a piece, each a JSON document; an empty list if it shows nothing."""

    @abstractmethod
    def end(self) -> list[bytes]:
        """Return the chunks after the last choice has finished."""

    @abstractmethod
    def add(self, piece: Piece) -> None:
        """Take a piece into the whole answer."""

    @abstractmethod
    def whole(self) -> bytes:
        """Return the answer as one JSON document, once every choice has finished."""


class ChoicesShape(Shape):
    """An answer with `choices`. Subclasses spell one of them; their methods return JSON objects."""

    object: str
    chunk_object: str
    id_prefix: str
    closing: dict[str, Any]
    """The content of the choice in the last chunk, which has no parts."""
    reports_prompt_in_choice: bool
    """Whether requested fields about the prompt are in the choice instead of the answer."""

    def __init__(self, context: AnswerContext) -> None:
        self.id = f"{self.id_prefix}-{context.request_id}"
        self._ask = context.ask
        self._choices = context.choices
        self._tokenizer = context.tokenizer
        self._header = {
            "id": self.id,
            "created": int(time.time()),
            "model": context.model,
            "system_fingerprint": context.fingerprint,
        }
        self._continuous = context.ask.continuous_usage
        self._sent: defaultdict[int, int] = defaultdict(int)
        """Number of tokens of each choice that chunks have covered."""
        self._token_ids = context.ask.return_token_ids
        self._templates: dict[int, tuple[bytes, bytes]] = {}
        self._wholes = [_Whole() for _ in context.choices]
        self._fields: dict[str, Any] = {}

    @abstractmethod
    def delta(self, parts: Sequence[Part]) -> dict[str, Any]:
        """Return the choice of a chunk with new parts."""

    @abstractmethod
    def opening(self, choice: Choice, report: PromptReport) -> dict[str, Any] | None:
        """Return the choice of a first chunk, sent before any part; None for shapes without such a chunk."""

    @abstractmethod
    def message(self, parts: Sequence[Part]) -> dict[str, Any]:
        """Return all parts of a choice that is not streamed."""

    @abstractmethod
    def logprobs(self, index: int, token_ids: Sequence[int], entries: Sequence[TokenLogprobs | None]) -> dict[str, Any]:
        """Return log-probabilities of the next tokens of a choice. An entry is None for the first token of an echoed
        prompt.
        """

    def prefix(self, choice: Choice, report: PromptReport) -> tuple[list[Part], dict[str, Any] | None]:
        """Return the text of the prompt that a choice repeats, and its log-probabilities."""
        return [], None

    def finish_reason(self, piece: Piece) -> str | None:
        """Return the reason for the end of a choice."""
        return piece.finish_reason

    def stream(self, piece: Piece) -> list[bytes]:
        chunks = []
        parts = piece.parts
        if piece.prompt is not None:
            chunks += self._open(piece.index, piece.prompt)
        self._sent[piece.index] += len(piece.token_ids)
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
            chunks.append(self._chunk([self.choice(piece.index, self.closing, last=piece)]))
        return chunks

    def end(self) -> list[bytes]:
        return [self._chunk([], usage(self._choices))] if self._ask.include_usage else []

    def add(self, piece: Piece) -> None:
        whole = self._wholes[piece.index]
        if piece.prompt is not None:
            choice = self._choices[piece.index]
            answer_fields, whole.fields = self._prompt_fields(choice, piece.prompt)
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
            {**self._header, "object": self.object, "choices": choices, "usage": usage(self._choices), **self._fields}
        )

    def choice(
        self, index: int, content: dict[str, Any], logprobs: dict[str, Any] | None = None, last: Piece | None = None
    ) -> dict[str, Any]:
        """Return one of the `choices`; `last` is its last piece, if it has ended."""
        choice = {"index": index, **content, "logprobs": logprobs, "finish_reason": None}
        if last is not None:
            choice["finish_reason"] = self.finish_reason(last)
            choice["stop_reason"] = last.stop_reason
        return choice

    def _open(self, index: int, report: PromptReport) -> list[bytes]:
        choice = self._choices[index]
        answer_fields, choice_fields = self._prompt_fields(choice, report)
        opening = self.opening(choice, report)
        if opening is None and choice_fields:
            opening = self.choice(index, self.delta([]))
        return [] if opening is None else [self._chunk([opening | choice_fields], **answer_fields)]

    def _prompt_fields(self, choice: Choice, report: PromptReport) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the requested fields about the prompt: those of the answer, and those of the choice."""
        fields: dict[str, Any] = {}
        if self._token_ids:
            fields["prompt_token_ids"] = choice.request.prompt_token_ids
        if self._ask.prompt_logprobs is not None and report.logprobs is not None:
            fields["prompt_logprobs"] = [
                None if entry is None else {str(item.token_id): self._prompt_logprob(item) for item in entry}
                for entry in report.logprobs
            ]
        return ({}, fields) if self.reports_prompt_in_choice else (fields, {})

    def _prompt_logprob(self, entry: Logprob) -> dict[str, Any]:
        """Return one of `prompt_logprobs`, an extension of vLLM."""
        token = self._tokenizer.bytes_of(entry.token_id).decode(errors="replace")
        return {"logprob": entry.logprob, "rank": entry.rank, "decoded_token": token}

    def _logprobs(self, piece: Piece) -> dict[str, Any]:
        return self.logprobs(piece.index, piece.token_ids[: len(piece.logprobs)], piece.logprobs)

    def _chunk(self, choices: list[dict[str, Any]], total: dict[str, Any] | None = None, **fields: Any) -> bytes:
        chunk = {**self._header, "object": self.chunk_object, "choices": choices, **fields}
        if self._ask.include_usage:
            chunk["usage"] = self._usage_so_far(choices[0]["index"]) if self._continuous and choices else total
        return orjson.dumps(chunk)

    def _usage_so_far(self, index: int) -> dict[str, int]:
        """Return the usage of one choice up to its latest chunk, an extension of vLLM."""
        prompt, completion = self._choices[index].prompt_tokens, self._sent[index]
        return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}

    def _template(self, index: int) -> tuple[bytes, bytes]:
        """Return a plain chunk around its text."""
        before, after = self._chunk([self.choice(index, self.delta([Text(_TEXT)]))]).split(_ENCODED_TEXT)
        self._templates[index] = before, after
        return before, after


class ChatShape(ChoicesShape):
    """chat.completion and its chunks."""

    operation = "chat"
    api = "chat_completions"
    object = "chat.completion"
    chunk_object = "chat.completion.chunk"
    id_prefix = "chatcmpl"
    closing = {"delta": {}}
    reports_prompt_in_choice = False

    @property
    def _old(self) -> bool:
        """Whether the request has OpenAI's old `functions`, and so the answer `function_call`."""
        return self._ask.tools is not None and self._ask.tools.param == "functions"

    def opening(self, choice: Choice, report: PromptReport) -> dict[str, Any]:
        return self.choice(choice.index, {"delta": {"role": "assistant", "content": ""}})

    def delta(self, parts: Sequence[Part]) -> dict[str, Any]:
        delta: dict[str, Any] = {}
        for part in parts:
            match part:
                case Text():
                    delta["content"] = delta.get("content", "") + part.text
                case Reasoning():
                    delta["reasoning_content"] = delta.get("reasoning_content", "") + part.text
                case ToolCall() if self._old:
                    delta["function_call"] = _piece_of_call(part)["function"]
                case ToolCall():
                    delta.setdefault("tool_calls", []).append(_piece_of_call(part))
        return {"delta": delta or {"content": ""}}

    def message(self, parts: Sequence[Part]) -> dict[str, Any]:
        text = "".join(part.text for part in parts if isinstance(part, Text))
        reasoning = "".join(part.text for part in parts if isinstance(part, Reasoning))
        calls = _whole_calls(part for part in parts if isinstance(part, ToolCall))
        message: dict[str, Any] = {"role": "assistant", "content": text if text or not calls else None, "refusal": None}
        if reasoning:
            message["reasoning_content"] = reasoning
        if calls and self._old:
            message["function_call"] = calls[0]["function"]
        elif calls:
            message["tool_calls"] = calls
        return {"message": message}

    def finish_reason(self, piece: Piece) -> str | None:
        calls = self._choices[piece.index].tool_calls
        if not calls or piece.finish_reason != "stop":
            return piece.finish_reason
        return "function_call" if self._old else "tool_calls"

    def logprobs(self, index: int, token_ids: Sequence[int], entries: Sequence[TokenLogprobs | None]) -> dict[str, Any]:
        """Return `choices[].logprobs`. The `bytes` of all tokens, joined, are the text's UTF-8."""
        content = [
            self._logprob(entry[0]) | {"top_logprobs": [self._logprob(top) for top in entry[1:]]}
            for entry in entries
            if entry is not None
        ]
        return {"content": content, "refusal": None}

    def _logprob(self, entry: Logprob) -> dict[str, Any]:
        raw = self._tokenizer.bytes_of(entry.token_id)
        return {"token": raw.decode(errors="replace"), "logprob": entry.logprob, "bytes": list(raw)}


class CompletionShape(ChoicesShape):
    """text_completion, whose chunks have the same shape."""

    operation = "text_completion"
    api = "completions"
    object = "text_completion"
    chunk_object = "text_completion"
    id_prefix = "cmpl"
    closing = {"text": ""}
    reports_prompt_in_choice = True

    def __init__(self, context: AnswerContext) -> None:
        super().__init__(context)
        self._offsets = [_Offsets(Detokenizer(self._tokenizer, self._ask.skip_special_tokens)) for _ in self._choices]
        self._echoes: dict[int, str] = {}

    def prefix(self, choice: Choice, report: PromptReport) -> tuple[list[Part], dict[str, Any] | None]:
        if not self._ask.echo:
            return [], None
        ids = choice.request.prompt_token_ids
        if (text := self._echoes.get(choice.prompt_index)) is None:
            text = self._echoes[choice.prompt_index] = self._tokenizer.decode(ids)
        if self._ask.logprobs is None or report.logprobs is None:
            return [Text(text)], None
        shown = self._logprobs_at(self._echo_offsets(ids, text), ids, report.logprobs)
        self._offsets[choice.index].characters = len(text)
        return [Text(text)], shown

    def opening(self, choice: Choice, report: PromptReport) -> dict[str, Any] | None:
        parts, logprobs = self.prefix(choice, report)
        return self.choice(choice.index, self.delta(parts), logprobs) if parts else None

    def delta(self, parts: Sequence[Part]) -> dict[str, Any]:
        return self.message(parts)

    def message(self, parts: Sequence[Part]) -> dict[str, Any]:
        return {"text": "".join(part.text for part in parts if isinstance(part, Text))}

    def logprobs(self, index: int, token_ids: Sequence[int], entries: Sequence[TokenLogprobs | None]) -> dict[str, Any]:
        return self._logprobs_at([self._offsets[index].next(token) for token in token_ids], token_ids, entries)

    def _echo_offsets(self, ids: Sequence[int], text: str) -> list[int]:
        """Return where each token of an echoed prompt begins in its `text`, which may lack a space at the start."""
        offsets = _Offsets(Detokenizer(self._tokenizer, skip_special_tokens=False))
        found = [offsets.next(token) for token in ids]
        stripped = max(0, offsets.end() - len(text))
        return [max(0, offset - stripped) for offset in found]

    def _logprobs_at(
        self, offsets: Sequence[int], token_ids: Sequence[int], entries: Sequence[TokenLogprobs | None]
    ) -> dict[str, Any]:
        return {
            "tokens": [self._token_text(token) for token in token_ids],
            "token_logprobs": [entry[0].logprob if entry else None for entry in entries],
            "top_logprobs": [
                {self._token_text(item.token_id): item.logprob for item in entry} if entry else None
                for entry in entries
            ],
            "text_offset": offsets,
        }

    def _token_text(self, token_id: int) -> str:
        """Return a token's text or, if it is not UTF-8 by itself, its bytes as OpenAI spells them."""
        raw = self._tokenizer.bytes_of(token_id)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


@dataclass(slots=True)
class _Offsets:
    """Counts the characters of a text while its tokens come."""

    text: Detokenizer
    characters: int = 0

    def next(self, token: int) -> int:
        """Return the number of whole characters before a token, and count those that it completes."""
        before = self.characters
        self.characters += len(self.text.feed((token,)))
        return before

    def end(self) -> int:
        """Return the number of all characters, including an unfinished one at the end."""
        return self.characters + len(self.text.flush())


def _joined(parts: list[dict[str, Any]]) -> dict[str, Any] | None:
    """Join the log-probabilities of a choice's pieces: their lists, one after the other."""
    if not parts:
        return None
    return {
        key: None if value is None else [item for part in parts for item in part[key]]
        for key, value in parts[0].items()
    }


def _piece_of_call(part: ToolCall) -> dict[str, Any]:
    function = {"arguments": part.arguments} if part.name is None else {"name": part.name, "arguments": part.arguments}
    if part.id is None:
        return {"index": part.index, "function": function}
    return {"index": part.index, "id": part.id, "type": "function", "function": function}


def _whole_calls(parts: Iterable[ToolCall]) -> list[dict[str, Any]]:
    """Join the pieces of each call."""
    calls: dict[int, dict[str, Any]] = {}
    for part in parts:
        call = calls.setdefault(part.index, {"id": "", "type": "function", "function": {"name": "", "arguments": ""}})
        call["id"] = part.id or call["id"]
        call["function"]["name"] = part.name or call["function"]["name"]
        call["function"]["arguments"] += part.arguments
    return [calls[index] for index in sorted(calls)]
