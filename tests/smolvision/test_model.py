"""smolvision's file of weights and SmolLM2 make a model folder, which transformers loads, and which answers rightly."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer
from transformers import AutoProcessor, LlamaConfig, LlamaForCausalLM, LlavaForConditionalGeneration

from engine.checkpoints.merge import merge
from engine.checkpoints.packaged import PACKAGED, VISION
from engine.checkpoints.store import resolve_model
from multimodal.text.templates import ChatTemplate
from smolvision.architecture import VOCABULARY, save
from smolvision.batches import Chats
from smolvision.conversations import (
    IMAGE_TOKEN,
    IMAGE_TOKEN_ID,
    IMAGE_TOKENS,
    TEMPLATE,
    Encoder,
    held_out_chats,
    make_chat,
)
from smolvision.evaluate import ALL_KINDS, Answers, evaluate, picture
from smolvision.images import SIZE
from smolvision.model import Student
from smolvision.train import main as train

ROOT = Path(__file__).resolve().parents[2]
SHIPPED = ROOT / "smolvision/smolvision.safetensors"


def test_ids_in_training_are_those_of_the_template(smollm2: Path, tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_file(str(smollm2 / "tokenizer.json"))
    assert tokenizer.add_special_tokens([IMAGE_TOKEN]) == 1 and tokenizer.token_to_id(IMAGE_TOKEN) == IMAGE_TOKEN_ID
    encoder, template = Encoder(tokenizer), ChatTemplate(TEMPLATE, {})
    for seed in range(100):
        chat = make_chat(seed, 3)
        text = template.render(chat.messages, add_generation_prompt=False)
        ids, said = encoder(chat, 1000)
        assert ids == tokenizer.encode(text.replace(IMAGE_TOKEN, IMAGE_TOKEN * IMAGE_TOKENS)).ids
        assert ids.count(IMAGE_TOKEN_ID) == IMAGE_TOKENS * len(chat.scenes)
        answers = [message["content"] for message in chat.messages if message["role"] == "assistant"]
        spoken = tokenizer.decode(
            [token for token, own in zip(ids, said, strict=True) if own], skip_special_tokens=False
        )
        assert spoken == "".join(f"{answer}<|im_end|>" for answer in answers)
        assert encoder(chat, 150)[0] == ids[: len(encoder(chat, 150)[0])]


@pytest.fixture(scope="module")
def base(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny, random language model with SmolLM2's name and vocabulary."""
    folder = tmp_path_factory.mktemp("cache") / smollm2.name
    shutil.copytree(smollm2, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    facts = json.loads((smollm2 / "config.json").read_text())
    sizes = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    config = LlamaConfig(**facts | sizes | {"head_dim": 16})
    torch.manual_seed(0)
    LlamaForCausalLM(config).bfloat16().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def student(base: Path) -> Student:
    return Student(base, None, torch.float32)


@pytest.fixture(scope="module")
def trained(student: Student, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file as training makes it, of a model whose every part is random."""
    tensors = {
        name: torch.randn_like(part) * 0.02 if name.endswith("lora_up") else part
        for name, part in student.trained.items()
    }
    path = tmp_path_factory.mktemp("packages") / "random_smolvision/weights.safetensors"
    path.parent.mkdir()
    save(path, tensors, {})
    return path


@pytest.fixture(scope="module")
def built(trained: Path, base: Path) -> Path:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(trained.parent.parent)
        patch.setitem(PACKAGED, VISION, PACKAGED[VISION]._replace(packages=(trained.parent.name,)))
        folder = resolve_model(VISION, base.parent)
        assert resolve_model(VISION, base.parent) == folder and folder.parent == base.parent
    return folder


def test_a_step_teaches_all_that_is_trained_and_nothing_else(student: Student, built: Path) -> None:
    batch = next(iter(Chats(built / "tokenizer.json", 0, 3, 2, 160)))
    features = student.look(batch.images)
    patches, _ = student.patch_loss(features, batch.patches)
    answers, _ = student.answer_loss(batch, features)
    (patches + answers).backward()
    learns = {
        name for name, parameter in student.trained.items() if parameter.grad is not None and parameter.grad.any()
    }
    # `lora_down` has no gradient while `lora_up` is zero, and LLaVA takes the tower's output before its last norm.
    assert learns >= {name for name in student.trained if "lora_down" not in name and "post_layernorm" not in name}
    taught = {id(parameter) for parameter in student.trained.values()}
    assert all(parameter.grad is None for parameter in student.language.parameters() if id(parameter) not in taught)


def test_the_folder_is_the_language_model_with_the_changes_and_the_tower(
    trained: Path, built: Path, base: Path
) -> None:
    merged, old, added = (
        load_file(built / "model.safetensors"),
        load_file(base / "model.safetensors"),
        load_file(trained),
    )
    changed = "model.layers.1.mlp.down_proj"
    change = added[f"language_model.{changed}.lora_up"].float() @ added[f"language_model.{changed}.lora_down"].float()
    expected = (old[f"{changed}.weight"].float() + change).bfloat16()
    torch.testing.assert_close(merged[f"language_model.{changed}.weight"], expected, rtol=2**-7, atol=1e-5)
    embeddings = merged["language_model.model.embed_tokens.weight"]
    assert embeddings.shape[0] == VOCABULARY and not embeddings[IMAGE_TOKEN_ID:].any()
    assert torch.equal(embeddings[:IMAGE_TOKEN_ID], old["model.embed_tokens.weight"])
    assert torch.equal(merged["language_model.model.norm.weight"], old["model.norm.weight"])
    new = {name: tensor for name, tensor in added.items() if "lora" not in name}
    assert len(new) > 50 and all(torch.equal(merged[name], tensor) for name, tensor in new.items())


def test_transformers_loads_the_folder_and_expands_images(built: Path) -> None:
    model, loading = LlavaForConditionalGeneration.from_pretrained(built, output_loading_info=True)
    assert not any(loading[fault] for fault in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert model.lm_head.weight.data_ptr() == model.model.language_model.embed_tokens.weight.data_ptr()
    processor: Any = AutoProcessor.from_pretrained(built)
    chat, _ = next(held_out_chats("which image"))
    prompt = processor.apply_chat_template(list(chat.messages), add_generation_prompt=True)
    pictures = [picture(scene, index) for index, scene in enumerate(chat.scenes)]
    inputs = processor(text=[prompt], images=pictures, return_tensors="pt")
    assert (inputs["input_ids"] == IMAGE_TOKEN_ID).sum() == 2 * IMAGE_TOKENS and inputs["pixel_values"].shape == (
        2,
        3,
        SIZE,
        SIZE,
    )
    expected = torch.from_numpy(np.stack([np.asarray(image) for image in pictures])).permute(0, 3, 1, 2) / 127.5 - 1
    torch.testing.assert_close(inputs["pixel_values"], expected, rtol=0, atol=1e-5)


def test_another_vocabulary_is_refused(trained: Path, base: Path, tmp_path: Path) -> None:
    other = shutil.copytree(base, tmp_path / "other")
    tokenizer = Tokenizer.from_file(str(base / "tokenizer.json"))
    tokenizer.add_special_tokens(["<other>"])
    tokenizer.save(str(other / "tokenizer.json"))
    with pytest.raises(ValueError, match="another vocabulary"):
        merge(other, trained, tmp_path, lambda *_: None)


def test_training_ends_in_time_with_weights_and_results(
    base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """From the beginning, and, after few steps, from where another run ended."""
    small = {
        "minutes": 0.1,
        "evaluation-seconds": 2,
        "batch": 2,
        "turns": 2,
        "length": 128,
        "workers": 0,
        "per-kind": 1,
        "device": "cpu",
    }
    flags = [f"--base={base}", f"--out={tmp_path}", *(f"--{name}={value}" for name, value in small.items())]
    more = [f"--start={tmp_path}/smolvision.safetensors", "--look-share=0", "--steps=2"]
    for again in (False, True):
        train([*flags, *(more if again else [])])
        said = capsys.readouterr().out
        assert ("look 100%" in said) != again and "answer 100%" in said
        results = json.loads((tmp_path / "results.json").read_text())
        assert results["asked"] == len(results["kinds"]) == len(ALL_KINDS) and results["steps"] > 1


@pytest.mark.timeout(300)
def test_the_shipped_weights_answer_held_out_questions(smollm2: Path, tmp_path: Path) -> None:
    merge(smollm2, SHIPPED, tmp_path, lambda *_: None)
    found = evaluate(Answers(tmp_path, "cpu"), per_kind=1)
    assert found["accuracy"] >= 0.95, found
