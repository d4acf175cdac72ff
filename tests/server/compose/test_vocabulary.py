"""A replica does not start with a tokenizer of another model, which has more tokens than its own."""

from pathlib import Path

import msgspec
import pytest
import tokenizers
from tokenizers import AddedToken, decoders, models

from engine.config import FakeConfig
from engine.errors import EngineFailure
from engine.fake.engine import FakeEngine
from multimodal.text.tokenizer import Tokenizer
from server.compose.engine import check_vocabulary


@pytest.mark.parametrize(("added", "vocab_size", "fits"), [(0, 9, True), (0, 8, False), (2, 9, True), (2, 8, False)])
async def test_tokens_beyond_the_models_vocabulary(tmp_path: Path, added: int, vocab_size: int, fits: bool) -> None:
    """Added ones may lie beyond: text models of Gemma 3 have the image token of the others."""
    backend = tokenizers.Tokenizer(models.BPE({letter: index for index, letter in enumerate("abcdefghi")}, []))
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(f"<{index}>", special=True) for index in range(added)])
    engine = FakeEngine(FakeConfig())
    await engine.start()
    info = msgspec.structs.replace(engine.info, model=str(tmp_path), vocab_size=vocab_size)
    await engine.close()
    if fits:
        check_vocabulary(Tokenizer(backend, {}), info)
        return
    with pytest.raises(EngineFailure, match=f"tokenizer.json of {tmp_path} has 9 tokens, and vocab_size .* is 8"):
        check_vocabulary(Tokenizer(backend, {}), info)
