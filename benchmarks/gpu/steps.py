"""Single steps on a GPU, without scheduler, sampling or HTTP: `python -m benchmarks.gpu.steps [server flags]`.

Prints the milliseconds that a step takes on the device and on the host, and the kernels of each by their time. A step
is named by its decodes, the tokens behind each of them, and the prompt tokens beside them.
"""

import argparse
import statistics
import tempfile
import time
from collections import Counter
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.gpu.__main__ import DEFAULTS, embedded_config, settings_of
from benchmarks.gpu.chip import chip
from benchmarks.gpu.model import SHAPES, write_folder
from benchmarks.steps import step_of
from engine.embedded.models.load import load_runner
from engine.embedded.models.runner import ModelRunner, StepInput

STEPS = [(64, 640, 1984), (1, 256, 0), (64, 640, 0), (64, 640, 192), (85, 640, 171), (256, 640, 0), (0, 0, 256)]
"""Decodes, the tokens behind each, and prompt tokens. The first waits for FlashInfer, whose import would disturb the
others."""
ROUNDS = 40


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.steps", description=__doc__, allow_abbrev=False)
    parser.add_argument("--top", type=int, default=10, help="kernels shown")
    args, flags = parser.parse_known_args()
    print(f"chip: {chip()}")
    with tempfile.TemporaryDirectory(prefix="trellis-gpu-") as folder:
        model = Path(folder)
        write_folder(model, SHAPES["llama-8b"])
        config = embedded_config(model, DEFAULTS | {"load-format": "dummy"} | settings_of(flags, parser))
        runner = load_runner(config)
        runner.take_memory()
        try:
            with torch.inference_mode():
                for decodes, behind, prompt in STEPS:
                    parts = [(behind, 1)] * decodes + [(0, prompt)] * bool(prompt)
                    report(runner, step_of(parts, config.kv_block_size), args.top)
        finally:
            runner.close()


def report(runner: ModelRunner, step: StepInput, top: int) -> None:
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
    with profile(activities=[ProfilerActivity.CUDA]) as recorded:
        for _ in range(3):
            runner.forward(step)
        torch.cuda.synchronize()
    seconds: Counter[str] = Counter()
    for event in recorded.events():
        seconds[event.name] += event.device_time / 3e3
    decodes = sum(length == 1 for length in step.lengths)
    prompt, behind = len(step.tokens) - decodes, step.starts[0] if decodes else 0
    print(f"\n## {decodes} decodes behind {behind}, {prompt} prompt tokens")
    print(
        f"device {statistics.median(device):.2f} ms, host {statistics.median(host):.2f}, kernels {seconds.total():.2f}"
    )
    for name, milliseconds in seconds.most_common(top):
        print(f"{milliseconds:8.3f}  {name[:110]}")


if __name__ == "__main__":
    main()
