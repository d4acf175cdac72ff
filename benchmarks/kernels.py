"""Time the kernels of a decode step on one GPU against its memory bandwidth: products, attention, and the rest.

    python -m benchmarks.kernels            # needs a GPU, triton and flashinfer

The shape is that of Llama 3.1 8B, and for products of one row also those of `ONE_ROW`. Every figure is the median over
replays of a CUDA graph that runs the operation on `COPIES` copies of its weights, so that the cache does not help.
"""

import itertools
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any
from unittest.mock import patch

import torch
from torch.nn import functional

from benchmarks.gpu import model as models
from engine.embedded.models.cuda.graphs import capture

HIDDEN, HEADS, KV_HEADS, DIM, MIDDLE, VOCABULARY = 4096, 32, 8, 128, 14336, 49152
SHAPES = {"qkv": (6144, 4096), "out": (4096, 4096), "gate_up": (28672, 4096), "down": (4096, 14336)}
COPIES = 8
BLOCK = 32
ONE_ROW = {name: models.SHAPES[name] for name in ("llama-8b", "qwen2.5-7b", "qwen3-8b")} | {
    "llama-3b": models.Shape(3072, 28, 24, 8, 8192, vocabulary=128256),
    "qwen2.5-0.5b": models.Shape(896, 24, 14, 2, 4864, vocabulary=151936),
    "qwen2.5-1.5b": models.Shape(1536, 28, 12, 2, 8960, vocabulary=151936),
    "qwen3-14b": models.Shape(5120, 40, 40, 8, 17408, vocabulary=151936),
    "smollm2-135m": models.Shape(576, 30, 9, 3, 1536),
}
"""Shapes of the models whose products of one row are measured."""
TILES = [
    *((1, 4096, 4), (2, 1024, 4), (2, 2048, 4), (2, 4096, 4), (2, 4096, 8), (4, 512, 4), (4, 1024, 4), (4, 2048, 4)),
    *((4, 2048, 8), (4, 4096, 8), (8, 512, 4), (8, 1024, 4), (8, 1024, 8), (8, 2048, 8), (16, 256, 4), (16, 512, 4)),
    (16, 1024, 8),
]
"""Shares of a program of `kernels.gemv`: rows of the weight, columns, warps."""
COMPRESSED_TILES = list(itertools.product((1, 2, 4), (1, 2, 4), (128, 256, 512)))
"""Shares of a program of `compressed.product`: rows of the weight, how many times, and words of a row at a time."""


