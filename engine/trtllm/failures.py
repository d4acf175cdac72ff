"""Classification of TensorRT-LLM's errors by their messages, since their types do not tell the cause.

1.2.1 turns any error of a step into a RequestError for every active request, goes on, and stays healthy
(`PyExecutor._handle_errors`): a broken GPU would refuse all requests forever.
"""

import re

from engine.errors import EngineDied, EngineError, EngineFailure, EngineUnavailable, InvalidRequest

_ENGINE = re.compile(
    r"\bCUDA\b|\bcu(da|blas|dnn)[A-Z_]|CUBLAS_|CUDNN_|\bNCCL\b|nccl[A-Z]|out of memory|OutOfMemory|"
    r"illegal (memory|instruction)|device-side assert|Hang detected|\bMPI_|worker (process )?died",
    re.IGNORECASE,
)
_TRANSFER = re.compile(
    r"in kv cache transfer|KV cache transfer (error|failed)|\bRequest\b.{0,40}timed out", re.IGNORECASE
)
_INVALID = re.compile(
    r"should not exceed max_num_tokens|Token ID out of range|Request beam width|`max_tokens` must be set|"
    r"is greater than `max_seq_len`|exceeds maximum input length|the maximum sequence length|"
    r"Guided decoding error(?!: internal)|kv_cache_transceiver is disabled|"
    r"Context only requests are not supported|mrope_position_(ids|deltas)_handle|LoRA is not enabled"
)
"""Refusals of 1.2.1 for which the request is to blame: `_check_arguments`, `_enqueue_request`, `_validate_request` and
the guided decoder."""


def classified(message: str) -> EngineError:
    """Return the error for the message of a RequestError.

    EngineDied: the engine is broken. EngineUnavailable: another attempt, here or elsewhere, may succeed.
    InvalidRequest: the request is wrong. EngineFailure: it is not known why the request failed.
    """
    if is_a_refusal(message):  # first: it may quote what the client sent
        return InvalidRequest(message)
    if _TRANSFER.search(message):
        return EngineUnavailable(f"the engine could not finish this request: {message}")
    if is_of_the_engine(message):
        return EngineDied(f"the engine died: {message}")
    return EngineFailure(f"the engine failed on this request: {message}")


def is_of_the_engine(message: str) -> bool:
    return _ENGINE.search(message) is not None


def is_a_refusal(message: str) -> bool:
    return _INVALID.search(message) is not None
