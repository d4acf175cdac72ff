"""The Triton kernels against torch, on a GPU, or by Triton's interpreter where Triton is installed without one."""

import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.nn import functional

ON_GPU = torch.cuda.is_available()
if not ON_GPU:
    os.environ["TRITON_INTERPRET"] = "1"
triton = pytest.importorskip("triton", reason="Triton is not installed")
tl = pytest.importorskip("triton.language")  # which the interpreter looks for beside every kernel

from engine.embedded.cuda import decode_attention, kernels, products  # noqa: E402

DEVICE = torch.device("cuda" if ON_GPU else "cpu")
DTYPE = torch.bfloat16 if ON_GPU else torch.float32


@triton.jit
def _nothing() -> None:
    pass


@pytest.fixture(autouse=True)
def interpreter(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The interpreter runs one program after the other: there is nothing to wait for."""
    torch.manual_seed(0)
    if not ON_GPU:
        from triton.runtime.interpreter import GridExecutor  # noqa: PLC0415

        for module in (decode_attention, kernels, products):
            monkeypatch.setattr(module, "gdc_wait", _nothing)
            monkeypatch.setattr(module, "gdc_launch_dependents", _nothing)
        call = GridExecutor.__call__
        monkeypatch.setattr(GridExecutor, "__call__", lambda self, *a, launch_pdl=True, **k: call(self, *a, **k))
    yield


def random(*shape: int, scale: float = 1.0) -> torch.Tensor:
    return (torch.randn(*shape, device=DEVICE) * scale).to(DTYPE)


def same(found: torch.Tensor, expected: torch.Tensor) -> None:
    largest = float(expected.abs().max())
    assert float((found.float() - expected.float()).abs().max()) <= (0.02 if ON_GPU else 1e-5) * max(1.0, largest)


def normed(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return (x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-5)).to(DTYPE) * weight


def gated(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    gate, up = (x.float() @ weight.float().T).chunk(2, -1)
    return functional.silu(gate) * up


@pytest.mark.parametrize("size", [96, 256, 4096])
def test_norms(size: int) -> None:
    x, weight = random(3, size), random(size)
    same(kernels.rms_norm(x, weight, 1e-5), normed(x, weight))


def test_gates() -> None:
    x = random(3, 4200)
    same(kernels.silu_mul(x), functional.silu(x[:, :2100].float()) * x[:, 2100:].float())


@pytest.mark.parametrize("k", [64, 256, 704])
def test_products_of_one_row(k: int) -> None:
    x, weight, norm, residual = random(1, k), random(64, k, scale=0.1), random(k), random(1, 64)
    same(kernels.gemv(x, weight, tile=(8, 128, 4)), x.float() @ weight.float().T)
    same(kernels.gemv(x, weight, norm=(norm, 1e-5), tile=(8, 1024, 4)), normed(x, norm).float() @ weight.float().T)
    same(kernels.gemv(x, weight, gated=True, tile=(2, 2048, 4)), gated(x, weight))
    expected = residual.float() + x.float() @ weight.float().T
    same(kernels.gemv(x, weight, residual=residual, fetch=ON_GPU and k != 704, tile=(4, 2048, 8)), expected)
    same(residual, expected)


@pytest.mark.parametrize("rows", [17, 33, 64])
@pytest.mark.parametrize("tile", [(64, 128, 2, 4, 4), (64, 64, 1, 3, 4), (128, 64, 4, 4, 4)])
def test_products_of_few_rows(rows: int, tile: tuple[int, int, int, int, int]) -> None:
    product = products.Product(DEVICE)
    x, weight, wide = random(rows, 512), random(128, 512, scale=0.05), random(256, 512, scale=0.05)
    for _ in range(2):  # the counters are as they were
        residual = random(rows, 128)
        expected = residual.float() + x.float() @ weight.float().T
        assert product(x, weight, tile, residual=residual) is residual
        same(residual, expected)
    if tile[2] == 1:
        same(product(x, wide, tile, gated=True), gated(x, wide))


@pytest.mark.parametrize(
    ("rows", "heads", "kv_heads", "dim"), [(1, 8, 2, 64), (3, 4, 4, 32), (5, 12, 2, 32), (40, 8, 8, 16), (130, 4, 1, 16)]
)
def test_attention_of_decodes(rows: int, heads: int, kv_heads: int, dim: int) -> None:
    size, blocks = 16, 60
    attend = decode_attention.DecodeAttention(heads, kv_heads, dim, dim**-0.5, DEVICE)
    cache = random(blocks, 3, 2, size, kv_heads, dim)
    keys, values = cache[:, 1, 0], cache[:, 1, 1]
    positions = torch.randint(0, 150, (rows,), dtype=torch.int32, device=DEVICE)
    positions[0], positions[-1] = 147, 0 if rows > 1 else 147
    pages = torch.stack([torch.randperm(blocks, device=DEVICE)[:12] for _ in range(rows)]).int()
    query = random(rows, heads, dim)
    out = torch.empty_like(query)
    for _ in range(2):
        attend(query, keys, values, pages, positions, out)
    for row in range(rows):
        length = int(positions[row]) + 1
        key, value = (part[pages[row].long()].flatten(0, 1)[:length].transpose(0, 1).float() for part in (keys, values))
        expected = functional.scaled_dot_product_attention(query[row][:, None].float(), key, value, enable_gqa=True)
        same(out[row], expected[:, 0])


def test_rotation_and_the_cache() -> None:
    heads, kv_heads, dim, size, layers = 4, 2, 16, 8, 2
    qkv, rotations = random(5, (heads + 2 * kv_heads) * dim), torch.randn(40, dim, device=DEVICE)
    original, positions = qkv.clone(), torch.randint(0, 40, (5,), dtype=torch.int32, device=DEVICE)
    cache = torch.zeros(7, layers, 2, size, kv_heads, dim, device=DEVICE, dtype=DTYPE)
    blocks, offsets = torch.tensor([0, 0, 1, 6, 2], device=DEVICE), torch.tensor([3, 7, 1, 5, 0], device=DEVICE)
    slots = blocks * (layers * 2 * size) + offsets
    query = kernels.rotate_and_store(qkv, (heads, kv_heads, dim), rotations, positions, slots, cache[:, 1, 0], cache[:, 1, 1])
    parts = original.view(5, -1, dim).float()
    cos, sin = rotations[positions.long(), None, : dim // 2], rotations[positions.long(), None, dim // 2 :]
    low, high = parts[..., : dim // 2], parts[..., dim // 2 :]
    turned: Any = torch.cat((low * cos - high * sin, high * cos + low * sin), -1)
    same(query, turned[:, :heads])
    same(qkv.view(5, -1, dim)[:, heads : heads + kv_heads], turned[:, heads : heads + kv_heads])
    same(cache[blocks, 1, 0, offsets], turned[:, heads : heads + kv_heads])
    same(cache[blocks, 1, 1, offsets], parts[:, heads + kv_heads :])
    assert not cache[:, 0].any()
