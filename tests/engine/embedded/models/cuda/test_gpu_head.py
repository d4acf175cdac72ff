"""The EAGLE-3 head on a GPU: its graphs draft what plain operations do, but for roundings, and requests wait for no
kernel."""

import logging
import random
from types import SimpleNamespace

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.speculation import run_requests
from engine.checkpoints.eagle import EagleHead, read_eagle_head
from engine.checkpoints.facts import read_model_facts
from engine.config import EmbeddedConfig
from engine.embedded.core import EngineCore
from engine.types import GenerateRequest, SamplingParams

pytest.importorskip("triton", reason="Triton is not installed")

from tests.support.eagle import MOST, Both
from tests.support.head_files import VOCAB, write_head

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    folder, path = tmp_path_factory.mktemp("llama"), tmp_path_factory.mktemp("head")
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, intermediate_size=128,
        vocab_size=VOCAB, max_position_embeddings=512, initializer_range=0.15, eos_token_id=1, bos_token_id=0,
    )  # fmt: skip
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    write_head(path)
    return SimpleNamespace(folder=folder, head=path)


@pytest.fixture(scope="module")
def head(model: SimpleNamespace) -> EagleHead:
    return read_eagle_head(model.head, read_model_facts(model.folder))


def test_drafts_are_those_of_plain_operations(head: EagleHead) -> None:
    both, rng, same = Both(head, device="cuda", dtype=torch.bfloat16), random.Random(5), list[bool]()
    for _ in range(30):
        asked = [(index, rng.choice([1, 2]), rng.randrange(MOST + 1)) for index in rng.sample(range(5), 3)]
        asked = [entry for entry in asked if both.ends[entry[0]] < 24]
        for expected, found in both.draft(asked) if asked else ():
            assert len(found.tokens) == len(expected.tokens)
            same += [one == other for one, other in zip(expected.tokens, found.tokens, strict=True)]
        if min(both.ends) >= 20:
            break
    assert len(same) > 30 and sum(same) > 0.8 * len(same)


def test_requests_are_answered_and_wait_for_no_kernel(model: SimpleNamespace, caplog: pytest.LogCaptureFixture) -> None:
    config = EmbeddedConfig(
        model=str(model.folder), device="cuda", dtype="bfloat16", num_blocks=100, max_batch_size=4,
        speculative="eagle3", speculative_model=str(model.head), speculative_min_speedup=0.0, speculative_tokens=MOST,
        speculative_min_match=1000,
    )  # fmt: skip
    core = EngineCore(config, lambda _: None)
    caplog.set_level(logging.WARNING)
    params = SamplingParams(max_tokens=50, temperature=0.0, ignore_eos=True)
    requests = [
        GenerateRequest(
            request_id=str(index),
            prompt_token_ids=tuple(random.Random(index).randrange(3, VOCAB) for _ in range(3 + 20 * index)),
            sampling=params,
        )
        for index in range(6)
    ]
    answers = run_requests(core, requests).answers
    assert [len(answer) for answer in answers] == [50] * 6
    stats = core.stats().spec_decoding_stats
    assert stats is not None and stats.num_drafts > 100
    assert "a request waited for kernel" not in caplog.text
    core.close()
