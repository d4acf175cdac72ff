"""Budgets of reasoning: a family's markers as token ids, compared with the parser that reads the text."""

from collections.abc import Iterator

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models

from engine.kit.reasoning import ReasoningProgress
from multimodal.answers.budgets import budget_of
from multimodal.answers.parsers.choose import REASONING_PARSERS, family
from multimodal.answers.parsers.engine import FamilyParser
from multimodal.answers.parsers.formats import OutputFormat, ReasoningFormat
from multimodal.answers.parts import Reasoning
from multimodal.text.tokenizer import Detokenizer, Tokenizer, byte_tokenizer

UNLIMITED = 1 << 30
PIECES = ["<", "</", "<t", "think", "th", "ink", "ink>", ">", ">\n", "/think>", "nk>a<th", "</think>x<think>", "a", " ",
          "◁", "◁/", "▷", "/", "t", "k"]  # fmt: skip
SPECIAL = ["<|channel|>", "<|message|>", "<|end|>", "<|start|>", "[THINK]", "[/THINK]"]
WORDS = ["analysis", "final", "assistant"]


def pieces_tokenizer() -> Tokenizer:
    """A tokenizer of which many tokens have parts of markers, or more than one."""
    texts = [piece.replace(" ", "Ġ").replace("\n", "Ċ").encode().decode("latin-1") for piece in PIECES + WORDS]
    backend = tokenizers.Tokenizer(models.BPE(vocab={text: place for place, text in enumerate(texts)}, merges=[]))
    backend.decoder = decoders.Sequence([decoders.Fuse()])
    backend.add_special_tokens([AddedToken(text, special=True) for text in SPECIAL])
    made = Tokenizer(backend, {})
    made.token_bytes = [text.encode() for text in PIECES + WORDS + SPECIAL]
    return made


TOKENIZER = pieces_tokenizer()


@pytest.mark.parametrize("name", REASONING_PARSERS)
def test_every_family_can_be_limited(name: str) -> None:
    tokenizer = byte_tokenizer()
    form = family(None, name)
    for inside in (False, True):
        budget = budget_of(form, 3, tokenizer=tokenizer, inside=inside, guided=False)
        assert budget is not None and budget.inside == inside
        progress = ReasoningProgress(budget)
        if not inside:
            written = form.messages.write_reasoning if form.messages else form.reasoning.write
            for token in tokenizer.encode(written[0] or "<think>"):
                progress.accept(token)
            assert progress.inside, name
        while progress.forced is None:
            progress.accept(tokenizer.encode("a")[0])
        while progress.forced is not None:
            progress.accept(progress.forced)
        assert not progress.inside, name


@pytest.mark.parametrize("name", ["deepseek_v3", "deepseek_r1", "kimi", "mistral", "qwen3"])
@given(ids=st.lists(st.integers(0, len(PIECES + WORDS + SPECIAL) - 1), max_size=30))
def test_engines_see_what_the_parser_sees(name: str, ids: list[int]) -> None:
    """Wherever tokens begin and end, as long as no text is held back."""
    parser = FamilyParser(family(None, name), {}, tokenizer=TOKENIZER)
    detokenizer = Detokenizer(TOKENIZER, False)
    budget = budget_of(family(None, name), UNLIMITED, tokenizer=TOKENIZER, inside=parser.reasons, guided=False)
    assert budget is not None
    progress = ReasoningProgress(budget)
    for token in ids:
        parser.feed((token,), detokenizer.feed((token,)))
        progress.accept(token)
        assert progress.inside == parser.reasons


@given(ids=st.lists(st.integers(0, len(PIECES + WORDS + SPECIAL) - 1), max_size=30), tokens=st.integers(0, 6))
def test_no_answer_has_more_reasoning_than_its_budget(ids: list[int], tokens: int) -> None:
    for name in ("deepseek_v3", "mistral", "gpt_oss"):
        parser = FamilyParser(family(None, name), {}, tokenizer=TOKENIZER)
        detokenizer = Detokenizer(TOKENIZER, False)
        budget = budget_of(family(None, name), tokens, tokenizer=TOKENIZER, inside=parser.reasons, guided=False)
        assert budget is not None
        progress = ReasoningProgress(budget)
        parts = []
        for wanted in ids:
            for token in _tokens(progress, wanted):
                progress.accept(token)
                parts += parser.feed((token,), detokenizer.feed((token,)))
        parts += parser.finish()
        assert sum(part.tokens for part in parts if isinstance(part, Reasoning)) <= tokens


def _tokens(progress: ReasoningProgress, wanted: int) -> Iterator[int]:
    """What comes before the token that a model wants, and that."""
    while (token := progress.forced) is not None:
        yield token
    yield wanted


def test_markers_that_vary_cannot_be_limited() -> None:
    form = OutputFormat(reasoning=ReasoningFormat("own", r"<(?:a|b)>", r"</[ab]>"))
    assert budget_of(form, 3, tokenizer=byte_tokenizer(), inside=True, guided=False) is None
    assert budget_of(OutputFormat(), 3, tokenizer=byte_tokenizer(), inside=False, guided=False) is None
