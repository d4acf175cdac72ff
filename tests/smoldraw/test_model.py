"""Training of smoldraw writes files that stock pipelines of diffusers load."""

import json
import math
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("diffusers", reason="needs the extra visual")

from diffusers import DiffusionPipeline
from safetensors.torch import load_file
from torch import nn

from engine.checkpoints.merge import unpack
from smoldraw.architecture import make_pipeline, make_text_encoder, make_tokenizer, make_transformer, make_vae, pack
from smoldraw.evaluate import load_shipped
from smoldraw.train import RESULTS, Trainer
from smoldraw.train import main as train

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(autouse=True)
def one_thread() -> object:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


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


def test_averages_forget_the_first_steps() -> None:
    """Phases may have a few hundred steps alone."""
    layer = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(layer.weight)
    clock = SimpleNamespace(steps=lambda _: (step / 400 for step in range(400)), seconds=0.0)
    Trainer([layer], 0.05, half=False).run("phase", clock, lambda: (layer.weight - 1).square().sum())  # type: ignore[arg-type]
    assert layer.weight.item() == pytest.approx(1, abs=0.05)


def test_training_writes_models_and_results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("smoldraw.train._SAVE_SECONDS", -1.0)
    monkeypatch.setattr("smoldraw.evaluate.STEPS", 2)
    flags = [
        "--minutes=0",
        "--pictures=20",
        "--clips=4",
        "--batch=16",
        "--held-out=1",
        "--scales",
        "--workers=0",
        "--device=cpu",
    ]
    for part in ("pictures", "more", "clips"):
        train([f"--out={tmp_path}", f"--part={part}", *flags])
    found = json.loads((tmp_path / RESULTS).read_text())
    assert [found[part]["steps"] for part in ("autoencoder", "judge", "image", "clip")] == [1, 1, 2, 1]
    assert all(math.isfinite(found[part]["loss"]) for part in ("autoencoder", "judge", "image", "clip"))
    assert (found["image"]["drawn"], found["clip"]["drawn"]) == (1, 1)
    for kind in ("image", "clip"):
        assert isinstance(load_shipped(kind, tmp_path, "cpu"), DiffusionPipeline)
