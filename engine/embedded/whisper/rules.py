"""Constraints on the tokens that Whisper may generate next: the rules of OpenAI's `decoding.py`, as in transformers'
logits processors."""

from collections.abc import Sequence

import torch

from engine.checkpoints.whisper import WhisperTokens

_NEVER = float("-inf")


class Rules:
    """The rules of one model. The prompt chooses among them: a prompt that ends in <|startoftranscript|> asks for the
    language, one with <|notimestamps|> for text alone, any other for text between timestamps."""

    def __init__(self, tokens: WhisperTokens, vocab_size: int, device: torch.device) -> None:
        self._tokens = tokens
        self._suppressed = _mask(tokens.suppressed, vocab_size, device)
        self._first = self._suppressed + _mask(tokens.suppressed_first, vocab_size, device)
        self._languages = torch.full((vocab_size,), _NEVER, device=device)
        self._languages[torch.tensor([*tokens.languages.values()], dtype=torch.int64)] = 0

    def apply(self, logits: torch.Tensor, prompt: Sequence[int], output: Sequence[int]) -> torch.Tensor:
        """Return one sequence's logits [vocabulary], those of tokens that may not come now -inf."""
        tokens = self._tokens
        if tokens.multilingual and prompt[-1] == tokens.start:
            return logits + self._languages
        scores = logits + (self._suppressed if output else self._first)
        if prompt[-1] != tokens.no_timestamps:
            self._keep_pairs(scores, output)
        return scores

    def _keep_pairs(self, scores: torch.Tensor, output: Sequence[int]) -> None:
        """Timestamps do not decrease, and come in pairs, except before the end and first of all."""
        first = self._tokens.first_timestamp
        scores[self._tokens.no_timestamps] = _NEVER
        if not output:
            scores[:first] = _NEVER
            if (most := self._tokens.most_first_timestamp) is not None:
                scores[first + most + 1 :] = _NEVER
            return
        after_one = output[-1] >= first
        after_two = after_one and (len(output) < 2 or output[-2] >= first)
        last = next((token for token in reversed(output) if token >= first), None)
        if last is not None:
            least = last if after_one and not after_two else last + 1
            scores[first:least] = _NEVER
        if after_two:
            scores[first:] = _NEVER
        elif after_one:
            scores[: self._tokens.end] = _NEVER
        # A timestamp comes if all of them together are more likely than any other token.
        if scores[first:].logsumexp(0) > scores[:first].max():
            scores[:first] = _NEVER


def _mask(ids: Sequence[int], vocab_size: int, device: torch.device) -> torch.Tensor:
    mask = torch.zeros(vocab_size, device=device)
    mask[torch.tensor([token for token in ids if 0 <= token < vocab_size], dtype=torch.int64)] = _NEVER
    return mask
