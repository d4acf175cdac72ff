"""The Triton kernels against torch, on a GPU, or by Triton's interpreter where Triton is installed without one."""

from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional

pytest.importorskip("triton", reason="Triton is not installed")

from engine.embedded.models.cuda import decode_attention, fp8_kernels, group_attention, kernels, products, step_kernels
from engine.embedded.models.cuda.fp8 import Fp8Products
from engine.embedded.models.cuda.weights import Copied, Norm, PlainProducts, Products
from tests.support.cuda import FP8, ON_GPU, interpreter  # noqa: F401 - a fixture

pytestmark = pytest.mark.usefixtures("interpreter")

DEVICE = torch.device("cuda" if ON_GPU else "cpu")
DTYPE = torch.bfloat16 if ON_GPU else torch.float32


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


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


def test_tokens_and_pending_ones_become_embeddings() -> None:
    embeddings = random(50, 96)
    sampled = torch.tensor([7, 11, 49], device=DEVICE)
    tokens = torch.tensor([3, -1, 0, -3, 42, -2], dtype=torch.int32, device=DEVICE)
    filled, found = step_kernels.embed(tokens, sampled, embeddings)
    assert filled.tolist() == [3, 7, 0, 49, 42, 11]
    assert torch.equal(found, embeddings[filled])


