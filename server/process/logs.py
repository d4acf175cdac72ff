"""Logs of a replica's processes, by the settings."""

from typing import Literal

from engine.kit import logs
from server.settings.environment import provide

_OF_TENSORRT_LLM = {"debug": "VERBOSE", "info": "INFO", "warning": "WARNING", "error": "ERROR"}
"""Values of TLLM_LOG_LEVEL by LOG_LEVEL: names that both halves of TensorRT-LLM know, in capitals as its C++ half
requires.
"""


def configure(level: str, form: Literal["text", "json"]) -> None:
    """Set up the logs of this process and of those that it will start. TensorRT-LLM, which reads its level when it is
    imported, gets the same level unless TLLM_LOG_LEVEL is set.
    """
    provide("TLLM_LOG_LEVEL", _OF_TENSORRT_LLM[level])
    logs.configure(logs.LogOptions(level, form))


def one_line(error: Exception) -> str:
    """Return the first and the last line of an error. If it quotes the output of a dead process, the last line is that
    process's error.
    """
    lines = str(error).splitlines() or [type(error).__name__]
    return lines[0] if len(lines) == 1 else f"{lines[0]}: {lines[-1]}"
