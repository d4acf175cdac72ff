"""The structures that `decoder.cpp` takes, field by field."""

from ctypes import POINTER, Structure, c_double, c_float, c_int32, c_int64, c_void_p
from enum import IntEnum


class Kind(IntEnum):
    """Storage format of a matrix: `Kind` in `blocks.h`. Names of block formats are GGUF's."""

    BFLOAT16 = 0
    Q8_0 = 1
    Q4_0 = 2
    Q4_1 = 3


BLOCK = 32
"""Weights in a block."""
BLOCK_BYTES = {Kind.Q8_0: 34, Kind.Q4_0: 18, Kind.Q4_1: 20}
"""Bytes of a block in a GGUF file: a scale of 16 bits, with Q4_1 a minimum of 16 bits, then the weights."""


class NativeMatrix(Structure):
    _fields_ = [("panels", c_void_p), ("bias", c_void_p), ("outputs", c_int64), ("inputs", c_int64), ("kind", c_int64)]


class NativeLayer(Structure):
    _fields_ = [
        *((name, NativeMatrix) for name in ("qkv", "out", "gate_up", "down")),
        *((name, c_void_p) for name in ("attention_norm", "mlp_norm", "query_norm", "key_norm")),
        *((name, c_void_p) for name in ("attended_norm", "computed_norm", "cache")),
        *((name, c_int64) for name in ("stride", "group", "window", "rotation")),
    ]


class NativeModel(Structure):
    _fields_ = [
        ("layers", POINTER(NativeLayer)),
        ("embedding", NativeMatrix),
        ("head", NativeMatrix),
        ("norm", c_void_p),
        *((name, c_int64) for name in ("num_layers", "heads", "kv_heads", "head_dim", "block_size", "gelu")),
        *((name, c_float) for name in ("epsilon", "scale", "embedding_scale")),
        ("hidden_norm", c_void_p),
        ("norm_before_residual", c_int64),
        ("fc", NativeMatrix),
    ]


class NativeStep(Structure):
    _fields_ = [
        *((name, c_void_p) for name in ("tokens", "embeddings", "cos", "sin", "turns", "chunks", "tables", "rows")),
        *((name, c_void_p) for name in ("logits", "features", "hidden")),
        *((name, c_int64) for name in ("num_tokens", "num_chunks", "num_rows", "num_turns")),
    ]


class Way(IntEnum):
    """How a token is drawn: `Way` in `sampling.h`."""

    QUANTILE = 0
    RACE = 1
    LARGEST = 2


class NativeDraw(Structure):
    _fields_ = [
        *((name, c_int64) for name in ("seed", "position", "top_k")),
        ("quantile", c_double),
        *((name, c_float) for name in ("temperature", "top_p", "min_p")),
        ("way", c_int32),
    ]


class NativeDrafting(Structure):
    _fields_ = [
        *((name, c_void_p) for name in ("names", "turns", "limits", "tokens", "probabilities")),
        ("most", c_int64),
        ("least", c_float),
    ]
