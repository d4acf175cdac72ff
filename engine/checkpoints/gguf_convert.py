"""Convert a GGUF file to a Hugging Face folder, without torch or transformers.

llama.cpp renames tensors, changes some of them, and stores tokenizer and configuration as metadata. The converter
reverses all three by the rules of the model's family (`gguf_llama.py`, `gguf_gemma.py`). Quantised weights become
bfloat16.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFReader, ReaderTensor, dequantize

from engine.checkpoints.gguf_family import GgufFamily, Metadata
from engine.checkpoints.gguf_gemma import GEMMA3
from engine.checkpoints.gguf_llama import LLAMA
from engine.checkpoints.tensor_file import Progress, bfloat16, write_tensors

_FAMILIES = {("llama", "gpt2"): LLAMA, ("gemma3", "llama"): GEMMA3}
"""Converters by architecture and kind of vocabulary."""
_TOP = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_SPECIAL = {"bos": "bos", "eos": "eos", "pad": "padding", "unk": "unknown"}
"""Names of special tokens in Hugging Face files, and in GGUF metadata."""
_ROWS = 16384
"""Rows of a tensor with one row for each token that are in memory at a time."""


def convert(source: Path, folder: Path, progress: Progress) -> None:
    """Write configuration, tokenizer, weights and chat template of the GGUF file `source` into an existing `folder`.

    `progress` is called repeatedly with the bytes written so far and in total. Raises ValueError if the file holds an
    unsupported architecture or vocabulary, OSError if the folder cannot be written.
    """
    reader = GGUFReader(source)
    metadata = {key: field.contents() for key, field in reader.fields.items()}
    kind = metadata["general.architecture"], metadata["tokenizer.ggml.model"]
    if kind not in _FAMILIES:
        raise ValueError(f"{source} holds {kind[0]} with a vocabulary of {kind[1]}, which cannot be converted")
    family = _FAMILIES[kind]
    ids = {f"{name}_token_id": metadata[f"tokenizer.ggml.{_SPECIAL[name]}_token_id"] for name in ("bos", "eos", "pad")}
    config = {
        **family.config(metadata),
        "dtype": "bfloat16",
        "vocab_size": len(metadata["tokenizer.ggml.tokens"]),
        "tie_word_embeddings": all(tensor.name != "output.weight" for tensor in reader.tensors),
        **ids,
    }
    _write_json(folder / "config.json", config)
    _write_json(folder / "generation_config.json", ids)
    (folder / "tokenizer.json").write_text(family.tokenizer(metadata).to_str(pretty=True), encoding="utf-8")
    _write_json(folder / "tokenizer_config.json", _tokenizer_config(metadata, config["max_position_embeddings"]))
    if template := metadata.get("tokenizer.chat_template"):
        (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    names = [_name(tensor.name, family) for tensor in reader.tensors]
    # GGUF lists the fastest-varying dimension first.
    shapes = {
        name: [int(size) for size in reversed(tensor.shape)] for name, tensor in zip(names, reader.tensors, strict=True)
    }
    write_tensors(folder / "model.safetensors", shapes, _blocks(reader.tensors, family, config), progress)


def _tokenizer_config(metadata: Metadata, context_length: int) -> dict[str, Any]:
    tokens = metadata["tokenizer.ggml.tokens"]
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **{f"{name}_token": tokens[metadata[f"tokenizer.ggml.{key}_token_id"]] for name, key in _SPECIAL.items()},
        "add_bos_token": metadata["tokenizer.ggml.add_bos_token"],
        "clean_up_tokenization_spaces": False,
        "model_max_length": context_length,
    }


def _blocks(tensors: list[ReaderTensor], family: GgufFamily, config: dict[str, Any]) -> Iterator[bytes]:
    for tensor in tensors:
        part = tensor.name.split(".")[-2]
        step = _ROWS if tensor.name in _TOP else len(tensor.data)
        for first in range(0, len(tensor.data), step):
            weights = dequantize(tensor.data[first : first + step], tensor.tensor_type).astype(np.float32, copy=False)
            yield bfloat16(family.restore(part, weights, config))


def _name(name: str, family: GgufFamily) -> str:
    if name in _TOP:
        return _TOP[name]
    prefix, layer, part, kind = name.split(".")
    if prefix != "blk" or part not in family.layer_names:
        raise ValueError(f"a model of this kind has no tensor {name!r}")
    return f"model.layers.{layer}.{family.layer_names[part]}.{kind}"


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
