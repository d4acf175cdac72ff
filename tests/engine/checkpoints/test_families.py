"""The table of families agrees with transformers' classes, and all readers of a model folder read the same facts."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoModelForImageTextToText

from engine.checkpoints.facts import ModelFacts, read_model_facts
from engine.checkpoints.families import FAMILIES, VisionPart
from engine.embedded.models.checkpoint import read_config
from engine.embedded.models.devices import UnsupportedModelError
from engine.embedded.models.transformers_models import load_config
from engine.errors import EngineFailure
from tests.support.vision_models import BUILDERS

SERVED: dict[str, VisionPart] = {name: family.vision for name, family in FAMILIES.items() if family.vision}
FACTS = (
    "model_type", "text_type", "vocab_size", "context_length", "eos_token_ids", "layers", "hidden_size", "heads",
    "kv_heads", "head_dim", "rope_theta", "quantized", "takes_images", "image_tokens", "no_images",
)  # fmt: skip
served = pytest.mark.parametrize("kind", SERVED)


def values(facts: ModelFacts) -> dict[str, Any]:
    return {name: getattr(facts, name) for name in FACTS}


def write(folder: Path, config: dict[str, Any], generation: dict[str, Any] | None = None) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return folder


def small(kind: str) -> Any:
    """A configuration of few layers; the defaults have as many as the largest models."""
    config = AutoConfig.for_model(kind)
    text = config.get_text_config()
    text.num_hidden_layers = 1
    if hasattr(text, "layer_types"):
        text.layer_types = ["full_attention"]
    return config


def test_a_family_with_audio_is_read_as_transformers_reads_it(tmp_path: Path) -> None:
    folder = write(tmp_path, {"model_type": "audioflamingo3", "text_config": {"vocab_size": 160000}})
    facts, (_, completed) = read_model_facts(folder), load_config(str(folder))
    part = FAMILIES["audioflamingo3"].audio
    assert part is not None and completed.config["audio_token_id"] == part.audio_token_id
    assert completed.image_tokens is not None and completed.image_tokens.token_id == part.audio_token_id
    assert facts.media_token_ids == {part.audio_token_id}
    assert (facts.text_type, completed.text_type) == (part.text_type, part.text_type)
    assert completed.takes_media and not completed.takes_images and not facts.no_media
    with torch.device("meta"):
        model = AutoModel.from_config(small("audioflamingo3"))
    names = {name.split(".")[0] for name, _ in model.named_parameters()}
    assert names == {part.language, *part.tower}


def test_every_served_family_has_a_builder_for_the_other_tests() -> None:
    assert SERVED.keys() == BUILDERS.keys()


@served
def test_a_folder_that_leaves_out_all_it_may_is_read_as_transformers_reads_it(kind: str, tmp_path: Path) -> None:
    config = {"model_type": kind, "text_config": {"vocab_size": 160000}, "vision_config": {}}
    folder = write(tmp_path, config)
    facts, (_, completed) = read_model_facts(folder), load_config(str(folder))
    assert values(facts) == values(completed)
    for key in ("rms_norm_eps", "hidden_act", "intermediate_size"):
        assert facts.text[key] == completed.text[key]


@served
def test_image_tokens_and_towers_are_transformers_defaults(kind: str) -> None:
    config, vision = AutoConfig.for_model(kind), SERVED[kind]
    assert vision.image_token_id == config.image_token_id
    assert vision.merge == getattr(config.vision_config, "spatial_merge_size", 0)
    assert bool(vision.merge) == hasattr(AutoModel._model_mapping[type(config)], "get_rope_index")
    assert vision.tower_types[:1] in ((), (config.vision_config.model_type,))
    assert vision.text_type == config.get_text_config().model_type


@served
def test_the_parts_of_a_model_are_the_submodules_that_transformers_makes(kind: str) -> None:
    with torch.device("meta"):
        model = AutoModel.from_config(small(kind))
    vision = SERVED[kind]
    assert {name for name, _ in model.named_children()} == {*vision.tower, vision.language}


@served
def test_tensors_get_the_names_that_they_have_in_text_models(kind: str) -> None:
    config, vision = small(kind), SERVED[kind]
    text = {name: value for name, value in config.get_text_config().to_dict().items() if name != "model_type"}
    with torch.device("meta"):
        names = [*AutoModelForImageTextToText.from_config(config).state_dict()]
        plain = AutoModelForCausalLM.from_config(AutoConfig.for_model(vision.text_type.split("_")[0], **text))
    found = {vision.text_tensor(name) for name in names} - {None}
    assert found == {*plain.state_dict()}
    older = [name.replace(f"model.{vision.language}.", f"{vision.language}.model.") for name in names]
    older = [f"{vision.language}.{name}" if name.startswith("lm_head.") else name for name in older]
    assert older != names and {vision.text_tensor(name) for name in older} - {None} == found
    assert sum(vision.text_tensor(name) is None for name in names) == len(names) - len(found) > 0


@served
def test_processors_exist(kind: str) -> None:
    assert isinstance(getattr(transformers, SERVED[kind].processor), type)


@pytest.mark.parametrize("kind", [name for name, family in FAMILIES.items() if family.no_images])
def test_families_whose_images_are_refused(kind: str) -> None:
    config = AutoConfig.for_model(kind).to_dict()
    facts = ModelFacts(config)
    assert facts.takes_images and facts.image_tokens is None and FAMILIES[kind].no_images in facts.no_images
    with pytest.raises(EngineFailure, match=f"models of type {kind} are not supported: it"):
        _ = facts.vision


@pytest.mark.parametrize("kind", ["mistral", "gemma3_text"])
def test_defaults_of_text_models_are_those_of_transformers(kind: str) -> None:
    config = AutoConfig.for_model(kind)
    for key, value in FAMILIES[kind].defaults.items():
        expected = config.rope_parameters["rope_theta"] if key == "rope_theta" else getattr(config, key)
        assert value == expected, key


@pytest.fixture(scope="module", params=SERVED)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return BUILDERS[request.param](tmp_path_factory.mktemp(request.param))


def test_all_who_read_a_folder_read_the_same(folder: Path) -> None:
    facts = read_model_facts(folder)  # the API layer, and TensorRT-LLM's adapter
    _, completed = load_config(str(folder))  # the engine on torch, and the vision tower
    assert values(facts) == values(completed)
    assert (facts.eos_token_ids, facts.no_images, facts.takes_images) == ((2,), "", True)
    if not facts.family.compiled:
        with pytest.raises(UnsupportedModelError, match=f"the model type {facts.model_type}"):
            read_config(folder)
        return
    compiled = read_config(folder)
    here = (compiled.vocab_size, compiled.context_length, compiled.eos_token_ids, compiled.layers, compiled.hidden)
    assert here == (facts.vocab_size, facts.context_length, facts.eos_token_ids, facts.layers, facts.hidden_size)
    sizes = (compiled.heads, compiled.kv_heads, compiled.head_dim)
    assert sizes == (facts.heads, facts.kv_heads, facts.head_dim)
    assert float(compiled.rotary.frequencies[1]) == pytest.approx(facts.rope_theta ** (-2 / facts.head_dim))
    assert compiled.takes_images == facts.image_tokens


@pytest.mark.parametrize("kind", ["qwen2_vl", "qwen2_5_vl"])
def test_a_flat_configuration_is_read_like_a_nested_one(kind: str, tmp_path: Path) -> None:
    """The folders on the hub have the language part's keys at the top."""
    folder = BUILDERS[kind](tmp_path / "nested")
    config = json.loads((folder / "config.json").read_text())
    flat = config.pop("text_config") | config
    flat["rope_scaling"] = {"type": "mrope", "mrope_section": [2, 3, 3]}
    flat["rope_theta"] = flat.pop("rope_parameters")["rope_theta"]
    other = write(tmp_path / "flat", flat, {"eos_token_id": 2})
    assert values(read_model_facts(other)) == values(read_model_facts(folder)) == values(load_config(str(other))[1])


