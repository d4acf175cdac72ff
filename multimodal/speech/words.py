"""Words of a transcript and when they are spoken, from its tokens (OpenAI's `timing.py` and `tokenizer.py`)."""

import string
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from multimodal.text.tokenizer import Detokenizer, Tokenizer

_WITHOUT_SPACES = frozenset({"zh", "ja", "th", "lo", "my", "yue"})
_OPENING = "\"'“¿([{-"
_CLOSING = "\"'.。,，!！?？:：”)]}、"  # noqa: RUF001 - as they are written


class Word(NamedTuple):
    text: str
    start: float
    """Seconds from the recording's beginning."""
    end: float
    tokens: int
    """Number of its tokens."""


def words_of(
    tokens: Sequence[int], times: Sequence[float], offset: float, tokenizer: Tokenizer, language: str
) -> list[Word]:
    """Return the words of text tokens. `times` has the second of the window at which each begins, and the last one
    ends; the window begins at `offset`."""
    words: list[Word] = []
    place = 0
    pieces = characters(tokens, tokenizer)
    for text, count in pieces if language in _WITHOUT_SPACES else _spaced(pieces):
        start, end = (round(offset + times[min(at, len(times) - 1)], 2) for at in (place, place + count))
        words.append(Word(text, start, max(start, end), count))
        place += count
    return _with_punctuation(words)


def characters(tokens: Sequence[int], tokenizer: Tokenizer) -> Iterator[tuple[str, int]]:
    """Yield the shortest runs of tokens that are whole characters, as their text and number."""
    text, count = Detokenizer(tokenizer, skip_special_tokens=True), 0
    for token in tokens:
        piece = text.feed((token,))
        count += 1
        if not text.unfinished:
            yield piece, count
            count = 0
    if count:
        yield text.flush(), count


def _spaced(pieces: Iterator[tuple[str, int]]) -> Iterator[tuple[str, int]]:
    """Join pieces to words, which begin with a space; punctuation is apart."""
    word, size = "", 0
    for text, count in pieces:
        if word and (text.startswith(" ") or text.strip() in string.punctuation):
            yield word, size
            word, size = "", 0
        word += text
        size += count
    if word:
        yield word, size


def _with_punctuation(words: Sequence[Word]) -> list[Word]:
    """Join opening marks to the word behind them, and closing ones to the word before, whose times stay."""
    joined: list[Word] = []
    opening: Word | None = None
    for word in words:
        if opening is not None:
            word = Word(opening.text + word.text, word.start, word.end, opening.tokens + word.tokens)
            opening = None
        if word.text.startswith(" ") and word.text.strip() in _OPENING:
            opening = word
        elif joined and not word.text.startswith(" ") and word.text and word.text in _CLOSING:
            last = joined.pop()
            joined.append(Word(last.text + word.text, last.start, last.end, last.tokens + word.tokens))
        else:
            joined.append(word)
    return [*joined, opening] if opening is not None else joined
