"""A small model drafts for a large one."""

import json
import random
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from engine.config import EmbeddedConfig
from engine.embedded.core import EngineCore
from engine.embedded.sampling.state import SamplerState
from engine.embedded.sequence import Sequence
from engine.embedded.speculation.draft_model import DraftModel
from engine.errors import EngineFailure
from engine.types import Delta, GenerateRequest, SamplingParams


def sequence(prompt: list[int], name: str) -> Sequence:
    params = SamplingParams(max_tokens=40, temperature=0, ignore_eos=True)
    request = GenerateRequest(request_id=name, prompt_token_ids=tuple(prompt), sampling=params)
    state = SamplerState(params, prompt, (2,), 0, None, 384, torch.device("cpu"))
    return Sequence(request=request, sampler=state, rank=0.0, arrival=0.0, tokens=list(prompt))


@pytest.fixture(scope="module")
def draft_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A smaller model than `tiny_model`, with its vocabulary."""
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=384, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=512, eos_token_id=2,
    )  # fmt: skip
    path = tmp_path_factory.mktemp("draft")
    LlamaForCausalLM(config).save_pretrained(path)
    return path


def run(folder: Path, prompts: list[list[int]], **options: object) -> tuple[list[list[int]], EngineCore]:
    fixed = {"dtype": "float32", "threads": 1, "num_blocks": 100, "kv_block_size": 16, "max_batch_size": 4}
    core = EngineCore(EmbeddedConfig(model=str(folder), **{**fixed, **options}), lambda _: None)
    answers: list[list[int]] = [[] for _ in prompts]
    for index, prompt in enumerate(prompts):
        core.add(sequence(prompt, name=str(index)))
    with torch.inference_mode():
        while core.busy:
            for name, delta in core.step():
                assert isinstance(delta, Delta)
                answers[int(name)] += delta.token_ids
    return answers, core


@pytest.mark.parametrize("overlap", ["on", "off"])
@pytest.mark.parametrize("itself", [True, False])
def test_a_draft_model_changes_nothing(tiny_model: Path, draft_folder: Path, overlap: str, itself: bool) -> None:
    """The model itself as its own draft model is always right."""
    rng = random.Random(0)
    prompts = [[rng.randrange(3, 384) for _ in range(length)] for length in (5, 150, 40, 70, 20)]
    plain, _ = run(tiny_model, prompts)
    drafts = {"speculative": "draft", "speculative_model": str(tiny_model if itself else draft_folder)}
    found, core = run(
        tiny_model, prompts, speculative_tokens=4, speculative_min_speedup=0, speculative_min_match=1000,
        overlap_scheduler=overlap, **drafts,
    )  # fmt: skip
    assert found == plain
    stats = core.stats().spec_decoding_stats
    assert stats is not None and stats.num_drafts > 0
    if itself:
        assert stats.num_accepted_tokens == stats.num_draft_tokens
        assert core.stats().iteration < sum(map(len, plain)) / 4
    assert core.speculator is not None and isinstance(core.speculator.drafter, DraftModel)
    assert core.speculator.drafter.used_blocks == 0


def test_a_draft_model_of_another_tokenizer_stops_the_start(tmp_path: Path) -> None:
    for name, words in (("target", ["a", "b"]), ("draft", ["a", "c"])):
        (tmp_path / name).mkdir()
        model = {"model": {"vocab": {word: index for index, word in enumerate(words)}}, "added_tokens": []}
        (tmp_path / name / "tokenizer.json").write_text(json.dumps(model))
    config = EmbeddedConfig(model=str(tmp_path / "target"), speculative_model=str(tmp_path / "draft"))
    with pytest.raises(EngineFailure, match=r"SPECULATIVE_MODEL: the tokenizer in .*: 2 tokens differ"):
        DraftModel(config, None)  # type: ignore[arg-type] # the tokenizers come first
