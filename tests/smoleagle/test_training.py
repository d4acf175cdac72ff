"""The training of the EAGLE-3 head, on a model of a few thousand weights."""

from random import Random

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from smoleagle.generate import Texts
from smoleagle.model import CONFIG, Head
from smoleagle.prompts import message, prompt
from smoleagle.train import Target, accepted, loss_of

SMALL = CONFIG | {
    "hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16,
}  # fmt: skip


def test_a_head_learns_what_the_model_says() -> None:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=16, hidden_size=32, intermediate_size=32, num_hidden_layers=6, num_attention_heads=2,
        num_key_value_heads=1, initializer_range=0.3,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval().requires_grad_(False)
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
    ends = {prompt(Random(seed)).rpartition("<|im_start|>")[2] for seed in range(50)}
    assert ends == {"user\n", "assistant\n"}
