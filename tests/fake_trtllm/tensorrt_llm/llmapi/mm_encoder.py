"""`tensorrt_llm.llmapi.mm_encoder`."""

from tensorrt_llm._encoder import MultimodalEncoder

__all__ = ["MultimodalEncoder"]
