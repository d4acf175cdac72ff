"""A suffix automaton over this and earlier answers, bounded in memory.

Its states are the sets of substrings that end at the same places (Blumer et al., 1985). Each answer extends it token by
token from a root of its own salt, so that clients who share no KV blocks learn nothing of each other's answers either.
Where an answer stands is one state; the longest end of it that has been followed by something is a few suffix links
away. There are two automata: when the newer is full, the older is dropped.

Adding a token takes about two microseconds, which many sequences on a fast GPU have no time for. So an answer that
was not looked at for a while is added little by little, and its rest when it ends, while that takes next to no time.
"""

import time
from collections.abc import Callable
from collections.abc import Sequence as Many

from engine.embedded.sequence import Sequence
from engine.embedded.speculation.drafter import Draft
from engine.embedded.speculation.lookup import Lookup, Match, draft_of

_COUNTED = 32
"""Suffixes of which an occurrence is counted, the longest ones: all of them would be many in text that repeats."""
_AT_ONCE = 32
"""Tokens of an answer that are added for a draft; while more are lacking, so many at its end are looked for."""
_SURE, _FEW = 16, 8
"""Tokens of a match in the sequence itself from which on other answers are not looked at. With more than a few
sequences there is no time to do so for any that has a match."""
_SHARE, _MOST_SAVED = 0.004, 0.005
"""Share of the time that adding the rest of answers that have ended may take, and the most seconds of it that are saved
up."""


class Automaton:
    """A suffix automaton of the answers so far, with counts of the tokens that follow each text."""

    def __init__(self) -> None:
        self.tokens = 0
        """Number of tokens in it."""
        self._roots: dict[str, int] = {}
        self._next: list[dict[int, int]] = []
        self._link: list[int] = []
        self._length: list[int] = []
        self._count: list[int] = []

    def root(self, salt: str) -> int:
        """Return the state of the empty text."""
        if salt not in self._roots:
            self._roots[salt] = self._state({}, -1, 0)
        return self._roots[salt]

    def extend(self, state: int, token: int) -> int:
        """Add a token behind a text that is in it; return the state of the longer text."""
        self.tokens += 1
        if (known := self._next[state].get(token)) is not None:
            found = known if self._length[known] == self._length[state] + 1 else self._split(state, token, known)
        else:
            found = self._state({}, -1, self._length[state] + 1)
            while state >= 0 and token not in self._next[state]:
                self._next[state][token] = found
                root, state = state, self._link[state]
            if state < 0:
                self._link[found] = root
            elif self._length[known := self._next[state][token]] == self._length[state] + 1:
                self._link[found] = known
            else:
                self._link[found] = self._split(state, token, known)
        state, count, link = found, self._count, self._link
        for _ in range(_COUNTED):
            count[state] += 1
            if (state := link[state]) < 0:
                break
        return found

    def advance(self, state: int, length: int, token: int) -> tuple[int, int]:
        """Return the state, and the length, of the longest end of a text and a token that is in it; `state` and
        `length` are those of the text."""
        while token not in self._next[state]:
            if self._link[state] < 0:
                return state, 0
            state = self._link[state]
            length = self._length[state]
        return self._next[state][token], length + 1

    def find(self, salt: str, tokens: Many[int]) -> tuple[int, int]:
        """Return the state, and the length, of the longest end of these tokens that is in it."""
        state, length = self.root(salt), 0
        for token in tokens:
            state, length = self.advance(state, length, token)
        return state, length

    def match(self, state: int, length: int, limit: int, least: int) -> Match:
        """Return the most frequent continuation of the longest known end of a text, if at least `least` of its tokens
        match."""
        while not self._next[state] and self._link[state] >= 0:
            state = self._link[state]
            length = self._length[state]
        if length < least:
            return Match(0, [])
        draft = list[int]()
        while len(draft) < limit and (following := self._next[state]):
            if len(following) == 1:
                [(token, state)] = following.items()
            else:
                token, state = max(following.items(), key=self._count_of)
            draft.append(token)
        return Match(length, draft)

    def _count_of(self, entry: tuple[int, int]) -> int:
        """Return how often the text of a token's state has come."""
        return self._count[entry[1]]

    def _state(self, following: dict[int, int], link: int, length: int) -> int:
        self._next.append(following)
        self._link.append(link)
        self._length.append(length)
        self._count.append(0)
        return len(self._next) - 1

    def _split(self, state: int, token: int, known: int) -> int:
        """Give the shorter texts of a state, up to that of `state` and the token, a state of their own."""
        clone = self._state(dict(self._next[known]), self._link[known], self._length[state] + 1)
        self._count[clone] = self._count[known]
        self._link[known] = clone
        while state >= 0 and self._next[state].get(token) == known:
            self._next[state][token] = clone
            state = self._link[state]
        return clone


