"""Slices of a text have the tokens of the whole, whatever the text."""

import asyncio
import itertools
import random
from collections.abc import Iterator
from typing import Any

import pytest
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors, trainers
from tokenizers import Tokenizer as Backend

from engine.kit import work
from engine.kit.tasks import cancel
from multimodal.errors import RequestError
from multimodal.text import tokenizer as text_tokenizer
from multimodal.text.tokenizer import Tokenizer, byte_tokenizer, cuts_of, encoded, pieces_of
from tests.support.waiting import until

CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
ENDS = r"\s*[\r\n]+|\s+(?!\S)|\s+"
LOWER, UPPER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]", r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
WORDS = rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+{CONTRACTIONS}?|[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*{CONTRACTIONS}?"
EXPRESSIONS = {
    "llama 3": [
        rf"{CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{ENDS}",
    ],
    "gpt-oss": [rf"{WORDS}|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{ENDS}"],
    "deepseek": [
        r"\p{N}{1,3}",
        "[一-龥぀-ゟ゠-ヿ]+",  # noqa: RUF001 - as it is
        "[!\"#$%&'()*+,\\-./:;<=>?@\\[\\\\\\]^_`{|}~][A-Za-z]+|[^\r\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+"
        f"| ?[\\p{{P}}\\p{{S}}]+[\r\n]*|{ENDS}",
    ],
}
ATOMS = [
    *["a", "e", "The", "the", "12", "3", "é", "你好", "ß", "'s", "'LL", "!", "?!", "/", "-", "_", "<", "<|end|>", "🙂"],
    *[" ", " ", " ", "  ", "   ", "\n", "\r\n", "\t", "\u00a0", "\u3000", "\u0301", "\u0308", " \n", ". ", ", "],
]
CORPUS = ["the cat's 12 hats, they'll be 345! The end.\n\nif (a) {\n    return b / c\n}\n é 你好"] * 4


def texts(seed: int, count: int = 150) -> Iterator[str]:
    chance = random.Random(seed)
    for _ in range(count):
        yield "".join(chance.choices(ATOMS, k=chance.randrange(1, 60)))


def byte_level(splits: list[str], normalizer: Any = None) -> Tokenizer:
    """Train a tokenizer that splits by these expressions, by GPT-2's if there are none. It adds special tokens."""
    backend = Backend(models.BPE())
    backend.normalizer = normalizer
    steps = [pre_tokenizers.Split(Regex(split), "isolated") for split in splits]
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [*steps, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not splits)]
    )
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=420, initial_alphabet=alphabet, special_tokens=["<|end|>", "<s>"])
    backend.train_from_iterator(CORPUS, trainer)
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A <|end|>", special_tokens=[("<s>", 1), ("<|end|>", 0)]
    )
    return Tokenizer(backend, {})


def sentence_piece() -> Tokenizer:
    """Train a tokenizer as Gemma's: spaces are spelled ▁, and nothing splits."""
    backend = Backend(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    backend.normalizer = normalizers.Replace(" ", "▁")
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    spelled = [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = trainers.BpeTrainer(vocab_size=500, special_tokens=["<|end|>", "<s>", "<unk>", *spelled])
    backend.pre_tokenizer = pre_tokenizers.Split(",", "merged_with_previous")  # else tokens would be whole lines
    backend.train_from_iterator([line.replace("12 ", "12, ") for line in CORPUS], trainer)
    backend.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    return Tokenizer(backend, {})


TOKENIZERS = {
    "gpt-2": lambda: byte_level([]),
    **{name: lambda splits=splits: byte_level(splits) for name, splits in EXPRESSIONS.items()},
    "qwen": lambda: byte_level(EXPRESSIONS["llama 3"], normalizers.NFC()),
    "gemma": sentence_piece,
}


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_tokenizer, "INLINE_LENGTH", 0)
    monkeypatch.setattr(text_tokenizer, "SLICE_CHARACTERS", 3)


@pytest.mark.parametrize("name", TOKENIZERS)
async def test_slices_have_the_tokens_of_the_whole(name: str) -> None:
    tokenizer = TOKENIZERS[name]()
    cuts = cuts_of(tokenizer)
    assert cuts is not None
    cut = 0
    for text in texts(sum(map(ord, name))):
        cut += len(list(pieces_of(text, cuts.at))) - 1
        for special in (False, True):
            whole = tokenizer.encode(text, special)
            assert await encoded(tokenizer, text, special) == whole, text
            for last in (1, 7):
                assert (await encoded(tokenizer, text, special, last=last))[-last:] == whole[-last:], text
    assert cut > 100


@pytest.mark.parametrize(
    "expression",
    [
        *[r"\w+ \w+|\s+", r".+?|\s+", r"[a-z ]+|\s+", r"\S+\s?|\s+", r"[^a]+|\s+", r"a[ -~]|\s+", r"a\p{Zs}|\s+"],
        *[r"(?<!a)b|\s+", r"a+(?=\s)|\s+", r"(?:a| x)|\s+", r"[a\x20]+|\s+", r"[a&&[^b]]+|\s+", r"\p{L}+", r"a\W|\s+"],
    ],
)
def test_tokenizers_that_may_join_over_a_space_are_not_cut(expression: str) -> None:
    assert cuts_of(byte_level([expression])) is None


def test_tokenizers_whose_tokens_depend_on_the_place_are_not_cut() -> None:
    assert cuts_of(byte_tokenizer()) is not None
    for normalizer in (normalizers.Prepend("▁"), normalizers.Strip(), normalizers.Replace(Regex("a b"), "c")):
        tokenizer = byte_tokenizer()
        tokenizer.backend.normalizer = normalizer
        assert cuts_of(tokenizer) is None
    for token in (
        AddedToken("of space", special=True),
        AddedToken("x", rstrip=True),
        AddedToken("y", single_word=True),
    ):
        tokenizer = byte_tokenizer()
        tokenizer.backend.add_tokens([token])
        assert cuts_of(tokenizer) is None


async def test_the_work_ends_with_its_waiter(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = byte_tokenizer()
    count = itertools.count()
    encode = tokenizer.encode
    monkeypatch.setattr(tokenizer, "encode", lambda *given, **named: (next(count), encode(*given, **named))[1])
    task = asyncio.create_task(encoded(tokenizer, "long text " * 10_000))
    await until(lambda: next(count) > 20)
    await cancel([task])
    await until(lambda: not work.NATIVE.waiting)
    done = next(count)
    assert await encoded(tokenizer, "abc defg") == tokenizer.encode("abc defg")
    assert next(count) - done < 10


async def test_tokenising_stops_when_there_are_too_many_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = byte_tokenizer()
    assert 50 < len(await encoded(tokenizer, "long text " * 1000, most=50)) < 70
    assert len(await encoded(tokenizer, "long text " * 1000, last=50)) < 70


async def test_texts_that_cannot_be_cut_have_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_tokenizer, "MAX_WHOLE_CHARACTERS", 100)
    tokenizer = byte_tokenizer()
    assert len(await encoded(tokenizer, "x" * 100)) == 100
    with pytest.raises(RequestError, match=r"101 characters .* it may have 100"):
        await encoded(tokenizer, "x" * 101)
    assert len(await encoded(tokenizer, "long text " * 1000)) == 10_000
