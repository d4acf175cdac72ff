"""The built-in model with weights of 8 bits, and of 4 bits as its GGUF file has them, on a CPU."""

import math
from pathlib import Path

import httpx
import pytest
import torch
from tokenizers import Tokenizer

from engine.checkpoints.packaged import BUILTIN, installed_files
from engine.checkpoints.store import resolve_model
from engine.config import EmbeddedConfig
from engine.embedded.models.checkpoint import read_config
from engine.embedded.models.native.checkpoint import NativeCheckpoint
from engine.embedded.models.native.levels import available
from engine.embedded.models.native.runner import NativeRunner
from tests.support.servers import ROOT, serving
from tests.support.steps import Part, step_of

LENGTH = 300


def perplexity(folder: Path, quantization: str) -> float:
    """Of two stretches of this project's documents."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    model = NativeRunner(
        EmbeddedConfig(model=str(folder), num_blocks=-(-LENGTH // 32), max_seq_len=LENGTH, quantization=quantization)
    )
    losses = []
    for name in ("architecture", "embedded-engine"):
        tokens = tokenizer.encode((ROOT / "docs" / f"{name}.md").read_text()).ids[:LENGTH]
        logits = model.forward(step_of([Part(tokens, list(range(-(-LENGTH // 32))), 0, LENGTH)]))
        losses.append(float(torch.nn.functional.cross_entropy(logits[:-1], torch.tensor(tokens[1:]))))
    return math.exp(sum(losses) / len(losses))


@pytest.fixture(scope="module")
def exact(smollm2: Path) -> float:
    return perplexity(smollm2, "none")


def test_int8_keeps_the_perplexity_of_a_text(smollm2: Path, exact: float) -> None:
    assert perplexity(smollm2, "int8") == pytest.approx(exact, rel=0.005)


def test_the_blocks_of_a_gguf_file_are_computed_as_they_are(exact: float, tmp_path: Path) -> None:
    (source,) = installed_files(BUILTIN)
    folder = resolve_model(str(source), tmp_path)
    with NativeCheckpoint(folder, read_config(folder)) as checkpoint:
        kinds = [checkpoint.block_kind(f"model.{name}.weight") for name in ("embed_tokens", "layers.0.mlp.up_proj")]
        assert [kind.name for kind in kinds if kind] == ["Q8_0", "Q4_1"]
    assert perplexity(folder, "int8") == pytest.approx(exact, rel=0.005)


def test_runtime_and_log_name_the_quantised_compute_path() -> None:
    with serving("--engine", "embedded", "--engine-process", "false", "--quantization", "int8") as server:
        runtime = httpx.get(f"{server.url}/server_info").json()["runtime"]
        assert (runtime["dtype"], runtime["compute_path"], runtime["quantization"]) == ("float32", "native", "int8")
        assert f"float32 on cpu (native, {available()[-1].name}, int8); after" in server.log