class _Standing:
    """State of a sequence in the two automata."""

    __slots__ = ("generation", "known", "length", "matched", "matched_length", "state")

    def __init__(self, known: int) -> None:
        self.known = known
        """Number of the sequence's tokens up to which its answer was added."""
        self.generation = -2
        """The generation of the newer automaton at that time; -2 if nothing was added yet."""
        self.state = 0
        """State of the newer automaton after these tokens were added to it."""
        self.length = 0
        self.matched = 0
        """State of the older automaton for the longest end of these tokens that it contains."""
        self.matched_length = 0


class Answers:
    """The `Drafter` that looks into the sequence itself, and into this and earlier answers."""

    free = True
    runner = None

    def __init__(self, least: int, capacity: int, clock: Callable[[], float] = time.monotonic) -> None:
        """`capacity`: tokens of answers that are kept."""
        self._lookup = Lookup(least)
        self._least = least
        self._capacity = capacity
        self._older, self._newer = Automaton(), Automaton()
        self._generation = 0
        """Number of automata that were full."""
        self._places: dict[Sequence, _Standing] = {}
        self._clock = clock
        self._saved, self._counted = _MOST_SAVED, clock()
        """Seconds that adding the rest of answers may take, and when they were counted."""

    @property
    def tokens(self) -> int:
        """Number of tokens of answers that are kept."""
        return self._older.tokens + self._newer.tokens

    def draft(self, sequences: Many[Sequence], limits: Many[int], least: float = 0.0) -> list[Draft]:
        """See `Drafter`."""
        sure = _SURE if max(len(sequences), len(self._places)) <= _FEW else self._least
        return [draft_of(self._match(sequence, limit, sure)) for sequence, limit in zip(sequences, limits, strict=True)]

    def forget(self, sequence: Sequence) -> None:
        """See `Drafter`."""
        if (place := self._places.pop(sequence, None)) is not None:
            self._add_rest(sequence, place)
        self._lookup.forget(sequence)

    def _match(self, sequence: Sequence, limit: int, sure: int) -> Match:
        best, salt = self._lookup.match(sequence, limit), sequence.request.cache_salt
        if (place := self._places.get(sequence)) is None:
            place = self._places[sequence] = _Standing(sequence.num_prompt)
        if best.length >= sure:
            return best
        self._add(sequence, place, _AT_ONCE)
        if place.known < len(sequence.tokens):
            end = sequence.tokens[-_AT_ONCE:]
            newer, older = self._newer.find(salt, end), self._older.find(salt, end)
        else:
            newer, older = (place.state, place.length), (place.matched, place.matched_length)
        found = self._newer.match(*newer, limit, self._least), self._older.match(*older, limit, self._least)
        return max(best, *found, key=_length)

    def _add_rest(self, sequence: Sequence, place: _Standing) -> None:
        """Add what is lacking of an answer, if there is time for it."""
        now = self._clock()
        self._saved = min(self._saved + _SHARE * (now - self._counted), _MOST_SAVED)
        self._counted = now
        while self._saved > 0 and place.known < len(sequence.tokens):
            self._add(sequence, place, _AT_ONCE)
            before, now = now, self._clock()
            self._saved -= now - before

    def _add(self, sequence: Sequence, place: _Standing, most: int) -> None:
        """Add up to so many tokens of a sequence's answer to the newer automaton, and note where it stands in both."""
        for token in sequence.tokens[place.known : place.known + most]:
            if self._newer.tokens >= self._capacity // 2:
                self._older, self._newer, self._generation = self._newer, Automaton(), self._generation + 1
            self._settle(place, sequence.request.cache_salt)
            place.state = self._newer.extend(place.state, token)
            place.length += 1
            place.matched, place.matched_length = self._older.advance(place.matched, place.matched_length, token)
            place.known += 1
        self._settle(place, sequence.request.cache_salt)

    def _settle(self, place: _Standing, salt: str) -> None:
        """Move a place to the present automata: what was added to the one that is the older now is a match there."""
        if place.generation == self._generation:
            return
        if place.generation == self._generation - 1:
            place.matched, place.matched_length = place.state, place.length
        else:
            place.matched, place.matched_length = self._older.root(salt), 0
        place.state, place.length = self._newer.root(salt), 0
        place.generation = self._generation


def _length(match: Match) -> int:
    return match.length
