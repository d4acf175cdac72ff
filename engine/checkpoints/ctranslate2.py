"""Convert a Whisper model of CTranslate2 to a Hugging Face folder, without torch or transformers.

CTranslate2's model.bin (its `model_spec.py`, version 6) is little-endian: the version, the name of the specification
and its revision, then a count and that many variables. A variable is its name, the number of its dimensions and each of
them, a type and the number of its bytes, and these. A text is the number of its bytes, which end in a zero, and these.
"""

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from engine.checkpoints.tensor_file import Progress, write_tensors

_VERSION = 6
_TYPES = {0: np.float32, 1: np.int8, 2: np.int16, 3: np.int32, 4: np.float16}
_PARTS = {
    "self_attention/layer_norm": ("self_attn_layer_norm",),
    "self_attention/linear_0": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "self_attention/linear_1": ("self_attn.out_proj",),
    "attention/layer_norm": ("encoder_attn_layer_norm",),
    "attention/linear_0": ("encoder_attn.q_proj",),
    "attention/linear_1": ("encoder_attn.k_proj", "encoder_attn.v_proj"),
    "attention/linear_2": ("encoder_attn.out_proj",),
    "ffn/layer_norm": ("final_layer_norm",),
    "ffn/linear_0": ("fc1",),
    "ffn/linear_1": ("fc2",),
}
"""Parts of a layer here and in Hugging Face's files. Several are one matrix here, one below the other."""
_OTHERS = {"embeddings/weight": "embed_tokens.weight", "position_encodings/encodings": "embed_positions.weight"}
_ENDS = {"gamma": "weight", "beta": "bias"}


def convert_whisper(path: Path, folder: Path, progress: Progress) -> None:
    """Write configuration, tokenizer and weights of the model.bin at `path`, with its config.json and tokenizer.json
    beside it, into an existing `folder`.

    `progress` is called repeatedly with the bytes written so far and in total. Raises ValueError and LookupError for a
    file that is damaged or no Whisper model in float16, OSError if a file cannot be read or written.
    """
    variables = _variables(path)
    own = json.loads((path.parent / "config.json").read_text(encoding="utf-8"))
    tokenizer = (path.parent / "tokenizer.json").read_text(encoding="utf-8")
    ids = {token["content"]: token["id"] for token in json.loads(tokenizer)["added_tokens"]}
    tensors = {name: tensor for key, values in variables.items() for name, tensor in _tensors(key, values)}
    if others := {str(tensor.dtype) for tensor in tensors.values()} - {"float16"}:
        raise ValueError(f"{path} has weights of type {', '.join(sorted(others))}; only float16 is supported")
    config = _config(variables, ids)
    features = {
        "feature_extractor_type": "WhisperFeatureExtractor", "feature_size": config["num_mel_bins"],
        "sampling_rate": 16000, "hop_length": 160, "n_fft": 400, "chunk_length": 30, "nb_max_frames": 3000,
        "n_samples": 480000, "padding_side": "right", "padding_value": 0.0, "return_attention_mask": False,
    }  # fmt: skip
    files = {
        "config.json": config,
        "generation_config.json": _generation_config(config, own, ids),
        "preprocessor_config.json": features,
        "tokenizer_config.json": {"tokenizer_class": "WhisperTokenizer", "model_max_length": 1024},
    }
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    (folder / "tokenizer.json").write_text(tokenizer, encoding="utf-8")
    shapes = {name: [*tensor.shape] for name, tensor in tensors.items()}
    blocks = (tensor.tobytes() for tensor in tensors.values())
    write_tensors(folder / "model.safetensors", shapes, blocks, progress, "F16")