def test_names_that_differ_from_the_usual_ones_come_from_transformers(tmp_path: Path) -> None:
    AutoConfig.for_model("gpt2", n_positions=96, n_layer=3, n_head=4, n_embd=32).save_pretrained(tmp_path)
    _, facts = load_config(str(tmp_path))
    assert (facts.context_length, facts.layers, facts.heads, facts.hidden_size, facts.head_dim) == (96, 3, 4, 32, 8)


@pytest.mark.parametrize(
    ("config", "generation", "ids"),
    [
        ({"eos_token_id": 2}, None, (2,)),
        ({"eos_token_id": [2, 7]}, {}, (2, 7)),
        ({"eos_token_id": 2}, {"eos_token_id": [3, 4]}, (3, 4)),
        ({"eos_token_id": 2}, {"eos_token_id": 0}, (0,)),
        ({"eos_token_id": 2}, {"eos_token_id": []}, (2,)),
        ({"eos_token_id": None}, {"eos_token_id": None}, ()),
        ({"eos_token_id": 5, "text_config": {"eos_token_id": 6}}, None, (6,)),
    ],
)
def test_tokens_that_end_a_sequence(
    config: dict[str, Any], generation: dict[str, Any] | None, ids: tuple[int, ...], tmp_path: Path
) -> None:
    assert read_model_facts(write(tmp_path, config, generation)).eos_token_ids == ids