def timed(work: Callable[[], Any], repeats: int = 10, replays: int = 1) -> float:
    """Capture `work` as a CUDA graph and return the median seconds of a replay, of so many in a row."""
    graph, _ = capture(work)
    times = []
    for _ in range(repeats):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        for _ in range(replays):
            graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) / 1e3 / replays)
    return sorted(times)[len(times) // 2]


def say(name: str, seconds: float, size: float, flops: float = 0) -> None:
    extra = f" {flops / seconds / 1e12:7.0f} TFLOP/s" if flops else ""
    print(f"{name:44s} {seconds * 1e6 / COPIES:9.2f} us {size / seconds / 1e12:6.2f} TB/s{extra}", flush=True)


def products(rows: int) -> None:
    total = 0.0
    for name, (n, k) in SHAPES.items():
        weights = [torch.randn(n, k, device="cuda", dtype=torch.bfloat16) * 0.02 for _ in range(COPIES)]
        x = torch.randn(rows, k, device="cuda", dtype=torch.bfloat16)
        seconds = timed(lambda: [functional.linear(x, weight) for weight in weights])
        total += seconds / COPIES
        say(
            f"cublas {name} rows={rows}",
            seconds,
            COPIES * (n * k * 2 + rows * (n + k) * 2),
            COPIES * 2.0 * rows * n * k,
        )
    print(f"  32 layers of products, rows={rows}: {total * 32 * 1e3:.2f} ms", flush=True)


def fp8_products(rows: int) -> None:
    """Time the products of `Fp8Products`, and the kernels that quantise their inputs."""
    from engine.embedded.models.cuda import fp8_kernels

    total = 0.0
    for name, (n, k) in SHAPES.items():
        weights = [fp8_weight(n, k) for _ in range(COPIES)]
        x = torch.randn(rows, k, device="cuda", dtype=torch.bfloat16)
        values, scales = fp8_kernels.quantise(x)

        def product(weight: torch.Tensor, channels: torch.Tensor) -> torch.Tensor:
            return torch._scaled_mm(
                values,
                weight.t(),
                scale_a=scales,
                scale_b=channels.unsqueeze(0),
                out_dtype=torch.bfloat16,
                use_fast_accum=True,
            )

        seconds = timed(lambda: [product(*weight) for weight in weights])
        total += seconds / COPIES
        say(
            f"scaled_mm {name} rows={rows}", seconds, COPIES * (n * k + rows * (k + n * 2)), COPIES * 2.0 * rows * n * k
        )
    print(f"  32 layers of fp8 products, rows={rows}: {total * 32 * 1e3:.2f} ms", flush=True)
    norm = torch.ones(HIDDEN, device="cuda", dtype=torch.bfloat16)
    x, wide = (torch.randn(rows, size, device="cuda", dtype=torch.bfloat16) for size in (HIDDEN, 2 * MIDDLE))
    added = torch.randn_like(x)
    say(
        f"fp8 quantise rows={rows}",
        timed(lambda: [fp8_kernels.quantise(x) for _ in range(COPIES)]),
        COPIES * rows * HIDDEN * 3,
    )
    seconds = timed(lambda: [fp8_kernels.rms_norm(x, norm, 1e-5, added) for _ in range(COPIES)])
    say(f"fp8 add and rms_norm rows={rows}", seconds, COPIES * rows * HIDDEN * 7)
    say(
        f"fp8 silu_mul rows={rows}",
        timed(lambda: [fp8_kernels.silu_mul(wide) for _ in range(COPIES)]),
        COPIES * rows * MIDDLE * 5,
    )


def fp8_weight(n: int, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    from engine.embedded.models.cuda import fp8_kernels

    values, channels = fp8_kernels.quantise(torch.randn(n, k, device="cuda", dtype=torch.bfloat16) * 0.02)
    return values, channels.flatten()


def gemvs(model: str, kind: str) -> None:
    """Print what each product of one row takes with the tile that is chosen for it, and with the three fastest.

    `kind`: bfloat16, fp8, or compressed; then, too, the rate is that of the bytes of bfloat16.
    """
    from engine.embedded.models.cuda import compressed, kernels
    from engine.embedded.models.cuda.compiling import compile_first
    from engine.embedded.models.cuda.decoder import _COMPRESSED_OUTPUT_TILE, _OUTPUT_TILE
    from engine.embedded.models.cuda.fp8 import Fp8Products
    from engine.embedded.models.cuda.weights import _COMPRESSED_TILES, PlainProducts

    shape = ONE_ROW[model]
    shapes = {
        "qkv": ((shape.heads + 2 * shape.kv_heads) * shape.head_dim, shape.hidden),
        "out": (shape.hidden, shape.heads * shape.head_dim),
        "gate_up": (2 * shape.intermediate, shape.hidden),
        "down": (shape.hidden, shape.intermediate),
        "output": (shape.vocabulary, shape.hidden),
    }
    fp8, is_compressed = kind == "fp8", kind == "compressed"
    chosen: Mapping[str, tuple[int, int, int]] = (Fp8Products if fp8 else PlainProducts).tiles
    module, multiply, output_tile = kernels, kernels.gemv, _OUTPUT_TILE
    if is_compressed:
        chosen, module, multiply = _COMPRESSED_TILES, compressed, compressed.product
        output_tile = _COMPRESSED_OUTPUT_TILE
    for name, (n, k) in shapes.items():
        if fp8 and name == "output":
            continue
        copies = max(COPIES, min(24, int(3e8 // (n * k))))  # more than the cache holds
        weights: list[Any] = [
            fp8_weight(n, k) if fp8 else torch.randn(n, k, device="cuda", dtype=torch.bfloat16) * 0.02
            for _ in range(copies)
        ]
        if is_compressed and None in (weights := [compressed.compress(weight) for weight in weights]):
            continue  # it is small
        x = torch.randn(1, k, device="cuda", dtype=torch.bfloat16)
        norm = (torch.ones(k, device="cuda", dtype=torch.bfloat16), 1e-5)
        residual = torch.zeros(1, n, device="cuda", dtype=torch.bfloat16)
        gated = name == "gate_up"
        arguments: dict[str, Any] = (
            {"residual": residual} if name in ("out", "down") else {"norm": norm, "gated": gated}
        )
        outputs = n // 2 if gated else n
        tile = chosen.get(name, output_tile)
        if is_compressed:
            own = compressed.tile_for(tile, outputs, k // 8)
            tiles = {tile for tile in COMPRESSED_TILES if outputs % (tile[0] * tile[1]) == 0} | {own}
        else:
            own = kernels.tile_for(tile, outputs, k, gated)
            tiles = {tile for tile in TILES if outputs % tile[0] == 0 and tile[1] < 2 * k} | {own}

        def run(tile: tuple[int, int, int], some: list[Any]) -> None:
            with patch.object(module, "tile_for", lambda *_: tile):
                for weight in some:
                    multiply(x, weight, tile=tile, **arguments)

        compile_first(lambda: [run(tile, weights[:1]) for tile in tiles])
        results = sorted((timed(lambda: run(tile, weights)) * COPIES / copies, tile) for tile in tiles)
        size = COPIES * n * k * (1 if fp8 else 2)
        for seconds, tile in [*(result for result in results if result[1] == own), *results[:3]]:
            say(f"{model} {kind} gemv {name} tile={tile}", seconds, size)


def few_tiles(rows: int, fp8: bool) -> None:
    """Print the three fastest tiles of our own products of few rows, for each product."""
    from engine.embedded.models.cuda.compiling import compile_first
    from engine.embedded.models.cuda.products import Product

    product, width = Product(torch.device("cuda")), 1 if fp8 else 2
    for name, (n, k) in SHAPES.items():
        gated = name == "gate_up"
        wide = n // 2 if gated else n
        x = torch.randn(rows, k, device="cuda", dtype=torch.bfloat16)
        residual = torch.zeros(rows, n, device="cuda", dtype=torch.bfloat16) if name in ("out", "down") else None
        if fp8:
            from engine.embedded.models.cuda import fp8_kernels

            values, scales = fp8_kernels.quantise(x)
            pairs = [fp8_weight(n, k) for _ in range(COPIES)]
        else:
            values, scales = x, x
            pairs = [(torch.randn(n, k, device="cuda", dtype=torch.bfloat16) * 0.02, x) for _ in range(COPIES)]

        def own(tile: tuple[int, int, int, int, int], weight: torch.Tensor, channels: torch.Tensor) -> None:
            both = (scales.flatten(), channels) if fp8 else None
            product(values, weight, tile, residual, gated, both)

        tiles = [
            (block_n, block_k, splits, stages, 4)
            for block_n, block_k, splits, stages in itertools.product(
                (64, 128), (64, 128, 256, 512), (1, 2, 4), (2, 3, 4, 6)
            )
            if not (gated and splits > 1)
            and k % (block_k * splits) == 0
            and 90 <= wide // block_n * splits <= 600
            and stages * block_k * width * (block_n * (1 + gated) + max(16, rows)) < 215_000
        ]
        compile_first(lambda: [own(tile, *pairs[0]) for tile in tiles])
        results = sorted((timed(lambda: [own(tile, *pair) for pair in pairs]), tile) for tile in tiles)
        for seconds, tile in results[:3]:
            say(f"{'fp8 ' * fp8}product {name} rows={rows} tile={tile}", seconds, COPIES * n * k * width)


def layer(rows: int, fp8: bool) -> None:
    """Time the products of a layer with norms and gates between them, by the library's products and as they are."""
    from engine.embedded.models.cuda import fp8 as eight_bits
    from engine.embedded.models.cuda import weights

    device = torch.device("cuda")
    products: weights.Products = eight_bits.Fp8Products(False, device) if fp8 else weights.PlainProducts(False, device)
    norm = torch.ones(HIDDEN, device="cuda", dtype=torch.bfloat16), 1e-5
    x, attended = (torch.randn(rows, HIDDEN, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    layers = [
        {
            name: products.weight(name, torch.randn(shape, device="cuda", dtype=torch.bfloat16) * 0.02)
            for name, shape in SHAPES.items()
        }
        for _ in range(COPIES)
    ]

    def run() -> None:
        for its in layers:
            products.product(products.norm(x, norm), its["qkv"])
            normed = products.add(x, attended, its["out"], norm)
            products.add_gated(x, normed, its["gate_up"], its["down"], norm)

    size = COPIES * sum(n * k for n, k in SHAPES.values()) * (1 if fp8 else 2)
    kind = "fp8" if fp8 else "bf16"
    say(f"{kind} layer rows={rows}, as it is", timed(run), size)
    with patch.object(weights, "_FEW_ROWS", 0), patch.object(eight_bits, "_FEW_TILES", {}):
        say(f"{kind} layer rows={rows}, library", timed(run), size)


def decode_attention(batch: int, length: int) -> None:
    """Compare our kernel with FlashInfer's, each between products, so that caches are cold."""
    import flashinfer

    from engine.embedded.models.cuda.decode_attention import DecodeAttention

    width = -(-length // BLOCK)
    cache = torch.randn(batch * width, COPIES, 2, BLOCK, KV_HEADS, DIM, device="cuda", dtype=torch.bfloat16)
    tables = torch.randperm(batch * width, device="cuda", dtype=torch.int32).view(batch, width)
    positions = torch.full((batch,), length - 1, device="cuda", dtype=torch.int32)
    query = torch.randn(batch, HEADS, DIM, device="cuda", dtype=torch.bfloat16)
    out = torch.empty_like(query)
    attend = DecodeAttention(HEADS, KV_HEADS, DIM, DIM**-0.5, torch.device("cuda"))
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
        torch.zeros(256 << 20, device="cuda", dtype=torch.uint8), use_tensor_cores=True
    )
    begun = torch.arange(0, batch + 1, dtype=torch.int32) * width
    last = torch.full((batch,), (length - 1) % BLOCK + 1, dtype=torch.int32)
    wrapper.plan(
        begun,
        tables.flatten(),
        last,
        HEADS,
        KV_HEADS,
        DIM,
        BLOCK,
        q_data_type=torch.bfloat16,
        kv_data_type=torch.bfloat16,
    )
    weight, x = (
        torch.randn(2 * MIDDLE, HIDDEN, device="cuda", dtype=torch.bfloat16),
        torch.randn(batch, HIDDEN, device="cuda").bfloat16(),
    )
    size = COPIES * batch * length * 2 * KV_HEADS * DIM * 2
    alone = timed(lambda: [functional.linear(x, weight) for _ in range(COPIES)])
    small, rounded = cache.to(torch.float8_e4m3fn), torch.empty_like(out)
    kinds: dict[str, Callable[[int], Any]] = {
        "ours": lambda i: attend(query, cache[:, i, 0], cache[:, i, 1], tables, positions, out),
        "ours, fp8": lambda i: attend(query, small[:, i, 0], small[:, i, 1], tables, positions, rounded),
        "flashinfer": lambda i: wrapper.run(query, (cache[:, i, 0], cache[:, i, 1])),
    }
    for name, run in kinds.items():
        seconds = timed(lambda: [(functional.linear(x, weight), run(i)) for i in range(COPIES)]) - alone
        say(f"{name} decode batch={batch} length={length}", seconds, size / 2 if "fp8" in name else size)
    error = float((kinds["flashinfer"](COPIES - 1) - out).abs().max())
    print(f"  largest difference {error:.4f}", flush=True)


def prefill_attention(count: int, length: int) -> None:
    import flashinfer

    rows, width = count * length, length // BLOCK
    cache = torch.randn(count * width, 2, 2, BLOCK, KV_HEADS, DIM, device="cuda", dtype=torch.bfloat16)
    tables = torch.arange(count * width, dtype=torch.int32, device="cuda")
    query = torch.randn(rows, HEADS, DIM, device="cuda", dtype=torch.bfloat16)
    key = torch.randn(rows, KV_HEADS, DIM, device="cuda", dtype=torch.bfloat16)
    begun = torch.arange(0, count + 1, dtype=torch.int32) * length
    flops = COPIES * count * length * length * 2.0 * HEADS * DIM
    for backend in ("fa3", "fa2"):
        workspace = torch.zeros(256 << 20, device="cuda", dtype=torch.uint8)
        ragged = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(workspace, "NHD", backend=backend)
        ragged.plan(
            begun, begun, HEADS, KV_HEADS, DIM, causal=True, q_data_type=torch.bfloat16, kv_data_type=torch.bfloat16
        )
        seconds = timed(lambda: [ragged.run(query, key, key) for _ in range(COPIES)])
        say(f"ragged {backend} {count}x{length}", seconds, 0, flops)
        paged = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD", backend=backend)
        last = torch.full((count,), BLOCK, dtype=torch.int32)
        paged.plan(
            begun, torch.arange(0, count + 1, dtype=torch.int32) * width, tables, last, HEADS, KV_HEADS, DIM, BLOCK,
            causal=True, q_data_type=torch.bfloat16, kv_data_type=torch.bfloat16,
        )  # fmt: skip
        seconds = timed(lambda: [paged.run(query, (cache[:, 1, 0], cache[:, 1, 1])) for _ in range(COPIES)])
        say(f"paged {backend} {count}x{length}", seconds, 0, flops)


def between(rows: int) -> None:
    from engine.embedded.models.cuda import kernels

    x = torch.randn(rows, HIDDEN, device="cuda", dtype=torch.bfloat16)
    weight = torch.ones(HIDDEN, device="cuda", dtype=torch.bfloat16)
    seconds = timed(lambda: [kernels.rms_norm(x, weight, 1e-5) for _ in range(COPIES)])
    say(f"rms_norm rows={rows}", seconds, COPIES * rows * HIDDEN * 4)
    wide = torch.randn(rows, 2 * MIDDLE, device="cuda", dtype=torch.bfloat16)
    seconds = timed(lambda: [kernels.silu_mul(wide) for _ in range(COPIES)])
    say(f"silu_mul rows={rows}", seconds, COPIES * rows * MIDDLE * 6)
    cache = torch.zeros(max(64, rows // BLOCK + 1), 2, 2, BLOCK, KV_HEADS, DIM, device="cuda", dtype=torch.bfloat16)
    rotations = torch.randn(8192, DIM, device="cuda")
    positions = torch.arange(rows, device="cuda", dtype=torch.int32) % 8192
    slots = torch.arange(rows, device="cuda", dtype=torch.int64)
    qkv = torch.randn(rows, (HEADS + 2 * KV_HEADS) * DIM, device="cuda", dtype=torch.bfloat16)
    keys, values = cache.view(-1)[:], cache.view(-1)[BLOCK * KV_HEADS * DIM :]
    seconds = timed(
        lambda: [
            kernels.rotate_and_store(qkv, (HEADS, KV_HEADS, DIM), rotations, positions, slots, keys, values)
            for _ in range(COPIES)
        ]
    )
    say(f"rotate_and_store rows={rows}", seconds, COPIES * rows * (HEADS * 2 + KV_HEADS * 5) * DIM * 2)


def main() -> None:
    print(torch.cuda.get_device_name(), torch.__version__, flush=True)
    parts: dict[str, Callable[[], Any]] = {
        "copy": lambda: _copy(),
        "products": lambda: [products(rows) for rows in (1, 16, 64, 128, 256, 8192)],
        "fp8": lambda: [fp8_products(rows) for rows in (1, 64, 256, 8192)],
        "few-tiles": lambda: [few_tiles(rows, fp8) for fp8 in (False, True) for rows in (16, 64, 128)],
        "layer": lambda: [layer(rows, fp8) for fp8 in (False, True) for rows in (2, 16, 64, 128, 256)],
        "gemv": lambda: [gemvs(model, "bfloat16") for model in ONE_ROW],
        "gemv-compressed": lambda: [gemvs(model, "compressed") for model in ONE_ROW],
        "gemv-fp8": lambda: gemvs("llama-8b", "fp8"),
        "between": lambda: [between(rows) for rows in (1, 64, 256, 8192)],
        "decode": lambda: [decode_attention(*cell) for cell in ((1, 256), (64, 640), (256, 640))],
        "prefill": lambda: [prefill_attention(*cell) for cell in ((16, 512), (2, 4096))],
    }
    for name in sys.argv[1:] or parts:
        started = time.monotonic()
        try:
            parts[name]()
        except Exception as error:
            print(name, "failed:", repr(error)[:2000], flush=True)
        print(f"[{name}: {time.monotonic() - started:.1f} s]", flush=True)


def _copy() -> None:
    source = torch.empty(1 << 32, device="cuda", dtype=torch.uint8)
    target = torch.empty_like(source)
    say("copy 4 GiB, read and written", timed(lambda: target.copy_(source)) * COPIES, 2 * COPIES * (1 << 32))
    wide = source.view(torch.int32)
    say("sum of 4 GiB, read", timed(lambda: wide.sum()) * COPIES, COPIES * (1 << 32))


if __name__ == "__main__":
    main()
