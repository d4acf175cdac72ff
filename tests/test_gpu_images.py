"""Images on a GPU: towers make of them what they make on a CPU, and answers are transformers' own, but for roundings."""

from pathlib import Path
from typing import Any

import pytest
import torch
from handover_support import tokens
from image_support import Family, answers, request_for, text
from test_embedded_images_native import make_folder
from vision_models import BUILDERS, image_bytes

from engine.config import EmbeddedConfig, EncoderConfig
from engine.embedded.core import EngineCore
from engine.embedded.vision.encoder import EmbeddedEncoder
from engine.encoder import EncodedImage, ImageInput

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600), pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
DEVICE = "cuda"
SIZES = ((40, 30), (30, 61), (16, 16), (64, 20), (40, 30))
FAST = {"head_dim": 128, "intermediate_size": 64}
"""What the GPU's kernels take."""
OPTIONS: dict[str, Any] = {
    "device": DEVICE, "max_num_tokens": 24, "max_batch_size": 4, "kv_block_size": 32, "num_blocks": 60, "max_seq_len": 256,
}  # fmt: skip


async def encoded(folder: Path, device: str) -> list[EncodedImage]:
    """More images than the tower takes at a time, of several shapes."""
    encoder = EmbeddedEncoder(EncoderConfig(model=str(folder), device=device, dtype="float32"))
    try:
        await encoder.start()
        return await encoder.encode([ImageInput(image_bytes(*size, seed=seed)) for seed in range(3) for size in SIZES])
    finally:
        await encoder.close()


@pytest.mark.parametrize("kind", BUILDERS)
async def test_embeddings_are_those_of_the_cpu(kind: str, tmp_path: Path) -> None:
    folder = BUILDERS[kind](tmp_path)
    for here, there in zip(await encoded(folder, DEVICE), await encoded(folder, "cpu"), strict=True):
        assert (here.text, here.rows, here.grid) == (there.text, there.rows, there.grid)
        a, b = (torch.frombuffer(bytearray(image.data), dtype=torch.float32) for image in (here, there))
        assert (a - b).norm() < 0.01 * b.norm(), "the GPU's convolutions round to TF32"


@pytest.mark.parametrize(
    ("kind", "shape", "options", "agreement"),
    [
        pytest.param("llava", FAST, {"dtype": "bfloat16", "attention": "flashinfer"}, 0.8, id="LLaVA, by the GPU's kernels"),
        pytest.param("smolvlm", FAST, {"dtype": "bfloat16", "attention": "flashinfer"}, 0.8, id="SmolVLM, by the GPU's kernels"),
        pytest.param("llava", {}, {"dtype": "float32", "attention": "sdpa"}, 0.95, id="LLaVA, by transformers"),
        pytest.param("qwen2_5_vl", None, {"dtype": "float32", "attention": "sdpa"}, 0.95, id="Qwen2.5-VL, by transformers"),
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
