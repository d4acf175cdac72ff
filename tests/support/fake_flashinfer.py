"""What the engine uses of FlashInfer, in torch and on any device: attention of a step's prompts.

`tests.support.cuda` has it imported in place of FlashInfer.
"""

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import torch


class Kernels:
    """In the place of `engine.embedded.models.cuda.flashinfer_kernels.FlashInferKernels`: there from the start."""

    ready = True

    def __init__(self, *_: Any) -> None:
        pass

    def start(self) -> None:
        pass

    def wait(self) -> None:
        pass

    def give_up(self, error: Exception) -> None:
        self.ready = False

    def close(self) -> None:
        pass


class _Wrapper:
    """Plans are copied, as FlashInfer copies them to the device: what they were made of may change before `run`."""

    def __init__(self, workspace: torch.Tensor, layout: str) -> None:
        assert layout == "NHD"
        self._plan: tuple[torch.Tensor | int, ...] = ()

    def _keep(
        self,
        *plan: torch.Tensor | int,
        causal: bool,
        sm_scale: float,
        q_data_type: torch.dtype,
        kv_data_type: torch.dtype,
    ) -> None:
        assert causal
        self._plan = tuple(value.clone() if isinstance(value, torch.Tensor) else value for value in plan)
        self._scale, self._dtypes = sm_scale, (q_data_type, kv_data_type)

    def _attend(
        self,
        begun: torch.Tensor,
        query: torch.Tensor,
        contexts: Iterator[tuple[torch.Tensor, torch.Tensor]],
        out: torch.Tensor,
    ) -> None:
        """Return attention of each prompt's queries over the keys and values of its context.

        The queries are the end of that context.
        """
        assert int(begun[-1]) == len(query)
        for (start, end), (keys, values) in zip(pairwise(begun.tolist()), contexts, strict=True):
            assert (query.dtype, keys.dtype) == self._dtypes
            part, groups = query[start:end].float(), query.shape[1] // keys.shape[1]
            scores = torch.einsum("qhd,khd->hqk", part, keys.float().repeat_interleave(groups, 1)) * self._scale
            unseen = torch.ones(scores.shape[1:], dtype=torch.bool).triu(scores.shape[2] - scores.shape[1] + 1)
            weights = scores.masked_fill(unseen, float("-inf")).softmax(-1)
            out[start:end] = torch.einsum("hqk,khd->qhd", weights, values.float().repeat_interleave(groups, 1))


class BatchPrefillWithRaggedKVCacheWrapper(_Wrapper):
    """Prompts whose keys and values are in the step: [tokens, kv_heads, head_dim]."""

    def plan(
        self, begun: torch.Tensor, kv_begun: torch.Tensor, heads: int, kv_heads: int, head_dim: int, **common: Any
    ) -> None:
        self._keep(begun, kv_begun, heads, kv_heads, head_dim, **common)

    def run(self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, out: torch.Tensor) -> None:
        begun, kv_begun, heads, kv_heads, head_dim = self._plan
        assert query.shape[1:] == (heads, head_dim) and keys.shape[1:] == values.shape[1:] == (kv_heads, head_dim)
        self._attend(
            begun, query, ((keys[start:end], values[start:end]) for start, end in pairwise(kv_begun.tolist())), out
        )


class BatchPrefillWithPagedKVCacheWrapper(_Wrapper):
    """Prompts whose keys and values are in the cache: [blocks, block_size, kv_heads, head_dim]."""

    def plan(
        self,
        begun: torch.Tensor,
        paged: torch.Tensor,
        blocks: torch.Tensor,
        last: torch.Tensor,
        *sizes: int,
        **common: Any,
    ) -> None:
        """Plan the next run.

        Takes the blocks of each prompt, where each prompt's blocks begin, and how much of its last block is used; then
        heads, kv_heads, head_dim and block_size.
        """
        self._keep(begun, paged, blocks, last, *sizes, **common)

    def run(self, query: torch.Tensor, cache: tuple[torch.Tensor, torch.Tensor], out: torch.Tensor) -> None:
        begun, paged, blocks, last, heads, kv_heads, head_dim, size = self._plan
        assert query.shape[1:] == (heads, head_dim) and cache[0].shape[1:] == (size, kv_heads, head_dim)

        def contexts() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
            for (start, end), taken in zip(pairwise(paged.tolist()), last.tolist(), strict=True):
                length = (end - start - 1) * size + taken
                keys, values = (part[blocks[start:end].long()].flatten(0, 1)[:length] for part in cache)
                yield keys, values

        self._attend(begun, query, contexts(), out)
