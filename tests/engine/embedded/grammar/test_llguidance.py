"""Masks of many sequences of one grammar, filled by several threads."""

import time
from pathlib import Path

import numpy as np
import pytest
from llguidance import LLExecutor, LLMatcher
from tokenizers import Tokenizer

from engine.embedded.grammar import with_llguidance
from engine.embedded.grammar.library import Setup
from engine.embedded.grammar.with_llguidance import Llguidance, LlguidanceGrammar
from engine.types import Guide
from tests.support.grammar import EOS, VOCAB, tokenizer, tokenizer_folder

__all__ = ["tokenizer", "tokenizer_folder"]  # fixtures

STRINGS = Guide("json_schema", '{"type": "array", "items": {"type": "string", "maxLength": 12}}')


def grammar(folder: Path) -> LlguidanceGrammar:
    library = Llguidance(Setup("llguidance", str(folder), VOCAB, (EOS,)))
    return library.build(STRINGS, library.prepare(STRINGS)[1])


def test_threads_fill_rows_of_a_lexer_each(
    tokenizer_folder: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(with_llguidance, "_threads", lambda: 3)
    monkeypatch.setattr(with_llguidance, "_COPIES_SECONDS", 60.0)
    monkeypatch.setattr(with_llguidance, "_executor", lambda: LLExecutor(3))
    compiled = grammar(tokenizer_folder)
    positions = [compiled.start() for _ in range(12)]
    assert [position.lexer for position in positions] == [0, 1, 2] * 4
    for row, position in enumerate(positions):
        for token in tokenizer.encode('["' + "x" * row).ids:
            assert position.accept(token)
    orders = []
    fill = with_llguidance.fill_next_token_bitmask_par

    def recorded(executor, matchers, bitmask) -> None:  # type: ignore[no-untyped-def]
        orders.append([row for _, row in matchers])
        fill(executor, matchers, bitmask)

    monkeypatch.setattr(with_llguidance, "fill_next_token_bitmask_par", recorded)
    together, alone = (np.full((12, VOCAB // 32), -1, dtype=np.int32) for _ in range(2))
    positions[0].together(together, [(position, row) for row, position in enumerate(positions)])
    for row, position in enumerate(positions):
        position.fill(alone, row)
    assert orders == [[0, 3, 6, 9, 1, 4, 7, 10, 2, 5, 8, 11]]
    assert (together == alone).all() and len(np.unique(together, axis=0)) > 3


@pytest.mark.parametrize(("seconds", "lexers"), [(0.06, [0, 0, 0]), (0.03, [0, 1, 0])])
def test_a_grammar_that_takes_long_has_fewer_lexers(
    seconds: float, lexers: list[int], tokenizer_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def slow(self: Llguidance, grammar: str) -> LLMatcher:
        time.sleep(seconds)
        return LLMatcher(self._tokenizer, grammar)

    monkeypatch.setattr(Llguidance, "_matcher", slow)
    monkeypatch.setattr(with_llguidance, "_threads", lambda: 3)
    monkeypatch.setattr(with_llguidance, "_COPIES_SECONDS", 0.05)
    compiled = grammar(tokenizer_folder)
    assert [compiled.start().lexer for _ in range(3)] == lexers
