"""Single steps on a GPU, without scheduler, sampling or HTTP: `python -m benchmarks.gpu.steps [server flags]`.

Prints the milliseconds that a step takes until the device is done and until the host is, by the CUDA graph that runs it
and without one, and its kernels by their time. A step is named by its decodes, the tokens before each of them (before
the prompt, if there are no decodes), and the tokens of a prompt.
"""

import argparse
import statistics
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.gpu.__main__ import DEFAULTS, embedded_config, settings_of
from benchmarks.gpu.chip import chip
from benchmarks.gpu.model import SHAPES, write_folder
from benchmarks.steps import step_of
from engine.embedded.models.load import load_runner
from engine.embedded.models.runner import StepInput

STEPS = [
    (64, 640, 1984), (1, 256, 0), (64, 640, 0), (64, 640, 192), (64, 640, 440), (85, 640, 171), (256, 640, 0),
    (0, 0, 256), (0, 0, 300), (0, 0, 500), (0, 0, 1000), (0, 0, 2000), (0, 2000, 500),
]  # fmt: skip
"""Decodes, the tokens before each (or before the prompt, if there are none), and the tokens of a prompt."""
ROUNDS = 40


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.steps", description=__doc__, allow_abbrev=False)
    parser.add_argument("--shape", default="llama-8b", choices=SHAPES)
    parser.add_argument("--top", type=int, default=10, help="kernels shown")
    args, flags = parser.parse_known_args()
    print(f"chip: {chip()}")
    with tempfile.TemporaryDirectory(prefix="trellis-gpu-") as folder:
        model = Path(folder)
        write_folder(model, SHAPES[args.shape])
        config = embedded_config(model, DEFAULTS | {"load-format": "dummy"} | settings_of(flags, parser))
        runner: Any = load_runner(config)  # a `CudaRunner`
        runner.take_memory()
        try:
            with torch.inference_mode():
                with patch.object(runner, "graph_of", lambda _: None):
                    runner.forward(step_of([(0, 1)], config.kv_block_size))  # waits for FlashInfer
                for decodes, behind, prompt in STEPS:
                    parts = [(behind, 1)] * decodes + [(0 if decodes else behind, prompt)] * bool(prompt)
                    report(runner, step_of(parts, config.kv_block_size), args.top)
        finally:
            runner.close()


def report(runner: Any, step: StepInput, top: int) -> None:
    decodes = sum(length == 1 for length in step.lengths)
    prompt, behind = len(step.tokens) - decodes, step.starts[0]
    print(f"\n## {decodes} decodes, {prompt} prompt tokens, behind {behind}")
    times = _times(runner, step)
    if graph := runner.graph_of(step):
        print(f"graph of {graph.size} ({graph.kind.name}): {times}")
        with patch.object(runner, "graph_of", lambda _: None):
            times = _times(runner, step)
    print(f"without a graph: {times}")
    with profile(activities=[ProfilerActivity.CUDA]) as recorded:
        for _ in range(3):
            runner.forward(step)
        torch.cuda.synchronize()
    seconds: Counter[str] = Counter()
    for event in recorded.events():
        seconds[event.name] += event.device_time / 3e3
    print(f"kernels {seconds.total():.2f} ms")
    for name, milliseconds in seconds.most_common(top):
        print(f"{milliseconds:8.3f}  {name[:110]}")


def _times(runner: Any, step: StepInput) -> str:
    for _ in range(5):
        runner.forward(step)
    torch.cuda.synchronize()
    device, host = [], []
    for _ in range(ROUNDS):
        began = time.perf_counter()
        runner.forward(step)
        host.append(1e3 * (time.perf_counter() - began))
        torch.cuda.synchronize()
        device.append(1e3 * (time.perf_counter() - began))
    return f"{statistics.median(device):.2f} ms, host {statistics.median(host):.2f}"


if __name__ == "__main__":
    main()
