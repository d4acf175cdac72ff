"""Images on a GPU.

Towers compute what they compute on a CPU, and answers are transformers' own, except for roundings.
"""

from pathlib import Path
from typing import Any

import pytest
import torch

from engine.config import EmbeddedConfig, EncoderConfig
from engine.embedded.core import EngineCore
from engine.embedded.models.transformers_models import load_config
from engine.embedded.vision.batches import BatchEncoder
from engine.embedded.vision.gpu import Graphs
from engine.embedded.vision.processing import ImageProcessing
from engine.embedded.vision.tower import Tower
from engine.media import EncodedMedia, MediaInput
from engine.transfer.shared_bytes import readable
from tests.engine.embedded.models.native.test_native_images import make_folder
from tests.support.handoff import tokens
from tests.support.vision_models import BUILDERS, image_bytes
from tests.support.vision_prompts import Family, answers, request_for, text

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
DEVICE = "cuda"
SIZES = ((40, 30), (30, 61), (16, 16), (64, 20), (40, 30))
FAST = {"head_dim": 128, "intermediate_size": 64}
"""What the GPU's kernels take."""
OPTIONS: dict[str, Any] = {
    "device": DEVICE, "max_num_tokens": 24, "max_batch_size": 4, "kv_block_size": 32, "num_blocks": 60,
    "max_seq_len": 256,
}  # fmt: skip


def encoded(folder: Path, device: str) -> list[EncodedMedia]:
    """More images than the tower takes at a time, of several shapes."""
    encoder = BatchEncoder(EncoderConfig(model=str(folder), device=device, dtype="float32"))
    images = [MediaInput(image_bytes(*size, seed=seed)) for seed in range(3) for size in SIZES]
    outcomes = dict(outcome for some in encoder.encode(images) for outcome in some)
    assert all(isinstance(outcome, EncodedMedia) for outcome in outcomes.values())
    return [outcomes[index] for index in range(len(images))]  # type: ignore[misc]


@pytest.mark.parametrize("kind", BUILDERS)
def test_embeddings_are_those_of_the_cpu(kind: str, tmp_path: Path) -> None:
    folder = BUILDERS[kind](tmp_path)
    for here, there in zip(encoded(folder, DEVICE), encoded(folder, "cpu"), strict=True):
        assert (here.text, here.rows, here.grid) == (there.text, there.rows, there.grid)
        a, b = (torch.frombuffer(bytearray(readable(image.data)), dtype=torch.float32) for image in (here, there))
        assert (a - b).norm() < 1e-4 * b.norm()


@pytest.mark.parametrize("kind", ["llava", "qwen2_vl"])
def test_a_graph_computes_what_the_tower_does(kind: str, tmp_path: Path) -> None:
    """For each number of images, the second time with others; a tower that takes more than pixels has none."""
    folder = BUILDERS[kind](tmp_path)
    config = EncoderConfig(model=str(folder), device=DEVICE, dtype="float32")
    tower, processing = Tower(config), ImageProcessing(config, load_config(str(folder))[1])
    for seed in range(2):
        for count in (3, 1, 2):
            images = [processing.prepare(MediaInput(image_bytes(40, 30, 10 * seed + index))) for index in range(count)]
            rows = torch.cat(
                [torch.frombuffer(bytearray(readable(data)), dtype=torch.float32) for data in tower.encode(images)]
            )
            others = {
                name: torch.cat([image.tensors[name] for image in images]).to(DEVICE) for name in images[0].tensors
            }
            with torch.inference_mode():
                assert torch.allclose(rows, tower.features(**others).flatten().cpu(), rtol=1e-4, atol=1e-5)
    assert len(tower.graphs) == (3 if kind == "llava" else 0)


def test_code_that_cannot_be_captured_runs_without_a_graph() -> None:
    def compute(pixels: torch.Tensor) -> torch.Tensor:
        return pixels * 2 if pixels.sum().item() > 0 else pixels

    graphs, pixels = Graphs(compute), torch.ones(2, 3, device=DEVICE)
    stream = torch.cuda.current_stream()
    for _ in range(3):
        assert torch.equal(graphs(pixels), pixels * 2)
        assert torch.cuda.current_stream() == stream and not torch.cuda.is_current_stream_capturing()
    others = Graphs(lambda pixels: pixels * 3)
    assert torch.equal(others(pixels), pixels * 3) and len(others) == 1


@pytest.mark.parametrize(
    ("kind", "shape", "options", "agreement"),
    [
        pytest.param(
            "llava", FAST, {"dtype": "bfloat16", "attention": "flashinfer"}, 0.8, id="LLaVA, by the GPU's kernels"
        ),
        pytest.param(
            "smolvlm", FAST, {"dtype": "bfloat16", "attention": "flashinfer"}, 0.8, id="SmolVLM, by the GPU's kernels"
        ),
        pytest.param("llava", {}, {"dtype": "float32", "attention": "sdpa"}, 0.95, id="LLaVA, by transformers"),
        pytest.param(
            "qwen2_5_vl", None, {"dtype": "float32", "attention": "sdpa"}, 0.95, id="Qwen2.5-VL, by transformers"
        ),
    ],
)
def test_answers_are_those_of_transformers_but_for_near_ties(
    kind: str, shape: dict[str, int] | None, options: dict[str, Any], agreement: float, tmp_path: Path
) -> None:
    """Prompts longer than a step, so that images are cut; the second time from the blocks that the first has left."""
    family = Family(BUILDERS[kind](tmp_path) if shape is None else make_folder(kind, tmp_path, **shape))
    seeds = range(4)
    prompts = [family.prompt(text(25, 0), seed, text(5, 1), (seed + 1) % 4, text(3, 2)) for seed in seeds]
    core = EngineCore(EmbeddedConfig(model=str(tmp_path), **{**OPTIONS, **options}), lambda _: None)
    for turn in "ab":
        deltas = answers(core, [request_for(f"{turn}{seed}", prompts[seed]) for seed in seeds])
        found = [tokens(deltas[f"{turn}{seed}"]) for seed in seeds]
        agreeing = total = 0
        for prompt, output in zip(prompts, found, strict=True):
            best = family.logprobs(prompt, output)[len(prompt.tokens) - 1 : -1].argmax(-1)
            agreeing += int((best == torch.tensor(output)).sum())
            total += len(output)
        assert agreeing / total >= agreement, f"{agreeing} of {total}"
        assert len({tuple(output) for output in found}) > 1, "another image, another answer"
