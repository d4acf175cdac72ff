"""`tensorrt_llm.executor.utils`."""

from tensorrt_llm._errors import RequestError

__all__ = ["RequestError"]
