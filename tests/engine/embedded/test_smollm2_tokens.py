"""The embedded engine on the default model: real text, and equal to transformers' `generate` token for token."""

from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM

from engine.config import EmbeddedConfig
from engine.embedded.models.native.levels import available
from engine.embedded.models.native.runner import NativeRunner
from tests.engine.embedded.test_equivalence import add, make_core, run, tokens
from tests.support.steps import Part, step_of

CHATML = (
    "<|im_start|>system\nYou are a helpful AI assistant.<|im_end|>\n"
    "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
)
QUESTIONS = [
    "What is the capital of France?",
    "Write a haiku about the sea.",
    "List the first 12 prime numbers, 2 3 5 and so on.",
    "Erkläre in einem Satz, was ein Compiler ist. 🙂",
    "def fibonacci(n):",
    "Repeat this list back to me: " + ", ".join(f"item {i}" for i in range(120)),
]


@pytest.mark.slow
def test_greedy_equals_generate(smollm2: Path) -> None:
    tokenizer = Tokenizer.from_file(str(smollm2 / "tokenizer.json"))
    prompts = [tokenizer.encode(CHATML.format(question), add_special_tokens=False).ids for question in QUESTIONS]
    reference = AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32)
    expected = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        output = reference.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False, pad_token_id=2
        )
        expected.append(output[0, len(prompt) :].tolist())
    del reference
    assert "Paris" in tokenizer.decode(expected[0])
    exact = [level for level in available() if level.computes_in("float32")]
    for level in exact:
        count = len(prompts) if level == exact[-1] else 3  # the long ones by the fastest alone
        core = make_core(smollm2, max_num_tokens=100, kv_cache_memory_mb=128, cpu_isa=level.name)
        for index, prompt in enumerate(prompts[:count]):
            add(core, str(index), prompt, max_tokens=12, ignore_eos=False)
        deltas = run(core)
        assert [tokens(deltas[str(index)]) for index in range(count)] == expected[:count], level.name


@pytest.mark.slow
def test_levels_that_round_activations_keep_the_perplexity(smollm2: Path) -> None:
    tokenizer = Tokenizer.from_file(str(smollm2 / "tokenizer.json"))
    text = Path("docs/embedded-engine.md").read_text(encoding="utf-8")
    ids = tokenizer.encode(text).ids[:1500]
    perplexities = {}
    for level in {level.products: level for level in available()}.values():
        runner = NativeRunner(EmbeddedConfig(model=str(smollm2), num_blocks=48, cpu_isa=level.name))
        logits = runner.forward(step_of([Part(ids, list(range(48)), 0, len(ids))]))
        perplexities[level] = float(cross_entropy(logits[:-1], torch.tensor(ids[1:])).exp())
    exact = next(found for level, found in perplexities.items() if level.computes_in("float32"))
    for level, found in perplexities.items():
        assert found == pytest.approx(exact, rel=0.005), level.name
