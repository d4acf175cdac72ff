"""Tiny models with random weights whose layers look back over windows, and what transformers generates with them."""

import random
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

WINDOW = 24
OUTPUT = 20
SIZES: dict[str, Any] = {
    "vocab_size": 384, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16,
    "max_position_embeddings": 512, "tie_word_embeddings": False, "sliding_window": WINDOW,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
KINDS: dict[str, dict[str, Any]] = {
    "gemma3_text": {
        "num_hidden_layers": 3,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
        "query_pre_attn_scalar": 40,
    },
    "gemma2": {
        "num_hidden_layers": 2,
        "query_pre_attn_scalar": 40,
        "attn_logit_softcapping": 2.0,
        "final_logit_softcapping": 3.0,
    },
    "mistral": {"num_hidden_layers": 2},
    "qwen2": {"num_hidden_layers": 3, "use_sliding_window": True, "max_window_layers": 2},
}


def save(kind: str, folder: Path, **options: Any) -> Path:
    """A model of the kind in a folder, of weights that bfloat16 holds: compiled code computes Gemma 3 and Mistral."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **{**SIZES, **KINDS.get(kind, {}), **options})
    model = AutoModelForCausalLM.from_config(config)
    for parameter in model.parameters():
        if parameter.ndim > 1:  # of a size that makes attention matter
            parameter.data.normal_(0.0, 0.3)
        parameter.data = parameter.data.bfloat16().float()
    model.generation_config = GenerationConfig(bos_token_id=1, eos_token_id=2)
    model.save_pretrained(folder)
    return folder


def prompts(count: int = 16) -> list[list[int]]:
    """Every third begins with the same 70 tokens; lengths lie below the window, around it and far beyond."""
    rng = random.Random(0)
    shared = [rng.randrange(3, 384) for _ in range(70)]
    tails = [[rng.randrange(3, 384) for _ in range(rng.choice([1, 7, 23, 24, 25, 60, 120, 200]))] for _ in range(count)]
    return [(shared if index % 3 == 0 else []) + tail for index, tail in enumerate(tails)]


def generate(folder: Path, many: list[list[int]], output: int = OUTPUT) -> list[list[int]]:
    """Greedy, float32, each prompt alone, without a repetition penalty that the model's makers may recommend."""
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    results = []
    for prompt in many:
        ids = torch.tensor([prompt])
        mask = torch.ones_like(ids)
        tokens = model.generate(
            ids, attention_mask=mask, max_new_tokens=output, do_sample=False, pad_token_id=0, eos_token_id=None,
            repetition_penalty=1.0,
        )  # fmt: skip
        results.append(tokens[0, len(prompt) :].tolist())
    return results
