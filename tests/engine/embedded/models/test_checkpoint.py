"""The reader of checkpoints of the Llama kind against transformers: configurations, rotary positions, tensors."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.gemma3.modeling_gemma3 import Gemma3RotaryEmbedding
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from engine.embedded.models.checkpoint import Checkpoint, read_config
from engine.embedded.models.devices import UnsupportedModelError
from engine.embedded.models.transformers_models import load_config
from engine.errors import EngineFailure

SIZES: dict[str, Any] = {
    "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 96,
    "intermediate_size": 48, "max_position_embeddings": 128,
}  # fmt: skip
SCALINGS: list[dict[str, Any]] = [
    {},
    {"rope_type": "linear", "factor": 3.0},
    {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    {
        "rope_type": "longrope",
        "attention_factor": 1,
        "short_factor": [1.0 + index / 7 for index in range(64)],
        "long_factor": [1.0 + index / 7 for index in range(64)],
        "original_max_position_embeddings": 64,
    },
    {"rope_type": "yarn", "factor": 4.0},
    {"rope_type": "yarn", "factor": 0.5, "original_max_position_embeddings": 32, "truncate": False},
    {"rope_type": "yarn", "factor": 40, "mscale": 0.707, "mscale_all_dim": 1.0, "beta_fast": 16, "beta_slow": None},
    {"rope_type": "yarn", "factor": 4, "truncate": None},
    {"rope_type": "yarn", "factor": 4, "attention_factor": 1.5, "mscale": 0.7, "original_max_position_embeddings": 64},
]


def write(folder: Path, config: dict[str, Any]) -> Path:
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **SIZES, tie_word_embeddings=False))
    model.save_pretrained(tmp_path)
    return tmp_path


@pytest.mark.parametrize("kind", ["llama", "mistral"])
@pytest.mark.parametrize("eos", [{}, {"eos_token_id": None}, {"eos_token_id": [5, 7]}])
def test_what_config_json_leaves_out_has_transformers_defaults(kind: str, eos: dict[str, Any], tmp_path: Path) -> None:
    """As that of Llama 2 leaves out the base of rotary positions."""
    write(tmp_path, {"model_type": kind, "sliding_window": None, **eos})
    (hf_config, completed), config = load_config(str(tmp_path)), read_config(tmp_path)
    assert (config.layers, config.hidden, config.heads) == (completed.layers, completed.hidden_size, completed.heads)
    assert (config.kv_heads, config.head_dim) == (completed.kv_heads, completed.head_dim)
    assert (config.vocab_size, config.context_length) == (completed.vocab_size, completed.context_length)
    assert (config.intermediate, config.epsilon) == (hf_config.intermediate_size, hf_config.rms_norm_eps)
    assert (config.eos_token_ids, config.tied) == (completed.eos_token_ids, completed.tied)
    assert torch.equal(config.rotary.frequencies, LlamaRotaryEmbedding(hf_config).inv_freq)


@pytest.mark.parametrize("rope", SCALINGS, ids=lambda rope: rope.get("rope_type", "default"))
def test_frequencies_are_those_of_transformers_to_the_bit(rope: dict[str, Any], tmp_path: Path) -> None:
    scaled = {"rope_parameters": {"rope_theta": 5e5, **rope}, "head_dim": 128, "model_type": "llama"}
    config = read_config(write(tmp_path, {**SIZES, **scaled}))
    reference = LlamaRotaryEmbedding(load_config(str(tmp_path))[0])
    assert torch.equal(config.rotary.frequencies, reference.inv_freq)
    cos, sin = (part[0, :, :64] for part in reference(torch.zeros(1), torch.tensor([[0, 1, 70, 127]])))
    found = (torch.from_numpy(part) for part in config.rotary.turns([0, 1, 70, 127]))
    for turn, expected in zip(found, (cos, sin), strict=True):
        torch.testing.assert_close(turn, expected, rtol=0, atol=2e-6)


@pytest.mark.parametrize(
    "wrong",
    [
        {"factor": None}, {"beta_fast": -1}, {"mscale": -1}, {"attention_factor": "1"}, {"attention_factor": 0},
        {"rope_theta": 1}, {"beta_fast": 1e308}, {"factor": 1e-300}, {"factor": 10**400}, {"full_attention": {}},
        {"beta_fast": 1e-10, "original_max_position_embeddings": 1e308},
    ],
)  # fmt: skip
def test_wrong_numbers_of_yarn_are_not_guessed(wrong: dict[str, Any], tmp_path: Path) -> None:
    rope = {"rope_theta": 5e5, "rope_type": "yarn", "factor": 4.0, **wrong}
    write(tmp_path, {**SIZES, "model_type": "llama", "rope_parameters": rope})
    with pytest.raises(UnsupportedModelError, match="does not know these scaled rotary positions"):
        read_config(tmp_path)


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
def test_scaling_that_is_added_counts_more_than_what_was_there(kind: str, tmp_path: Path) -> None:
    """As in transformers, which saves `rope_parameters`, while model cards tell to add `rope_scaling`."""
    added = {"rope_theta": 1e6, "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    scaled = {"rope_parameters": {"rope_theta": 1e6, "rope_type": "default"}, "rope_scaling": added}
    given = {"head_dim": 32, "model_type": kind, "hidden_act": "silu", "rms_norm_eps": 1e-6}
    config = read_config(write(tmp_path, {**SIZES, **scaled, **given}))
    reference = LlamaRotaryEmbedding(load_config(str(tmp_path))[0])
    assert torch.equal(config.rotary.frequencies, reference.inv_freq)
    assert config.rotary.attention_factor == reference.attention_scaling > 1


@pytest.mark.parametrize(
    "rope",
    [
        {},
        {"rope_theta": 5e5, "rope_local_base_freq": 2e4, "rope_scaling": {"rope_type": "linear", "factor": 8.0}},
        {"rope_parameters": {"full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 3e5}}},
        {"rope_parameters": {"full_attention": {}, "sliding_attention": {}}, "rope_theta": 5e5},
        {"rope_parameters": {"sliding_attention": {"rope_type": "default"}}, "rope_local_base_freq": 2e4},
        {
            "rope_parameters": {"full_attention": {"rope_theta": 7e5}, "sliding_attention": {"rope_theta": 7e3}},
            "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        },
        {"rope_scaling": {"type": "linear", "factor": 8.0}},
    ],
    ids=["defaults", "older", "newer", "theta at the top", "local theta at the top", "scaling added", "older type"],
)
def test_gemma_turns_heads_in_windows_otherwise(rope: dict[str, Any], tmp_path: Path) -> None:
    sizes = {**SIZES, "model_type": "gemma3_text", "num_hidden_layers": 7, "head_dim": 32}
    config = read_config(write(tmp_path, {**sizes, **rope}))
    reference = Gemma3RotaryEmbedding(load_config(str(tmp_path))[0])
    full, sliding = (rotary.frequencies for rotary in config.rotaries)
    assert torch.equal(full, reference.full_attention_inv_freq)
    assert torch.equal(sliding, reference.sliding_attention_inv_freq)
    assert config.sliding == (True,) * 5 + (False, True) and config.scale == 256**-0.5


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"final_logit_softcapping": 30.0}, "capped logits"),
        ({"use_bidirectional_attention": True}, "both directions"),
        ({"hidden_activation": "relu"}, "the activation relu"),
        ({"layer_types": ["full_attention"]}, "1 entries for 2 layers"),
        ({"layer_types": ["chunked_attention"] * 2}, "sliding windows"),
        ({"sliding_window_pattern": 0}, "sliding_window_pattern 0"),
        ({"sliding_window": None}, "no sliding_window"),
        ({"rope_local_base_freq": [1]}, "scaled rotary positions"),
        ({"rope_parameters": {"rope_theta": 7e5}}, "scaled rotary positions"),
        ({"rope_scaling": {"full_attention": {"rope_type": "linear", "factor": 8.0}}}, "scaled rotary positions"),
    ],
)
def test_other_models_like_gemma_are_refused(change: dict[str, Any], reason: str, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match=reason):
        read_config(write(tmp_path, {**SIZES, "model_type": "gemma3_text", **change}))


def test_a_window_that_no_sequence_fills_is_none(tmp_path: Path) -> None:
    write(tmp_path, {**SIZES, "model_type": "mistral", "sliding_window": 32})
    for most in (0, 33, 500):
        assert read_config(tmp_path, most).attends == ((32, 32), 1, 32)
    config = read_config(tmp_path, 32)
    assert config.context_length == 32 and config.attends == ((None, None), 1, 32)


def test_tensors_are_read_into_memory_of_another_type(folder: Path) -> None:
    stored = load_file(folder / "model.safetensors")
    with Checkpoint(folder, read_config(folder)) as checkpoint:
        whole = torch.zeros((3, 48, 64), dtype=torch.bfloat16)
        names = [f"model.layers.{layer}.mlp.{part}_proj.weight" for layer, part in ((0, "up"), (1, "gate"))]
        checkpoint.fill(dict(zip(names, whole, strict=False)))
        assert not checkpoint.unused
    for name, found in zip(names, whole, strict=False):
        assert torch.equal(found, stored[name].bfloat16())
    assert not whole[2].any()


def test_values_that_are_not_finite_are_told_with_their_tensor(folder: Path) -> None:
    stored = load_file(folder / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.weight"
    stored[name][3, 5] = float("nan")
    save_file(stored, folder / "model.safetensors")
    with Checkpoint(folder, read_config(folder)) as checkpoint:
        parts = {each: torch.empty(shape) for each, shape in read_config(folder).shapes.items()}
        with pytest.raises(EngineFailure, match=rf"the tensor {name} in .*model\.safetensors has values .* not finite"):
            checkpoint.fill(parts)
