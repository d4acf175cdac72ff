"""`CompletionOutput` and what it holds."""

from typing import Any

from tensorrt_llm._dataclasses import build_dataclass

__all__ = ["CompletionOutput", "Logprob"]

_LAST = {
    "_last_text_len": 0,
    "_last_token_ids_len": 0,
    "_last_logprobs_len": 0,
    "_incremental_states": None,
    "_postprocess_result": None,
}


class _Diffs:
    """What the latest response added."""

    __slots__ = ()

    @property
    def length(self: Any) -> int:
        return len(self.token_ids)

    @property
    def text_diff(self: Any) -> str:
        return self.text[self._last_text_len :]

    @property
    def token_ids_diff(self: Any) -> list[int]:
        return self.token_ids[self._last_token_ids_len :]

    @property
    def logprobs_diff(self: Any) -> list[Any]:
        return self.logprobs[self._last_logprobs_len :]


Logprob: Any = build_dataclass("Logprob")
CompletionOutput: Any = build_dataclass("CompletionOutput", _Diffs, hidden=_LAST)
