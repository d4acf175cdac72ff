"""GGUF files of Llama models with a byte-level BPE vocabulary.

llama.cpp interleaves the rows of query and key projections for its rotary embedding.
"""

from typing import Any

import numpy as np
from gguf import TokenType
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from engine.checkpoints.gguf_family import GgufFamily, Metadata, decimal

_NAMES = {
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
_DIGITS = {"smollm": True, "gpt-2": False}
"""Supported pre-tokenisers by llama.cpp's names, and whether each splits numbers into digits."""


def _config(metadata: Metadata) -> dict[str, Any]:
    heads = metadata["llama.attention.head_count"]
    hidden = metadata["llama.embedding_length"]
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": metadata["llama.feed_forward_length"],
        "num_hidden_layers": metadata["llama.block_count"],
        "num_attention_heads": heads,
        "num_key_value_heads": metadata["llama.attention.head_count_kv"],
        "head_dim": metadata.get("llama.rope.dimension_count", hidden // heads),
        "hidden_act": "silu",
        "max_position_embeddings": metadata["llama.context_length"],
        "rms_norm_eps": decimal(metadata["llama.attention.layer_norm_rms_epsilon"]),
        "rope_parameters": {"rope_type": "default", "rope_theta": decimal(metadata["llama.rope.freq_base"])},
        "attention_bias": False,
        "mlp_bias": False,
    }


def _tokenizer(metadata: Metadata) -> Tokenizer:
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


def _restore(part: str, weights: np.ndarray, config: dict[str, Any]) -> np.ndarray:
    """Reorder the rows of each head: llama.cpp rotates neighbouring rows together, transformers row i and i + half."""
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    if part not in heads:
        return weights
    rows, columns = weights.shape
    return weights.reshape(heads[part], rows // heads[part] // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)


LLAMA = GgufFamily(_NAMES, _config, _tokenizer, _restore)
