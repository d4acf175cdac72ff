"""`tensorrt_llm.llmapi`."""

from tensorrt_llm._encoder import MultimodalEncoder
from tensorrt_llm._errors import RequestError
from tensorrt_llm._llm import LLM
from tensorrt_llm._models import NAMES
from tensorrt_llm._outputs import CompletionOutput
from tensorrt_llm._results import RequestOutput
from tensorrt_llm._retention import KvCacheRetentionConfig
from tensorrt_llm.disaggregated_params import DisaggregatedParams
from tensorrt_llm.executor.request import LoRARequest
from tensorrt_llm.sampling_params import GuidedDecodingParams, SamplingParams

__all__ = [
    "LLM",
    "CompletionOutput",
    "DisaggregatedParams",
    "GuidedDecodingParams",
    "KvCacheRetentionConfig",
    "LoRARequest",
    "MultimodalEncoder",
    "RequestError",
    "RequestOutput",
    "SamplingParams",
]

_INTERNAL = {
    "LlmArgs",
    "BaseLlmArgs",
    "SpeculativeConfig",
    "SparseAttentionConfig",
    "GuidedDecodingBackend",
    "GuidedDecodingConfig",
}
globals().update(
    {
        name: value
        for name, value in NAMES.items()
        if name not in _INTERNAL | {"LoadFormat", "SamplerType", "LoraConfig"}
    }
)
