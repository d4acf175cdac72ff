"""CUDA graphs of a denoiser: a step of many small kernels is launched as one."""

import logging
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import tree_flatten, tree_map

_MOST = 16
"""Graphs that are kept, one for each set of shapes. They share their memory, since none runs beside another."""

log = logging.getLogger(__name__)


class _Captured(NamedTuple):
    graph: Any
    inputs: list[torch.Tensor]
    output: Any


class GraphedForward:
    """A module's `forward` that is captured when the same shapes come for the second time, and replayed from then on.

    `forward` must not synchronize with the GPU, nor decide by the values of tensors. What cannot be captured is
    computed as it is.
    """

    def __init__(self, forward: Callable[..., Any]) -> None:
        self._forward = forward
        self._graphs: OrderedDict[object, _Captured | None] = OrderedDict()
        """By shapes: None if they have come once, or cannot be captured."""
        self._failed: set[object] = set()
        self._pool: Any = None

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        values, form = tree_flatten((arguments, named))
        tensors = [value for value in values if isinstance(value, torch.Tensor)]
        key = (
            repr(form),
            tuple(
                (value.shape, value.dtype, value.device) if isinstance(value, torch.Tensor) else value
                for value in values
            ),
        )
        known = key in self._graphs
        graph = self._graphs.get(key)
        if graph is None and known and key not in self._failed and all(tensor.is_cuda for tensor in tensors):
            graph = self._capture(key, arguments, named)
        self._graphs[key] = graph
        self._graphs.move_to_end(key)
        if len(self._graphs) > _MOST:
            self._graphs.popitem(last=False)
        if graph is None:
            return self._forward(*arguments, **named)
        for own, tensor in zip(graph.inputs, tensors, strict=True):
            own.copy_(tensor)
        graph.graph.replay()
        return tree_map(_copied, graph.output)

    def _capture(self, key: object, arguments: Any, named: Any) -> _Captured | None:
        copied = tree_map(_copied, (arguments, named))
        inputs = [value for value in tree_flatten(copied)[0] if isinstance(value, torch.Tensor)]
        graph = torch.cuda.CUDAGraph()
        self._pool = self._pool or torch.cuda.graph_pool_handle()
        try:
            with torch.cuda.graph(graph, self._pool, capture_error_mode="thread_local"):
                output = self._forward(*copied[0], **copied[1])
        except RuntimeError as error:
            log.warning("a denoiser is computed without CUDA graphs: %s", error)
            self._failed.add(key)
            return None
        return _Captured(graph, inputs, output)


def _copied(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value
