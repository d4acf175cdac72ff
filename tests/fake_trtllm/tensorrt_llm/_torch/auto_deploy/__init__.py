"""`tensorrt_llm._torch.auto_deploy`."""

from typing import Any

from tensorrt_llm._llm import LLM as _TorchLLM  # noqa: N811
from tensorrt_llm._torch.auto_deploy.llm_args import LlmArgs

__all__ = ["LLM", "LlmArgs"]


class LLM(_TorchLLM):
    """Loads by AutoDeploy's factory, which also makes its tokenizer, and processes inputs by `ADInputProcessor`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        kwargs["backend"] = "_autodeploy"
        super().__init__(*args, **kwargs)

    def _embeddings(self, inputs: Any, prompt: str | None, token_ids: list[int], handles: Any) -> list[Any] | None:
        """Images of PIL meet a variable that is set for tensors only."""
        if isinstance(inputs, dict) and inputs.get("multi_modal_data"):
            raise UnboundLocalError("cannot access local variable 'do_rescale' where it is not associated with a value")
        return super()._embeddings(inputs, prompt, token_ids, handles)


LLM.__module__ = "tensorrt_llm._torch.auto_deploy.llm"
