"""An EAGLE-3 head in torch's operations, on any device."""

import math
from collections.abc import Callable, Sequence
from itertools import accumulate

import torch
from torch.nn import functional

from engine.checkpoints.eagle import EagleHead
from engine.embedded.models.devices import to_device
from engine.embedded.models.heads import (
    DraftRounds,
    HeadDraft,
    HeadStep,
    head_rotary,
    likeliest,
    load_tensors,
    places_of,
)


class TorchHead:
    """A `HeadRunner`. It waits for the device once for each token drafted, and runs in no CUDA graph."""

    rounds: DraftRounds | None = None

    def __init__(
        self, head: EagleHead, embed: Callable[[torch.Tensor], torch.Tensor], output: torch.Tensor, blocks: int,
        block_size: int,
    ) -> None:  # fmt: skip
        """`embed` returns the target's embeddings of token ids; `output` has its output rows, for a head without its
        own. Raises EngineFailure."""
        facts, tensors = head.facts, load_tensors(head)
        self._device, dtype = output.device, output.dtype
        rotary = head_rotary(head)
        self._embed, self._rotary = embed, rotary._replace(frequencies=rotary.frequencies.to(self._device))
        self._drafted = tensors.pop("d2t").to(self._device)
        self._weights = {name: tensor.to(self._device, dtype) for name, tensor in tensors.items()}
        if "lm_head" not in self._weights:
            self._weights["lm_head"] = output[self._drafted]
        self._norm_before_residual, self._epsilon = head.norm_before_residual, facts.number("rms_norm_eps")
        self._heads, self._kv_heads, self._dim = facts.heads, facts.kv_heads, facts.head_dim
        self._size = block_size
        shape = blocks, block_size, 2, self._kv_heads, self._dim
        self._cache = torch.zeros(shape, dtype=dtype, device=self._device)

    @torch.inference_mode()
    def draft(self, step: HeadStep, limits: Sequence[int], least: float) -> list[HeadDraft]:
        """See `HeadRunner`."""
        drafts = [HeadDraft([], []) for _ in limits]
        hidden = self._product(step.inputs.to(self._weights["fc"].dtype), "fc")
        going = list(range(len(limits)))
        while True:
            last = self._compute(step, hidden)
            best, probabilities = likeliest(self._product(self._normalise(last, "norm"), "lm_head"))
            tokens: list[int] = self._drafted[self._to_device(best)].tolist()
            left: list[int] = []
            for row, (index, token, probability) in enumerate(zip(going, tokens, probabilities, strict=True)):
                if not limits[index]:
                    continue
                drafts[index].tokens.append(token)
                drafts[index].probabilities.append(probability)
                if len(drafts[index].tokens) < limits[index] and math.prod(drafts[index].probabilities) > least:
                    left.append(row)
            if not left:
                return drafts
            ends = list(accumulate(step.lengths))
            step = HeadStep(
                tokens=[tokens[row] for row in left],
                positions=[step.positions[ends[row] - 1] + 1 for row in left],
                starts=[step.starts[row] + step.lengths[row] for row in left],
                lengths=[1] * len(left),
                tables=[step.tables[row] for row in left],
                inputs=step.inputs,
            )
            going, hidden = [going[row] for row in left], last[left]

    def _compute(self, step: HeadStep, hidden: torch.Tensor) -> torch.Tensor:
        """Compute positions of their hidden states [positions, hidden]; return the output at the last ones."""
        normed = self._normalise(hidden, "hidden_norm")
        x = normed if self._norm_before_residual else hidden
        joined = torch.cat((self._normalise(self._embed(self._to_device(step.tokens)), "input_layernorm"), normed), -1)
        x = x + self._product(self._attend(joined, step), "o_proj")
        normed = self._normalise(x, "post_attention_layernorm")
        gated = functional.silu(self._product(normed, "gate_proj")) * self._product(normed, "up_proj")
        x = x + self._product(gated, "down_proj")
        return x[self._to_device(step.lengths).cumsum(0) - 1]

    def _attend(self, joined: torch.Tensor, step: HeadStep) -> torch.Tensor:
        """Write keys and values, and attend to them in the sequences' blocks: [positions, heads * dim]."""
        count, longest = len(step.lengths), max(step.lengths)
        positions = self._to_device(step.positions)
        query = self._turned(self._product(joined, "q_proj"), positions)
        key = self._turned(self._product(joined, "k_proj"), positions)
        value = self._product(joined, "v_proj").view(len(joined), self._kv_heads, self._dim)
        flat = places_of(step)
        owners = [index for index, length in enumerate(step.lengths) for _ in range(length)]
        blocks = self._to_device(
            [step.tables[owner][place // self._size] for owner, place in zip(owners, flat, strict=True)]
        )
        slots = self._to_device([place % self._size for place in flat])
        self._cache[blocks, slots] = torch.stack((key, value), 1)

        ends = [start + length for start, length in zip(step.starts, step.lengths, strict=True)]
        wide = -(-max(ends) // self._size)
        tables = self._to_device([(table + [0] * wide)[:wide] for table in step.tables])
        keys, values = self._cache[tables].flatten(1, 2).transpose(1, 3).unbind(2)  # [sequences, kv heads, keys, dim]
        padded = query.new_zeros((count, longest, self._heads, self._dim))
        rows = self._to_device([place - step.starts[owner] for owner, place in zip(owners, flat, strict=True)])
        padded[self._to_device(owners), rows] = query
        place = self._to_device(step.starts)[:, None] + torch.arange(longest, device=self._device)
        seen = torch.arange(keys.shape[2], device=self._device) <= place[:, :, None]
        found = functional.scaled_dot_product_attention(
            padded.transpose(1, 2), keys, values, attn_mask=seen[:, None], enable_gqa=True
        )
        return found.transpose(1, 2)[self._to_device(owners), rows].flatten(1)

    def _turned(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        angles = (positions[:, None] * self._rotary.frequencies)[:, None]
        cos, sin = ((turn * self._rotary.attention_factor).to(x.dtype) for turn in (angles.cos(), angles.sin()))
        low, high = x.view(len(x), -1, self._dim).chunk(2, -1)
        return torch.cat((low * cos - high * sin, high * cos + low * sin), -1)

    def _normalise(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return functional.rms_norm(x.float(), x.shape[-1:], self._weights[name].float(), self._epsilon).to(x.dtype)

    def _product(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return functional.linear(x, self._weights[name])

    def _to_device(self, values: Sequence[int] | Sequence[list[int]]) -> torch.Tensor:
        return to_device(values, torch.int64, self._device)
