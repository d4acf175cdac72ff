"""From one GGUF file of a Llama with a byte-level BPE vocabulary to a Hugging Face folder, without torch or transformers.

llama.cpp renames tensors, stores query and key rows interleaved for its rotary embedding, and keeps tokenizer and configuration as
metadata; here all three are turned back. Quantised weights become bfloat16.
"""

import json
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFReader, ReaderTensor, TokenType, dequantize
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_TOP = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight", "output.weight": "lm_head.weight"}
# Pre-tokenisers that llama.cpp knows by name, GPT-2's and a variant: does it take digits apart?
_DIGITS = {"smollm": True, "gpt-2": False}


def convert(source: Path, folder: Path, progress: Callable[[int, int], None]) -> None:
    """Write config, tokenizer, chat template and weights of the GGUF file `source` into `folder`, which exists.

    `progress(done, total)` is called after each tensor with bytes written. ValueError: the file holds something else than a Llama
    with a GPT-2 style vocabulary. OSError: the folder cannot be written.
    """
    reader = GGUFReader(source)
    metadata = {key: field.contents() for key, field in reader.fields.items()}
    if metadata["general.architecture"] != "llama" or metadata["tokenizer.ggml.model"] != "gpt2":
        raise ValueError(f"{source} is not a Llama with a byte-level BPE vocabulary")
    config = _config(metadata, tied=all(tensor.name != "output.weight" for tensor in reader.tensors))
    eos = config["eos_token_id"]
    _write_json(folder / "config.json", config)
    _write_json(folder / "generation_config.json", {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")})
    _tokenizer(metadata).save(str(folder / "tokenizer.json"))
    _write_json(folder / "tokenizer_config.json", _tokenizer_config(metadata, eos))
    (folder / "chat_template.jinja").write_text(metadata["tokenizer.chat_template"], encoding="utf-8")
    _write_weights(folder / "model.safetensors", reader.tensors, config, progress)


def _config(metadata: dict[str, Any], tied: bool) -> dict[str, Any]:
    heads = metadata["llama.attention.head_count"]
    hidden = metadata["llama.embedding_length"]
    rope = {"rope_type": "default", "rope_theta": _decimal(metadata["llama.rope.freq_base"])}
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "bfloat16",
        "vocab_size": len(metadata["tokenizer.ggml.tokens"]),
        "hidden_size": hidden,
        "intermediate_size": metadata["llama.feed_forward_length"],
        "num_hidden_layers": metadata["llama.block_count"],
        "num_attention_heads": heads,
        "num_key_value_heads": metadata["llama.attention.head_count_kv"],
        "head_dim": metadata.get("llama.rope.dimension_count", hidden // heads),
        "hidden_act": "silu",
        "max_position_embeddings": metadata["llama.context_length"],
        "rms_norm_eps": _decimal(metadata["llama.attention.layer_norm_rms_epsilon"]),
        "rope_parameters": rope,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": tied,
        "bos_token_id": metadata["tokenizer.ggml.bos_token_id"],
        "eos_token_id": metadata["tokenizer.ggml.eos_token_id"],
        "pad_token_id": metadata["tokenizer.ggml.padding_token_id"],
    }


def _decimal(value: float) -> float:
    """The number that was meant by a float32: 1e-05 for 9.999999747378752e-06."""
    return float(f"{value:.7g}")


def _tokenizer(metadata: dict[str, Any]) -> Tokenizer:
    pre = metadata["tokenizer.ggml.pre"]
    if pre not in _DIGITS:
        raise ValueError(f"the pre-tokeniser {pre!r} is not one of {', '.join(_DIGITS)}")
    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    kinds: list[int] = metadata["tokenizer.ggml.token_type"]
    pairs = (merge.split(" ") for merge in metadata["tokenizer.ggml.merges"])
    merges = [(left, right) for left, right in pairs]
    tokenizer = Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=merges))
    digits = [pre_tokenizers.Digits(individual_digits=True)] if _DIGITS[pre] else []
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    tokenizer.decoder = decoders.ByteLevel()
    special = [token for token, kind in zip(tokens, kinds, strict=True) if kind == TokenType.CONTROL]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    return tokenizer


def _tokenizer_config(metadata: dict[str, Any], eos: int) -> dict[str, Any]:
    tokens = metadata["tokenizer.ggml.tokens"]
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": tokens[metadata["tokenizer.ggml.bos_token_id"]],
        "eos_token": tokens[eos],
        "pad_token": tokens[metadata["tokenizer.ggml.padding_token_id"]],
        "unk_token": tokens[metadata["tokenizer.ggml.unknown_token_id"]],
        "add_bos_token": metadata["tokenizer.ggml.add_bos_token"],
        "clean_up_tokenization_spaces": False,
        "model_max_length": metadata["llama.context_length"],
    }


def _write_weights(path: Path, tensors: list[ReaderTensor], config: dict[str, Any], progress: Callable[[int, int], None]) -> None:
    """One safetensors file, written tensor by tensor so that no more than one is held in memory."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    total = 0
    for tensor in tensors:
        shape = [int(size) for size in reversed(tensor.shape)]  # GGUF names the fastest dimension first
        end = total + 2 * int(tensor.n_elements)
        header[_name(tensor.name)] = {"dtype": "BF16", "shape": shape, "data_offsets": [total, end]}
        total = end
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(encoded)) + encoded)
        done = 0
        for block in _blocks(tensors, config):
            done += file.write(block)
            progress(done, total)


def _blocks(tensors: list[ReaderTensor], config: dict[str, Any]) -> Iterator[bytes]:
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    for tensor in tensors:
        weights = dequantize(tensor.data, tensor.tensor_type).astype(np.float32, copy=False)
        part = tensor.name.split(".")[-2]
        if part in heads:
            weights = _half_rotary(weights, heads[part])
        yield _bfloat16(weights)


def _name(name: str) -> str:
    if name in _TOP:
        return _TOP[name]
    prefix, layer, part, kind = name.split(".")
    if prefix != "blk" or part not in _LAYER:
        raise ValueError(f"a Llama has no tensor {name!r}")
    return f"model.layers.{layer}.{_LAYER[part]}.{kind}"


def _half_rotary(weights: np.ndarray, heads: int) -> np.ndarray:
    """Rows of a head from pairs (0, 1), (2, 3) … that rotate together, as llama.cpp has them, to halves, as transformers has them."""
    rows, columns = weights.shape
    return weights.reshape(heads, rows // heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)


def _bfloat16(weights: np.ndarray) -> bytes:
    """float32 rounded to the nearest bfloat16, ties to even; the weights are finite."""
    bits = np.ascontiguousarray(weights).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype("<u2").tobytes()


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
