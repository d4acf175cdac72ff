"""GGUF files of text-only Gemma 3 models with a SentencePiece vocabulary.

llama.cpp stores the weights of norms with 1 added.
"""

from typing import Any

import numpy as np
from gguf import TokenType
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from engine.checkpoints.gguf_family import GgufFamily, Metadata, decimal

_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k": "self_attn.k_proj",
    "attn_k_norm": "self_attn.k_norm",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_PATTERN = 6
"""Every sixth layer has full attention. llama.cpp has this and the local rotary base in its code, not in the file."""
_LOCAL_ROPE_THETA = 10000.0


def _config(metadata: Metadata) -> dict[str, Any]:
    layers = metadata["gemma3.block_count"]
    head_dim = metadata["gemma3.attention.key_length"]
    full = {"rope_type": "default", "rope_theta": decimal(metadata["gemma3.rope.freq_base"])}
    if metadata.get("gemma3.rope.scaling.type", "none") != "none":
        full |= {
            "rope_type": metadata["gemma3.rope.scaling.type"],
            "factor": decimal(metadata["gemma3.rope.scaling.factor"]),
        }
    return {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "hidden_size": metadata["gemma3.embedding_length"],
        "intermediate_size": metadata["gemma3.feed_forward_length"],
        "num_hidden_layers": layers,
        "num_attention_heads": metadata["gemma3.attention.head_count"],
        "num_key_value_heads": metadata["gemma3.attention.head_count_kv"],
        "head_dim": head_dim,
        "query_pre_attn_scalar": head_dim,
        "hidden_activation": "gelu_pytorch_tanh",
        "max_position_embeddings": metadata["gemma3.context_length"],
        "rms_norm_eps": decimal(metadata["gemma3.attention.layer_norm_rms_epsilon"]),
        "sliding_window": metadata["gemma3.attention.sliding_window"],
        "layer_types": [
            "full_attention" if (layer + 1) % _PATTERN == 0 else "sliding_attention" for layer in range(layers)
        ],
        "rope_parameters": {
            "full_attention": full,
            "sliding_attention": {"rope_type": "default", "rope_theta": _LOCAL_ROPE_THETA},
        },
        "attention_bias": False,
    }


def _tokenizer(metadata: Metadata) -> Tokenizer:
    """Return a BPE tokenizer that is equivalent to SentencePiece.

    SentencePiece joins the neighbours whose union has the best score; BPE does so if its merges are ordered by score.
    """
    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    kinds: list[int] = metadata["tokenizer.ggml.token_type"]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    unknown = tokens[metadata["tokenizer.ggml.unknown_token_id"]]
    merges = _merges(metadata, vocabulary)
    tokenizer = Tokenizer(
        models.BPE(vocab=vocabulary, merges=merges, unk_token=unknown, fuse_unk=True, byte_fallback=True)
    )
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    for kind, special in ((TokenType.CONTROL, True), (TokenType.USER_DEFINED, False)):
        added = [token for token, own in zip(tokens, kinds, strict=True) if own == kind]
        tokenizer.add_tokens([AddedToken(token, special=special, normalized=False) for token in added])
    if metadata["tokenizer.ggml.add_bos_token"]:
        bos = metadata["tokenizer.ggml.bos_token_id"]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{tokens[bos]} $A", pair=f"{tokens[bos]} $A $B", special_tokens=[(tokens[bos], bos)]
        )
    return tokenizer


def _merges(metadata: Metadata, vocabulary: dict[str, int]) -> list[tuple[str, str]]:
    """Return all pairs of tokens that join into a third token, the best score first."""
    kinds: list[int] = metadata["tokenizer.ggml.token_type"]
    scores: list[float] = metadata["tokenizer.ggml.scores"]
    normal = [token for token, index in vocabulary.items() if kinds[index] == TokenType.NORMAL and len(token) > 1]
    merges = []
    for token in sorted(normal, key=lambda token: -scores[vocabulary[token]]):
        merges += [
            (token[:cut], token[cut:])
            for cut in range(1, len(token))
            if token[:cut] in vocabulary and token[cut:] in vocabulary
        ]
    return merges


def _restore(part: str, weights: np.ndarray, _: dict[str, Any]) -> np.ndarray:
    return weights - 1 if part.endswith("_norm") else weights


GEMMA3 = GgufFamily(_NAMES, _config, _tokenizer, _restore)
