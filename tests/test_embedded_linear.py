"""What replaces a model's linears and norms on a CPU computes what they do."""

import sys

import pytest
import torch
from torch import nn

from engine.embedded.linear import FEW_ROWS, PackedLinear, pack_linears
from engine.embedded.norm import RmsNorm, replace_norms
from engine.embedded.rotary import replace_rotary, rotate

pytestmark = pytest.mark.skipif(
    not torch._C._has_mkldnn or "fbgemm" not in torch.backends.quantized.supported_engines, reason="torch without oneDNN or FBGEMM"
)


class LlamaNorm(nn.Module):
    """RMSNorm as transformers' decoders spell it; `shift` makes it another one, which looks the same."""

    def __init__(self, size: int, shift: float = 0.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(size) + 0.5)
        self.variance_epsilon = 1e-5
        self._shift = shift

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.weight + self._shift) * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon))


class Block(nn.Module):
    """A decoder block's linears, used in another order and with a second input in between."""

    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(64, size, bias) for size in (64, 16, 16))
        self.gate_proj, self.up_proj, self.down_proj = nn.Linear(64, 96, bias), nn.Linear(64, 96, bias), nn.Linear(96, 64, bias)
        self.head = nn.Linear(64, 128, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        key, query, value = self.k_proj(x), self.q_proj(x), self.v_proj(x)
        x = x + query * key.repeat(1, 1, 4) + self.q_proj(x + 1) + value.repeat(1, 1, 4)
        x = x + self.down_proj(nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))
        logits: torch.Tensor = self.head(x)
        return logits


@pytest.mark.parametrize("rows", [1, FEW_ROWS, FEW_ROWS + 1, 100])
@pytest.mark.parametrize("bias", [False, True])
def test_packed_linears_compute_what_the_model_did(rows: int, bias: bool) -> None:
    torch.manual_seed(rows)
    block = Block(bias)
    for parameter in block.parameters():  # as a bfloat16 checkpoint in float32
        parameter.data = parameter.data.bfloat16().float()
    x = torch.randn(1, rows, 64)
    with torch.inference_mode():
        expected = block(x)
        pack_linears(block, block.head)
        assert not [child for child in block.modules() if type(child) is nn.Linear]
        torch.testing.assert_close(block(x), expected, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(block(x), block(x), rtol=0, atol=0)


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


def test_rotary_is_replaced_where_it_is_the_usual_one(monkeypatch: pytest.MonkeyPatch) -> None:
    class Model(nn.Module):
        pass

    def usual(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        def turned(x: torch.Tensor) -> torch.Tensor:
            first, second = x.chunk(2, -1)
            return x * cos.unsqueeze(1) + torch.cat((-second, first), -1) * sin.unsqueeze(1)

        return turned(q), turned(k)

    def interleaved(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return usual(q.roll(1, -1), k, cos, sin)

    code = sys.modules[__name__]
    for function, expected in ((usual, rotate), (interleaved, interleaved)):
        monkeypatch.setattr(code, "apply_rotary_pos_emb", function, raising=False)
        replace_rotary(Model())
        assert vars(code)["apply_rotary_pos_emb"] is expected
    q, k, angles = torch.randn(1, 9, 7, 64), torch.randn(1, 3, 7, 64), torch.randn(1, 7, 32).repeat(1, 1, 2)
    for mine, its in zip(rotate(q, k, angles.cos(), angles.sin()), usual(q, k, angles.cos(), angles.sin()), strict=True):
        torch.testing.assert_close(mine, its)
