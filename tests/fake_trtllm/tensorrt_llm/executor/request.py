"""`tensorrt_llm.executor.request`."""

from pathlib import Path
from typing import Any

from tensorrt_llm._dataclasses import build_dataclass

__all__ = ["LoRARequest", "PromptAdapterRequest"]


class _Lora:
    __slots__ = ()

    def __post_init__(self: Any) -> None:
        if self.lora_path is not None and not Path(self.lora_path or "?").exists():
            raise ValueError(f"lora_path ({self.lora_path}) does not exist.")
        if self.lora_ckpt_source not in {"hf", "nemo"}:
            raise ValueError(f"lora_ckpt_source must be one of hf, nemo, got {self.lora_ckpt_source}")

    @property
    def adapter_id(self: Any) -> Any:
        return self.lora_int_id

    @property
    def name(self: Any) -> Any:
        return self.lora_name

    @property
    def path(self: Any) -> Any:
        return self.lora_path

    @property
    def ckpt_source(self: Any) -> Any:
        return self.lora_ckpt_source


class _PromptAdapter:
    def __post_init__(self: Any) -> None:
        if not Path(self.prompt_adapter_local_path or "?").exists():
            raise RuntimeError(f"prompt_adapter_local_path ({self.prompt_adapter_local_path}) does not exist.")


LoRARequest: Any = build_dataclass("LoRARequest", _Lora)
PromptAdapterRequest: Any = build_dataclass("PromptAdapterRequest", _PromptAdapter)
