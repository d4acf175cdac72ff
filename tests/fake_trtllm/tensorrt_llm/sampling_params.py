"""`tensorrt_llm.sampling_params`."""

import dataclasses
import os
from abc import ABC, abstractmethod
from typing import Any

from tensorrt_llm._dataclasses import build_dataclass

__all__ = ["BatchedLogitsProcessor", "GuidedDecodingParams", "LogitsProcessor", "SamplingParams"]


class LogitsProcessor(ABC):
    @abstractmethod
    def __call__(
        self, req_id: int, logits: Any, token_ids: list[list[int]], stream_ptr: int | None, client_id: int | None
    ) -> None: ...


class BatchedLogitsProcessor(ABC):
    @abstractmethod
    def __call__(
        self,
        req_ids: list[int],
        logits: list[Any],
        token_ids: list[list[list[int]]],
        stream_ptr: int,
        client_ids: list[int | None],
    ) -> None: ...


class _Guides:
    __slots__ = ()

    def _validate(self) -> None:
        guides = [field.name for field in dataclasses.fields(self) if getattr(self, field.name)]  # type: ignore[arg-type]
        if len(guides) > 1:
            raise ValueError(f"Only one guide can be used for a request, but got {len(guides)}.")


class _Sampling:
    """The rules of SamplingParams."""

    __slots__ = ()

    def __post_init__(self: Any) -> None:
        if self.pad_id is None:
            self.pad_id = self.end_id
        if self.best_of is None:
            self.best_of = self.n
        if isinstance(self.embedding_bias, list):
            import torch  # noqa: PLC0415 - slow, and seldom needed

            self.embedding_bias = torch.tensor(self.embedding_bias, dtype=torch.float32)
        self.logprobs = self.logprobs and int(self.logprobs)
        self.prompt_logprobs = self.prompt_logprobs and int(self.prompt_logprobs)
        self._validate()

    def _validate(self: Any) -> None:
        if self.top_p is not None and not 0 <= self.top_p <= 1:
            raise ValueError(f"require 0 <= top_p <= 1, got top_p={self.top_p}")
        if self.top_k is not None and self.top_k < 0:
            raise ValueError(f"require top_k >= 0, got top_k={self.top_k}")
        if self.temperature is not None and self.temperature < 0:
            raise ValueError(f"require temperature >= 0, got temperature={self.temperature}")
        if self.best_of < self.n:
            raise ValueError(f"In SamplingParams, best_of ({self.best_of}) must be at least n ({self.n}).")
        if self.best_of > 1 and self._greedy_decoding and os.environ.get("TLLM_ALLOW_N_GREEDY_DECODING") != "1":
            raise ValueError("Greedy decoding in the LLM API does not allow multiple returns.")
        if self.truncate_prompt_tokens is not None and self.truncate_prompt_tokens < 1:
            raise ValueError(f"truncate_prompt_tokens must be >= 1, got {self.truncate_prompt_tokens}")
        if self.guided_decoding is not None:
            self.guided_decoding._validate()

    @staticmethod
    def params_imply_greedy_decoding(*, temperature: Any, top_p: Any, top_k: Any, use_beam_search: Any) -> bool:
        if use_beam_search:
            return False
        unset = temperature is None and top_p is None and top_k is None
        return unset or top_k == 1 or top_p == 0.0 or temperature == 0

    @property
    def _greedy_decoding(self: Any) -> bool:
        return bool(
            self.params_imply_greedy_decoding(
                temperature=self.temperature, top_p=self.top_p, top_k=self.top_k, use_beam_search=self.use_beam_search
            )
        )


GuidedDecodingParams: Any = build_dataclass("GuidedDecodingParams", _Guides)
SamplingParams: Any = build_dataclass(
    "SamplingParams", _Sampling, hidden={"_bad_word_ids": None, "_stop_word_ids": None, "_stream_interval": None}
)
