"""CUDA graphs: capture of a computation that has static inputs and outputs. Needs torch alone."""

from collections.abc import Callable
from typing import Any, TypeVar

import torch

T = TypeVar("T")


def capture(compute: Callable[[], T], pool: Any = None) -> tuple[torch.cuda.CUDAGraph, T]:
    """Run `compute` once, so that everything it needs is loaded, and record it; return the graph and what `compute`
    returned.

    Each `replay` reads and writes the memory that the recording used. `pool` is another graph's `pool()`, to share its
    memory: then neither may be replayed before what the other has written was used. Raises what `compute` raises,
    torch.OutOfMemoryError, and RuntimeError for what no graph can hold; the current stream is the same afterwards in
    any case.
    """
    current = torch.cuda.current_stream()
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    side.wait_stream(current)
    with torch.cuda.stream(side):
        compute()
    current.wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
            outputs = compute()
    finally:
        torch.cuda.set_stream(current)  # torch leaves another one behind when a capture fails
    return graph, outputs
