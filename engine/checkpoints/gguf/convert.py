"""Convert a GGUF file to a Hugging Face folder, without torch or transformers. Quantised weights become bfloat16."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from engine.checkpoints.gguf.families import GgufModel
from engine.checkpoints.gguf.file import BLOCK_TYPES, GgufFile
from engine.checkpoints.gguf.tokenizer import GgufVocabulary
from engine.checkpoints.tensor_file import Progress, bfloat16, write_tensors
from engine.errors import EngineFailure

_SPECIAL = {"bos": "bos", "eos": "eos", "pad": "padding", "unk": "unknown"}
"""Names of special tokens in Hugging Face files, and in GGUF metadata."""
_SAMPLING = {
    "temp": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "penalty_repeat": "repetition_penalty",
}
"""Parameters of sampling in GGUF metadata, and in generation_config.json."""
_WEIGHTS_AT_ONCE = 1 << 24
"""Maximum number of weights that are dequantised at a time, in tensors of which rows do not change places."""


def convert(file: GgufFile, folder: Path, progress: Progress) -> None:
    """Write configuration, tokenizer, weights and chat template of a GGUF file into an existing `folder`.

    `progress` is called repeatedly with the bytes written so far and in total. Raises EngineFailure for a file that is
    damaged or not supported, OSError if the folder cannot be written.
    """
    model, vocabulary = GgufModel(file), GgufVocabulary(file.metadata, str(file.path))
    ids = {f"{name}_token_id": vocabulary.special(key) for name, key in _SPECIAL.items() if name != "unk"}
    ids = {name: token_id for name, token_id in ids.items() if token_id is not None}
    config = model.settings() | ids
    _write_json(folder / "config.json", config)
    sampling = {name: file.metadata.get(f"general.sampling.{key}") for key, name in _SAMPLING.items()}
    sampling = {name: round(value, 6) for name, value in sampling.items() if value is not None}  # of float32
    _write_json(folder / "generation_config.json", ids | sampling | {"eos_token_id": vocabulary.ends})
    (folder / "tokenizer.json").write_text(vocabulary.tokenizer().to_str(pretty=True), encoding="utf-8")
    _write_json(folder / "tokenizer_config.json", _tokenizer_config(vocabulary, config["max_position_embeddings"]))
    if template := file.metadata.get("tokenizer.chat_template"):
        (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    shapes = {model.parts[name].name: list(file.tensors[name].shape) for name in model.parts if name in file.tensors}
    write_tensors(folder / "model.safetensors", shapes, _blocks(model), progress)


def check(path: Path) -> GgufModel:
    """Return the model in a GGUF file, without its weights. Raises EngineFailure if `convert` would refuse the file."""
    model = GgufModel(GgufFile(path))
    _ = model.settings(), GgufVocabulary(model.file.metadata, str(path)).pre_tokenizer
    return model


def dequantized(file: GgufFile, name: str, first: int = 0, rows: int | None = None) -> np.ndarray:
    """Return a tensor, or some of its rows, as float32 [rows, columns] by ggml's own formulas (its package `gguf`)."""
    from gguf.constants import GGMLQuantizationType  # noqa: PLC0415
    from gguf.quants import dequantize  # noqa: PLC0415 - only for converting

    blocks = file.blocks(name, first, rows)
    kind = GGMLQuantizationType(BLOCK_TYPES[file.tensors[name].type].number)
    weights: np.ndarray = dequantize(blocks, kind).astype(np.float32, copy=False)
    return weights.reshape(len(blocks), -1)


def _blocks(model: GgufModel) -> Iterator[bytes]:
    """Yield the weights of all tensors in the order of `parts`."""
    for name in model.parts:
        if name not in model.file.tensors:
            continue
        tensor = model.file.tensors[name]
        layer_part = name.split(".", 2)[-1] if name.startswith("blk.") else name
        step = tensor.rows if name.startswith("blk.") else max(1, _WEIGHTS_AT_ONCE // tensor.shape[-1])
        for first in range(0, tensor.rows, step):
            weights = model.family.restore(layer_part, dequantized(model.file, name, first, step), model.sizes)
            if not np.isfinite(weights).all():
                raise EngineFailure(f"the tensor {name} in {tensor.path} has values that are not finite")
            yield bfloat16(weights)


def _tokenizer_config(vocabulary: GgufVocabulary, context_length: int) -> dict[str, Any]:
    specials = {f"{name}_token": vocabulary.special(key) for name, key in _SPECIAL.items()}
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **{name: vocabulary.tokens[token_id] for name, token_id in specials.items() if token_id is not None},
        "add_bos_token": vocabulary.adds_bos,
        "clean_up_tokenization_spaces": False,
        "model_max_length": context_length,
    }


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
