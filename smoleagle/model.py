"""The head: EAGLE-3's draft model, one decoder layer over the target's hidden states (Li et al., 2025).

Its input at a position is the embedding of the next token beside three of the target's hidden states; its output is
the token after that. To draft further it takes its own output in the place of the target's.
"""

import json
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional

Config = dict[str, Any]
CONFIG_FILE = "config.json"


def read_config(folder: Path) -> Config:
    config: Config = json.loads((folder / CONFIG_FILE).read_text())
    return config


class Norm(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(config["hidden_size"]))
        self.epsilon = config["rms_norm_eps"]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x.float()
        return (y * torch.rsqrt(y.square().mean(-1, keepdim=True) + self.epsilon) * self.weight).to(x.dtype)


class Attention(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        hidden, dim = config["hidden_size"], config["head_dim"]
        self.heads, self.kv_heads, self.dim = config["num_attention_heads"], config["num_key_value_heads"], dim
        self.theta = config["rope_theta"]
        self.q_proj = nn.Linear(2 * hidden, self.heads * dim, bias=False)
        self.k_proj = nn.Linear(2 * hidden, self.kv_heads * dim, bias=False)
        self.v_proj = nn.Linear(2 * hidden, self.kv_heads * dim, bias=False)
        self.o_proj = nn.Linear(self.heads * dim, hidden, bias=False)

    def forward(self, x: torch.Tensor, first: int, past: list[tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
        """`x`: [batch, positions, 2 * hidden], which begin at `first`. `past` has the keys and values of earlier
        passes: of the first one those up to a position are seen, of each later one those of the position alone."""
        batch, length, _ = x.shape
        group = self.heads // self.kv_heads
        query = _turned(self.q_proj(x).view(batch, length, self.heads, self.dim), first, self.theta)
        key = _turned(self.k_proj(x).view(batch, length, self.kv_heads, self.dim), first, self.theta)
        value = self.v_proj(x).view(batch, length, self.kv_heads, self.dim)
        key, value = (y.repeat_interleave(group, 2).transpose(1, 2) for y in (key, value))
        past.append((key, value))
        query = query.transpose(1, 2) * self.dim**-0.5
        later = torch.ones(length, length, dtype=torch.bool, device=x.device).triu(1)
        scores = (query @ past[0][0].transpose(2, 3)).masked_fill(later, float("-inf"))
        own = [(query * key).sum(-1, keepdim=True) for key, _ in past[1:]]
        weights = torch.cat((scores, *own), -1).float().softmax(-1).to(value.dtype)
        out = weights[..., :length] @ past[0][1]
        for index, (_, value) in enumerate(past[1:]):
            out = out + weights[..., length + index, None] * value
        return self.o_proj(out.transpose(1, 2).flatten(2))


class Mlp(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        hidden, width = config["hidden_size"], config["intermediate_size"]
        self.gate_proj = nn.Linear(hidden, width, bias=False)
        self.up_proj = nn.Linear(hidden, width, bias=False)
        self.down_proj = nn.Linear(width, hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.self_attn, self.mlp = Attention(config), Mlp(config)
        self.hidden_norm, self.input_layernorm = Norm(config), Norm(config)
        self.post_attention_layernorm = Norm(config)

    def forward(
        self, embedded: torch.Tensor, x: torch.Tensor, first: int, past: list[tuple[torch.Tensor, torch.Tensor]]
    ) -> torch.Tensor:
        joined = torch.cat((self.input_layernorm(embedded), self.hidden_norm(x)), -1)
        x = x + self.self_attn(joined, first, past)
        return x + self.mlp(self.post_attention_layernorm(x))


class Head(nn.Module):
    """The head's trained parts, under their published names; embeddings and output rows are the target's."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        hidden = config["hidden_size"]
        self.fc = nn.Linear(3 * hidden, hidden, bias=False)
        self.midlayer = Layer(config)
        self.norm = Norm(config)
        for parameter in self.parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.02)

    def forward(
        self, features: torch.Tensor, tokens: torch.Tensor, embedding: torch.Tensor, depth: int
    ) -> list[torch.Tensor]:
        """Return the outputs [batch, positions, hidden], before the output rows, of `depth` tokens drafted in a row
        from each position. `features`: [batch, positions, 3 * hidden] of the target; `tokens`: [batch, positions].

        Pass i stands for the i-th token of a draft: it sees the right tokens so far, as a draft that goes on is right
        so far, and the head's own output in the place of hidden states that the target has not computed.
        """
        x, past, found = self.fc(features), [], []
        for index in range(depth):
            following = functional.pad(tokens[:, 1 + index :], (0, 1 + index))
            x = self.midlayer(functional.embedding(following, embedding), x, index, past)
            found.append(self.norm(x))
        return found


def _turned(x: torch.Tensor, first: int, theta: float) -> torch.Tensor:
    """Rotate [batch, positions, heads, dim] by position."""
    half = x.shape[-1] // 2
    frequencies = theta ** (-torch.arange(half, device=x.device) / half)
    angles = torch.arange(first, first + x.shape[1], device=x.device)[:, None, None] * frequencies
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    low, high = x.chunk(2, -1)
    return torch.cat((low * cos - high * sin, high * cos + low * sin), -1)
