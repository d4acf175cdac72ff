"""The training of the EAGLE-3 head, on a model of a few thousand weights."""

import json
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM

import smoleagle
from smoleagle.generate import Texts, Writer
from smoleagle.model import Head, read_config
from smoleagle.prompts import message, prompt
from smoleagle.train import Target, accepted, config_for, loss_of

SMALL = read_config(Path(smoleagle.__file__).parent / "smollm2-135m-instruct") | {
    "hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16,
}  # fmt: skip


def make_target() -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=16, hidden_size=32, intermediate_size=32, num_hidden_layers=6, num_attention_heads=2,
        num_key_value_heads=1, initializer_range=0.3,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval().requires_grad_(False)


def test_a_head_learns_what_the_model_says() -> None:
    torch.manual_seed(0)
    model = make_target()
    tokens = model.generate(torch.tensor([[3], [7]]), max_new_tokens=11, do_sample=False, eos_token_id=99)
    texts = Texts(tokens, torch.ones_like(tokens, dtype=torch.bool))
    target, head = Target(model, 16), Head(SMALL)
    assert target.choose([texts]) == 1
    optimizer = torch.optim.AdamW(head.parameters(), lr=2e-2)
    before = loss_of(head, target, tokens, texts.written, target.read(tokens), 2).item()
    for _ in range(25):
        loss = loss_of(head, target, tokens, texts.written, target.read(tokens), 2)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert loss.item() < before
    first, both = accepted(head, target, texts, 2, batch=2)
    assert first >= both > 0.5


def test_held_out_prompts_are_not_those_of_training() -> None:

    trained = {message(Random(seed), held_out=False) for seed in range(300)}
    assert not trained & {message(Random(seed), held_out=True) for seed in range(300)}
    ends = {prompt(Random(seed), False, "").rpartition("<|im_start|>")[2] for seed in range(50)}
    assert ends == {"user\n", "assistant\n"}


def test_a_text_ends_with_the_turns_of_any_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their end has the id that the model's tokenizer gives it, and logits come from rows that the model may have apart
    from its embedding."""
    words = {"<unk>": 0, "<|im_end|>": 5, "user": 6, "assistant": 7, "Qwen": 8}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()  # type: ignore[assignment]
    monkeypatch.setattr("smoleagle.generate.prompt", lambda rng, held_out, system: f"{system} user assistant")
    torch.manual_seed(1)
    model = make_target()
    texts = Writer(model, tokenizer, 24, 20, "Qwen").write(0, temperatures=(0.0, 1.0))
    assert texts.tokens[:, :3].unique(dim=0).tolist() == [[8, 6, 7]]
    assert not texts.written[:, :3].any()
    greedy = model.generate(texts.tokens[:1, :3], max_new_tokens=17, do_sample=False, eos_token_id=99)
    assert greedy[0].tolist() in texts.tokens.tolist()
    ended = [row for row, written in zip(texts.tokens, texts.written, strict=True) if 5 in row[written]]
    assert 0 < len(ended) < 24
    for row, written in zip(texts.tokens[:, 3:].tolist(), texts.written[:, 3:].tolist(), strict=True):
        last = row.index(5) if 5 in row else len(row) - 1
        assert written == [index <= last for index in range(len(row))]


def test_bases_that_texts_cannot_be_written_for_are_refused() -> None:
    empty = Tokenizer(models.WordLevel({"<unk>": 0}, unk_token="<unk>"))
    with pytest.raises(SystemExit, match="tokenizer has no"):
        Writer(make_target(), empty, 1, 8, "")
    model = make_target()
    model.config.model_type = "qwen3"
    with pytest.raises(SystemExit, match="of the type qwen3, not llama or qwen2"):
        Writer(model, empty, 1, 8, "")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"vocab_size": 17}, "vocab_size is 17 in .* and 16 in the base"),
        ({"eagle_config": {}}, "has eagle_config: heads are trained for layers 2"),
    ],
)
def test_heads_that_are_not_for_the_base_are_refused(tmp_path: Path, change: dict[str, Any], reason: str) -> None:
    right = SMALL | {"vocab_size": 16}
    (tmp_path / "config.json").write_text(json.dumps(right))
    assert config_for(make_target(), tmp_path) == right
    (tmp_path / "config.json").write_text(json.dumps(right | change))
    with pytest.raises(SystemExit, match=reason):
        config_for(make_target(), tmp_path)
