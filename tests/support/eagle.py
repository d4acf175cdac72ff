"""EAGLE-3 heads of random weights, as the GPU's kernels compute them and as torch does."""

import json
import random
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from engine.checkpoints.eagle import EagleHead
from engine.embedded.models.cuda.head import CudaHead
from engine.embedded.models.heads import HeadDraft, HeadStep
from engine.embedded.models.torch.head import TorchHead

HIDDEN, VOCAB, BLOCK, BLOCKS, MOST = 64, 64, 4, 40, 6
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


class Both:
    """The same head twice, and sequences that both read."""

    def __init__(
        self, head: EagleHead, *, graphs: bool = True, device: str = "cpu", dtype: torch.dtype = torch.float32
    ) -> None:
        self._device = device
        self._rng, self._generator = random.Random(4), torch.Generator().manual_seed(4)
        weights = torch.randn((VOCAB, HIDDEN), generator=self._generator).to(device, dtype)

        def embed(tokens: torch.Tensor) -> torch.Tensor:
            return weights[tokens]

        self._plain = TorchHead(head, embed, weights, BLOCKS, BLOCK)
        sizes = {"positions": 64, "most_tokens": MOST, "batch": 5, "graphs": graphs}
        self._fast = CudaHead(head, weights, weights, blocks=BLOCKS, block_size=BLOCK, **sizes)
        self.ends = [0] * 5
        """Number of positions of each sequence that have been read."""
        self.skipped = [0] * 5
        """Number of blocks before the first of its table."""

    def draft(self, asked: list[tuple[int, int, int]], least: float = 0.0) -> list[tuple[HeadDraft, HeadDraft]]:
        """Read and draft: sequences, how many positions of each, and limits. Return what each found, plain operations
        first."""
        count = sum(length for _, length, _ in asked)
        limits = [limit for _, _, limit in asked]
        inputs = torch.randn((count, 3 * HIDDEN), generator=self._generator).to(self._device)
        step = HeadStep([], [], [], [], [], inputs)
        for index, length, limit in asked:
            start = self.ends[index]
            self.ends[index] += length
            step.tokens.extend(self._rng.randrange(VOCAB) for _ in range(length))
            step.positions.extend(range(start, start + length))
            step.starts.append(start - self.skipped[index] * BLOCK)
            step.lengths.append(length)
            held = -(-(step.starts[-1] + length + limit) // BLOCK)
            step.tables.append([8 * index + block for block in range(held)])
        expected, found = self._plain.draft(step, limits, least), self._fast.draft(step, limits, least)
        return list(zip(expected, found, strict=True))
