"""Replacements of a model's linears, norms and layers on a CPU compute the same results."""

from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from engine.embedded.models.torch import decoder
from engine.embedded.models.torch.interface import ATTENTION_NAME
from engine.embedded.models.torch.linear import FEW_ROWS, PackedLinear, can_pack, replacements
from engine.embedded.models.torch.norm import RmsNorm, replace_norms

pytestmark = pytest.mark.skipif(not can_pack(), reason="torch without oneDNN or FBGEMM")


class LlamaNorm(nn.Module):
    """RMSNorm as transformers' decoders spell it; `shift` makes it another one, which looks the same."""

    def __init__(self, size: int, shift: float = 0.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(size) + 0.5)
        self.variance_epsilon = 1e-5
        self._shift = shift

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.weight + self._shift) * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon))


@pytest.mark.parametrize("rows", [1, FEW_ROWS, FEW_ROWS + 1, 100])
@pytest.mark.parametrize("bias", [False, True])
def test_packed_linears_compute_what_they_replace(rows: int, bias: bool) -> None:
    torch.manual_seed(rows)
    model = nn.Sequential(
        nn.Linear(64, 96, bias), nn.SiLU(), nn.Sequential(nn.Linear(96, 64, bias)), nn.Linear(64, 128, bias=False)
    )
    as_bfloat16(model)
    x = torch.randn(1, rows, 64)
    with torch.inference_mode():
        expected = model(x)
        for replace in list(replacements(model, model[3])):
            replace()
        assert not [child for child in model.modules() if type(child) is nn.Linear]
        torch.testing.assert_close(model(x), expected, rtol=1e-5, atol=1e-5)


def as_bfloat16(model: nn.Module) -> None:
    """Weights as a bfloat16 checkpoint has them, in float32."""
    for parameter in model.parameters():
        parameter.data = parameter.data.bfloat16().float()


def test_weights_that_float16_would_change_keep_float32() -> None:
    torch.manual_seed(0)
    for weight in (torch.randn(8, 16), torch.full((8, 16), 1e6)):
        x = torch.randn(1, 1, 16)
        with torch.inference_mode():
            torch.testing.assert_close(PackedLinear(weight, None, few_only=True)(x), x @ weight.T, rtol=1e-6, atol=1e-5)


def test_norms_are_replaced_if_they_are_rms_norm_and_only_then() -> None:
    model = nn.Sequential(LlamaNorm(64), LlamaNorm(64, shift=1.0), nn.Sequential(LlamaNorm(32)))
    x, y = torch.randn(1, 5, 64), torch.zeros(1, 2, 32)
    with torch.inference_mode():
        expected, small = model[:2](x), model[2](y)
        replace_norms(model)
        assert [type(norm) for norm in (model[0], model[1], model[2][0])] == [RmsNorm, LlamaNorm, RmsNorm]
        torch.testing.assert_close(model[:2](x), expected)
        torch.testing.assert_close(model[2](y), small)


def small_model(kind: str) -> nn.Module:
    """A model of the kind with random weights, ready for our attention."""
    sizes = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    config = AutoConfig.for_model(kind, vocab_size=128, head_dim=16, pad_token_id=0, **sizes)
    config._attn_implementation = ATTENTION_NAME
    torch.manual_seed(0)
    model: nn.Module = AutoModelForCausalLM.from_config(config).eval()
    as_bfloat16(model)
    return model


class Attention:
    """Causal attention of one sequence to itself, in the place of the paged one."""

    def __call__(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float, **options: Any
    ) -> torch.Tensor:
        parts = (part.transpose(0, 1).unsqueeze(0) for part in (query, key, value))
        out = nn.functional.scaled_dot_product_attention(*parts, is_causal=True, scale=scale, enable_gqa=True)
        return out[0].transpose(0, 1)


@pytest.mark.parametrize(
    ("kind", "replaced"), [("llama", True), ("mistral", True), ("qwen2", True), ("qwen3", False), ("granite", False)]
)
def test_layers_of_the_llama_kind_are_replaced_and_no_others(kind: str, replaced: bool) -> None:
    """Granite's parts have the same names, but it scales what they add; Qwen3 normalises queries and keys."""
    model = small_model(kind)
    if kind == "granite":
        model.config.residual_multiplier = 0.5
        for layer in model.model.layers:  # type: ignore[union-attr]
            layer.residual_multiplier = 0.5
    arguments: dict[str, Any] = {"input_ids": torch.arange(20).unsqueeze(0), "use_cache": False, "paged": Attention()}
    with torch.inference_mode():
        expected = model(**arguments).logits
        replace_norms(model)
        for replace in list(decoder.replacements(model)):
            replace()
        layers = [type(layer) is decoder.DecoderLayer for layer in model.model.layers]  # type: ignore[union-attr]
        assert layers == [replaced, replaced]
        torch.testing.assert_close(model(**arguments).logits, expected, rtol=1e-4, atol=1e-5)
