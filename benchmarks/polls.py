"""Measure what reading TensorRT-LLM's events and statistics costs its server's event loop, next to not reading them.

    PYTHONPATH=tests/fake_trtllm python -m benchmarks.polls MODEL     # on the stand-in
    python -m benchmarks.polls MODEL                                  # on the package

MODEL is a folder that the installed package can load; the stand-in needs only its config.json. The engine runs in this
process, so the stand-in's own work counts too. Each way is measured `--rounds` times, in turn.
"""

import argparse
import asyncio
import json
import os
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from statistics import quantiles
from typing import Any

from benchmarks.report import table
from engine.config import TrtllmConfig
from engine.process.host import SWITCH_SECONDS
from engine.trtllm import engine as trtllm
from engine.types import GenerateRequest, SamplingParams
from server.bench.machine import describe_machine

PROMPT = tuple(range(4, 36))
NAP = 0.002
"""Seconds that the event loop is asked to sleep; what it sleeps longer is its lag."""


class Unread:
    """A stand-in for a poller that reads nothing."""

    async def stop(self) -> None:
        pass


async def first_token(engine: trtllm.TrtllmEngine, name: str, tokens: int) -> float:
    """Generate `tokens` tokens. Returns the time to the first, in seconds."""
    started = time.perf_counter()
    first = 0.0
    sampling = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)
    async for _ in engine.generate(GenerateRequest(request_id=name, prompt_token_ids=PROMPT, sampling=sampling)):
        first = first or time.perf_counter() - started
    return first


@asynccontextmanager
async def streams(engine: trtllm.TrtllmEngine, count: int) -> AsyncIterator[None]:
    """Keep `count` long generations running."""
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(first_token(engine, f"stream-{number}", 400)) for number in range(count)]
        await asyncio.sleep(1)
        yield
        for task in tasks:
            task.cancel()


async def figures(engine: trtllm.TrtllmEngine, seconds: float) -> list[float]:
    """Return the loop's lag, p50, p99 and most, then first tokens, p50 and p99, in ms."""
    lags = []
    ends = time.perf_counter() + seconds
    while (before := time.perf_counter()) < ends:
        await asyncio.sleep(NAP)
        lags.append(time.perf_counter() - before - NAP)
    firsts = []
    for number in range(20):
        firsts.append(await first_token(engine, f"first-{number}", 1))
        await asyncio.sleep(0.15)
    lag, first = quantiles(lags, n=100), quantiles(firsts, n=100)
    return [1000 * value for value in (lag[49], lag[98], max(lags), first[49], first[98])]


async def measure(config: TrtllmConfig, counts: Sequence[int], seconds: float) -> list[list[float]]:
    """Return the figures beside each number of streams."""
    found = []
    async with trtllm.TrtllmEngine(config) as engine:
        for count in counts:
            async with streams(engine, count):
                found.append(await figures(engine, seconds))
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="folder of a model")
    parser.add_argument("--rounds", type=int, default=2, help="times that each way is measured")
    parser.add_argument("--streams", type=int, nargs="+", default=[0, 256], help="generations that run beside")
    parser.add_argument("--seconds", type=float, default=8, help="of each measurement of the lag")
    options = parser.parse_args(arguments)
    os.environ.setdefault("FAKE_TRTLLM_CONFIG", json.dumps({"token_delay": 0.1, "num_blocks": 20000}))
    sys.setswitchinterval(SWITCH_SECONDS)
    engine_arguments: dict[str, Any] = {
        "kv_cache_config": {"event_buffer_max_size": 100_000},
        "max_batch_size": 512,
        "enable_iter_perf_stats": True,
    }
    config = TrtllmConfig(model=options.model, arguments=engine_arguments)
    readers = (trtllm.kv_event_poller, trtllm.stats_poller)
    rows = []
    for _ in range(options.rounds):
        for way in ("read", "not read"):
            unread = partial(lambda *_: Unread())
            trtllm.kv_event_poller, trtllm.stats_poller = readers if way == "read" else (unread, unread)
            found = asyncio.run(measure(config, options.streams, options.seconds))
            rows += [
                [way, str(count), *(f"{value:.2f}" for value in line)]
                for count, line in zip(options.streams, found, strict=True)
            ]
    print(json.dumps(describe_machine()))
    head = ["events and statistics", "streams", "lag p50, ms", "p99", "most", "first token p50, ms", "p99"]
    print(table(head, rows))


if __name__ == "__main__":
    main()
