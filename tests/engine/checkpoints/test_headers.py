"""Damaged and mismatched checkpoints are refused by the names of file and tensor, the same on every path."""

import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from engine.checkpoints.headers import read_headers
from engine.config import EmbeddedConfig
from engine.embedded.models.load import load_runner
from engine.embedded.models.runner import ModelRunner
from engine.errors import EngineFailure

DOWN = "model.layers.1.mlp.down_proj.weight"
PATHS = {"native": "auto", "transformers": "sdpa"}
"""Values of ATTENTION by what computes."""


def save(folder: Path, kind: str = "llama", **options: Any) -> Path:
    torch.manual_seed(0)
    sizes = {
        "vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "max_position_embeddings": 64, "eos_token_id": 2,
    }  # fmt: skip
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **{**sizes, **options}))
    model.bfloat16().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("whole"))


@pytest.fixture
def folder(whole: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole, tmp_path, dirs_exist_ok=True))


@pytest.fixture(params=PATHS)
def path(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def load(folder: Path, path: str, **options: Any) -> ModelRunner:
    config = {"device": "cpu", "attention": PATHS[path], "num_blocks": 4, "threads": 1, **options}
    return load_runner(EmbeddedConfig(model=str(folder), **config))


def change_config(folder: Path, **values: Any) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


def change_tensors(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    file = folder / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, metadata={"format": "pt"})


def refusal(folder: Path, path: str) -> str:
    with pytest.raises(EngineFailure) as caught:
        load(folder, path)
    assert str(folder) in str(caught.value)
    return str(caught.value)


def test_a_whole_checkpoint_is_served_and_leaves_no_trace_of_the_trial(folder: Path, path: str) -> None:
    runner = load(folder, path)
    assert runner.compute_path == path
    assert not any(blocks.any() for blocks in runner.memory.blocks)


@pytest.mark.parametrize("new_name", ["", "Xodel.layers.1.mlp.down_proj.weight"])
def test_a_missing_tensor_is_named(folder: Path, path: str, new_name: str) -> None:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        moved = tensors.pop(DOWN)
        if new_name:
            tensors[new_name] = moved

    change_tensors(folder, change)
    said = refusal(folder, path)
    assert f"1 tensor: {DOWN}" in said and new_name in said


def test_only_a_tied_head_may_be_left_out(folder: Path, path: str) -> None:
    change_tensors(folder, lambda tensors: tensors.pop("lm_head.weight"))
    assert "1 tensor: lm_head.weight" in refusal(folder, path)
    change_config(folder, tie_word_embeddings=True)
    assert load(folder, path).compute_path == path


def test_unexpected_tensors_are_one_warning(folder: Path, path: str, caplog: pytest.LogCaptureFixture) -> None:
    more = {f"more.{index}": torch.ones(2) for index in range(9)}
    change_tensors(folder, lambda tensors: tensors.update(more, **{"model.rotary_emb.inv_freq": torch.ones(4)}))
    assert load(folder, path).compute_path == path
    [warning] = [record for record in caplog.records if record.levelno >= logging.WARNING]
    listed = "9 tensors: more.0, more.1, more.2, more.3, more.4 and 4 more"
    assert warning.getMessage() == f"the model does not use all that {folder} has: {listed}"


def test_biases_that_the_kind_does_not_have_are_not_used(folder: Path, path: str) -> None:
    before = load(folder, path)
    change_tensors(folder, lambda tensors: tensors.update({"model.layers.0.self_attn.o_proj.bias": torch.ones(32)}))
    assert load(folder, path).compute_path == before.compute_path == path


def test_biases_must_be_whole(tmp_path: Path, path: str) -> None:
    folder = save(tmp_path, "qwen2")
    assert load(folder, path).compute_path == path
    change_tensors(folder, lambda tensors: tensors.pop("model.layers.0.self_attn.k_proj.bias"))
    assert "1 tensor: model.layers.0.self_attn.k_proj.bias" in refusal(folder, path)


@pytest.mark.parametrize(
    "name", [DOWN, "model.norm.weight", "lm_head.weight", "model.layers.0.self_attn.k_proj.weight"]
)
def test_a_tensor_of_another_shape_is_named_with_its_file(folder: Path, path: str, name: str) -> None:
    shape = list(load_file(folder / "model.safetensors")[name].shape)
    change_tensors(folder, lambda tensors: tensors.update({name: torch.ones(7, *shape[1:])}))
    said = refusal(folder, path)
    assert f"the tensor {name} in {folder / 'model.safetensors'} has the shape {[7, *shape[1:]]}" in said
    assert str(shape) in said


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64, torch.bool])
def test_weights_that_are_whole_numbers_are_refused(folder: Path, path: str, dtype: torch.dtype) -> None:
    change_tensors(folder, lambda tensors: tensors.update({DOWN: tensors[DOWN].to(dtype)}))
    assert f"the tensor {DOWN} in {folder / 'model.safetensors'} has the type " in refusal(folder, path)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize(
    "name",
    ["model.embed_tokens.weight", "lm_head.weight", "model.norm.weight", "model.layers.1.self_attn.k_proj.weight"],
)
def test_a_value_that_is_not_finite_is_refused(folder: Path, path: str, name: str, value: float) -> None:
    """Wherever it is: few of the embeddings take part in a trial."""
    change_tensors(folder, lambda tensors: tensors[name].view(-1)[33 % tensors[name].numel()].fill_(value))
    said = refusal(folder, path)
    assert f"the tensor {name} in {folder / 'model.safetensors'} has values that are not finite" in said


