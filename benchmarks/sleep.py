"""Measure sleep and wake of the embedded engine: `python -m benchmarks.sleep`.

The engine runs in a process of its own, as in a server. Each level: memory that is given back, seconds to fall asleep
and to wake, and whether the same prompts get the same tokens. Then how soon a long prefix gets its first token after
level 2, from the host tier and computed.
"""

import argparse
import asyncio
import subprocess
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from statistics import median
from typing import Any

import psutil

from benchmarks.tiers import Answer, ask, prompt_of
from engine.checkpoints.store import resolve_model, weight_bytes
from engine.config import EmbeddedConfig, SleepConfig
from engine.process.child import EngineProcess
from engine.process.client import EngineClient
from engine.sleep import SleepOrder
from server.settings import Settings

MIB = 1 << 20


class Asleep:
    """A measured engine process: the GPU memory that it uses, or on a CPU its resident memory."""

    def __init__(self, client: EngineClient, process: Any, device: str) -> None:
        self.client = client
        self._process = process
        self._cuda = device.startswith("cuda")

    def memory(self) -> int:
        """Return bytes."""
        if not self._cuda:
            return int(psutil.Process(self._process.pid).memory_info().rss)
        return device_memory()


def device_memory() -> int:
    """Return the bytes of the first visible GPU that are in use."""
    query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits", "--id=0"]
    return int(subprocess.run(query, capture_output=True, text=True, check=True).stdout.split()[0]) * MIB


@asynccontextmanager
async def running(config: EmbeddedConfig, device: str) -> AsyncIterator[Asleep]:
    process = EngineProcess(config)
    client = EngineClient(process.address, process.wait_failed)
    try:
        await process.start()
        await client.start()
        yield Asleep(client, process, device)
    finally:
        await client.close()
        await process.close()


async def levels(options: argparse.Namespace, config: EmbeddedConfig, weights: int) -> None:
    before = device_memory() if options.device.startswith("cuda") else None
    async with running(config, options.device) as engine:
        info = engine.client.info
        prompts = [prompt_of(options.tokens // 4, info.vocab_size) for _ in range(3)]

        async def answers() -> list[Answer]:
            return [await ask(engine.client, prompt, 32) for prompt in prompts]

        token_bytes = info.kv_bytes / (info.num_blocks * info.block_size)
        written = min(info.kv_bytes, int(len(prompts) * (len(prompts[0]) + 32) * token_bytes))
        """Bytes of KV blocks; those of a CPU take memory once they are written."""
        expected = [answer.tokens for answer in await answers()]
        print(f"{info.compute_path} on {info.device}, {info.dtype}: weights {weights / MIB:.0f} MiB in files, ", end="")
        print(f"KV cache {info.kv_bytes / MIB:.0f} MiB\n")
        print("| level | awake MiB | asleep MiB | given back | asleep after s | awake after s, median (all) | tokens |")
        print("|---|---|---|---|---|---|---|")
        for level in (1, 2):
            falls, wakes, equal = [], [], True
            for _ in range(options.rounds):
                awake = engine.memory()
                falls.append(await timed(engine.client.sleep(SleepOrder(level))))
                asleep = engine.memory()
                wakes.append(await timed(engine.client.wake_up()))
                equal &= [answer.tokens for answer in await answers()] == expected
            share = (awake - asleep) / (weights + written if before is None else awake - before)
            whole = "weights and written KV blocks" if before is None else "all that the engine took"
            seen = ", ".join(f"{seconds:.3f}" for seconds in wakes)
            print(
                f"| {level} | {awake / MIB:.0f} | {asleep / MIB:.0f} | {(awake - asleep) / MIB:.0f}, {share:.0%} of "
                f"{whole} | {median(falls):.3f} | {median(wakes):.3f} ({seen}) | {'equal' if equal else 'DIFFERENT'} |"
            )


async def prefix(options: argparse.Namespace, config: EmbeddedConfig) -> None:
    async with running(config, options.device) as engine:
        host: list[float] = []
        cold: list[float] = []
        for _ in range(options.rounds):
            prompt = prompt_of(options.tokens, engine.client.info.vocab_size)
            computed = await ask(engine.client, prompt)
            await engine.client.sleep(SleepOrder(2))
            await engine.client.wake_up()
            loaded = await ask(engine.client, prompt)
            assert loaded.tokens == computed.tokens, "the answers differ"
            assert loaded.cached > options.tokens // 2, f"{loaded.cached} tokens came from the host"
            cold.append(computed.first)
            host.append(loaded.first)
        print(
            f"\nFirst token of a prefix of {options.tokens} tokens after level 2: {median(host):.3f} s from the host, "
        )
        print(f"{median(cold):.3f} s computed, {median(cold) / median(host):.1f} times sooner")


async def timed(work: Any) -> float:
    started = time.perf_counter()
    await work
    return time.perf_counter() - started


async def main(options: argparse.Namespace) -> None:
    settings = Settings()
    folder = resolve_model(options.model or settings.model, settings.cache_dir)
    own: dict[str, Any] = {"kv_cache_memory_mb": options.kv_mb} if options.kv_mb else {}
    fields: dict[str, Any] = {"model": str(folder), "device": options.device, "load_format": options.load_format, **own}
    config = EmbeddedConfig(**fields, sleep=SleepConfig(), max_seq_len=options.context)
    await levels(options, config, weight_bytes(Path(folder)))
    if not options.no_prefix:
        tiered = EmbeddedConfig(
            **fields, sleep=SleepConfig(), max_seq_len=options.context, kv_host_cache_mb=options.host_mb
        )
        await prefix(options, tiered)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default="", help="folder or name; default: the packaged model")
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--load-format", default="auto", choices=("auto", "dummy"))
    parser.add_argument("--tokens", type=int, default=2000, help="of the prefix; 16000 on a GPU")
    parser.add_argument("--context", type=int, default=0, help="tokens; default: the model's")
    parser.add_argument("--kv-mb", type=int, default=0, help="KV cache of a CPU")
    parser.add_argument("--host-mb", type=int, default=1024, help="host tier; 16384 on a GPU")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--no-prefix", action="store_true")
    asyncio.run(main(parser.parse_args()))
