"""A small byte-level tokenizer, and a grammar compiler for it.

Tests of guided decoding follow compiled grammars with them.
"""

import json
import random
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from engine.embedded.grammar.compiler import GrammarCompiler, Matcher, new_bitmask
from engine.embedded.grammar.library import Compiled
from engine.types import Guide, GuideKind

EOS = 2
SPECIAL = 3
VOCAB = 448
"""Larger than the tokenizer, as padded models have it."""
TEXT = """((7)) ((1)) [[1]] [[2]] The quick brown fox {"name": "value", "items": [1, 2, 3], \
"ok": true, "none": null} jumps.
  Il était une fois, 日本語. """


@pytest.fixture(scope="module")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = [AddedToken(text, special=True) for text in ("<pad>", "<s>", "</s>", "<|special|>")]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator([TEXT * 3], trainer)
    assert tokenizer.get_vocab_size() < VOCAB - 8
    folder = tmp_path_factory.mktemp("tokenizer")
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture(scope="module")
def tokenizer(tokenizer_folder: Path) -> Iterator[Tokenizer]:
    yield Tokenizer.from_file(str(tokenizer_folder / "tokenizer.json"))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def compiler(tokenizer_folder: Path) -> AsyncIterator[GrammarCompiler]:
    compiler = GrammarCompiler(tokenizer_folder, VOCAB, (EOS,), timeout=20.0)
    yield compiler
    await compiler.close()


def started(guide: Compiled) -> Matcher:
    """Return a matcher at the start of a grammar."""
    return Matcher((EOS,), guide)


def allowed(matcher: Matcher) -> set[int]:
    bitmask = new_bitmask(3, VOCAB)
    matcher.fill(bitmask, 1)
    assert bool((bitmask[[0, 2]] == -1).all()), "other rows are left alone"
    found = set(np.flatnonzero(np.unpackbits(bitmask[1].numpy().view(np.uint8), bitorder="little")).tolist())
    assert matcher.error or {token for token in range(VOCAB) if matcher.allows(token)} == found
    return found


def accepts(guide: Compiled, tokenizer: Tokenizer, text: str) -> bool:
    """Whether the tokens of `text` and then the end pass the masks."""
    matcher = started(guide)
    for token in [*tokenizer.encode(text, add_special_tokens=False).ids, EOS]:
        if token not in allowed(matcher):
            return False
        matcher.accept(token)
    assert matcher.finished
    return True


def generate(guide: Compiled, tokenizer: Tokenizer, seed: int, limit: int = 400) -> str | None:
    """Text that the masks let a random model write; None if it does not come to an end.

    The model prefers what closes strings and brackets, the more the longer it writes.
    """
    matcher, choose, output = started(guide), random.Random(seed), list[int]()
    closing = {token for text, token in tokenizer.get_vocab().items() if set(text) <= set('"}],:{[0123456789')}
    while len(output) < limit:
        options = sorted(allowed(matcher))
        if not set(options) <= {EOS} and choose.random() < (0.5 if len(output) < 40 else 0.95):
            options = sorted(closing & set(options)) or options
        token = EOS if EOS in allowed(matcher) and choose.random() < 0.5 else choose.choice(options)
        matcher.accept(token)
        if matcher.finished:
            return str(tokenizer.decode(output, skip_special_tokens=False))
        output.append(token)
    return None


async def check(
    compiler: GrammarCompiler, tokenizer: Tokenizer, kind: GuideKind, spec: Any, good: list[str], bad: list[str]
) -> None:
    guide = await compiler.compile(Guide(kind, spec if isinstance(spec, str) else json.dumps(spec)))
    assert [text for text in good if not accepts(guide, tokenizer, text)] == []
    assert [text for text in bad if accepts(guide, tokenizer, text)] == []
