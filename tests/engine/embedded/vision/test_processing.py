"""Processing of images gives transformers' results: the same pixels, tokens in a prompt, and embeddings."""

import logging
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from transformers import AutoModelForImageTextToText
from transformers.models.smolvlm import processing_smolvlm

from engine.checkpoints.facts import read_model_facts
from engine.config import EncoderConfig
from engine.embedded.vision.batches import BatchEncoder
from engine.errors import EngineError, EngineFailure
from engine.kit.time_slices import TimeSlices
from engine.media import EncodedMedia, MediaInput
from tests.support.vision_models import BUILDERS, TOKENS, build_llava, image, image_bytes

SIZES = [(40, 30), (64, 20), (17, 60), (8, 8), (40, 30), (300, 200)]
MAX_PIXELS = 1_000_000


@pytest.fixture(scope="module", params=[*BUILDERS, "siglip"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp(request.param)
    return build_llava(path, "siglip") if request.param == "siglip" else BUILDERS[request.param](path)


@pytest.fixture(scope="module")
def encoder(folder: Path) -> BatchEncoder:
    return new_encoder(folder)


@pytest.fixture(scope="module")
def llava(tmp_path_factory: pytest.TempPathFactory) -> BatchEncoder:
    return new_encoder(build_llava(tmp_path_factory.mktemp("llava")))


def new_encoder(folder: Path, **options: Any) -> BatchEncoder:
    config = EncoderConfig(model=str(folder), **{"dtype": "float32", "max_image_pixels": MAX_PIXELS, **options})
    return BatchEncoder(config)


def reference_processor(encoder: BatchEncoder, monkeypatch: pytest.MonkeyPatch) -> Any:
    """transformers' own, for whole prompts. SmolVLM's class is taken without what it needs for videos."""
    ours = encoder.processing.processor
    if "SmolVLM" not in type(ours.image_processor).__name__:
        return ours
    monkeypatch.setattr(processing_smolvlm, "num2words", str)

    class WithoutVideos(processing_smolvlm.SmolVLMProcessor):  # type: ignore[misc]
        def check_argument_for_proper_class(self, argument_name: str, argument: Any) -> Any:
            return None

    return WithoutVideos(ours.image_processor, ours.tokenizer, None, image_seq_len=ours.image_seq_len)


def outcomes(encoder: BatchEncoder, *files: bytes) -> list[EncodedMedia | EngineError]:
    found = dict(pair for pairs in encoder.encode([MediaInput(file) for file in files]) for pair in pairs)
    return [found[index] for index in range(len(files))]


def encode(encoder: BatchEncoder, *files: bytes) -> list[tuple[EncodedMedia, torch.Tensor]]:
    pairs = []
    for outcome in outcomes(encoder, *files):
        assert isinstance(outcome, EncodedMedia), outcome
        rows = torch.frombuffer(bytearray(outcome.data), dtype=torch.float32).view(
            outcome.rows, encoder.info.hidden_size
        )
        pairs.append((outcome, rows))
    return pairs


def test_the_expanded_prompt_is_the_processors_own(
    folder: Path, encoder: BatchEncoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = encoder.info.placeholder
    prompt = f"<|im_start|>user\nLook:\n{place}\n\nand {place}{place} then\n\n{place}the {place}\n{place}<|im_end|>\n"
    inputs = reference_processor(encoder, monkeypatch)(
        images=[image(*size, seed) for seed, size in enumerate(SIZES)], text=[prompt], add_special_tokens=False
    )
    encoded = [result for result, _ in encode(encoder, *(image_bytes(*size, seed) for seed, size in enumerate(SIZES)))]
    pieces = prompt.split(place)
    expanded = "".join(piece + result.text for piece, result in zip(pieces, encoded, strict=False)) + pieces[-1]
    ids = Tokenizer.from_file(str(folder / "tokenizer.json")).encode(expanded, add_special_tokens=False).ids
    assert ids == list(inputs["input_ids"][0])
    assert ids.count(encoder.info.image_token_id) == sum(result.rows for result in encoded)
    if "image_grid_thw" in inputs:
        assert [list(result.grid) for result in encoded] == np.asarray(inputs["image_grid_thw"]).tolist()
    else:
        assert {result.grid for result in encoded} == {(0, 0, 0)}


@pytest.mark.parametrize("at_once", [1, 8])
def test_embeddings_are_those_of_the_whole_model(
    folder: Path, encoder: BatchEncoder, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(encoder, "together", at_once)
    inputs = reference_processor(encoder, monkeypatch)(
        images=[image(*size, seed) for seed, size in enumerate(SIZES)],
        text=[encoder.info.placeholder * len(SIZES)],
        return_tensors="pt",
    )
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()
    names = ("pixel_values", "pixel_attention_mask", "image_grid_thw")
    with torch.inference_mode():
        expected = torch.cat(
            tuple(model.get_image_features(**{name: inputs[name] for name in names if name in inputs}).pooler_output)
        )
    rows = torch.cat(
        [rows for _, rows in encode(encoder, *(image_bytes(*size, seed) for seed, size in enumerate(SIZES)))]
    )
    torch.testing.assert_close(rows, expected, rtol=1e-4, atol=1e-4)


def test_an_image_alone_is_what_it_is_among_others(encoder: BatchEncoder) -> None:
    files = [image_bytes(*size, seed) for seed, size in enumerate(SIZES)]
    for file, (result, rows) in zip(files, encode(encoder, *files), strict=True):
        ((alone, alone_rows),) = encode(encoder, file)
        assert (alone.text, alone.rows, alone.grid) == (result.text, result.rows, result.grid)
        torch.testing.assert_close(alone_rows, rows, rtol=1e-4, atol=1e-4)


def test_large_images_do_not_wait_for_others(llava: BatchEncoder, monkeypatch: pytest.MonkeyPatch) -> None:
    waiting = threading.Event()

    def going_on() -> bool:
        waiting.wait()
        return True

    outcomes = llava.embed_large()
    llava.begin_large(1, MediaInput(b"no image"), lambda: True)
    assert next(outcomes)[0] == 1
    monkeypatch.setattr(llava, "_large_slices", TimeSlices(2))
    llava.begin_large(2, MediaInput(image_bytes()), going_on)
    llava.begin_large(3, MediaInput(image_bytes()), lambda: True)
    assert next(outcomes)[0] == 3
    waiting.set()
    assert next(outcomes)[0] == 2 and llava.longest() is None


def test_no_language_model_stays_in_memory(encoder: BatchEncoder) -> None:
    names = [name for name, _ in encoder.tower.model.named_parameters()]
    assert names and not any(name.startswith(("language_model", "text_model", "lm_head")) for name in names)


def test_facts(folder: Path, encoder: BatchEncoder) -> None:
    tokens = read_model_facts(folder).image_tokens
    assert tokens is not None and tokens.token_id == encoder.info.image_token_id == TOKENS[encoder.info.placeholder]
    assert bool(tokens.merge) == (encoder.info.placeholder == "<|image_pad|>")
    assert encoder.info.hidden_size == 64 and encoder.info.dtype == "float32" and len(encoder.info.fingerprint) == 32


def test_fingerprints_tell_weights_options_and_types_apart(tmp_path: Path, llava: BatchEncoder) -> None:
    folder = build_llava(tmp_path)
    assert new_encoder(folder).info.fingerprint == llava.info.fingerprint
    changed = new_encoder(folder, processor_options={"do_normalize": False})
    rounded = new_encoder(folder, dtype="bfloat16")
    other = new_encoder(build_llava(tmp_path / "other", "siglip"))
    assert len({llava.info.fingerprint, *(one.info.fingerprint for one in (changed, rounded, other))}) == 4
    assert rounded.info.dtype == "bfloat16"


def test_options_of_the_processor(tmp_path: Path) -> None:
    folder = BUILDERS["qwen2_vl"](tmp_path)
    ((few, _),) = encode(new_encoder(folder, processor_options={"max_pixels": 256}), image_bytes(64, 64))
    ((many, _),) = encode(new_encoder(folder), image_bytes(64, 64))
    assert (few.rows, many.rows) == (4, 64)
    with pytest.raises(EngineFailure, match="has no option sharpness"):
        new_encoder(folder, processor_options={"sharpness": 1})


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ('{"model_type": "gemma3", "vision_config": {}}', "attend to each other in both directions"),
        ('{"model_type": "unheard_of", "vision_config": {}}', "only for llava"),
        ('{"model_type": "llava", "vision_config": {"model_type": "pixtral"}}', "llava with a pixtral"),
        ('{"model_type": "llama"}', "takes no images"),
    ],
)
def test_other_models_are_refused_with_the_reason(tmp_path: Path, config: str, reason: str) -> None:
    (tmp_path / "config.json").write_text(config)
    with pytest.raises(EngineFailure, match=reason):
        new_encoder(tmp_path)


def test_names_of_weights_in_older_folders(tmp_path: Path, llava: BatchEncoder) -> None:
    weights = load_file(build_llava(tmp_path) / "model.safetensors")
    older = {name.replace("vision_tower.", "vision_tower.vision_model."): value for name, value in weights.items()}
    save_file(older, tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert new_encoder(tmp_path).info.fingerprint == llava.info.fingerprint


def test_random_weights_for_measuring_are_the_same_everywhere(tmp_path: Path) -> None:
    folder = build_llava(tmp_path)
    (folder / "model.safetensors").unlink()
    first, second = (new_encoder(folder, load_format="dummy") for _ in range(2))
    assert first.info == second.info
    ((_, rows), (_, others)), ((_, again),) = (
        encode(first, image_bytes(40, 30, 1), image_bytes(40, 30, 2)),
        encode(second, image_bytes(40, 30, 1)),
    )
    assert torch.equal(rows, again)
    assert not torch.equal(rows, others)


TOWER = "vision_tower.encoder.layers.1.mlp.fc1.weight"
"""The end of a tensor's name; files may have more before it."""


def change_tensor(folder: Path, change: Callable[[torch.Tensor], torch.Tensor | None]) -> str:
    """Replace a tensor of the tower, or take it away, and return its name."""
    file = folder / "model.safetensors"
    weights = load_file(file)
    [name] = [name for name in weights if name.endswith(TOWER)]
    changed = change(weights.pop(name))
    save_file(weights | ({} if changed is None else {name: changed}), file, metadata={"format": "pt"})
    return name


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tensor: None, "the safetensors of .* lack what the model needs, 1 tensor: "),
        (
            lambda tensor: tensor[1:].contiguous(),
            r"\.safetensors has the shape \[47, 32\], .* asks for \[48, 32\]",
        ),
        (lambda tensor: tensor.int(), r"model\.safetensors has the type I32"),
        (
            lambda tensor: tensor.index_fill(0, torch.tensor([3]), torch.inf),
            r"\.safetensors has values that are not",
        ),
        (lambda tensor: torch.full_like(tensor, 3e38), "computes embeddings that are not finite in torch.float32"),
    ],
)
def test_a_folder_with_a_damaged_tower_is_refused(tmp_path: Path, change: Any, message: str) -> None:
    folder = build_llava(tmp_path)
    name = change_tensor(folder, change)
    with pytest.raises(EngineFailure, match=message) as caught:
        new_encoder(folder)
    assert str(folder) in str(caught.value) and (TOWER in str(caught.value)) == ("finite in" not in message), name


def test_unexpected_tensors_of_the_tower_are_one_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = build_llava(tmp_path)
    file = folder / "model.safetensors"
    save_file(load_file(file) | {"vision_tower.more": torch.ones(1)}, file, metadata={"format": "pt"})
    new_encoder(folder)
    [warning] = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert warning == f"the model does not use all that {folder} has: 1 tensor: vision_tower.more"


def test_a_damaged_tokenizer_is_refused_with_the_folder(tmp_path: Path) -> None:
    (build_llava(tmp_path) / "tokenizer.json").write_text('{"version": ')
    with pytest.raises(EngineFailure, match=f"the image processor of {tmp_path} cannot be loaded: "):
        new_encoder(tmp_path)
