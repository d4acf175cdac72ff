"""The GPU benchmark of contexts, tried without a GPU: its tables, and which steps it has run."""

from pathlib import Path
from types import ModuleType

import pytest
import torch

if torch.cuda.is_available():
    pytest.skip("the benchmark itself runs on a GPU", allow_module_level=True)

from benchmarks.gpu import contexts
from benchmarks.gpu.model import SHAPES, write_folder
from engine.config import EmbeddedConfig
from tests.support.cuda import cuda_runner, interpreter  # noqa: F401 - fixtures

SIZES = contexts.Sizes(
    long=40, long_requests=3, longest=60, prefix=32, own=3, sharing=4, output=6, conversation=40, turns=(3,), warm_up=20
)


async def test_parts(
    tmp_path: Path,
    cuda_runner: ModuleType,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("engine.embedded.models.cuda.graph_sizes.LEAST_SEQUENCES", 2)
    monkeypatch.setattr("engine.embedded.models.cuda.prefixes.LEAST_SEQUENCES", 2)
    monkeypatch.setattr("engine.embedded.models.cuda.prefixes.LEAST_TOKENS", 16)
    monkeypatch.setattr(cuda_runner, "LEAST_SAVED", 1)
    write_folder(tmp_path, SHAPES["tiny"])
    config = EmbeddedConfig(
        model=str(tmp_path), device="cpu", dtype="float32", load_format="dummy", num_blocks=100, kv_block_size=4,
        max_batch_size=4, max_num_tokens=24, max_seq_len=200,
    )  # fmt: skip
    await contexts.run(config, SHAPES["tiny"], SIZES, 1e9, list(contexts.Contexts.PARTS))
    shown = capsys.readouterr().out
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in shown.splitlines() if line.startswith("|")]
    assert ["3 x 40"] in [row[:1] for row in rows]
    steps = {row[0]: int(row[5]) for row in rows if row[0] in ("cascade", "no cascade", "own prefixes")}
    assert steps["cascade"] and not steps["no cascade"] and not steps["own prefixes"]
    assert ["3", "40"] in [row[:2] for row in rows], "a conversation is found in the cache"
