"""`tensorrt_llm._torch.auto_deploy.llm_args`."""

from tensorrt_llm._models import MODELS

__all__ = ["LlmArgs"]

LlmArgs = MODELS["auto_deploy.LlmArgs"]