def test_weights_whose_results_are_not_finite_are_refused(folder: Path, path: str) -> None:
    change_tensors(folder, lambda tensors: tensors["model.layers.1.mlp.up_proj.weight"].fill_(3e38))
    assert "computes logits that are not finite in torch.float32" in refusal(folder, path)


@pytest.mark.parametrize("count", [1, 3, 1_000_000])
def test_layers_are_those_that_are_there(folder: Path, path: str, count: int) -> None:
    change_config(folder, num_hidden_layers=count)
    assert f"num_hidden_layers in the config.json of {folder} is {count}, but its safetensors have 2 layers" in (
        refusal(folder, path)
    )


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("vocab_size", 10), ("vocab_size", 97), ("num_attention_heads", 7), ("num_attention_heads", 8),
        ("num_key_value_heads", 0), ("num_key_value_heads", 4), ("head_dim", 16), ("hidden_size", 36),
        ("intermediate_size", 50), ("max_position_embeddings", 0), ("max_position_embeddings", -1),
        ("max_position_embeddings", 10**30), ("layer_types", 5), ("rms_norm_eps", -1), ("tie_word_embeddings", "no"),
    ],
)  # fmt: skip
def test_sizes_that_do_not_fit_are_refused(folder: Path, path: str, key: str, value: Any) -> None:
    change_config(folder, **{key: value})
    said = refusal(folder, path)
    assert "asks for" in said or (key in said and str(value) in said)


@pytest.mark.parametrize("size", [0, 7, 100, 3000, -1])
def test_a_truncated_file_is_named(folder: Path, path: str, size: int) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:size])
    assert f"{file} is damaged or not a safetensors file: " in refusal(folder, path)


def test_an_index_names_what_is_missing(tmp_path: Path, path: str) -> None:
    model = AutoModelForCausalLM.from_pretrained(save(tmp_path / "one"), dtype=torch.bfloat16)
    folder = tmp_path / "many"
    model.save_pretrained(folder, max_shard_size="8KB")
    shards = sorted(folder.glob("*.safetensors"))
    assert len(shards) > 2 and load(folder, path).compute_path == path
    shards[1].unlink()
    assert f"{folder} lacks {shards[1].name}, which model.safetensors.index.json names" in refusal(folder, path)
    index = folder / "model.safetensors.index.json"
    for content in ("{", "[]", '{"weight_map": 3}'):
        index.write_text(content)
        assert f"{index} is not an index of safetensors files" in refusal(folder, path)


def test_files_beside_the_model_are_not_read(folder: Path, path: str) -> None:
    """As transformers does: some folders hold the weights twice."""
    (folder / "consolidated.safetensors").write_bytes(b"other")
    assert load(folder, path).compute_path == path
    assert {tensor.path.name for tensor in read_headers(folder).values()} == {"model.safetensors"}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "foo"}, "model_type in the config.json of .* is 'foo', which transformers .* does not know"),
        ({"model_type": "clip_vision_model"}, "models of type clip_vision_model generate no text"),
        ({"hidden_act": "foo"}, "transformers cannot load .*foo"),
    ],
)
def test_models_that_nothing_computes_are_refused_in_one_line(
    folder: Path, path: str, change: dict[str, Any], message: str
) -> None:
    change_config(folder, **change)
    with pytest.raises(EngineFailure, match=message) as caught:
        load(folder, path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("device", ["cuda", "cuda:3", "foo"])
def test_a_device_that_is_absent_is_named(folder: Path, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(
        EngineFailure, match=rf"^DEVICE={device}(, but PyTorch \S+ sees 0 CUDA devices| is not a PyTorch)"
    ):
        load(folder, "native", device=device)


def test_more_memory_than_there_is_is_refused_before_weights_are_read(tmp_path: Path, path: str) -> None:
    with pytest.raises(EngineFailure, match=r"^KV_CACHE_MEMORY_MB=1000000000 is more than the \d+ MiB of memory here$"):
        load(tmp_path, path, num_blocks=0, kv_cache_memory_mb=1_000_000_000)
