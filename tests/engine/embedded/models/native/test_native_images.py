"""Images on the compiled path of a CPU: LLaVA, Idefics3 and SmolVLM around a Llama.

The engine generates what transformers generates from the pixels.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForImageTextToText

from engine.checkpoints.families import FAMILIES
from engine.config import EmbeddedConfig
from engine.embedded.core import EngineCore
from engine.embedded.models.checkpoint import Checkpoint, read_config
from engine.embedded.models.devices import UnsupportedModelError
from engine.embedded.models.native.runner import NativeRunner
from tests.support.handoff import OPTIONS as PAIR_OPTIONS
from tests.support.handoff import pair_of, sequence_of, tokens
from tests.support.vision_models import BUILDERS
from tests.support.vision_prompts import Family, Prompt, answers, request_for, text, without_data

COMPILED = [name for name, family in FAMILIES.items() if family.compiled and family.vision]
OPTIONS: dict[str, Any] = {
    **PAIR_OPTIONS,
    "kv_transfer": "",
    "attention": "auto",
    "kv_block_size": 32,
    "num_blocks": 30,
}


def make_folder(kind: str, folder: Path, **text_options: Any) -> Path:
    """One of `tests.support.vision_models` with weights that bfloat16 holds, and heads of the size of a panel."""
    BUILDERS[kind](folder)
    config = AutoConfig.from_pretrained(folder)
    for name, value in {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32, **text_options}.items():
        setattr(config.text_config, name, value)
    config.tie_word_embeddings = config.text_config.tie_word_embeddings
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            parameter.data.normal_(0.0, 0.3)
    model.bfloat16().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module", params=COMPILED)
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Family:
    tied = {"tie_word_embeddings": request.param == "llava"}
    return Family(make_folder(request.param, tmp_path_factory.mktemp(request.param), **tied))


@pytest.fixture(scope="module")
def prompts(family: Family) -> list[Prompt]:
    return [
        family.prompt(text(25, 0), 0, text(5, 1)),
        family.prompt(text(25, 0), 1, text(5, 1)),
        family.prompt(2, text(9, 2), 3, text(1, 3), 0),
        family.prompt(text(30, 6)),
    ]


@pytest.fixture(scope="module")
def expected(family: Family, prompts: list[Prompt]) -> list[list[int]]:
    return [family.generate(prompt) for prompt in prompts]


def core_of(folder: Path, **options: Any) -> EngineCore:
    core = EngineCore(EmbeddedConfig(model=str(folder), **{**OPTIONS, **options}), lambda _: None)
    assert type(core.runner) is NativeRunner
    return core


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, id="plain"),
        pytest.param({"max_num_tokens": 7, "overlap_scheduler": "on"}, id="cut within images"),
        pytest.param({"num_blocks": 9, "max_num_tokens": 40, "enable_block_reuse": False}, id="few blocks"),
    ],
)
def test_greedy_equals_generate(
    family: Family, prompts: list[Prompt], expected: list[list[int]], options: dict[str, Any]
) -> None:
    core = core_of(family.folder, **options)
    for turn in "ab":  # the second time from blocks that the first has left
        deltas = answers(core, [request_for(f"{turn}{index}", prompt) for index, prompt in enumerate(prompts)])
        assert [tokens(deltas[f"{turn}{index}"]) for index in range(len(prompts))] == expected
    assert expected[0] != expected[1]


def test_the_cut_makes_no_difference_to_the_bit(family: Family, prompts: list[Prompt]) -> None:
    reports = []
    for most in (200, 5):
        deltas = answers(
            core_of(family.folder, max_num_tokens=most), [request_for("a", prompts[2], max_tokens=1, prompt_logprobs=1)]
        )
        assert deltas["a"][0].prompt is not None
        reports.append(deltas["a"][0].prompt.logprobs)
    assert reports[0] == reports[1]


def test_decode_needs_no_embeddings(family: Family, prompts: list[Prompt], expected: list[list[int]]) -> None:
    options = {**OPTIONS, "kv_transfer": "tcp"}
    request = request_for("a", prompts[2])
    with pair_of(family.folder, options) as pair:
        handed = pair.hand_over(request)
        pair.decode.add(sequence_of(pair.decode, replace(without_data(request), handoff=handed)))
        assert list(handed.first.token_ids) + tokens(pair.finish()["a"]) == expected[2]


def test_tensors_may_have_the_names_that_the_classes_give_them(tmp_path: Path) -> None:
    """Files have LLaVA's first ones; transformers writes those, and reads both."""
    folder = make_folder("llava", tmp_path, tie_word_embeddings=False)
    [file] = folder.glob("*.safetensors")
    names = ["lm_head.weight", "model.norm.weight", "model.layers.0.self_attn.q_proj.weight"]
    with Checkpoint(folder, read_config(folder)) as checkpoint:
        expected = [checkpoint.floats(name) for name in names]
    now = {"language_model.model.": "model.language_model.", "language_model.lm_head.": "lm_head.", "": "model."}
    renamed = {}
    for name, tensor in load_file(file).items():
        prefix = next(prefix for prefix in now if name.startswith(prefix))
        renamed[now[prefix] + name.removeprefix(prefix)] = tensor
    assert not set(renamed) & set(load_file(file))
    save_file(renamed, file)
    with Checkpoint(folder, read_config(folder)) as checkpoint:
        assert all(torch.equal(checkpoint.floats(name), tensor) for name, tensor in zip(names, expected, strict=True))


def test_a_text_configuration_tells_only_what_differs(tmp_path: Path) -> None:
    """As LLaVA's own does, whose sizes are Llama's defaults."""
    (tmp_path / "config.json").write_text(
        json.dumps(
            {
                "model_type": "llava",
                "image_token_index": 32000,
                "text_config": {"model_type": "llama", "vocab_size": 32064},
            }
        )
    )
    config = read_config(tmp_path)
    sizes = (config.hidden, config.intermediate, config.layers, config.heads, config.kv_heads)
    assert sizes == (4096, 11008, 32, 32, 32)
    assert (config.vocab_size, config.epsilon, config.context_length) == (32064, 1e-6, 2048)
    assert config.facts.rope_theta == 10000.0
    assert config.takes_images is not None and config.takes_images.token_id == 32000


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"model_type": "qwen2_vl"}, "the model type qwen2_vl"),
        ({"quantization_config": {"bits": 4}}, "quantised weights"),
        ({"text_config": {"model_type": "phi"}}, "the model type phi"),
    ],
)
def test_others_are_refused(change: dict[str, Any], reason: str, tmp_path: Path) -> None:
    facts = {"model_type": "llava", "image_token_index": 3, "text_config": {"model_type": "llama"}}
    (tmp_path / "config.json").write_text(json.dumps(facts | change))
    with pytest.raises(UnsupportedModelError, match=reason):
        read_config(tmp_path)