def test_parameters_that_the_makers_sample_with(tmp_path: Path) -> None:
    generation = {"do_sample": True, "temperature": 0.7, "top_k": 20, "repetition_penalty": None, "eos_token_id": 2}
    assert read_model_facts(write(tmp_path, {}, generation)).sampling_defaults == {"temperature": 0.7, "top_k": 20}
    assert read_model_facts(write(tmp_path, {}, {})).sampling_defaults == {}
    for wrong in ({"top_p": "0.9"}, {"top_k": 0.5}, {"min_p": True}):
        facts = read_model_facts(write(tmp_path, {}, wrong))
        with pytest.raises(EngineFailure, match=rf"{next(iter(wrong))} in the generation_config\.json"):
            _ = facts.sampling_defaults


@pytest.mark.parametrize(
    ("change", "name", "message"),
    [
        ({"vocab_size": "many"}, "vocab_size", "^vocab_size in the config.json of .* a positive integer, not 'many'$"),
        ({"vocab_size": 0}, "vocab_size", "vocab_size .* not 0"),
        ({"max_position_embeddings": True}, "context_length", "max_position_embeddings .* not True"),
        ({"text_config": {"num_hidden_layers": 1.5}}, "layers", r"text_config\.num_hidden_layers .* not 1\.5"),
        ({"text_config": {"hidden_act": "silu"}}, "hidden_size", r"config\.json of .* has no text_config\.hidden_size"),
        ({"text_config": [1]}, "vocab_size", r"text_config in .* must be an object, not \[1\]"),
        ({"model_type": 3}, "vocab_size", "model_type in .* must be a string"),
        ({"rope_theta": -1}, "rope_theta", "rope_theta .* must be a positive number, not -1"),
        ({"rope_parameters": 7}, "rope_theta", "rope_parameters .* must be an object, not 7"),
        ({}, "rope_theta", "has no rope_theta"),
        ({"eos_token_id": "</s>"}, "eos_token_ids", r"eos_token_id in the config\.json of .* not '</s>'"),
        ({"model_type": "llava", "image_token_index": -1}, "image_tokens", "image_token_index .* must be a token id"),
        ({"model_type": "llava", "vision_config": "clip"}, "no_images", "vision_config in .* must be an object"),
        (
            {"model_type": "qwen2_vl", "vision_config": {"spatial_merge_size": 0}},
            "image_tokens",
            r"vision_config\.spatial_merge_size in .* must be a positive integer, not 0",
        ),
    ],
)  # fmt: skip
def test_wrong_values_are_refused_by_the_names_of_file_and_key(
    change: dict[str, Any], name: str, message: str, tmp_path: Path
) -> None:
    folder = write(tmp_path, {"model_type": "unheard_of"} | change)
    with pytest.raises(EngineFailure, match=message) as caught:
        getattr(read_model_facts(folder), name)
    assert str(folder) in str(caught.value)


