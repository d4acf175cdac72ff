"""Measure what a GPU sustains: `python -m benchmarks.gpu.chip`. GPUs of one model differ, and power limits all."""

import subprocess
import time
from collections.abc import Callable

import torch


def chip(seconds: float = 1.0) -> str:
    """Return the sustained rates of a product of 8192 rows with a 28672 x 4096 weight, and of reading 4 GiB."""
    x, weight = (torch.randn(rows, 4096, device="cuda", dtype=torch.bfloat16) for rows in (8192, 28672))
    product = _rate(lambda: x @ weight.t(), 2 * 8192 * 28672 * 4096, seconds)
    query = ["nvidia-smi", "--query-gpu=clocks.sm,power.draw,power.limit,temperature.gpu", "--format=csv,noheader"]
    state = subprocess.run(query, capture_output=True, text=True, check=False).stdout.strip()
    return f"{product / 1e12:.0f} TFLOP/s sustained ({state}), {read_bandwidth(seconds) / 1e12:.2f} TB/s read"


def read_bandwidth(seconds: float = 1.0) -> float:
    """Return the sustained rate of reading 4 GiB, in bytes a second."""
    big = torch.empty(1 << 30, device="cuda").uniform_()
    return _rate(big.sum, 4 << 30, seconds)


def _rate(work: Callable[[], object], amount: float, seconds: float) -> float:
    work()
    torch.cuda.synchronize()
    began, count = time.perf_counter(), 0
    while time.perf_counter() - began < seconds:
        for _ in range(10):
            work()
        count += 10
        torch.cuda.synchronize()
    return count * amount / (time.perf_counter() - began)


if __name__ == "__main__":
    print(chip())
