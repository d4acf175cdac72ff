"""`tensorrt_llm.llmapi.llm`."""

from tensorrt_llm._llm import LLM
from tensorrt_llm._results import RequestOutput

__all__ = ["LLM", "RequestOutput"]
