"""The structures that `decoder.cpp` takes, field by field."""

from ctypes import POINTER, Structure, c_float, c_int64, c_void_p


class NativeMatrix(Structure):
    _fields_ = [("panels", c_void_p), ("bias", c_void_p), ("outputs", c_int64), ("inputs", c_int64)]


class NativeLayer(Structure):
    _fields_ = [
        *((name, NativeMatrix) for name in ("qkv", "out", "gate_up", "down")),
        *((name, c_void_p) for name in ("attention_norm", "mlp_norm")),
    ]


class NativeModel(Structure):
    _fields_ = [
        ("layers", POINTER(NativeLayer)),
        ("embedding", NativeMatrix),
        ("head", NativeMatrix),
        ("norm", c_void_p),
        ("cache", c_void_p),
        *((name, c_int64) for name in ("num_layers", "heads", "kv_heads", "head_dim", "block_size")),
        ("epsilon", c_float),
        ("scale", c_float),
    ]


class NativeStep(Structure):
    _fields_ = [
        *((name, c_void_p) for name in ("tokens", "embeddings", "cos", "sin", "chunks", "tables", "rows", "logits")),
        *((name, c_int64) for name in ("num_tokens", "num_chunks", "num_rows")),
    ]
