"""Measure KV tiers in process: `python -m benchmarks.tiers`.

Four questions: how fast blocks are copied from the host, beside one large copy; how soon a conversation that returns
gets its first token, computed, from the host and from the disk; how many tokens a second many conversations get that
do not fit the device, with tiers and without; what tiers cost when nothing is reused. Engines with and without tiers
take turns, and figures are medians.
"""

import argparse
import asyncio
import logging
import math
import random
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from statistics import median
from typing import Any

import torch

from engine.base import Engine
from engine.checkpoints.store import resolve_model
from engine.config import EmbeddedConfig
from engine.create import create_engine
from engine.embedded.kv.host_tier import Device, padded
from engine.embedded.kv.tiers import LOADERS
from engine.embedded.models.devices import device_of
from engine.stats import IterationStats
from engine.types import GenerateRequest, SamplingParams
from server.settings import Settings

QUESTIONS = ("copies", "returning", "crowd", "nothing")
NEARLY = 0.05
"""Difference of log-probabilities that rounding explains."""
_ids = count()
_rng = random.Random(0)


@dataclass(frozen=True)
class Answer:
    tokens: tuple[int, ...]
    first: float
    """Seconds to the first token."""
    cached: int
    """Prompt tokens that were not computed."""
    likely: dict[int, float]
    """Log-probabilities of the likeliest first tokens."""

    def agrees(self, other: "Answer") -> bool:
        """Return whether another answer has the same tokens, or else a first one that is as likely up to rounding: of
        random weights, tokens are almost equally likely."""
        return self.tokens == other.tokens or (
            self.likely.get(other.tokens[0], -math.inf) > max(self.likely.values()) - NEARLY
        )


def prompt_of(length: int, vocab_size: int) -> list[int]:
    return [_rng.randrange(10, vocab_size) for _ in range(length)]


async def ask(engine: Engine, prompt: Sequence[int], output: int = 1) -> Answer:
    sampling = SamplingParams(max_tokens=output, temperature=0.0, ignore_eos=True, logprobs=5)
    request = GenerateRequest(request_id=str(next(_ids)), prompt_token_ids=tuple(prompt), sampling=sampling)
    began, first, cached = time.perf_counter(), 0.0, 0
    tokens: tuple[int, ...] = ()
    likely: dict[int, float] = {}
    async for delta in engine.generate(request):
        first = first or time.perf_counter() - began
        if not tokens and delta.logprobs:
            likely = {entry.token_id: entry.logprob for entry in delta.logprobs[0]}
        tokens += delta.token_ids
        if delta.prompt is not None:
            cached = delta.prompt.cached_tokens
    return Answer(tokens, first, cached, likely)


@asynccontextmanager
async def running(config: EmbeddedConfig) -> AsyncIterator[Engine]:
    engine = create_engine(config)
    try:
        await engine.start()
        yield engine
    finally:
        await engine.close()


async def settled(engine: Engine) -> IterationStats:
    """Return statistics once copies to the disk have had time to end."""
    stored = -1
    while True:
        await asyncio.sleep(0.5)
        stats = await anext(aiter(engine.stats()))
        now = sum(tier.stored_bytes for tier in stats.tiers)
        if now == stored:
            return stats
        stored = now


