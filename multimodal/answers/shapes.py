"""The answers of OpenAI's chat and completions. The two differ here, and nowhere else below their conversions."""

from collections.abc import Iterable, Sequence
from typing import Any

from engine.types import PromptReport, TokenLogprobs
from multimodal.answers.choices import Choice, Piece
from multimodal.answers.chunks import AnswerContext, ChoicesShape
from multimodal.answers.logprobs import CompletionOffsets, chat_logprobs
from multimodal.answers.parts import Part, Reasoning, Text, ToolCall


class ChatShape(ChoicesShape):
    """chat.completion and its chunks."""

    operation = "chat"
    object = "chat.completion"
    chunk_object = "chat.completion.chunk"
    id_prefix = "chatcmpl"

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
                case ToolCall():
                    delta.setdefault("tool_calls", []).append(_piece_of_call(part))
        return {"delta": delta or {"content": ""}}

    def closing(self) -> dict[str, Any]:
        return {"delta": {}}

    def message(self, parts: Sequence[Part]) -> dict[str, Any]:
        text = "".join(part.text for part in parts if isinstance(part, Text))
        reasoning = "".join(part.text for part in parts if isinstance(part, Reasoning))
        calls = _whole_calls(part for part in parts if isinstance(part, ToolCall))
        message: dict[str, Any] = {"role": "assistant", "content": text if text or not calls else None, "refusal": None}
        if reasoning:
            message["reasoning_content"] = reasoning
        if calls:
            message["tool_calls"] = calls
        return {"message": message}

    def finish_reason(self, piece: Piece) -> str | None:
        calls = self._choices[piece.index].calls_tools
        return "tool_calls" if calls and piece.finish_reason == "stop" else piece.finish_reason

    def logprobs(self, index: int, token_ids: Sequence[int], entries: Sequence[TokenLogprobs]) -> dict[str, Any]:
        return chat_logprobs(entries, self._tokenizer)


class CompletionShape(ChoicesShape):
    """text_completion, whose chunks have the same shape."""

    operation = "text_completion"
    object = "text_completion"
    chunk_object = "text_completion"
    id_prefix = "cmpl"

    def __init__(self, context: AnswerContext) -> None:
        super().__init__(context)
        self._echo = context.ask.echo
        self._scores_echo = context.ask.echo and context.ask.logprobs is not None
        self._offsets: dict[int, CompletionOffsets] = {}
        self._echoes: dict[int, str] = {}

    def prefix(self, choice: Choice, report: PromptReport) -> tuple[list[Part], dict[str, Any] | None]:
        if not self._echo:
            return [], None
        ids = choice.request.prompt_token_ids
        if (text := self._echoes.get(choice.prompt_index)) is None:
            text = self._echoes[choice.prompt_index] = self._tokenizer.decode(ids)
        if not self._scores_echo or report.logprobs is None:
            return [Text(text)], None
        return [Text(text)], self._of(choice.index).show(ids, report.logprobs)

    def opening(self, choice: Choice, report: PromptReport) -> dict[str, Any] | None:
        parts, logprobs = self.prefix(choice, report)
        return self.choice(choice.index, self.delta(parts), logprobs) if parts else None

    def delta(self, parts: Sequence[Part]) -> dict[str, Any]:
        return self.message(parts)

    def closing(self) -> dict[str, Any]:
        return self.message([])

    def message(self, parts: Sequence[Part]) -> dict[str, Any]:
        return {"text": "".join(part.text for part in parts if isinstance(part, Text))}

    def logprobs(self, index: int, token_ids: Sequence[int], entries: Sequence[TokenLogprobs]) -> dict[str, Any]:
        return self._of(index).show(token_ids, entries)

    def place(self, fields: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        return {}, fields

    def _of(self, index: int) -> CompletionOffsets:
        return self._offsets.setdefault(index, CompletionOffsets(self._tokenizer))


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
