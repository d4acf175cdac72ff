"""`tensorrt_llm.executor.result`."""

from tensorrt_llm._feeds import IterationResult
from tensorrt_llm._outputs import CompletionOutput, Logprob
from tensorrt_llm._results import GenerationResult

__all__ = ["CompletionOutput", "GenerationResult", "IterationResult", "Logprob"]
