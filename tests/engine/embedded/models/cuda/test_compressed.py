"""Weights in 12 bits without loss, on a GPU, or by Triton's interpreter where Triton is installed without one."""

from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from engine.config import EmbeddedConfig
from engine.embedded.models.checkpoint import LlamaConfig, read_config
from engine.embedded.models.cuda import compressed, kernels
from engine.embedded.models.cuda import decoder as cuda_decoder
from engine.embedded.models.cuda.compressed import ENTRIES, CompressedWeight, compress
from engine.embedded.models.cuda.decoder import LlamaDecoder, trial
from engine.embedded.models.devices import UnsupportedModelError
from tests.support.cuda import ON_GPU, OPTIONS, cuda_runner, interpreter, save  # noqa: F401 - fixtures

pytestmark = pytest.mark.usefixtures("interpreter")

DEVICE = torch.device("cuda" if ON_GPU else "cpu")


@pytest.fixture(autouse=True)
def narrow(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Compress weights that are small enough for the interpreter."""
    torch.manual_seed(0)
    monkeypatch.setattr(compressed, "_LEAST_WIDTH", 32)
    with torch.inference_mode():
        yield


def weight_of(rows: int, k: int, spread: float = 0.02) -> torch.Tensor:
    return (torch.randn(rows, k, device=DEVICE) * spread).bfloat16()


def compressed_copy(values: torch.Tensor) -> CompressedWeight:
    copy = compress(values)
    assert copy is not None
    return copy


def restored(weight: CompressedWeight) -> torch.Tensor:
    """Read the format as the module's docstring says: float64 [N, K]."""
    words = weight.words.cpu().long() & 0xFFFFFFFF
    n, _, width = words.shape
    low, high, rest = words.unbind(1)
    turned = (rest << 4 | rest >> 28) & 0xFFFFFFFF
    values = torch.empty((n, 8, width), dtype=torch.float64)
    for part in range(8):
        shift = 8 * (part % 4)
        byte = ((low, high)[part // 4] >> shift) & 0xFF
        others = ((rest, turned)[part // 4] >> shift) & 0x87
        exponent, mantissa = (others & 7) << 1 | byte >> 7, byte & 0x7F
        size = torch.where(exponent > 0, (0x80 | mantissa) << (exponent - 1).clamp(min=0), mantissa)
        values[:, part] = torch.where(others >= 0x80, -size, size).double()
    smallest = weight.scales.cpu().double() * 2.0 ** (100 - 126 - 7)
    values = values.view(n, -1) * smallest[:, None]
    for entries in weight.listed.cpu().long() & 0xFFFFFFFF:
        listed = (entries & 0xFFFF).to(torch.int16).view(torch.bfloat16).double()
        values[torch.arange(n), entries >> 16] += listed
    return values


@pytest.mark.parametrize("k", [64, 2048, 4128])
def test_every_value_is_kept(k: int) -> None:
    weight = weight_of(32, k)
    weight[1] = 0
    weight[2, 3] = 0
    weight[3, 5], weight[4, k - 1] = 8.0, -20.0
    weight[5, :9] = torch.tensor([1e-39, -1e-39, 3e-38, 2.0**-126, 0.0, -0.0, 1e-20, -1e-6, 1e-5], device=DEVICE)
    weight[6] *= 1e-30
    weight[7] *= 1e30
    assert torch.equal(restored(compressed_copy(weight)), weight.cpu().double())


def test_a_window_is_chosen_in_which_most_values_lie() -> None:
    """The largest value of the row is listed, not the many that are too small for a window below it."""
    weight = weight_of(16, 2048)
    weight[3, 7] = 8.0
    copy = compressed_copy(weight)
    assert int((copy.listed[:, 3] != 0).sum()) <= 4
    assert (8.0, 7) in [
        (torch.tensor(int(entry) & 0xFFFF).to(torch.int16).view(torch.bfloat16).item(), int(entry) >> 16)
        for entry in copy.listed[:, 3]
    ]


def test_what_does_not_fit_is_not_compressed(monkeypatch: pytest.MonkeyPatch) -> None:
    wide = weight_of(16, 256)
    wide[5, : ENTRIES + 1] *= 1e-20
    assert compress(wide) is None
    wide[5, 0] = 0
    assert compress(wide) is not None
    assert compress(wide.half()) is None
    assert compress(weight_of(16, 72)) is None  # no whole number of words for each thread
    monkeypatch.setattr(compressed, "_LEAST_WIDTH", 512)
    assert compress(wide) is None


@pytest.mark.parametrize("k", [64, 2048, 4128])
@pytest.mark.parametrize("tile", [(1, 1, 512), (4, 2, 512), (2, 2, 128)])
def test_products_are_those_of_the_weight_itself(
    k: int, tile: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compressed, "_LEAST_WARPS", 1)
    x, weight, norm = weight_of(1, k, 1.0), weight_of(32, k, 0.1), weight_of(1, k, 1.0)[0]
    weight[3, 9] = 9.0
    weight[20, 8:16] *= 1e-5
    residual, copies = weight_of(1, 32, 1.0), [torch.zeros_like(x) for _ in range(2)]
    copy = compressed_copy(weight)

    def same(**around: Any) -> None:
        found = compressed.product(x, copy, tile=tile, **around)
        same_as(found, kernels.gemv(x, weight, tile=(2, 1024, 4), **around))

    same()
    same(gated=True)
    same(norm=(norm, 1e-5), gated=True)
    found = compressed.product(x, copy, norm=(norm, 1e-5), copy=copies[0], tile=tile)
    same_as(found, kernels.gemv(x, weight, norm=(norm, 1e-5), copy=copies[1]))
    assert torch.equal(copies[0], copies[1])
    added = residual.clone()
    kernels.gemv(x, weight, residual=residual)
    assert compressed.product(x, copy, residual=added, fetch=ON_GPU, tile=tile) is added
    same_as(added, residual)


def same_as(found: torch.Tensor, expected: torch.Tensor) -> None:
    """Both sums are in float32, in another order, and rounded to 8 bits."""
    largest = float(expected.abs().max())
    assert float((found.float() - expected.float()).abs().max()) <= 0.01 * largest


def test_a_weight_has_any_number_of_rows() -> None:
    x, weight = weight_of(1, 64, 1.0), weight_of(33, 64)
    same_as(compressed.product(x, compressed_copy(weight), tile=(4, 2, 512)), kernels.gemv(x, weight, tile=(1, 64, 4)))


def test_the_smallest_values_count() -> None:
    """They are subnormal numbers as codes."""
    weight = torch.full((16, 64), 2.0**-21, device=DEVICE).bfloat16()
    weight[:, 0] = 1.0
    x = torch.ones((1, 64), device=DEVICE).bfloat16()
    x[0, 0] = 0
    copy = compressed_copy(weight)
    assert not copy.listed.any()
    assert compressed.product(x, copy, tile=(1, 1, 128)).tolist() == [[63 * 2.0**-21] * 16]


@pytest.mark.parametrize(
    ("tile", "n", "k", "expected"),
    [
        ((4, 2, 512), 6144, 4096, (4, 2, 512)),
        ((4, 2, 512), 3584, 4096, (4, 1, 512)),  # else they were fewer than 2,000
        ((4, 2, 512), 1024, 4096, (2, 1, 512)),
        ((4, 2, 512), 4096, 14336, (4, 2, 512)),
        ((4, 2, 512), 5120, 17408, (4, 1, 256)),  # 512 words would read more than an eighth beyond the last one
        ((2, 2, 512), 17408, 5120, (2, 2, 128)),
        ((2, 2, 512), 8192, 3072, (2, 2, 128)),
        ((4, 2, 512), 151936, 3584, (4, 2, 512)),
        ((4, 2, 512), 16, 64, (1, 1, 128)),
    ],
)
def test_tiles_suit_any_width(tile: tuple[int, int, int], n: int, k: int, expected: tuple[int, int, int]) -> None:
    assert compressed.tile_for(tile, n, k // 8) == expected


@pytest.mark.parametrize(
    ("wanted", "options", "dtype", "size", "free", "kept"),
    [
        ("auto", {}, torch.bfloat16, 12, 90, True),
        ("auto", {}, torch.bfloat16, 13, 90, False),
        ("auto", {}, torch.bfloat16, 12, 23, False),
        ("on", {}, torch.bfloat16, 13, 14, True),
        ("on", {}, torch.bfloat16, 0, 90, False),
        ("off", {}, torch.bfloat16, 1, 90, False),
        ("auto", {}, torch.float16, 1, 90, False),
        ("auto", {"quantization": "fp8"}, torch.bfloat16, 1, 90, False),
    ],
)
@pytest.mark.skipif(ON_GPU, reason="the runner is imported for a CPU")
def test_copies_are_kept_where_they_take_a_small_part_of_the_memory(
    cuda_runner: ModuleType,  # noqa: F811
    wanted: str,
    options: dict[str, Any],
    dtype: torch.dtype,
    size: int,
    free: int,
    kept: bool,
) -> None:
    config = EmbeddedConfig(model="", compressed_weights=wanted, **options)
    assert cuda_runner.keeps_copies(config, dtype, size << 30, free << 30, 96 << 30) is kept


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"memory_service": "/run/service"}, "not shared"),
        ({"quantization": "fp8"}, "without QUANTIZATION"),
    ],
)
@pytest.mark.skipif(ON_GPU, reason="the runner is imported for a CPU")
def test_copies_that_cannot_be_kept_are_refused(
    cuda_runner: ModuleType,  # noqa: F811
    tmp_path: Path,
    options: dict[str, Any],
    said: str,
) -> None:
    model = str(save(tmp_path, 0.2))
    with pytest.raises(UnsupportedModelError, match=said):
        cuda_runner.CudaRunner(EmbeddedConfig(model=model, compressed_weights="on", **OPTIONS, **options))


def decoder_of(shape: LlamaConfig) -> LlamaDecoder:
    decoder = LlamaDecoder(shape, torch.bfloat16, DEVICE)
    decoder.randomise()
    return decoder


@pytest.mark.parametrize("tied", [False, True])
def test_a_model_answers_one_token_from_compressed_weights(
    tmp_path: Path, tied: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda_decoder, "_TRIAL", [1, 3])
    decoder = decoder_of(read_config(save(tmp_path, 0.2, tied=tied), 32))
    expected = trial(decoder, torch.bfloat16, DEVICE)
    rows, product = [], compressed.product

    def counted(x: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
        rows.append(len(x))
        return product(x, *args, **options)

    monkeypatch.setattr(compressed, "product", counted)
    size = decoder.compress()
    assert size == decoder.bytes_compressed
    found = trial(decoder, torch.bfloat16, DEVICE)
    assert rows == [1] * (4 * 2 + 1)  # the products of two layers, and the output
    same_as(found, expected)
