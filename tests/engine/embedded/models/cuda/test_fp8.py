"""Eight bits where there is no GPU for them: refused by name, never ignored; and what they make of a cache."""

from pathlib import Path
from typing import Any

import pytest
import torch

from engine.config import EmbeddedConfig
from engine.embedded.models.load import load_runner
from engine.embedded.models.torch.runner import TorchRunner
from engine.errors import EngineFailure


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"device": "cpu", "quantization": "fp8"}, "QUANTIZATION=fp8 cannot be used: it needs an NVIDIA GPU"),
        ({"device": "cpu", "kv_cache_dtype": "fp8"}, "KV_CACHE_DTYPE=fp8 cannot be used: it needs an NVIDIA GPU"),
        ({"device": "cpu", "compressed_weights": "on"}, "COMPRESSED_WEIGHTS=on cannot be used: it needs an NVIDIA GPU"),
        (
            {"device": "cpu", "attention": "sdpa", "quantization": "fp8", "kv_cache_dtype": "fp8"},
            "QUANTIZATION=fp8 and KV_CACHE_DTYPE=fp8",
        ),
        (
            {"device": "cuda", "attention": "sdpa", "quantization": "fp8"},
            "QUANTIZATION=fp8 cannot be used with ATTENTION=sdpa",
        ),
    ],
)
def test_what_only_the_fast_path_has_is_refused_without_it(
    tiny_model: Path, options: dict[str, Any], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(EngineFailure, match=said):
        load_runner(EmbeddedConfig(model=str(tiny_model), **options))


def test_a_cache_of_eight_bits_has_twice_the_blocks(tiny_model: Path) -> None:
    counts = {}
    for dtype in ("auto", "fp8"):
        model = TorchRunner(
            EmbeddedConfig(
                model=str(tiny_model), device="cpu", dtype="bfloat16", kv_cache_dtype=dtype, kv_cache_memory_mb=16
            )
        )
        counts[dtype] = model.groups[0].num_blocks
        assert model.cache.data.nbytes <= 16 << 20
        assert model.cache.data.dtype == (torch.bfloat16 if dtype == "auto" else torch.float8_e4m3fn)
    assert counts["fp8"] == 2 * counts["auto"]
