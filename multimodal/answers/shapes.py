"""The two schemas of an answer. Chat and completions differ here, and nowhere else above the prompt."""

from collections.abc import Sequence
from typing import Any, Protocol

from engine.types import PromptReport, TokenLogprobs
from multimodal.answers.choices import Choice, Piece
from multimodal.answers.logprobs import CompletionLogprobs, chat_logprobs, prompt_logprobs
from multimodal.text.tokenizer import Tokenizer


class Shape(Protocol):
    """How one API spells choices. Every method returns JSON objects."""

    object: str
    chunk_object: str

    def opening(self, choice: Choice, report: PromptReport) -> dict[str, Any] | None:
        """The first chunk's choice, before any text."""
        ...

    def delta(self, index: int, text: str, logprobs: dict[str, Any] | None) -> dict[str, Any]:
        """A chunk's choice with new text."""
        ...

    def closing(self, piece: Piece) -> dict[str, Any]:
        """The last chunk's choice: the finish reason and no text."""
        ...

    def whole(self, piece: Piece, text: str, logprobs: dict[str, Any] | None) -> dict[str, Any]:
        """The choice of an answer that is not streamed; `piece` is its last."""
        ...

    def logprobs(self, index: int, token_ids: Sequence[int], entries: Sequence[TokenLogprobs]) -> dict[str, Any]:
        """Log-probabilities of the next tokens of a choice."""
        ...

    def prompt_fields(self, choice: Choice, report: PromptReport) -> tuple[dict[str, Any], dict[str, Any]]:
        """What is said of the prompt when asked for: fields of the answer, and fields of the choice."""
        ...


class ChatShape:
    """chat.completion and its chunks."""

    object, chunk_object = "chat.completion", "chat.completion.chunk"

    def __init__(self, tokenizer: Tokenizer, *, return_token_ids: bool, prompt_logprobs: bool) -> None:
        self._tokenizer = tokenizer
        self._return_token_ids = return_token_ids
        self._prompt_logprobs = prompt_logprobs

    def opening(self, choice: Choice, report: PromptReport) -> dict[str, Any]:
        return _choice(choice.index, {"delta": {"role": "assistant", "content": ""}}, None)

    def delta(self, index: int, text: str, logprobs: dict[str, Any] | None) -> dict[str, Any]:
        return _choice(index, {"delta": {"content": text}}, logprobs)

    def closing(self, piece: Piece) -> dict[str, Any]:
        return _choice(piece.index, {"delta": {}}, None, piece)

    def whole(self, piece: Piece, text: str, logprobs: dict[str, Any] | None) -> dict[str, Any]:
        return _choice(
            piece.index, {"message": {"role": "assistant", "content": text, "refusal": None}}, logprobs, piece
        )

    def logprobs(self, index: int, token_ids: Sequence[int], entries: Sequence[TokenLogprobs]) -> dict[str, Any]:
        return chat_logprobs(entries, self._tokenizer)

    def prompt_fields(self, choice: Choice, report: PromptReport) -> tuple[dict[str, Any], dict[str, Any]]:
        return _prompt_fields(
            self._tokenizer, choice, report, ids=self._return_token_ids, logprobs=self._prompt_logprobs
        ), {}


class CompletionShape:
    """text_completion, whose chunks have the same shape. `echo` holds the prompts' texts when they are to be repeated."""

    object = chunk_object = "text_completion"

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        return_token_ids: bool,
        prompt_logprobs: bool,
        logprobs: bool = False,
        echo: Sequence[str] | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self._return_token_ids = return_token_ids
        self._prompt_logprobs = prompt_logprobs
        self._logprobs = logprobs
        self._echo = echo
        self._offsets: dict[int, CompletionLogprobs] = {}

    def opening(self, choice: Choice, report: PromptReport) -> dict[str, Any] | None:
        if self._echo is None:
            return None
        logprobs = None
        if self._logprobs and report.logprobs is not None:
            logprobs = self._shown(choice.index).show(choice.request.prompt_token_ids, report.logprobs)
        return self.delta(choice.index, self._echo[choice.prompt_index], logprobs)

    def delta(self, index: int, text: str, logprobs: dict[str, Any] | None) -> dict[str, Any]:
        return _choice(index, {"text": text}, logprobs)

    def closing(self, piece: Piece) -> dict[str, Any]:
        return _choice(piece.index, {"text": ""}, None, piece)

    def whole(self, piece: Piece, text: str, logprobs: dict[str, Any] | None) -> dict[str, Any]:
        return _choice(piece.index, {"text": text}, logprobs, piece)

    def logprobs(self, index: int, token_ids: Sequence[int], entries: Sequence[TokenLogprobs]) -> dict[str, Any]:
        return self._shown(index).show(token_ids, entries)

    def prompt_fields(self, choice: Choice, report: PromptReport) -> tuple[dict[str, Any], dict[str, Any]]:
        return {}, _prompt_fields(
            self._tokenizer, choice, report, ids=self._return_token_ids, logprobs=self._prompt_logprobs
        )

    def _shown(self, index: int) -> CompletionLogprobs:
        return self._offsets.setdefault(index, CompletionLogprobs(self._tokenizer))


def _choice(
    index: int, content: dict[str, Any], logprobs: dict[str, Any] | None, last: Piece | None = None
) -> dict[str, Any]:
    choice = {"index": index, **content, "logprobs": logprobs, "finish_reason": last.finish_reason if last else None}
    if last is not None:
        choice["stop_reason"] = last.stop_reason
    return choice


def _prompt_fields(
    tokenizer: Tokenizer, choice: Choice, report: PromptReport, *, ids: bool, logprobs: bool
) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    if ids:
        fields["prompt_token_ids"] = choice.request.prompt_token_ids
    if logprobs and report.logprobs is not None:
        fields["prompt_logprobs"] = prompt_logprobs(report.logprobs, tokenizer)
    return fields