@pytest.mark.parametrize("copy", [True, False])
def test_keys_are_located_by_the_tables_of_slots(copy: bool) -> None:
    width, block_size, pitch = 1100, 4, 4 * 2 * 3  # more blocks than are copied together
    tables = torch.arange(5 * width, dtype=torch.int32, device=DEVICE).flip(0).view(5, width)
    inputs = torch.tensor([[4, 0, 2], [0, 4398, 7]], dtype=torch.int32, device=DEVICE)
    cells, own = step_kernels.locate(inputs[0], inputs[1], tables, block_size, pitch, copy=copy)
    blocks = [int(tables[slot, position // block_size]) for slot, position in inputs.T.tolist()]
    assert cells.tolist() == [block * pitch + at for block, at in zip(blocks, (0, 2, 3), strict=True)]
    assert torch.equal(own, tables[inputs[0].long()]) if copy else own is tables


@pytest.mark.parametrize("size", [96, 256, 4096])
def test_norms(size: int) -> None:
    x, weight = random(3, size), random(size)
    copies = torch.zeros(3, 2, size, dtype=DTYPE, device=DEVICE)
    same(kernels.rms_norm(x, weight, 1e-5, copies[:, 1]), normed(x, weight))
    assert torch.equal(copies[:, 1], x) and not copies[:, 0].any()


def test_gates() -> None:
    x = random(3, 4200)
    same(kernels.silu_mul(x), functional.silu(x[:, :2100].float()) * x[:, 2100:].float())


@pytest.mark.parametrize("k", [64, 256, 704, 2240, 4096, 4672])
def test_products_of_one_row(k: int) -> None:
    x, weight, norm, residual = random(1, k), random(64, k, scale=0.1), random(k), random(1, 64)
    same(kernels.gemv(x, weight, tile=(8, 128, 4)), x.float() @ weight.float().T)
    same(kernels.gemv(x, weight, norm=(norm, 1e-5), tile=(8, 1024, 4)), normed(x, norm).float() @ weight.float().T)
    same(kernels.gemv(x, weight, gated=True, tile=(2, 2048, 4)), gated(x, weight))
    expected = residual.float() + x.float() @ weight.float().T
    same(kernels.gemv(x, weight, residual=residual, fetch=ON_GPU and not k & (k - 1), tile=(4, 2048, 8)), expected)
    same(residual, expected)


@pytest.mark.parametrize(
    ("n", "k", "gated", "tile"),
    [
        (6144, 4096, False, (2, 4096, 4)),
        (14336, 4096, True, (2, 4096, 4)),
        (4608, 3584, False, (2, 4096, 4)),  # an eighth of the tile is beyond the last column
        (7168, 5120, False, (4, 2048, 4)),
        (17408, 5120, True, (2, 2048, 4)),
        (10240, 2560, True, (4, 1024, 4)),
        (960, 576, False, (4, 1024, 4)),  # at once; wider tiles would be fewer than 200
        (1536, 576, True, (4, 1024, 4)),
        (64, 64, False, (1, 64, 4)),
        (151936, 1536, False, (4, 2048, 4)),
    ],
)
def test_tiles_suit_any_width(n: int, k: int, gated: bool, tile: tuple[int, int, int]) -> None:
    assert kernels.tile_for((2, 4096, 4), n, k, gated) == tile


@pytest.mark.parametrize("rows", [2, 5, 16])
@pytest.mark.parametrize("k", [64, 576, 2048])
def test_products_of_few_rows_and_small_weights(rows: int, k: int) -> None:
    x, weight, norm, behind = random(rows, k), random(64, k, scale=0.05), random(k), random(17, 64)
    found = products.small_product(x, weight, norm=(norm, 1e-5))
    same(found, normed(x, norm).float() @ weight.float().T)
    copies = torch.zeros(17, 2, k, dtype=DTYPE, device=DEVICE)
    found = products.small_product(x, weight, norm=(norm, 1e-5), copy=copies[:rows, 1], gated=True)
    same(found, gated(normed(x, norm), weight))
    assert torch.equal(copies[:rows, 1], x) and not copies[:, 0].any() and not copies[rows:].any()
    residual, untouched = behind[:rows], behind[rows:].clone()
    expected = residual.float() + x.float() @ weight.float().T
    assert products.small_product(x, weight, residual=residual) is residual
    same(residual, expected)
    assert torch.equal(behind[rows:], untouched)


@pytest.mark.parametrize(
    ("rows", "shape", "small"),
    [
        (16, (3072, 576), True),
        (17, (3072, 576), False),
        (4, (2048, 2048), True),
        (4, (2080, 2048), False),  # more values than pay
        (4, (64, 2112), False),  # wider than a program takes
        (4, (48, 576), False),  # half of it is no whole number of tiles
        (4, (64, 32), False),
    ],
)
def test_small_weights(rows: int, shape: tuple[int, int], small: bool) -> None:
    assert products.is_small(rows, torch.empty(shape, device="meta")) is small


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
    ("rows", "heads", "kv_heads", "dim"),
    [(1, 8, 2, 64), (3, 4, 4, 32), (5, 12, 2, 32), (40, 8, 8, 16), (130, 4, 1, 16)],
)
def test_attention_of_decodes(rows: int, heads: int, kv_heads: int, dim: int) -> None:
    size, blocks = 16, 60
    attend = decode_attention.DecodeAttention(heads, kv_heads, dim, dim**-0.5, DEVICE)
    cache = random(blocks, 3, 2, size, kv_heads, dim)
    keys, values = cache[:, 1, 0], cache[:, 1, 1]
    positions = torch.randint(0, 150, (rows,), dtype=torch.int32, device=DEVICE)
    positions[0], positions[-1] = 147, 0 if rows > 1 else 147
    tables = torch.stack([torch.randperm(blocks, device=DEVICE)[:12] for _ in range(rows)]).int()
    query = random(rows, heads, dim)
    out = torch.empty_like(query)
    for _ in range(2):
        attend(query, keys, values, tables, positions, out)
    for row in range(rows):
        same(out[row], dense(query[row : row + 1], keys, values, tables[row], int(positions[row]) + 1)[0])


@pytest.mark.parametrize(("rows", "dim"), [(1, 16), (1, 128), (3, 128)])
def test_decodes_are_divided_by_length(rows: int, dim: int) -> None:
    """Short sequences use few of the splits that a graph has, and every number of splits leaves counters as they
    were."""
    heads, kv_heads, blocks = 4, 2, 280
    attend = decode_attention.DecodeAttention(heads, kv_heads, dim, dim**-0.5, DEVICE)
    keys, values = random(blocks, 16, kv_heads, dim), random(blocks, 16, kv_heads, dim)
    tables = torch.stack([torch.randperm(blocks, device=DEVICE)[:256] for _ in range(rows)]).int()
    for length in (1, 128, 129, 512, 513, 640, 2049, 4096):
        positions = torch.tensor([length - 1, 0, length // 2][:rows], dtype=torch.int32, device=DEVICE)
        query = random(rows, heads, dim)
        out = torch.empty_like(query)
        attend(query, keys, values, tables, positions, out)
        for row in range(rows):
            expected = dense(query[row : row + 1], keys, values, tables[row], int(positions[row]) + 1)
            same(out[row], expected[0])


def test_long_sequences_are_divided_among_many_others() -> None:
    """Short ones are not: 20 sequences and 16 heads are enough programs for them."""
    rows, kv_heads, dim, blocks = 20, 16, 16, 140
    attend = decode_attention.DecodeAttention(kv_heads, kv_heads, dim, dim**-0.5, DEVICE)
    keys, values = random(blocks, 16, kv_heads, dim), random(blocks, 16, kv_heads, dim)
    tables = torch.stack([torch.randperm(blocks, device=DEVICE) for _ in range(rows)]).int()
    positions = torch.tensor([2200, 1, 1000, 2111] + [40] * (rows - 4), dtype=torch.int32, device=DEVICE)
    query = random(rows, kv_heads, dim)
    out = torch.empty_like(query)
    attend.parts.fill_(float("nan"))
    for _ in range(2):  # the counters are as they were
        attend(query, keys, values, tables, positions, out)
    for row in range(rows):
        same(out[row], dense(query[row : row + 1], keys, values, tables[row], int(positions[row]) + 1)[0])
    divided = attend.parts.isfinite().view(-1, 6, 16 * (dim + 2)).any(2).sum(1).view(-1, kv_heads)
    assert divided[:4].T.tolist() == [[2, 0, 0, 2]] * kv_heads
    assert not divided[4:rows].any()


@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(8, 2, 16), (12, 2, 32), (4, 4, 16)])
@pytest.mark.parametrize("dtype", [DTYPE, FP8])
def test_attention_of_groups(heads: int, kv_heads: int, dim: int, dtype: torch.dtype) -> None:
    """Decodes, drafts, chunks of prompts that begin and that go on, and padding, in one step; some are divided."""
    size, blocks, slots = 16, 150, 5
    attend = group_attention.GroupAttention(heads, kv_heads, dim, dim**-0.5, DEVICE)
    cache = random(blocks, 3, 2, size, kv_heads, dim).to(dtype)
    keys, values = cache[:, 1, 0], cache[:, 1, 1]
    tables = torch.stack([torch.randperm(blocks, device=DEVICE)[:140] for _ in range(slots)]).int()
    for lengths, starts in (
        ([1, 1, 5, 40, 23], [700, 0, 2100, 0, 1300]),
        ([70], [0]),
        ([3], [2200]),
        ([1] * 5, [5, 300, 0, 12, 100]),
    ):
        padding = 3
        tokens = sum(lengths) + padding
        positions = np.array(
            [start + i for start, length in zip(starts, lengths, strict=True) for i in range(length)] + [0] * padding,
            dtype=np.int32,
        )
        slot = torch.tensor([i for i, length in enumerate(lengths) for _ in range(length)] + [4] * padding).int()
        work = np.zeros(attend.work_size(tokens), dtype=np.int32)
        attend.plan(np.array([*lengths, padding]), positions, work)
        query = random(tokens, heads, dim)
        out = torch.full_like(query, float("nan"))
        attend(
            query, keys, values, tables, slot.to(DEVICE), torch.from_numpy(positions).to(DEVICE),
            torch.from_numpy(work).to(DEVICE), out,
        )  # fmt: skip
        whole = cache.to(DTYPE)
        for index, (start, length) in enumerate(zip(starts, lengths, strict=True)):
            rows = slice(sum(lengths[:index]), sum(lengths[: index + 1]))
            expected = dense(query[rows], whole[:, 1, 0], whole[:, 1, 1], tables[index], start + length)
            same_over(out[rows], expected, dtype)
        assert bool(out.isfinite().all()), "padding is computed, too"


@pytest.mark.parametrize("dtype", [DTYPE, FP8])
@pytest.mark.parametrize("decodes", [0, 1, 20])
def test_decodes_apart_from_chunks(dtype: torch.dtype, decodes: int) -> None:
    """Decodes by their own kernel, which is told how many they are; chunks and padding behind them in groups."""
    heads, kv_heads, dim, size, blocks = 8, 2, 16, 16, 60
    sizes = heads, kv_heads, dim, dim**-0.5, DEVICE
    decode, group = decode_attention.DecodeAttention(*sizes), group_attention.GroupAttention(*sizes)
    cache = random(blocks, 2, size, kv_heads, dim).to(dtype)
    keys, values, whole = cache[:, 0], cache[:, 1], cache.to(DTYPE)
    lengths, starts, padding = [1] * decodes + [30, 9], [7 * i for i in range(decodes)] + [0, 301], 5
    tokens = sum(lengths) + padding
    positions = np.array(
        [start + i for start, length in zip(starts, lengths, strict=True) for i in range(length)] + [0] * padding,
        dtype=np.int32,
    )
    slots = torch.tensor([i for i, n in enumerate([*lengths, padding]) for _ in range(n)], device=DEVICE).int()
    tables = torch.stack([torch.randperm(blocks, device=DEVICE)[:30] for _ in range(len(lengths) + 1)]).int()
    work = np.zeros(group.work_size(tokens), dtype=np.int32)
    group.plan(np.array([*lengths[decodes:], padding]), positions, work, decodes)
    query, on_device = random(tokens, heads, dim), torch.from_numpy(positions).to(DEVICE)
    out = torch.full_like(query, float("nan"))
    for _ in range(2):
        count = torch.tensor([decodes], dtype=torch.int32, device=DEVICE)
        decode(query, keys, values, tables[slots.long()], on_device, out, count=count)
        assert bool(out[:decodes].isfinite().all()) and bool(out[decodes:].isnan().all()), "others are left alone"
        apart, out = out[:decodes].clone(), torch.full_like(out, float("nan"))
        group(query, keys, values, tables, slots, on_device, torch.from_numpy(work).to(DEVICE), out)
        assert bool(out[:decodes].isnan().all()) and bool(out[decodes:].isfinite().all())
        together = torch.cat((apart, out[decodes:]))
        out.fill_(float("nan"))
    for index, (start, length) in enumerate(zip(starts, lengths, strict=True)):
        rows = slice(sum(lengths[:index]), sum(lengths[: index + 1]))
        expected = dense(query[rows], whole[:, 0], whole[:, 1], tables[index], start + length)
        same_over(together[rows], expected, dtype)


@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(8, 2, 16), (12, 2, 32)])
@pytest.mark.parametrize("dtype", [DTYPE, FP8])
def test_decodes_that_share_prefixes(heads: int, kv_heads: int, dim: int, dtype: torch.dtype) -> None:
    """Two prefixes, whose sequences are mixed, and sequences without one; the longer prefix is divided."""
    size, blocks = 16, 150
    group, decode = (
        kind(heads, kv_heads, dim, dim**-0.5, DEVICE)
        for kind in (group_attention.GroupAttention, decode_attention.DecodeAttention)
    )
    cache = random(blocks, 2, size, kv_heads, dim).to(dtype)
    keys, values, whole = cache[:, 0], cache[:, 1], cache.to(DTYPE)
    kinds = [index % 3 for index in range(30)]
    shared = np.array([(0, 48, 1200)[kind] for kind in kinds], dtype=np.int32)
    prefixes = [torch.randperm(blocks, device=DEVICE)[: tokens // size].int() for tokens in (0, 48, 1200)]
    tables = torch.stack([torch.randperm(blocks, device=DEVICE)[:100] for _ in kinds]).int()
    for table, kind in zip(tables, kinds, strict=True):
        table[: len(prefixes[kind])] = prefixes[kind]
    slots = torch.randperm(len(kinds), device=DEVICE)
    own = [1, 7, 200, 33, 16]
    positions = torch.tensor([tokens + own[i % 5] - 1 for i, tokens in enumerate(shared)], device=DEVICE).int()
    members = np.array([i for kind in (1, 2) for i, other in enumerate(kinds) if other == kind], dtype=np.int32)
    work = np.zeros(group.work_size(len(kinds)), dtype=np.int32)
    group.plan(np.array([10, 10]), shared[members] - 1, work)
    of_slots = torch.empty_like(tables)
    of_slots[slots] = tables
    query = random(len(kinds), heads, dim)
    state = torch.full((len(kinds), heads, dim), float("nan"), device=DEVICE)
    sums = torch.full((len(kinds), heads, 2), float("nan"), device=DEVICE)
    on_device = [torch.from_numpy(part).to(DEVICE) for part in (shared - 1, members, work, shared)]
    out = torch.empty_like(query)
    for _ in range(2):
        group.prefixes(query, keys, values, of_slots, slots.int(), *on_device[:3], state, sums)
        decode(query, keys, values, tables, positions, out, (on_device[3], state, sums))
    for row, table in enumerate(tables):
        expected = dense(query[row : row + 1], whole[:, 0], whole[:, 1], table, int(positions[row]) + 1)
        same_over(out[row], expected[0], dtype)


@pytest.mark.parametrize("kv_heads", [1, 2, 8, 32])
def test_worklists_hold_every_token_once(kv_heads: int) -> None:
    rng = np.random.default_rng(0)
    attend = group_attention.GroupAttention(32, kv_heads, 16, 1.0, torch.device("cpu"))
    programs = group_attention.PROGRAMS
    for _ in range(50):
        lengths = rng.integers(1, 60, rng.integers(1, 12)) if rng.integers(2) else np.ones(rng.integers(1, 250), int)
        starts = rng.integers(0, 10 ** rng.integers(1, 6), len(lengths))
        positions = np.concatenate([start + np.arange(n) for start, n in zip(starts, lengths, strict=True)])
        work = np.zeros(attend.work_size(len(positions)), dtype=np.int32)
        attend.plan(lengths, positions.astype(np.int32), work)
        count, share = work[:2].tolist()
        first, rows, part = work[2:].reshape(3, -1)[:, :count]
        begun = part == 0
        assert sorted(
            np.concatenate([np.arange(a, a + n) for a, n in zip(first[begun], rows[begun], strict=True)])
        ) == list(range(len(positions)))
        assert rows.max() <= attend.rows
        used = -(-(positions[first + rows - 1] + 1) // (share * group_attention.TILE))
        assert bool((part < used).all()) and count == used[begun].sum()
        divided = used > 1
        assert not divided.any() or divided[: divided.sum()].all(), "divided groups come first"
        assert divided.sum() * kv_heads <= 2 * programs


def same_over(found: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> None:
    """Compare what attention gives over a cache of this type."""
    if dtype == FP8:
        near = 0.02 if ON_GPU else 2e-3
        assert float((found.float() - expected).abs().max()) <= near * float(expected.abs().max())
    else:
        same(found, expected)


def dense(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, table: torch.Tensor, length: int
) -> torch.Tensor:
    """Return attention of the last tokens of a sequence of this length over its blocks: [tokens, heads, dim]."""
    key, value = (part[table.long()].flatten(0, 1)[:length].transpose(0, 1).float() for part in (keys, values))
    seen = torch.ones(len(query), length, dtype=torch.bool, device=DEVICE).tril(length - len(query))
    return functional.scaled_dot_product_attention(
        query.transpose(0, 1).float(), key, value, attn_mask=seen, enable_gqa=True
    ).transpose(0, 1)


@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("biased", [False, True])
def test_rotation_and_the_cache(biased: bool, normed: bool) -> None:
    heads, kv_heads, dim, size, layers = 4, 2, 16, 8, 2
    qkv, rotations = random(5, (heads + 2 * kv_heads) * dim), torch.randn(40, dim, device=DEVICE)
    original, positions = qkv.clone(), torch.randint(0, 40, (5,), dtype=torch.int32, device=DEVICE)
    cache = torch.zeros(7, layers, 2, size, kv_heads, dim, device=DEVICE, dtype=DTYPE)
    blocks, offsets = torch.tensor([0, 0, 1, 6, 2], device=DEVICE), torch.tensor([3, 7, 1, 5, 0], device=DEVICE)
    slots = blocks * (layers * 2 * size) + offsets
    bias, weights = random(qkv.shape[1]) if biased else None, random(2, dim)
    norms = (weights, 1e-3) if normed else None
    query = kernels.rotate_and_store(
        qkv, (heads, kv_heads, dim), rotations, positions, slots, cache[:, 1, 0], cache[:, 1, 1], bias, norms
    )
    parts = (original if bias is None else original + bias).view(5, -1, dim).float()
    if normed:
        scale = (parts.square().mean(-1, keepdim=True) + 1e-3).rsqrt()
        own = weights.float().repeat_interleave(torch.tensor([heads, kv_heads], device=DEVICE), 0)
        parts[:, : heads + kv_heads] = (parts * scale)[:, : heads + kv_heads] * own
    cos, sin = rotations[positions.long(), None, : dim // 2], rotations[positions.long(), None, dim // 2 :]
    low, high = parts[..., : dim // 2], parts[..., dim // 2 :]
    turned: Any = torch.cat((low * cos - high * sin, high * cos + low * sin), -1)
    same(query, turned[:, :heads])
    same(qkv.view(5, -1, dim)[:, heads : heads + kv_heads], turned[:, heads : heads + kv_heads])
    same(cache[blocks, 1, 0, offsets], turned[:, heads : heads + kv_heads])
    same(cache[blocks, 1, 1, offsets], parts[:, heads + kv_heads :])
    assert not cache[:, 0].any()


def restored(quantised: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    values, scales = quantised
    assert values.dtype == FP8 and scales.shape == (len(values), 1)
    assert bool((values.float().abs().amax(1) == 448).all()), "a row's largest value is the largest there is"
    return values.float() * scales


def near(found: torch.Tensor, expected: torch.Tensor) -> None:
    """Each value within half a step of eight bits, which are three of mantissa, or of the smallest step of its row."""
    expected = expected.float()
    steps = expected.abs().amax(1, keepdim=True) / 448 * 2**-9
    assert bool(((found - expected).abs() <= expected.abs() * (2**-4 + 2**-7) + steps).all())


@pytest.mark.parametrize("size", [96, 4096, 14336])
def test_rows_in_eight_bits(size: int) -> None:
    x, weight, gates = random(3, size, scale=30), random(size), random(3, 2 * size)
    near(restored(fp8_kernels.quantise(x)), x)
    near(restored(fp8_kernels.rms_norm(x, weight, 1e-5)), normed(x, weight))
    near(restored(fp8_kernels.silu_mul(gates)), functional.silu(gates[:, :size].float()) * gates[:, size:].float())
    added = random(3, size)
    expected = x + added
    near(restored(fp8_kernels.rms_norm(x, weight, 1e-5, added)), normed(expected, weight))
    assert torch.equal(x, expected)


def test_a_row_of_zeros_in_eight_bits() -> None:
    values, scales = fp8_kernels.quantise(torch.zeros(2, 64, device=DEVICE, dtype=DTYPE))
    assert not values.float().any() and bool(scales.isfinite().all())


@pytest.mark.parametrize("k", [64, 704, 2240, 4096])
def test_products_of_one_row_with_weights_in_eight_bits(k: int) -> None:
    x, norm, residual = random(1, k), random(k), random(1, 64)
    values, scales = fp8_kernels.quantise(random(64, k, scale=0.1))
    weight, pair = values.float() * scales, (values, scales.flatten())
    same(kernels.gemv(x, pair, tile=(8, 256, 4)), x.float() @ weight.T)
    same(kernels.gemv(x, pair, norm=(norm, 1e-5), tile=(8, 2048, 4)), normed(x, norm).float() @ weight.T)
    same(kernels.gemv(x, pair, gated=True, tile=(2, 4096, 4)), gated(x, weight))
    expected = residual.float() + x.float() @ weight.T
    kernels.gemv(x, pair, residual=residual, fetch=ON_GPU and not k & (k - 1), tile=(4, 4096, 8))
    same(residual, expected)


@pytest.mark.parametrize("rows", [1, 16, 33, 100])
@pytest.mark.parametrize("tile", [(64, 128, 2, 4, 4), (64, 256, 1, 2, 4)])
def test_products_of_few_rows_in_eight_bits(rows: int, tile: tuple[int, int, int, int, int]) -> None:
    product = products.Product(DEVICE)
    x, scales = fp8_kernels.quantise(random(rows, 512))
    values, channels = fp8_kernels.quantise(random(256, 512, scale=0.05))
    exact, weight, pair = x.float() * scales, values.float() * channels, (scales.flatten(), channels.flatten())
    near = 0.02 if ON_GPU else 0.01  # what is not added to a residual is bfloat16
    for _ in range(2):  # the counters are as they were
        residual = random(rows, 256)
        expected = residual.float() + exact @ weight.T
        assert product(x, values, tile, residual, scales=pair) is residual
        same(residual, expected)
    found = [(product(x, values, tile, scales=pair), exact @ weight.T)]
    if tile[2] == 1:
        found.append((product(x, values, tile, gated=True, scales=pair), gated(exact, weight)))
    for got, expected in found:
        assert got.dtype == torch.bfloat16
        assert float((got.float() - expected).abs().max()) < near * float(expected.abs().max())


@pytest.mark.parametrize(("rows", "heads", "kv_heads", "dim"), [(3, 4, 4, 32), (5, 12, 2, 32), (130, 4, 1, 16)])
def test_attention_of_decodes_over_eight_bits(rows: int, heads: int, kv_heads: int, dim: int) -> None:
    attend = decode_attention.DecodeAttention(heads, kv_heads, dim, dim**-0.5, DEVICE)
    cache = random(60, 3, 2, 16, kv_heads, dim).to(FP8)
    positions = torch.randint(0, 150, (rows,), dtype=torch.int32, device=DEVICE)
    tables = torch.stack([torch.randperm(60, device=DEVICE)[:12] for _ in range(rows)]).int()
    query, whole = random(rows, heads, dim), cache.to(DTYPE)
    out, expected = torch.empty_like(query), torch.empty_like(query)
    attend(query, cache[:, 1, 0], cache[:, 1, 1], tables, positions, out)
    attend(query, whole[:, 1, 0], whole[:, 1, 1], tables, positions, expected)
    assert float((out.float() - expected.float()).abs().max()) <= (0.02 if ON_GPU else 2e-3) * float(
        expected.abs().max()
    )


def test_rotation_and_a_cache_of_eight_bits() -> None:
    heads, dim, size = (4, 2, 16), 16, 8
    qkv, rotations = random(5, 8 * dim, scale=300), torch.randn(40, dim, device=DEVICE)
    positions, slots = (
        torch.arange(5, dtype=torch.int32, device=DEVICE),
        torch.tensor([3, 7, 33, 37, 32], device=DEVICE),
    )
    caches = [torch.zeros(3, 2, 2, size, 2, dim, device=DEVICE).to(dtype) for dtype in (DTYPE, FP8)]
    left = [qkv.clone() for _ in caches]
    queries = [
        kernels.rotate_and_store(own, heads, rotations, positions, slots, cache[:, 1, 0], cache[:, 1, 1])
        for own, cache in zip(left, caches, strict=True)
    ]
    assert torch.equal(queries[0], queries[1]) and torch.equal(left[0], left[1])
    assert float(caches[0].abs().max()) > 448
    assert torch.equal(caches[1].float(), caches[0].clamp(-448, 448).to(FP8).float())


def layer(
    products: Products, x: torch.Tensor, attended: torch.Tensor, parts: dict[str, list[torch.Tensor]], norm: Norm
) -> list[torch.Tensor]:
    """Run a layer twice, as a decoder does, and copy x each time. Return the queries of both runs, then x."""
    weights = {name: products.weight(name, torch.cat(own)) for name, own in parts.items()}
    found, following = [], products.norm(x, norm)
    for last in (None, norm):
        copies = torch.zeros(len(x), 2, x.shape[1], dtype=x.dtype, device=x.device)
        found.append(products.product(following, weights["qkv"], Copied(x, copies[:, 1])))
        assert torch.equal(copies[:, 1], x) and not copies[:, 0].any()
        following = products.add(x, attended, weights["out"], norm)
        following = products.add_gated(
            x, following, weights["gate_up"], weights["down"], norm if last is None else None
        )
    return [*found, x]


@pytest.mark.parametrize("rows", [1, 6, 40, 70, 130])
@pytest.mark.parametrize("hidden", [256, 512])
@pytest.mark.parametrize("own", [True, False])
@torch.inference_mode()
def test_both_kinds_of_products(rows: int, hidden: int, own: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer, run twice, against the same layer in float32, by our own products of few rows and without them. With 256
    their tiles have half as many columns.

    The error is below a fiftieth of the value, or below an eighth of it in eight bits.
    """
    monkeypatch.setattr(products, "LEAST_PROGRAMS", 1 if own else 1 << 20)
    sizes = {
        "qkv": [(256, hidden), (64, hidden), (64, hidden)],
        "out": [(hidden, hidden)],
        "gate_up": [(512, hidden)] * 2,
        "down": [(hidden, 512)],
    }
    parts = {name: [random(*shape, scale=0.05) for shape in shapes] for name, shapes in sizes.items()}
    x, attended, norm = random(rows, hidden), random(rows, hidden), (random(hidden), 1e-5)
    exact = x.float()
    whole = {name: torch.cat(own).float() for name, own in parts.items()}
    expected = []
    for _ in range(2):
        expected.append(normed(exact, norm[0].float()).float() @ whole["qkv"].T)
        exact = exact + attended.float() @ whole["out"].T
        exact = exact + gated(normed(exact, norm[0].float()), whole["gate_up"]) @ whole["down"].T
    for products_, limit in ((PlainProducts(False, DEVICE), 0.02), (Fp8Products(False, DEVICE), 0.125)):
        for found, wanted in zip(layer(products_, x.clone(), attended, parts, norm), [*expected, exact], strict=True):
            assert float((found.float() - wanted).norm() / wanted.norm()) < limit
