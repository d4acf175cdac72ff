"""All of canitoolcall's fixtures under all its ways to cut a stream, with token ids, and with hidden special tokens."""

import pytest
from canitoolcall.chunking import DEFAULT_STRATEGIES, ChunkStrategy

from multimodal.answers.parsers.choose import family
from tests.support.fixtures_of_calls import (
    FIXTURES,
    FORMATS,
    chunks,
    from_ids,
    from_text,
    parsers_of,
    passes,
    random_groups,
    tokenizer_of,
)

STRATEGIES = [*DEFAULT_STRATEGIES, ChunkStrategy("char", 0), ChunkStrategy("char", 1), ChunkStrategy("char", 2)]


@pytest.mark.parametrize("name", FIXTURES)
def test_text(name: str) -> None:
    fixture = FIXTURES[name]
    streams = {strategy.id: from_text(fixture, chunks(fixture, strategy), whole_calls=True) for strategy in STRATEGIES}
    assert streams["char:0"] == streams["char:1"] == streams["char:2"] or fixture.expected is not None
    passes(fixture, from_text(fixture, [fixture.raw_output], whole_calls=True), streams)


@pytest.mark.parametrize("skip", [False, True], ids=["shown", "hidden"])
@pytest.mark.parametrize("name", FIXTURES)
def test_token_ids(name: str, skip: bool) -> None:
    """Markers are special tokens, which the detokenizer shows or drops."""
    fixture = FIXTURES[name]
    known = family(*parsers_of(fixture)).markers
    markers = [marker for marker in FORMATS[fixture.family].markers if marker in fixture.raw_output]
    if skip and not all(marker in known for marker in markers):
        pytest.skip("has a special token in its text that is no marker of the parser's")
    ids = tokenizer_of(FORMATS[fixture.family]).encode(fixture.raw_output)
    streams = {
        f"rand:{seed}:8": from_ids(fixture, random_groups(ids, seed), skip, whole_calls=True) for seed in (1, 2)
    } | {"token": from_ids(fixture, [[token] for token in ids], skip, whole_calls=True)}
    passes(fixture, from_ids(fixture, [ids], skip, whole_calls=True), streams)
