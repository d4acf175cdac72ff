"""`tensorrt_llm.disaggregated_params`."""

import random
from typing import Any

from tensorrt_llm._contract import API
from tensorrt_llm._dataclasses import build_dataclass

__all__ = ["DisaggregatedParams"]

_REQUEST_TYPES = API["enums"]["request_type"]["members"]


class _Rules:
    """The rules of DisaggregatedParams."""

    __slots__ = ()

    def __post_init__(self: Any) -> None:
        if self.request_type is not None:
            self.request_type = self.request_type.lower()
            if self.request_type not in _REQUEST_TYPES:
                raise ValueError(f"Unknown request type: {self.request_type}. Must be one of {_REQUEST_TYPES}")
        handles, hashes = self.multimodal_embedding_handles, self.multimodal_hashes
        if handles is None:
            return
        if not handles:
            raise ValueError("multimodal_embedding_handles must not be empty")
        if hashes is None:
            self.multimodal_hashes = [[random.getrandbits(31) for _ in range(8)]] * len(handles)
        elif len(hashes) != len(handles):
            raise ValueError("multimodal_hashes and multimodal_embedding_handles must have the same length")
        elif any(len(entry) != 8 or not all(isinstance(part, int) for part in entry) for entry in hashes):
            raise ValueError("each multimodal hash must be a list of 8 integers")


DisaggregatedParams: Any = build_dataclass("DisaggregatedParams", _Rules)
