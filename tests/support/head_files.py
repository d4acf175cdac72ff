"""Files of an EAGLE-3 head of random weights."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

HIDDEN, VOCAB = 64, 64
CONFIG: dict[str, Any] = {
    "hidden_size": HIDDEN, "intermediate_size": 80, "num_hidden_layers": 1, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "hidden_act": "silu", "rms_norm_eps": 1e-6, "rope_theta": 10000.0,
    "max_position_embeddings": 64, "vocab_size": VOCAB, "draft_vocab_size": 48,
    "eagle_aux_hidden_state_layer_ids": [0, 1, 1],
}  # fmt: skip
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}


def write_head(path: Path, **changed: Any) -> None:
    """Write a head without output rows of its own, for a model of 64 hidden values and 64 tokens."""
    (path / "config.json").write_text(json.dumps(CONFIG | changed))
    generator = torch.Generator().manual_seed(2)
    drafted = torch.randperm(VOCAB, generator=generator)[: CONFIG["draft_vocab_size"]].sort().values
    attention = {"q_proj": (64, 128), "k_proj": (32, 128), "v_proj": (32, 128), "o_proj": (64, 64)}
    mlp = {"gate_proj": (80, 64), "up_proj": (80, 64), "down_proj": (64, 80)}
    norms = ("midlayer.hidden_norm", "midlayer.input_layernorm", "midlayer.post_attention_layernorm", "norm")
    shapes: dict[str, tuple[int, ...]] = {f"midlayer.self_attn.{name}": shape for name, shape in attention.items()}
    shapes |= {f"midlayer.mlp.{name}": shape for name, shape in mlp.items()}
    shapes |= {"fc": (64, 192)} | dict.fromkeys(norms, (64,))
    tensors = {
        f"{name}.weight": torch.empty(shape).normal_(float(len(shape) == 1), 0.2, generator=generator)
        for name, shape in shapes.items()
    }
    save_file(tensors | {"d2t": drafted - torch.arange(len(drafted))}, path / "model.safetensors")
