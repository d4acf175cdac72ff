"""Every family that the GPU's decoder takes computes what transformers computes, here in Triton's interpreter."""

import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AudioFlamingo3Config,
    AudioFlamingo3ForConditionalGeneration,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PreTrainedModel,
)
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

pytest.importorskip("triton")  # tests.support.cuda needs it

if torch.cuda.is_available():
    pytest.skip("test_cuda_engine runs the model on the GPU", allow_module_level=True)

from engine.checkpoints.families import FAMILIES
from engine.config import EmbeddedConfig
from engine.embedded.models.checkpoint import read_config
from engine.embedded.models.devices import UnsupportedModelError
from engine.embedded.models.transformers_models import load_config
from tests.engine.embedded.models.native.test_native_images import make_folder
from tests.engine.embedded.models.test_checkpoint import SCALINGS
from tests.support.cuda import OPTIONS, cuda_runner, interpreter  # noqa: F401 - fixtures
from tests.support.steps import Part, step_of
from tests.support.weights import vary

TEXT: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": None},
    "qwen2": {"num_attention_heads": 14, "num_key_value_heads": 2},
    "qwen3": {"num_attention_heads": 6, "num_key_value_heads": 2},
}
VISION = ("llava", "idefics3", "smolvlm")
SIZES: dict[str, Any] = {
    "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32,
    "intermediate_size": 64, "vocab_size": 96, "max_position_embeddings": 128, "initializer_range": 0.15,
    "eos_token_id": 2,
}  # fmt: skip
TOKENS = list(range(40, 61))


def make_text(folder: Path, kind: str, **options: Any) -> Path:
    torch.manual_seed(0)
    return save(AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **{**SIZES, **options})), folder)


def save(model: PreTrainedModel, folder: Path) -> Path:
    vary(model)
    model.save_pretrained(folder)
    return folder


def load(cuda_runner: ModuleType, folder: Path, **options: Any) -> Any:  # noqa: F811
    return cuda_runner.CudaRunner(EmbeddedConfig(model=str(folder), **{**OPTIONS, **options}))


def compare(cuda_runner: ModuleType, folder: Path, auto: Any) -> None:  # noqa: F811
    """A prompt, then a decode: products of many rows and of one."""
    runner = load(cuda_runner, folder)
    with torch.inference_mode():
        model = auto.from_pretrained(folder, dtype=torch.float32).eval()
        expected = model(input_ids=torch.tensor([TOKENS])).logits[0]
    parts = [Part(TOKENS, list(range(6)), 0, 20), Part(TOKENS, list(range(6)), 20, 1)]
    found = torch.cat([runner.forward(step_of([part])).clone() for part in parts])
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4 * float(expected.abs().max()))


def test_every_family_that_compiled_code_takes_is_tried() -> None:
    tried = {*TEXT, *VISION, "audioflamingo3"}
    refused = {"gemma3_text"}  # by `check_kind`; a CPU's code takes it
    assert tried | refused == {name for name, family in FAMILIES.items() if family.compiled}


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("kind", TEXT)
def test_a_model_of_text(cuda_runner: ModuleType, tmp_path: Path, kind: str, tied: bool) -> None:  # noqa: F811
    folder = make_text(tmp_path, kind, tie_word_embeddings=tied, **TEXT[kind])
    compare(cuda_runner, folder, AutoModelForCausalLM)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("kind", VISION)
def test_the_language_part_of_a_model_with_images(
    cuda_runner: ModuleType,  # noqa: F811
    tmp_path: Path,
    kind: str,
    tied: bool,
) -> None:
    folder = make_folder(kind, tmp_path, intermediate_size=64, tie_word_embeddings=tied)
    compare(cuda_runner, folder, AutoModelForImageTextToText)


def test_the_language_part_of_a_model_with_audio(cuda_runner: ModuleType, tmp_path: Path) -> None:  # noqa: F811
    torch.manual_seed(0)
    audio = {"num_mel_bins": 80, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2}
    config = AudioFlamingo3Config(
        text_config={"model_type": "qwen2", **SIZES},
        audio_config={"num_hidden_layers": 1, "max_source_positions": 50, **audio},
        audio_token_id=95,
    )
    save(AudioFlamingo3ForConditionalGeneration(config), tmp_path)
    compare(cuda_runner, tmp_path, AudioFlamingo3ForConditionalGeneration)


