"""Budgets of reasoning: a family's markers as token ids, for engines that have no text (`engine/kit/reasoning.py`)."""

import re
from functools import cache, lru_cache, reduce

from engine.types import ReasoningBudget
from multimodal.answers.parsers.formats import SPACE, OutputFormat
from multimodal.text.tokenizer import Tokenizer

_TEXTS = re.compile("(?:«.*?»|[^|«])+", re.DOTALL)
_OPTIONAL = re.compile(r"(?:\(\?:[^()|]*\)|\\?.)\?$")
_AHEAD = re.compile(r"\(\?=(.*)\)")
_SYNTAX = re.compile(r"[\\()\[\]*+?{}^$.]")
_PIECE = re.compile("«(.*?)»|([^«]+)", re.DOTALL)
_SPECIAL = 256
"""Symbols of a text are its bytes (below this number) and its special tokens (from this number on)."""

Symbols = tuple[int, ...]


def budget_of(
    family: OutputFormat, tokens: int, *, tokenizer: Tokenizer, inside: bool, guided: bool
) -> ReasoningBudget | None:
    """Return the budget of `tokens` for the reasoning in an output; None if the family has no reasoning, or its markers
    are not fixed texts. `inside`: the output begins inside reasoning. `guided`: a grammar guides it.
    """
    reasoning, messages = family.reasoning, family.messages
    close, avoid = "", ""
    if messages is not None:
        begins, ends = literals(messages.reasoning_begin), literals(messages.reasoning_end)
        close = messages.write_reasoning[1]
        if not guided:  # a grammar says itself how the next message begins
            close, avoid = close + messages.write_next[0], messages.write_next[1]
    elif reasoning is not None:
        begins = literals(reasoning.begin)
        ends = literals(reasoning.end) + literals(reasoning.cut.replace(SPACE, "\n"))
        close = reasoning.write[1].lstrip()
    else:
        return None
    if not ends or not (begins or inside):
        return None
    close = close or ends[0].replace("«", "").replace("»", "")
    return ReasoningBudget(
        tokens=tokens,
        close=tuple(tokenizer.encode(close)),
        avoid=tuple(tokenizer.encode(avoid)[:1]),
        inside=inside,
        steps=_steps(tokenizer, begins, ends),
    )


def literals(pattern: str) -> tuple[str, ...]:
    """Return the texts that a pattern matches, without optional endings; an empty tuple if the pattern is more than a
    choice of fixed texts. Markers keep their « and ».
    """
    found = tuple(_OPTIONAL.sub("", _AHEAD.sub(r"\1", text)) for text in _TEXTS.findall(pattern))
    return () if any(map(_SYNTAX.search, (_PIECE.sub(r"\2", text) for text in found))) else found


@lru_cache(maxsize=8)
def _steps(tokenizer: Tokenizer, begins: tuple[str, ...], ends: tuple[str, ...]) -> dict[int, dict[int, int]]:
    """Return `ReasoningBudget.steps`: an automaton over token ids that finds the texts `begins` and, inside, `ends`.

    A state is the longest suffix of the output that begins one of these texts (Aho and Corasick's automaton). Tokens
    take several steps of it, or, as special tokens, one.
    """
    special = {tokenizer.bytes_of(token): _SPECIAL + token for token in tokenizer.special_ids}
    modes = [[_symbols(text, special) for text in texts] for texts in (begins, ends)]
    texts: list[tuple[int, Symbols]] = [(0, ()), (1, ())]
    texts += dict.fromkeys((mode, word[:n]) for mode in (0, 1) for word in modes[mode] for n in range(1, len(word)))
    numbers = {(mode, text): (2 * place if text else 0) + mode for place, (mode, text) in enumerate(texts)}
    states = {number: state for state, number in numbers.items()}

    @cache
    def step(number: int, symbol: int) -> int:
        mode, text = states[number]
        text = (*text, symbol)
        for start in range(len(text)):
            if text[start:] in modes[mode]:
                return 1 - mode
            if (found := numbers.get((mode, text[start:]))) is not None:
                return found
        return mode

    def run(number: int, symbols: Symbols) -> int | None:
        """Return the state after these symbols; None if the same symbols lead there from the start of its mode."""
        other = number % 2
        for symbol in symbols:
            number, other = step(number, symbol), step(other, symbol)
            if number == other:
                return None
        return number

    spelled = [
        (_SPECIAL + token,) if token in tokenizer.special_ids else tuple(text)
        for token, text in enumerate(tokenizer.token_bytes)
    ]
    by_first: dict[int, list[int]] = {}
    for token, symbols in enumerate(spelled):
        by_first.setdefault(symbols[0] if symbols else -1, []).append(token)
    alphabet = {symbol for words in modes for word in words for symbol in word}
    found: dict[int, dict[int, int]] = {}
    for mode, words in enumerate(modes):
        firsts = {word[0] for word in words}
        near = ((token, symbols) for token, symbols in enumerate(spelled) if not firsts.isdisjoint(symbols))
        ended = ((token, reduce(step, symbols, mode)) for token, symbols in near)
        found[mode] = {token: number for token, number in ended if number != mode}
    for number in states.keys() - {0, 1}:
        ahead = [symbol for symbol in alphabet if step(number, symbol) != step(number % 2, symbol)]
        after = {token: run(number, spelled[token]) for symbol in ahead for token in by_first.get(symbol, ())}
        found[number] = {token: state for token, state in after.items() if state is not None}
    return found


def _symbols(text: str, special: dict[bytes, int]) -> Symbols:
    found: list[int] = []
    for marker, plain in _PIECE.findall(text):
        known = special.get(marker.encode()) if marker else None
        found += [known] if known is not None else (marker or plain).encode()
    return tuple(found)
