"""Profile workloads in process with torch's profiler: `python -m benchmarks.gpu.trace CELLS [server flags]`.

Prints the rates that the GPU sustains (a large matrix product, a large read). Then, for prompts and for decoding, it
prints the share of time in which a kernel ran, the idle time between kernels by its length and by its neighbours, and
the kernels by their time.
"""

import argparse
import asyncio
import random
import tempfile
from collections import Counter
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.gpu.__main__ import DEFAULTS, embedded_config, settings_of
from benchmarks.gpu.cells import WORKLOADS, Workload
from benchmarks.gpu.chip import chip
from benchmarks.gpu.model import SHAPES, write_folder
from benchmarks.gpu.worker import measure
from benchmarks.report import Cell
from engine.base import Engine
from engine.config import EmbeddedConfig
from engine.create import create_engine


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.trace", description=__doc__, allow_abbrev=False)
    parser.add_argument("cells", help=f"workloads, separated by commas: {', '.join(WORKLOADS)}")
    parser.add_argument("--seconds", type=float, default=0.5, help="seconds of decoding to record")
    parser.add_argument("--top", type=int, default=18, help="kernels shown")
    args, flags = parser.parse_known_args()
    print(f"chip: {chip()}")
    with tempfile.TemporaryDirectory(prefix="trellis-gpu-") as folder:
        model = Path(folder)
        write_folder(model, SHAPES["llama-8b"])
        config = embedded_config(model, DEFAULTS | {"load-format": "dummy"} | settings_of(flags, parser))
        asyncio.run(trace(config, [WORKLOADS[name] for name in args.cells.split(",")], args.seconds, args.top))


async def trace(config: EmbeddedConfig, workloads: list[Workload], seconds: float, top: int) -> None:
    engine = create_engine(config)
    try:
        await engine.start()
        for workload in workloads:
            await measure(engine, workload.warm_up(), "warm-up", workload)
            print(f"\n## {workload.name}: prompts\n" + table(await prompts(engine, workload), top))
            if not workload.prefill:
                print(f"\n## {workload.name}: decodes\n" + table(await decodes(engine, workload, seconds), top))
    finally:
        await engine.close()


async def prompts(engine: Engine, workload: Workload) -> "list[Any]":
    with profile(activities=[ProfilerActivity.CUDA]) as recorded:
        await measure(
            engine, Cell(workload.cell.concurrency, workload.cell.prompt_tokens, 1), f"{random.random()}", workload
        )
        torch.cuda.synchronize()
    return list(recorded.events())


async def decodes(engine: Engine, workload: Workload, seconds: float) -> "list[Any]":
    """Record the kernels of some steps in the middle of a run, after all prompts."""
    cell = workload.cell
    running = asyncio.create_task(
        measure(engine, Cell(cell.concurrency, cell.prompt_tokens, 2048), f"{random.random()}", workload)
    )
    await asyncio.sleep(cell.concurrency * cell.prompt_tokens / 35_000 + 1)
    with profile(activities=[ProfilerActivity.CUDA]) as recorded:
        await asyncio.sleep(seconds)
    running.cancel()
    with suppress(asyncio.CancelledError):
        await running
    return list(recorded.events())


def table(events: "list[Any]", top: int) -> str:
    """Return the recorded kernels as text; times are in microseconds unless named otherwise."""
    spans = sorted(
        (event.time_range.start, event.time_range.end, event.name)
        for event in events
        if event.device_type.name == "CUDA"
    )
    if len(spans) < 2:
        return "nothing recorded"
    busy, idle, around, end, last = 0.0, Counter[str](), Counter[tuple[str, str]](), spans[0][0], ""
    for begin, finish, name in spans:
        if begin > end:
            idle[next(length for limit, length in _GAPS if begin - end < limit)] += begin - end
            around[last, name] += begin - end
        busy += max(0.0, finish - max(begin, end))
        if finish > end:
            end, last = finish, name
    whole = end - spans[0][0]
    gaps = sum(b[0] - a[1] > _STEP for a, b in pairwise(spans))
    lines = [
        f"{len(spans)} kernels and copies in {whole / 1e3:.1f} ms, busy {busy / whole:.1%}; "
        f"{gaps} gaps of more than {_STEP:.0f}; idle: "
        + ", ".join(f"{name} {idle[name] / whole:.1%}" for _, name in _GAPS)
    ]
    times, counts = Counter[str](), Counter[str]()
    for begin, finish, name in spans:
        times[name] += finish - begin
        counts[name] += 1
    lines += [
        f"{times[name] / whole:7.1%} {counts[name]:7} x {times[name] / counts[name]:9.1f}  {name[:110]}"
        for name, _ in times.most_common(top)
    ]
    lines += [
        f"{idle_time / whole:7.1%} idle between {before[:60]} and {after[:60]}"
        for (before, after), idle_time in around.most_common(_AROUND)
    ]
    return "\n".join(lines)


_STEP = 20.0
_AROUND = 8
_GAPS = ((2.0, "under 2"), (20.0, "under 20"), (100.0, "under 100"), (float("inf"), "longer"))


if __name__ == "__main__":
    main()