class Bench:
    """The options of a run, and sizes in MiB that follow from the model."""

    def __init__(self, options: argparse.Namespace, folder: Path, disk: Path) -> None:
        self.options = options
        self.folder = folder
        self.disk = disk

    def config(self, tokens: int, block_mb: float, *, tiers: bool, host: int = 0) -> EmbeddedConfig:
        """Return an engine whose device holds `tokens`, and its host `host` tokens."""
        blocks = -(-tokens // self.options.block)
        fields: dict[str, Any] = {
            "model": str(self.folder),
            "device": self.options.device,
            "load_format": self.options.load_format,
            "num_blocks": blocks,
            "kv_block_size": self.options.block,
            "max_seq_len": self.options.tokens + 512,
        }
        if tiers:
            fields["kv_host_cache_mb"] = int(block_mb * (host // self.options.block + 2)) + 1
            fields["kv_disk_cache_mb"] = self.options.disk_mb
            fields["kv_disk_cache_dir"] = str(self.disk)
        return EmbeddedConfig(**fields)

    async def block_mb(self) -> float:
        config = self.config(64 * self.options.block, 0.0, tiers=False)  # so many that a spare one does not matter
        async with running(config) as engine:
            return engine.info.kv_bytes / engine.info.num_blocks / (1 << 20)

    async def copies(self, block_mb: float) -> None:
        """Measure copies of a conversation's blocks from the host, in no order, and one copy as large as all."""
        count, size = self.options.tokens // self.options.block, int(block_mb * (1 << 20))
        target = torch.empty(count * size, dtype=torch.uint8, device=device_of(self.config(0, 0.0, tiers=False)))
        device = Device(target.device)
        host = device.allocate(count * padded(size), write_combined=target.is_cuda)
        slots = _rng.sample(range(count), count)

        def copy(pieces: list[tuple[int, int, int]]) -> None:
            with device.copies() as copies:
                for to, source, length in pieces:
                    copies.copy(target.data_ptr() + to, host + source, length)
                copies.wait()

        blocks = [(index * size, slot * padded(size), size) for index, slot in enumerate(slots)]
        speeds: dict[str, float] = {}
        with ThreadPoolExecutor(LOADERS) as threads:
            for name, shares in (
                ("blocks", [blocks[first::LOADERS] for first in range(LOADERS)]),
                ("one copy", [[(0, 0, count * size)]]),
            ):
                seconds = []
                for _ in range(self.options.rounds + 1):
                    began = time.perf_counter()
                    list(threads.map(copy, shares))
                    seconds.append(time.perf_counter() - began)
                speeds[name] = count * size / median(seconds[1:]) / 1e9  # the first touches pages
        device.close()
        share = speeds["blocks"] / speeds["one copy"]
        print(f"\n{count} blocks of {block_mb:.2f} MiB from the host: {speeds['blocks']:.1f} GB/s, ", end="")
        print(f"one copy of all {speeds['one copy']:.1f} GB/s: {share:.0%}")

    async def returning(self, block_mb: float) -> None:
        """Time the first token of a conversation that is computed, and that comes back from each tier."""
        tokens = self.options.tokens
        config = self.config(tokens + 64, block_mb, tiers=True, host=3 * tokens)
        times: dict[str, list[float]] = {"computed": [], "host": [], "disk": []}
        loaded: dict[str, int] = {}
        other: list[int] | None = None
        for _ in range(self.options.rounds):
            async with running(config) as engine:
                other = other or prompt_of(tokens, engine.info.vocab_size)
                prompt = prompt_of(tokens, engine.info.vocab_size)
                computed = await ask(engine, prompt)
                kept = await ask(engine, prompt)
                await ask(engine, other)  # takes all blocks of the device
                host = await ask(engine, prompt)
                await settled(engine)
                if self.options.trace and not times["host"]:
                    await ask(engine, other)
                    await engine.start_profile()
                    await ask(engine, prompt)
                    await engine.stop_profile(self.options.trace)
            async with running(config) as engine:
                await asyncio.sleep(1)
                disk = await ask(engine, prompt)
            # Where as much was loaded as the device had kept, the same kernels computed the rest.
            for name, answer in (("host", host), ("disk", disk)):
                expected = kept if answer.cached else computed
                assert expected.agrees(answer), f"the answers differ, from the {name}: {expected} and {answer}"
            assert computed.cached == 0, "a tier had a new conversation"
            for name, answer in (("computed", computed), ("host", host), ("disk", disk)):
                times[name].append(answer.first)
                loaded[name] = answer.cached
        print(f"\nFirst token of a conversation of {tokens} tokens that returns, {len(times['host'])} rounds\n")
        print("| from | tokens loaded | median s | times sooner, median of rounds |\n|---|---|---|---|")
        for name, found in times.items():
            sooner = median(slow / fast for slow, fast in zip(times["computed"], found, strict=True))
            print(f"| {name} | {loaded[name]} | {median(found):.3f} | {sooner:.1f} |")
        print("\nA tier from which loading takes longer than computing (see the log) is not asked.")

    async def crowd(self, block_mb: float) -> None:
        """Measure tokens a second of many conversations that take turns, more than the device holds."""
        many, length, output = self.options.conversations, self.options.length, 8
        whole = many * (length + 3 * output * self.options.rounds + 64)
        device = max(length + 256, whole // 4)
        rates: dict[bool, list[float]] = {False: [], True: []}
        on_cpu = device_of(self.config(0, 0.0, tiers=False)).type == "cpu"
        async with (
            running(self.config(device, block_mb, tiers=False)) as plain,
            running(self.config(device, block_mb, tiers=True, host=whole)) as tiered,
        ):
            talks = [prompt_of(length, plain.info.vocab_size) for _ in range(many)]
            answers: dict[bool, list[Answer]] = {}
            for turn in range(self.options.rounds + 1):
                order = ((False, plain), (True, tiered)) if turn % 2 else ((True, tiered), (False, plain))
                for tiers, engine in order:
                    began = time.perf_counter()
                    answers[tiers] = []
                    for first in range(0, many, 4):  # four at a time
                        group = (ask(engine, talk, output) for talk in talks[first : first + 4])
                        answers[tiers] += await asyncio.gather(*group)
                    if turn:  # all compute in the first
                        rates[tiers].append(many * output / (time.perf_counter() - began))
                same = sum(one.tokens == two.tokens for one, two in zip(answers[False], answers[True], strict=True))
                if on_cpu:
                    assert same == many, "the answers differ"
                else:
                    print(f"turn {turn}: {same} of {many} answers are the same with tiers and without")
                for talk, answer in zip(talks, answers[False], strict=True):
                    talk += [*answer.tokens, *prompt_of(8, plain.info.vocab_size)]
            if not on_cpu:
                await self.print_agreement(plain, talks)
        ratio = median(fast / slow for slow, fast in zip(rates[False], rates[True], strict=True))
        print(f"\n{many} conversations of {length} tokens and more, the device holds a quarter\n")
        print("| tiers | tok/s, median |\n|---|---|")
        print(f"| no | {median(rates[False]):.1f} |\n| yes | {median(rates[True]):.1f} |\n\nratio {ratio:.2f}")

    async def print_agreement(self, engine: Engine, talks: list[list[int]]) -> None:
        """Print how often an engine without tiers gives the same answer when the device has the prompt's blocks.

        On a GPU, products of other sizes round differently, and random weights leave tokens almost equally likely.
        """
        some, same = talks[:20], 0
        for talk in some:
            answers = [await ask(engine, talk, 8) for _ in range(2)]
            assert answers[1].cached > answers[0].cached, "the device did not keep the prompt's blocks"
            same += answers[0].tokens == answers[1].tokens
        print(f"of {len(some)} prompts asked twice without tiers, {same} have the same answer from the device's blocks")

    async def nothing(self, block_mb: float) -> None:
        """Measure the time of prompts that are new to the server."""
        length, output = self.options.length, 16
        device = 4 * (length + 64)
        times: dict[bool, list[float]] = {False: [], True: []}
        worked: dict[bool, list[float]] = {False: [], True: []}
        """Seconds of all cores, which other processes disturb less."""
        async with (
            running(self.config(device, block_mb, tiers=False)) as plain,
            running(self.config(device, block_mb, tiers=True, host=4 * device)) as tiered,
        ):
            for turn in range(4 * self.options.rounds):
                prompt = prompt_of(length, plain.info.vocab_size)
                order = ((False, plain), (True, tiered)) if turn % 2 else ((True, tiered), (False, plain))
                for tiers, engine in order:
                    began, work = time.perf_counter(), time.process_time()
                    await ask(engine, prompt, output)
                    times[tiers].append(time.perf_counter() - began)
                    worked[tiers].append(time.process_time() - work)
        cost, cores = (
            median(two / one for one, two in zip(of[False], of[True], strict=True)) for of in (times, worked)
        )
        print(f"\n{len(times[True])} prompts of {length} tokens, each asked once\n")
        print(f"without tiers {median(times[False]):.3f} s, with tiers {median(times[True]):.3f} s: {cost - 1:+.1%}")
        print(f"time of all cores {median(worked[False]):.3f} s and {median(worked[True]):.3f} s: {cores - 1:+.1%}")


async def main(options: argparse.Namespace) -> None:
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    settings = Settings()
    folder = resolve_model(options.model or settings.model, settings.cache_dir)
    with tempfile.TemporaryDirectory(prefix="trellis-tiers-", dir=options.folder) as disk:
        bench = Bench(options, folder, Path(disk))
        block_mb = await bench.block_mb()
        for name in options.only or QUESTIONS:
            await getattr(bench, name)(block_mb)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default="", help="folder or name; default: the packaged model")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--trace", default="", help="file for a profile of a conversation that returns from the host")
    parser.add_argument("--load-format", default="auto", choices=("auto", "dummy"))
    parser.add_argument("--tokens", type=int, default=4000, help="of the conversation that returns")
    parser.add_argument("--conversations", type=int, default=24)
    parser.add_argument("--length", type=int, default=800, help="tokens of each of these, and of prompts asked once")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--block", type=int, default=32, help="tokens in a KV block")
    parser.add_argument("--disk-mb", type=int, default=20_000)
    parser.add_argument("--folder", help="where the disk tier's folder is made; default: the system's temporary one")
    parser.add_argument("--only", nargs="*", choices=QUESTIONS)
    asyncio.run(main(parser.parse_args()))
