"""Log-probabilities of tokens, as OpenAI's two APIs show them."""

from collections.abc import Sequence
from typing import Any

from engine.types import Logprob, TokenLogprobs
from multimodal.text.tokenizer import Tokenizer


def chat_logprobs(entries: Sequence[TokenLogprobs], tokenizer: Tokenizer) -> dict[str, Any]:
    """Return `choices[].logprobs` of a chat. The `bytes` of all tokens, joined, are the text's UTF-8."""

    def show(entry: Logprob) -> dict[str, Any]:
        raw = tokenizer.bytes_of(entry.token_id)
        return {"token": raw.decode(errors="replace"), "logprob": entry.logprob, "bytes": list(raw)}

    content = [show(entry[0]) | {"top_logprobs": [show(top) for top in entry[1:]]} for entry in entries]
    return {"content": content, "refusal": None}


def prompt_logprobs(entries: Sequence[TokenLogprobs | None], tokenizer: Tokenizer) -> list[dict[str, Any] | None]:
    """Return the `prompt_logprobs` extension as vLLM has it: for each prompt token a map by id, null for the first."""

    def show(entry: Logprob) -> dict[str, Any]:
        return {
            "logprob": entry.logprob,
            "rank": entry.rank,
            "decoded_token": tokenizer.bytes_of(entry.token_id).decode(errors="replace"),
        }

    return [None if entry is None else {str(item.token_id): show(item) for item in entry} for entry in entries]


class CompletionOffsets:
    """Spells `choices[].logprobs` of one completion, piece by piece.

    Offsets count characters from the start of its text.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._offset = 0

    def show(self, token_ids: Sequence[int], entries: Sequence[TokenLogprobs | None]) -> dict[str, Any]:
        """Return the next tokens' log-probabilities; an entry is None for the first token of an echoed prompt."""
        offsets = []
        for token in token_ids:
            offsets.append(self._offset)
            self._offset += len(self._tokenizer.bytes_of(token).decode(errors="ignore"))
        return {
            "tokens": [self._text(token) for token in token_ids],
            "token_logprobs": [entry[0].logprob if entry else None for entry in entries],
            "top_logprobs": [
                {self._text(item.token_id): item.logprob for item in entry} if entry else None for entry in entries
            ],
            "text_offset": offsets,
        }

    def _text(self, token_id: int) -> str:
        """Return a token's text or, if it is not UTF-8 by itself, its bytes as OpenAI spells them."""
        raw = self._tokenizer.bytes_of(token_id)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)
