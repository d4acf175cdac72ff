"""`tensorrt_llm.lora_helper`."""

from tensorrt_llm._models import NAMES

__all__ = ["LoraConfig"]

LoraConfig = NAMES["LoraConfig"]