def test_a_cache_of_eight_bits_is_refused_for_keys_with_biases(cuda_runner: ModuleType, tmp_path: Path) -> None:  # noqa: F811
    make_text(tmp_path, "qwen2")
    with pytest.raises(UnsupportedModelError, match="keys of qwen2 have biases"):
        load(cuda_runner, tmp_path, kv_cache_dtype="fp8")


def test_a_head_in_the_files_counts_although_the_configuration_ties_it(
    cuda_runner: ModuleType,  # noqa: F811
    tmp_path: Path,
) -> None:
    folder = make_text(tmp_path, "llama", tie_word_embeddings=False)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": True}))
    compare(cuda_runner, folder, AutoModelForCausalLM)


@pytest.mark.parametrize("rope", SCALINGS, ids=lambda rope: rope.get("rope_type", "default"))
@pytest.mark.usefixtures("cuda_runner")
def test_rotations_are_those_of_transformers(rope: dict[str, Any], tmp_path: Path) -> None:
    """To the bit, and for as many positions as a sequence may have."""
    from engine.embedded.models.cuda import decoder  # noqa: PLC0415 - it imports FlashInfer

    options = {"rope_parameters": {"rope_theta": 1e4, **rope}, "head_dim": 128}
    config = {**SIZES, **options, "model_type": "llama"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    positions = torch.arange(100)
    cos, sin = LlamaRotaryEmbedding(load_config(str(tmp_path))[0])(torch.zeros(1), positions.unsqueeze(0))
    shape = read_config(tmp_path, 100)
    found = decoder.rotations(shape.rotary, shape.context_length, torch.device("cpu"))
    assert torch.equal(found, torch.cat((cos[0, :, :64], sin[0, :, :64]), -1))


@pytest.mark.parametrize(
    ("kind", "options", "reason"),
    [
        ("gemma3_text", {}, "the norms and gates of Gemma"),
        ("mistral", {"sliding_window": 64}, "sliding windows"),
        ("llama", {"head_dim": 24}, "heads of a power of two, not of 24"),
        ("llama", {"intermediate_size": 96}, r"down_proj.weight has \(64, 96\)"),
        ("llama", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}, "rotary positions"),
    ],
)
def test_other_models_are_left_to_transformers(
    cuda_runner: ModuleType,  # noqa: F811
    tmp_path: Path,
    kind: str,
    options: dict[str, Any],
    reason: str,
) -> None:
    config = AutoConfig.for_model(kind, **{**SIZES, **options}).to_dict()
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedModelError, match=reason):
        load(cuda_runner, tmp_path)


def test_files_with_other_names_are_left_to_transformers(
    cuda_runner: ModuleType,  # noqa: F811
    tmp_path: Path,
) -> None:
    """transformers knows models without their head, whose names have no prefix."""
    folder = make_text(tmp_path, "llama", tie_word_embeddings=True)
    weights = load_file(folder / "model.safetensors")
    renamed = {name.removeprefix("model."): value for name, value in weights.items()}
    save_file(renamed, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(UnsupportedModelError, match=r"models without the tensor model\.embed_tokens\.weight"):
        load(cuda_runner, folder)


@pytest.mark.parametrize("options", [{}, {"quantization": "fp8"}])
def test_random_weights_need_no_files(
    cuda_runner: ModuleType,  # noqa: F811
    tmp_path: Path,
    options: dict[str, Any],
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(AutoConfig.for_model("llama", **SIZES).to_dict()))
    first, second = (load(cuda_runner, tmp_path, load_format="dummy", **options) for _ in range(2))
    step = step_of([Part(TOKENS, list(range(6)), 0, 20)])
    logits = first.forward(step).clone()
    assert bool(logits.isfinite().all()) and float(logits.std()) > 0
    assert torch.equal(second.forward(step), logits), "the same ones each time"