def test_files_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(EngineFailure, match=r"has no config\.json"):
        read_model_facts(tmp_path)
    (tmp_path / "config.json").write_text("[1]")
    with pytest.raises(EngineFailure, match=r"config\.json must hold a JSON object"):
        read_model_facts(tmp_path)
    write(tmp_path, {"vocab_size": 8, "max_position_embeddings": 8})
    (tmp_path / "config.json").write_text("[" * 100_000)
    with pytest.raises(EngineFailure, match=r"config\.json cannot be read"):
        read_model_facts(tmp_path)
    write(tmp_path, {"vocab_size": 8, "max_position_embeddings": 8})
    (tmp_path / "generation_config.json").write_text("{")
    with pytest.raises(EngineFailure, match=r"generation_config\.json cannot be read"):
        read_model_facts(tmp_path)


def test_errors_of_transformers_name_the_folder(tmp_path: Path) -> None:
    with pytest.raises(EngineFailure, match=f"transformers cannot use the config.json of {tmp_path}: .*hidden_act"):
        load_config(str(write(tmp_path, {"model_type": "llama", "hidden_act": 7})))
    unknown = f"^model_type in the config.json of {tmp_path} is 'unheard_of', which transformers [0-9.]+ does not know$"
    with pytest.raises(EngineFailure, match=unknown):
        load_config(str(write(tmp_path, {"model_type": "unheard_of"})))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"num_hidden_layers": 0},
            "num_hidden_layers in the config.json of the model must be a positive .*, not 0",
        ),
        ({"vocab_size": 1 << 31}, "vocab_size .* must be at most 2147483647, not 2147483648"),
        (
            {"num_attention_heads": 6, "num_key_value_heads": 4},
            "num_attention_heads .* multiple of num_key_value_heads, 4, not 6",
        ),
        ({"num_attention_heads": 6, "num_key_value_heads": 12}, "num_attention_heads .* multiple of .*, 12, not 6"),
        ({"num_attention_heads": 6, "hidden_size": 64}, "hidden_size .* multiple of num_attention_heads, 6, unless"),
        ({"text_config": {"num_attention_heads": 0}}, r"text_config\.num_attention_heads .* positive integer, not 0"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps .* must be a positive number, not nan"),
        ({"tie_word_embeddings": "no"}, "tie_word_embeddings .* must be true or false, not 'no'"),
        ({"layer_types": "full_attention"}, "layer_types .* must be a list of strings"),
        ({"eos_token_id": 8}, "eos_token_id of the model is 8, which is outside a vocabulary of 8"),
        ({"eos_token_id": [2, -1]}, "eos_token_id of the model is -1"),
    ],
)
def test_values_that_no_model_can_have(change: dict[str, Any], message: str) -> None:
    with pytest.raises(EngineFailure, match=message):
        ModelFacts({"vocab_size": 8, "max_position_embeddings": 8} | change).check()


@pytest.mark.parametrize(
    "values",
    [
        {"num_attention_heads": 6, "num_key_value_heads": None, "hidden_size": 48},
        {"num_attention_heads": 6, "hidden_size": 64, "head_dim": 16},
        {"intermediate_size": [48, 64], "num_key_value_heads": 1, "num_attention_heads": 3},
        {"eos_token_id": None, "rope_scaling": None, "layer_types": None},
        {"text_config": {"num_hidden_layers": 2}, "num_hidden_layers": 0},
    ],
)
def test_values_that_models_have(values: dict[str, Any]) -> None:
    ModelFacts({"vocab_size": 8, "max_position_embeddings": 8} | values).check()


def test_required_facts_are_checked_before_weights_are_loaded() -> None:
    ModelFacts({"vocab_size": 8, "max_position_embeddings": 8}).check()
    for lacking in ("vocab_size", "max_position_embeddings"):
        with pytest.raises(EngineFailure, match=f"no {lacking}"):
            ModelFacts({"vocab_size": 8, "max_position_embeddings": 8, lacking: None}).check()
