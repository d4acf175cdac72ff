"""`tensorrt_llm.executor`."""

from tensorrt_llm._errors import RequestError
from tensorrt_llm._feeds import IterationResult
from tensorrt_llm._results import GenerationResult
from tensorrt_llm.executor.request import LoRARequest, PromptAdapterRequest

__all__ = ["GenerationResult", "IterationResult", "LoRARequest", "PromptAdapterRequest", "RequestError"]
