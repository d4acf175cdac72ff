"""The encoder computes what transformers' does, and names what is missing."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import WhisperModel

from engine.checkpoints.whisper import read_sizes
from engine.embedded.whisper.encoder import AudioEncoder, load_weights
from engine.errors import EngineFailure
from tests.support.whisper_models import build_whisper

CPU = torch.device("cpu")


def load(folder: Path, dtype: torch.dtype = torch.float32) -> AudioEncoder:
    sizes = read_sizes(folder)
    weights = load_weights(folder, "model.encoder.", dtype, CPU)
    return AudioEncoder(weights, sizes.encoder_layers, sizes.encoder_heads)


@pytest.mark.parametrize("bins", [80, 128])
def test_a_batch_of_windows_is_encoded_as_by_transformers(tmp_path: Path, bins: int) -> None:
    folder = build_whisper(tmp_path, bins=bins)
    encoder = load(folder)
    features = torch.randn(3, bins, 2 * encoder.positions)
    with torch.inference_mode():
        wanted = WhisperModel.from_pretrained(folder, dtype=torch.float32).encoder.eval()(features).last_hidden_state
    torch.testing.assert_close(encoder(features), wanted, atol=1e-4, rtol=1e-4)
    assert (encoder.bins, encoder.width) == (bins, wanted.shape[-1])
    assert encoder(features[:1, :, :60]).shape == (1, 30, encoder.width)


def test_a_folder_without_all_tensors_is_refused(tmp_path: Path) -> None:
    folder = build_whisper(tmp_path)
    file = folder / "model.safetensors"
    weights = load_file(file)
    bad = weights.pop("model.encoder.layers.1.fc1.weight")
    save_file(weights, file, {"format": "pt"})
    with pytest.raises(EngineFailure, match=r"lack the tensor model\.encoder\.layers\.1\.fc1\.weight"):
        load(folder)
    save_file(weights | {"model.encoder.layers.1.fc1.weight": bad * float("nan")}, file, {"format": "pt"})
    with pytest.raises(EngineFailure, match="not finite"):
        load(folder)
