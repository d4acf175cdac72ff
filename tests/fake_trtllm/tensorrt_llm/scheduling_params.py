"""`tensorrt_llm.scheduling_params`."""

from typing import Any

from tensorrt_llm._dataclasses import build_dataclass

__all__ = ["SchedulingParams"]

SchedulingParams: Any = build_dataclass("SchedulingParams")
