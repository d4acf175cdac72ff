"""Markers and patterns: special tokens are recognised by id, and matches may still be incomplete."""

import re
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache

import regex

from multimodal.answers.parsers.formats import OutputFormat
from multimodal.text.tokenizer import Detokenizer, Tokenizer

STAND_INS = "\ud800-\udfff"
"""Characters that stand for special tokens: lone surrogates, which decoded text never has. To be used in a class."""
_FIRST_STAND_IN = 0xDC00
_STAND_IN = re.compile(f"[{STAND_INS}]")
_LITERAL = re.compile("«(.*?)»", re.DOTALL)
_NEGATED = re.compile(r"(?<!\\)\[\^")
_LONGEST_MATCH = 4096


class Pattern:
    """A family's pattern, compiled for the middle and for the end of an output."""

    def __init__(self, source: str, stand_ins: Mapping[str, str]) -> None:
        source = _NEGATED.sub(f"[^{STAND_INS}", source)  # a special token is in no class
        source = _LITERAL.sub(lambda found: stand_ins.get(found[1]) or regex.escape(found[1]), source)
        self._middle = regex.compile(source.replace("EOS", "(?!)"), regex.DOTALL)
        self._end = regex.compile(source.replace("EOS", r"\Z"), regex.DOTALL)
        characters = {*map(chr, range(128)), *source}
        starts = [one for one in characters if self._middle.match(one, partial=True) is not None]
        self._starts = re.compile(f"[{re.escape(''.join(sorted(starts)))}]" if starts else "(?!)")

    def search(self, text: str, start: int, final: bool) -> "regex.Match[str] | None":
        """Return the first match. It is partial if more output may complete or extend it."""
        if final:
            return self._end.search(text, start)
        if self._starts.search(text, start) is None:  # much faster, and almost always so
            return None
        return _bounded(self._middle.search(text, start, partial=True), text)

    def all(self, text: str) -> "Iterator[regex.Match[str]]":
        """Yield the matches in a whole text."""
        yield from self._end.finditer(text)

    def match(self, text: str, start: int, final: bool) -> "regex.Match[str] | None":
        """Return the match right here, as `search` does."""
        return self._end.match(text, start) if final else _bounded(self._middle.match(text, start, partial=True), text)


def _bounded(found: "regex.Match[str] | None", text: str) -> "regex.Match[str] | None":
    """Give up a match that is still partial after many characters, which would be read again with every token."""
    return None if found is not None and found.partial and len(text) - found.start() > _LONGEST_MATCH else found


class SpecialTokens:
    """Replaces markers that are special tokens by one character each, which stands for the token in the text."""

    def __init__(self, family: OutputFormat, tokenizer: Tokenizer | None, skipped: bool) -> None:
        special = {} if tokenizer is None else _special_ids(tokenizer)
        literals = [literal for literal in family.markers if literal in special]
        self.stand_ins = {literal: chr(_FIRST_STAND_IN + n) for n, literal in enumerate(literals)}
        self._shown = {stand_in: literal for literal, stand_in in self.stand_ins.items()}
        self._marks = {special[literal]: (literal, stand_in) for literal, stand_in in self.stand_ins.items()}
        self._skipped = skipped
        self._detokenizer = None
        if tokenizer is not None and (literals or family.reasoning is not None or family.messages is not None):
            self._detokenizer = Detokenizer(tokenizer, skipped)
            self._widths = _widths(tokenizer, skipped)
        self._unfinished = False  # a character
        self._made = 0  # characters that the ids made
        self._placed = 0  # the same, with stand-ins
        self._seen = 0  # characters that came
        self._due: deque[tuple[int, str, str]] = deque()  # special tokens whose text has not come
        self._held = ""
        self._ends: deque[int] = deque()  # where tokens end that were not read
        self._total = 0

    def place(self, ids: Sequence[int], text: str) -> str:
        """Return the text with stand-ins."""
        if self._detokenizer is None:
            text = without_surrogates(text)
            self._total += len(text)
            self._ends.extend([self._total] * len(ids))
            return text
        for token in ids:
            width = None if self._unfinished else self._widths.get(token)
            if width is None:
                width = self._width(token)
            self._made += width
            self._placed += width
            mark = self._marks.get(token)
            if mark is not None:
                literal, stand_in = mark
                width = 0 if self._skipped else len(literal)
                self._due.append((self._made - width, literal[:width], stand_in))
                self._placed += 1 - width
            self._ends.append(self._placed)
        if self._due or self._held:
            text = self._put(text)
        else:
            self._seen += len(text)
        self._total += len(text)
        return text

    def _width(self, token: int) -> int:
        """Return how many characters a token adds to the text."""
        assert self._detokenizer is not None
        before = self._unfinished
        width = len(self._detokenizer.feed((token,)))
        self._unfinished = self._detokenizer.unfinished
        if not before and not self._unfinished:
            self._widths[token] = width
        return width

    def _put(self, text: str) -> str:
        text = self._held + text
        start = self._seen
        self._held = ""
        pieces: list[str] = []
        position = 0
        while self._due:
            offset, shown, stand_in = self._due[0]
            at = offset - start
            if at > len(text):
                break
            if at + len(shown) > len(text):
                self._held = text[at:]
                text = text[:at]
                break
            self._due.popleft()
            pieces += (text[position:at], stand_in)
            position = at + len(shown)
        self._seen = start + len(text)
        return "".join(pieces) + text[position:]

    def rest(self) -> str:
        """Return the text of a token that was cut off."""
        self._total += len(self._held)
        held, self._held = self._held, ""
        return held

    def hide(self, text: str) -> str:
        """Return a prompt's text with stand-ins."""
        for literal, stand_in in self.stand_ins.items():
            text = text.replace(literal, stand_in)
        return text

    def show(self, text: str) -> str:
        """Return text with stand-ins replaced by the tokens' texts."""
        if not self._shown or _STAND_IN.search(text) is None:
            return text
        return _STAND_IN.sub(lambda found: self._shown.get(found[0], ""), text)

    def read_up_to(self, left: int) -> int:
        """Return how many tokens were read since the last time; `left` characters are unread."""
        count, ends = 0, self._ends
        if not left and ends and ends[-1] <= self._total:  # almost always so
            count = len(ends)
            ends.clear()
            return count
        read = self._total - left
        while ends and ends[0] <= read:
            ends.popleft()
            count += 1
        return count


@lru_cache(maxsize=1024)
def compiled(source: str, stand_ins: tuple[tuple[str, str], ...]) -> Pattern:
    return Pattern(source, dict(stand_ins))


@lru_cache(maxsize=8)
def _widths(tokenizer: Tokenizer, skipped: bool) -> dict[int, int]:
    """Return a table, filled by use, of how many characters tokens add to a text that ends in a whole character."""
    return {}


@lru_cache(maxsize=8)
def _special_ids(tokenizer: Tokenizer) -> dict[str, int]:
    """Return the special tokens by their texts."""
    return {tokenizer.bytes_of(token_id).decode(errors="replace"): token_id for token_id in tokenizer.special_ids}


def without_surrogates(text: str) -> str:
    """Return text as valid Unicode: pairs of surrogates become the character they stand for, others are replaced."""
    return text if text.isascii() else text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
