"""Whisper's encoder: from log-mel features (`engine/kit/log_mel.py`) to one vector for each 20 ms of speech."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from torch.nn import functional

from engine.checkpoints.headers import Headers, place, read_headers
from engine.errors import EngineFailure

Weights = Mapping[str, torch.Tensor]
"""Tensors by their names in the files, without the prefix of the part that they belong to."""


def load_weights(folder: Path, prefix: str, dtype: torch.dtype, device: torch.device) -> dict[str, torch.Tensor]:
    """Return the tensors of a folder's safetensors whose names begin with `prefix`, without it. Raises EngineFailure
    for files that are damaged, and for values that are not finite."""
    stored: Headers = read_headers(folder)
    found: dict[str, torch.Tensor] = {}
    for path in {tensor.path for name, tensor in stored.items() if name.startswith(prefix)}:
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - it is no mapping
                if name.startswith(prefix):
                    values = file.get_tensor(name).to(device, dtype)
                    if not values.isfinite().all():
                        raise EngineFailure(f"{place(stored, name)} has values that are not finite")
                    found[name.removeprefix(prefix)] = values
    if not found:
        raise EngineFailure(f"the safetensors of {folder} have no tensors of {prefix.rstrip('.')}")
    return found


@dataclass(frozen=True)
class Linear:
    """A matrix [outputs, inputs] and, if there is one, what is added to its product."""

    weight: torch.Tensor
    bias: torch.Tensor | None

    @classmethod
    def of(cls, weights: Weights, *names: str) -> "Linear":
        """Return one or several matrices of the same input, as one. Raises LookupError."""
        matrices = [weights[f"{name}.weight"] for name in names]
        biases = [weights.get(f"{name}.bias") for name in names]
        if all(bias is None for bias in biases):
            return cls(torch.cat(matrices), None)
        whole = [
            matrix.new_zeros(len(matrix)) if bias is None else bias
            for matrix, bias in zip(matrices, biases, strict=True)
        ]
        return cls(torch.cat(matrices), torch.cat(whole))

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return functional.linear(x, self.weight, self.bias)


@dataclass(frozen=True)
class Norm:
    weight: torch.Tensor
    bias: torch.Tensor

    @classmethod
    def of(cls, weights: Weights, name: str) -> "Norm":
        return cls(weights[f"{name}.weight"], weights[f"{name}.bias"])

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return functional.layer_norm(x, self.weight.shape, self.weight, self.bias)


@contextmanager
def missing_tensors(prefix: str) -> Iterator[None]:
    """Raise EngineFailure for a tensor that the weights lack, named as in the files."""
    try:
        yield
    except KeyError as error:
        raise EngineFailure(f"the safetensors of the model lack the tensor {prefix}{error.args[0]}") from error


def split_heads(x: torch.Tensor, heads: int) -> torch.Tensor:
    """[n, length, heads * size] as [n, heads, length, size]."""
    return x.view(*x.shape[:2], heads, -1).transpose(1, 2)


def join_heads(x: torch.Tensor) -> torch.Tensor:
    """[n, heads, length, size] as [n, length, heads * size]."""
    return x.transpose(1, 2).flatten(2)


class FeedForward:
    """The second half of every layer."""

    def __init__(self, weights: Weights, prefix: str) -> None:
        self._norm = Norm.of(weights, f"{prefix}.final_layer_norm")
        self._up = Linear.of(weights, f"{prefix}.fc1")
        self._down = Linear.of(weights, f"{prefix}.fc2")

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return x + self._down(functional.gelu(self._up(self._norm(x))))


class _EncoderLayer:
    def __init__(self, weights: Weights, prefix: str, heads: int) -> None:
        attention = f"{prefix}.self_attn"
        self._heads = heads
        self._norm = Norm.of(weights, f"{prefix}.self_attn_layer_norm")
        self._inputs = Linear.of(weights, *(f"{attention}.{part}_proj" for part in "qkv"))
        self._output = Linear.of(weights, f"{attention}.out_proj")
        self._feed_forward = FeedForward(weights, prefix)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (split_heads(part, self._heads) for part in self._inputs(self._norm(x)).chunk(3, -1))
        x = x + self._output(join_heads(functional.scaled_dot_product_attention(q, k, v)))
        return self._feed_forward(x)


class AudioEncoder:
    """The encoder of one model, on the device and in the type of its weights, which are named as in Whisper's files
    behind `model.encoder.`. Raises EngineFailure if one is missing."""

    def __init__(self, weights: Weights, layers: int, heads: int) -> None:
        with missing_tensors("model.encoder."):
            self._convolutions = [(weights[f"conv{n}.weight"], weights[f"conv{n}.bias"]) for n in (1, 2)]
            self._positions = weights["embed_positions.weight"]
            self._layers = [_EncoderLayer(weights, f"layers.{number}", heads) for number in range(layers)]
            self._norm = Norm.of(weights, "layer_norm")

    @property
    def bins(self) -> int:
        """Mel bins of the features that it takes."""
        return self._convolutions[0][0].shape[1]

    @property
    def width(self) -> int:
        return self._positions.shape[1]

    @property
    def positions(self) -> int:
        """Maximum number of positions of its output."""
        return len(self._positions)

    @torch.inference_mode()
    def __call__(self, features: torch.Tensor) -> torch.Tensor:
        """Encode windows of equal length: [n, bins, frames] as [n, frames / 2, width]. Whisper was trained on windows
        of 30 seconds, 3000 frames; fewer are computed as they are."""
        return self._norm(self._hidden(features, self.positions))

    @torch.inference_mode()
    def averaged(self, features: torch.Tensor, positions: int) -> torch.Tensor:
        """Encode windows, of which the first `positions` are speech and the others silence, which nothing attends to:
        averages of two neighbours, [n, positions // 2, width]."""
        x = self._hidden(features, positions)
        pairs = x[:, : positions // 2 * 2].reshape(len(x), positions // 2, 2, self.width)
        return self._norm(pairs.mean(2))

    def _hidden(self, features: torch.Tensor, positions: int) -> torch.Tensor:
        (first, bias1), (second, bias2) = self._convolutions
        x = functional.gelu(functional.conv1d(features.to(first), first, bias1, padding=1))
        x = functional.gelu(functional.conv1d(x, second, bias2, stride=2, padding=1)).transpose(1, 2)[:, :positions]
        x = x + self._positions[: x.shape[1]]
        for layer in self._layers:
            x = layer(x)
        return x
