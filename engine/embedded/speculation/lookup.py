"""Prompt lookup: the end of a sequence is looked for earlier in it, and what followed there is proposed.

A match is followed for as long as it predicts the output. Once it fails, the longest other match is looked for, and of
several the one that lies next behind the last: an edited text goes on shortly behind where it was left.
"""

from collections.abc import Sequence as Many
from typing import NamedTuple

from engine.embedded.sequence import Sequence
from engine.embedded.speculation.drafter import NOTHING, Draft, classes_of_match

_LONGEST = 32
"""Tokens by which matches are compared."""
_PREDICTED = 8
"""Length of match that the beginning of a prediction counts as, before any of it has come true."""


class Match(NamedTuple):
    length: int
    """Tokens before `follows` that are also the end of the text."""
    draft: list[int]


class KnownText:
    """A prediction, if the request has one, then the prompt and the output so far."""

    def __init__(self, prediction: Many[int], least: int) -> None:
        """`least`: tokens that a match has at least."""
        self._text = _characters(prediction)
        """A character for each token: nothing finds one text in another as fast as a string does."""
        self._least = least
        self._next = 0 if prediction else -1
        """Index of the token that is predicted next; -1 for none."""
        self._length = _PREDICTED
        """Length of the match before it."""
        self._left = 0
        """Position at which the last match failed."""

    def append(self, tokens: Many[int], *, follow: bool = True) -> None:
        """Note tokens; without `follow` they are a prompt, which a prediction does not predict."""
        known = len(self._text)
        self._text += _characters(tokens)
        if not follow or self._next < 0:
            return
        for index in range(known, len(self._text)):
            if self._text[self._next] != self._text[index]:
                self._left, self._next = self._next, -1
                return
            self._next += 1
            self._length += 1

    def match(self, limit: int) -> Match:
        """Return up to `limit` tokens that may come next; none without a match. Where what followed ends with the text
        itself, it is taken to repeat."""
        if self._next < 0:
            self._search()
        if self._next < 0:
            return Match(0, [])
        found = list(map(ord, self._text[self._next : self._next + limit]))
        while len(found) < limit:
            found += found[: limit - len(found)]
        return Match(self._length, found)

    def _search(self) -> None:
        """Find the longest match of the text's end."""
        text, end = self._text, len(self._text) - 1
        found, missing = 0, min(_LONGEST, end) + 1
        length = self._least
        while found + 1 < missing:  # what is found of some length is found of any that is shorter
            if text.find(text[-length:], 0, end) < 0:
                missing = length
                if not found:
                    return
            else:
                found = length
            length = (found + missing) // 2
        if not found:
            return
        longest = text[-found:]
        place = text.find(longest, max(self._left - found, 0), end)
        self._next = (text.rfind(longest, 0, end) if place < 0 else place) + found
        self._length = found


class Lookup:
    """The `Drafter` that looks into the sequence itself."""

    free = True
    runner = None

    def __init__(self, least: int) -> None:
        self._least = least
        self._texts: dict[Sequence, tuple[KnownText, int]] = {}
        """The state of each sequence, and how many of its tokens it has taken in."""

    def draft(self, sequences: Many[Sequence], limits: Many[int], least: float = 0.0) -> list[Draft]:
        """See `Drafter`."""
        return [draft_of(self.match(sequence, limit)) for sequence, limit in zip(sequences, limits, strict=True)]

    def match(self, sequence: Sequence, limit: int) -> Match:
        """Return the tokens after the longest match of the sequence's end."""
        if (entry := self._texts.get(sequence)) is None:
            text, known = KnownText(sequence.request.prediction, self._least), sequence.num_prompt
            text.append(sequence.tokens[:known], follow=False)
        else:
            text, known = entry
        text.append(sequence.tokens[known:])
        self._texts[sequence] = text, len(sequence.tokens)
        return text.match(limit)

    def forget(self, sequence: Sequence) -> None:
        """See `Drafter`."""
        self._texts.pop(sequence, None)


def draft_of(match: Match) -> Draft:
    """Return a match as a draft, whose tokens are the surer the longer the match before them is."""
    if not match.draft:
        return NOTHING
    return Draft(match.draft, classes_of_match(match.length, len(match.draft)))


def _characters(tokens: Many[int]) -> str:
    return "".join(map(chr, tokens))
