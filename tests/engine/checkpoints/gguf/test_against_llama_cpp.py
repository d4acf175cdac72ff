"""GGUF files give what llama.cpp gives for them: weights, token ids and greedy tokens that it produced are stored.

`llama_cpp.json` says which llama.cpp made it, from the files that `tests/support/gguf_files.py` writes and from random
weights that it quantised.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine.checkpoints.gguf.convert import convert
from engine.checkpoints.gguf.families import GGUF_FAMILIES
from engine.checkpoints.gguf.file import GgufFile
from engine.checkpoints.gguf.tokenizer import PRE_TOKENIZERS, GgufVocabulary
from engine.embedded.models.native.runner import NativeRunner
from tests.engine.embedded.test_equivalence import add, make_core, run
from tests.engine.embedded.test_equivalence import tokens as tokens_of
from tests.support.gguf_files import pieces, write_gguf

KNOWN = json.loads((Path(__file__).parent / "llama_cpp.json").read_text(encoding="utf-8"))
TEXTS: list[str] = KNOWN["texts"]
FACTORS = np.array([1, 1, 1, 3.5, 3.5, 8, 8, 8], np.float32)
LINEAR = {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}
YARN = {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 32}
SOFT = {"final_logit_softcapping": 20.0, "rope.scaling.type": "linear", "rope.scaling.factor": 8.0}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama tied": {"tied": True},
    "llama linear": {"settings": LINEAR},
    "llama yarn": {"settings": YARN},
    "llama factors": {"tensors": {"rope_freqs.weight": FACTORS}},
    "qwen2": {"architecture": "qwen2", "tokenizer": {"pre": "qwen2"}},
    "qwen3": {"architecture": "qwen3", "tokenizer": {"pre": "qwen2"}},
    "gemma3": {"architecture": "gemma3"},
    "gemma3 soft": {"architecture": "gemma3", "settings": SOFT},
}


VARIANTS = {"llama tied", "llama linear", "llama yarn", "gemma3 soft"}
"""What `make test` leaves to `make test-slow`."""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if name in VARIANTS else name for name in MODELS]
)
def test_greedy_tokens(tmp_path: Path, name: str) -> None:
    """Across windows of 16 tokens, and with prompts of 7, 40 and 90."""
    file = GgufFile(write_gguf(tmp_path / "model.gguf", **MODELS[name]))
    convert(file, tmp_path, lambda *_: None)
    core = make_core(tmp_path, max_num_tokens=64, kv_cache_memory_mb=8)
    assert isinstance(core.runner, NativeRunner) == (name != "gemma3 soft")
    for index, prompt in enumerate(KNOWN["prompts"]):
        add(core, str(index), prompt, max_tokens=16, ignore_eos=True)
    deltas = run(core)
    assert [tokens_of(deltas[str(index)]) for index in range(len(KNOWN["prompts"]))] == KNOWN["greedy"][name]


def test_every_architecture_is_compared() -> None:
    assert {name.split()[0] for name in KNOWN["greedy"]} == set(GGUF_FAMILIES)
    assert KNOWN["greedy"].keys() == MODELS.keys() and KNOWN["pre"].keys() == PRE_TOKENIZERS.keys()


@pytest.mark.parametrize("pre", PRE_TOKENIZERS)
def test_byte_level_token_ids(tmp_path: Path, pre: str) -> None:
    file = GgufFile(write_gguf(tmp_path / "model.gguf", tokenizer={"pre": pre}))
    tokenizer = GgufVocabulary(file.metadata, "it").tokenizer()
    assert [tokenizer.encode(text).ids for text in TEXTS] == KNOWN["pre"][pre]


@pytest.mark.parametrize("spaced", [True, False])
def test_sentence_piece_token_ids(tmp_path: Path, spaced: bool) -> None:
    words = pieces() | {"add_space_prefix": spaced}
    file = GgufFile(write_gguf(tmp_path / "model.gguf", vocabulary=words))
    tokenizer = GgufVocabulary(file.metadata, "it").tokenizer()
    assert [tokenizer.encode(text).ids for text in TEXTS] == KNOWN["pieces"][str(spaced)]
    ids = tokenizer.encode("the  abc\né", add_special_tokens=False).ids
    assert tokenizer.decode(ids, skip_special_tokens=False) == "the  abc\né"
