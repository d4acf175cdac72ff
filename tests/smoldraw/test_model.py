"""smoldraw as it ships: stock pipelines load it, it draws what held-out prompts say, and training makes such files."""

import json
import math
from pathlib import Path

import pytest
import torch

pytest.importorskip("diffusers", reason="needs the extra visual")

from safetensors.torch import load_file

from engine.checkpoints.merge import unpack
from engine.checkpoints.store import resolve_model
from engine.visual.base import Picture
from engine.visual.types import VisualConfig, VisualRequest
from engine.visual.with_diffusers import DiffusersPipeline
from smoldraw.architecture import make_pipeline, make_text_encoder, make_tokenizer, make_transformer, make_vae, pack
from smoldraw.evaluate import HERE, JUDGE, held_out, judged, load_judge, load_shipped
from smoldraw.train import RESULTS
from smoldraw.train import main as train

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(autouse=True)
def one_thread() -> object:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def test_it_draws_held_out_prompts() -> None:
    judge = load_judge(HERE / JUDGE, "cpu")
    drawings = held_out("image", 12)
    right = list(judged(load_shipped("image", HERE, "cpu"), judge, drawings, 12, 3.0))
    assert sum(right) >= 10, [drawing.prompt for drawing, is_so in zip(drawings, right, strict=True) if not is_so]


def test_the_engine_makes_a_clip(tmp_path: Path) -> None:
    folder = resolve_model("smoldraw-clips", tmp_path)
    pipeline = DiffusersPipeline(VisualConfig(backend="diffusers", model=str(folder), device="cpu"))
    info = pipeline.load()
    assert (info.makes, info.width, info.height, info.frames) == (("video",), 64, 64, 16)
    steps: list[int] = []
    prompt = "a red circle moves to the right on a white background"
    request = VisualRequest(
        request_id="r", prompt=prompt, seeds=(1,), width=64, height=64, steps=6, guidance=3.0, frames=16
    )
    (made,) = pipeline.generate([Picture(request, 1)], lambda step, _: steps.append(step))
    assert made.shape == (16, 64, 64, 3) and steps == list(range(1, 7))
    seen = load_judge(HERE / JUDGE, "cpu").see(torch.from_numpy(made).permute(0, 3, 1, 2) / 127.5 - 1)
    assert [(it.colour, it.shape) for picture in seen for it in picture.items] == [("red", "circle")] * 16
    assert seen[-1].items[0].x > seen[0].items[0].x + 80


def test_a_folder_survives_its_file(tmp_path: Path) -> None:
    tokenizer = make_tokenizer()
    pipeline = make_pipeline(
        "clip",
        vae=make_vae(),
        text_encoder=make_text_encoder(len(tokenizer)),
        transformer=make_transformer("clip"),
    )
    pipeline.save_pretrained(tmp_path / "before")
    pack(tmp_path / "before", tmp_path / "packed.safetensors")
    (tmp_path / "after").mkdir()
    unpack(tmp_path / "packed.safetensors", tmp_path / "after", lambda *_: None)
    names = [
        {path.relative_to(folder) for path in folder.rglob("*")} for folder in (tmp_path / "before", tmp_path / "after")
    ]
    assert names[0] == names[1]
    for path in (tmp_path / "before").rglob("*.safetensors"):
        after = load_file(tmp_path / "after" / path.relative_to(tmp_path / "before"))
        for name, tensor in load_file(path).items():
            assert torch.equal(after[name], tensor.bfloat16())


def test_training_writes_models_and_results(tmp_path: Path) -> None:
    flags = ["--minutes=0", "--pictures=20", "--clips=4", "--batch=16", "--held-out=5", "--workers=0", "--device=cpu"]
    for part in ("pictures", "clips"):
        train([f"--out={tmp_path}", f"--part={part}", *flags])
    found = json.loads((tmp_path / RESULTS).read_text())
    assert {found[part]["steps"] for part in ("autoencoder", "judge", "image", "clip")} == {1}
    assert all(math.isfinite(found[part]["loss"]) for part in ("autoencoder", "judge", "image", "clip"))
    assert (found["image"]["drawn"], found["clip"]["drawn"]) == (5, 1)
    for name in ("smoldraw.safetensors", "smoldraw-clips.safetensors"):
        assert load_file(tmp_path / name).keys() == load_file(HERE / name).keys()