def _variables(path: Path) -> dict[str, np.ndarray]:
    """Return the variables of a file by name, mapped into memory."""
    data = np.memmap(path, np.uint8, "r")
    place = 0

    def read(form: str) -> Any:
        nonlocal place
        found = struct.unpack_from(f"<{form}", data.data, place)
        place += struct.calcsize(f"<{form}")
        return found

    def text() -> str:
        (size,) = read("H")
        (content,) = read(f"{size}s")
        return str(content.rstrip(b"\0"), "utf-8")

    try:
        (version,) = read("I")
        name = text()
        if (version, name) != (_VERSION, "WhisperSpec"):
            raise ValueError(f"{path} is not a Whisper model of CTranslate2 in version {_VERSION} of its format")
        _, count = read("II")
        found: dict[str, np.ndarray] = {}
        for _ in range(count):
            key = text()
            (dimensions,) = read("B")
            shape = read(f"{dimensions}I")
            kind, size = read("BI")
            if place + size > len(data):
                raise ValueError(f"{path} is cut off")
            found[key] = data[place : place + size].view(_TYPES[kind]).reshape(shape)
            place += size
    except struct.error as error:
        raise ValueError(f"{path} is cut off") from error
    return found


def _tensors(key: str, values: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
    """Yield what a variable is in Hugging Face's files; nothing for one that is no weight."""
    side, _, rest = key.partition("/")
    if rest in _OTHERS:
        yield f"model.{side}.{_OTHERS[rest]}", values
        return
    part, _, end = rest.rpartition("/")
    end = _ENDS.get(end, end)
    if not part or end not in ("weight", "bias"):
        return
    layer, _, inner = part.partition("/")
    if not layer.startswith("layer_") or not inner:
        yield f"model.{side}.{part}.{end}", values
        return
    names = _PARTS[inner]
    for name, piece in zip(names, np.split(values, len(names)), strict=True):
        if (name, end) not in (("self_attn.k_proj", "bias"), ("encoder_attn.k_proj", "bias")):  # zeros
            yield f"model.{side}.layers.{layer.removeprefix('layer_')}.{name}.{end}", piece


def _config(variables: dict[str, np.ndarray], ids: dict[str, int]) -> dict[str, Any]:
    width, bins, _ = variables["encoder/conv1/weight"].shape
    config: dict[str, Any] = {
        "architectures": ["WhisperForConditionalGeneration"],
        "model_type": "whisper",
        "d_model": width,
        "num_mel_bins": bins,
        "vocab_size": len(variables["decoder/embeddings/weight"]),
        "max_source_positions": len(variables["encoder/position_encodings/encodings"]),
        "max_target_positions": len(variables["decoder/position_encodings/encodings"]),
        "torch_dtype": "float16",
    }
    for side in ("encoder", "decoder"):
        layers = {key.split("/")[1] for key in variables if key.startswith(f"{side}/layer_") and key.count("/") > 2}
        config[f"{side}_layers"] = len(layers)
        config[f"{side}_attention_heads"] = int(variables[f"{side}/num_heads"])
        config[f"{side}_ffn_dim"] = len(variables[f"{side}/layer_0/ffn/linear_0/weight"])
    end = ids["<|endoftext|>"]
    config |= {f"{name}_token_id": end for name in ("bos", "eos", "pad")}
    return config | {"num_hidden_layers": config["encoder_layers"], "decoder_start_token_id": _start(ids)}


def _start(ids: dict[str, int]) -> int:
    return ids["<|startoftranscript|>"]


def _generation_config(config: dict[str, Any], own: dict[str, Any], ids: dict[str, int]) -> dict[str, Any]:
    """Return what transformers and `engine/embedded/whisper/` read of the special tokens."""
    multilingual = config["vocab_size"] >= 51865  # by which OpenAI's own code tells them from models for English
    tasks = {
        "lang_to_id": {token: ids[token] for token in ids if ids[token] in own["lang_ids"]},
        "task_to_id": {task: ids[f"<|{task}|>"] for task in ("transcribe", "translate")},
    }
    return {
        "bos_token_id": config["bos_token_id"],
        "eos_token_id": config["eos_token_id"],
        "pad_token_id": config["pad_token_id"],
        "decoder_start_token_id": _start(ids),
        "prev_sot_token_id": ids["<|startofprev|>"],
        "no_timestamps_token_id": ids["<|notimestamps|>"],
        "alignment_heads": own["alignment_heads"],
        "suppress_tokens": own["suppress_ids"],
        "begin_suppress_tokens": own["suppress_ids_begin"],
        "is_multilingual": multilingual,
        "max_initial_timestamp_index": 50,
        "max_length": config["max_target_positions"],
        "return_timestamps": False,
        **(tasks if multilingual else {}),
    }
