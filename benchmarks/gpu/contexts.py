"""Measure long and shared contexts on one GPU, in process: `python -m benchmarks.gpu.contexts [PARTS] [server flags]`.

long     32 requests with 32,768 tokens of context each: decode steps against the memory's limit
128k     one prompt of 131,072 tokens: first token, decode steps
shared   256 requests that share a prefix of 8,192 tokens: with and without cascade attention, and with own prefixes
short    a conversation of 16,384 tokens in the cache, and 32 or 128 new ones: first token by graphs and by FlashInfer

The shape is that of Llama 3.1 8B with dummy weights. All parts take about four minutes, each one to two if it runs
alone. Where only the length of a context matters, its prompt is not computed: the cache has random contents from the
start. Contexts that do not fit the cache are left out, and the table names how many there are: 32 of 32,768 tokens take
137 GB, or half of that with `--kv-cache-dtype fp8`. GPU tests of the same code:

    python -m pytest -p no:cacheprovider -m "gpu or not gpu" tests/engine/embedded/models/cuda/test_cuda_kernels.py \\
        tests/engine/embedded/models/cuda/test_prefixes.py tests/engine/embedded/models/cuda/test_cuda_engine.py
"""

import argparse
import asyncio
import gc
import logging
import random
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch

from benchmarks.gpu.__main__ import DEFAULTS, embedded_config, settings_of
from benchmarks.gpu.chip import read_bandwidth
from benchmarks.gpu.load import token_ids
from benchmarks.gpu.model import LLAMA_8B, Shape, write_folder
from benchmarks.report import table
from engine.config import EmbeddedConfig
from engine.create import create_engine
from engine.embedded.core import EngineCore
from engine.embedded.engine import EmbeddedEngine
from engine.embedded.models.runner import StepInput
from engine.types import GenerateRequest, SamplingParams

SHARE_BAR = 0.75
"""Least share of the memory's limit for `long`."""
CASCADE_BAR = 1.5
"""Least ratio of rates with and without cascade for `shared`."""
MARGIN = 4096
"""Positions of the model beyond the longest prompt."""


class Sizes(NamedTuple):
    """Numbers of tokens and of requests."""

    long: int = 32_768
    long_requests: int = 32
    longest: int = 131_072
    prefix: int = 8_192
    own: int = 64
    sharing: int = 256
    output: int = 256
    conversation: int = 16_384
    turns: tuple[int, ...] = (32, 128)
    warm_up: int = 200


@dataclass
class Timed:
    """When tokens of a request came."""

    times: list[float] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    sent: float = 0.0
    cached: int = 0

    @property
    def ttft(self) -> float:
        return self.times[0] - self.sent

    @property
    def gaps(self) -> list[float]:
        return [b - a for a, b in zip(self.times, self.times[1:], strict=False)]


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu.contexts",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    names = list(Contexts.PARTS)
    parser.add_argument("parts", nargs="*", metavar="PARTS", help=f"all if none is named: {', '.join(names)}")
    args, flags = parser.parse_known_args()
    if wrong := set(args.parts) - set(names):
        parser.error(f"no such parts: {', '.join(wrong)}; choose from {', '.join(names)}")
    logging.basicConfig(level="WARNING", format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    bandwidth = read_bandwidth()
    torch.cuda.empty_cache()
    print(f"{torch.cuda.get_device_name()}, reads {bandwidth / 1e12:.2f} TB/s", flush=True)
    sizes = Sizes()
    with tempfile.TemporaryDirectory(prefix="trellis-gpu-") as folder:
        model = Path(folder)
        shape = replace(LLAMA_8B, max_position=sizes.longest + MARGIN)
        write_folder(model, shape)
        flags_given = {"load-format": "dummy", "max-seq-len": str(shape.max_position)} | settings_of(flags, parser)
        config = embedded_config(model, DEFAULTS | flags_given)
        asyncio.run(run(config, shape, sizes, bandwidth, args.parts or names))


async def run(config: EmbeddedConfig, shape: Shape, sizes: Sizes, bandwidth: float, parts: list[str]) -> None:
    engine = create_engine(config)
    assert isinstance(engine, EmbeddedEngine)
    began = time.perf_counter()
    try:
        await engine.start()
        gc.collect()
        gc.freeze()  # as the engine's host does
        blocks = f"{engine.info.num_blocks} KV blocks of {engine.info.block_size}"
        print(f"started after {time.perf_counter() - began:.1f} s, {blocks}", flush=True)
        contexts = Contexts(engine, await core_of(engine), config, shape, sizes, bandwidth)
        await contexts.warm_up()
        for name in parts:
            began = time.perf_counter()
            print(f"\n{name}\n{await Contexts.PARTS[name](contexts)}", flush=True)
            print(f"{time.perf_counter() - began:.1f} s", flush=True)
    finally:
        await engine.close()


async def core_of(engine: EmbeddedEngine) -> EngineCore:
    """Return the engine's core, whose model runner and cache are changed while nothing runs."""
    return await engine._ask(lambda core: core)


class Contexts:
    """The parts of one run, each of which returns its table."""

    PARTS: "dict[str, Callable[[Contexts], Awaitable[str]]]" = {}

    def __init__(
        self,
        engine: EmbeddedEngine,
        core: EngineCore,
        config: EmbeddedConfig,
        shape: Shape,
        sizes: Sizes,
        bandwidth: float,
    ) -> None:
        self._engine = engine
        self._runner: Any = core.runner
        self._config = config
        self._shape = shape
        self._sizes = sizes
        self._bandwidth = bandwidth
        self._rng = random.Random(0)
        self._requests = 0

    async def warm_up(self) -> None:
        """Run prompts and decodes once, and fill the cache."""
        cache = self._runner.cache.data
        with torch.inference_mode():
            for blocks in cache.split(64):
                blocks.copy_(torch.randn(blocks.shape, device=blocks.device, dtype=torch.bfloat16))
        if cache.is_cuda:
            torch.cuda.synchronize()
        most = min(self._config.max_batch_size, 64)
        await self._all([self._prompt(self._sizes.warm_up) for _ in range(most)], 8)

    async def long(self) -> str:
        """Decode many requests with long contexts."""
        sizes = self._sizes
        room = self._room() // (sizes.long + sizes.output + self._config.kv_block_size)
        count = min(sizes.long_requests, room)
        prompts = [self._prompt(sizes.long) for _ in range(count)]
        await self._put_into_cache(prompts)
        found = await self._all(prompts, sizes.output)
        step = _step_of_all(found)
        limit = self._limit(count * (sizes.long + sizes.output // 2))
        row = [f"{count} x {sizes.long}", f"{count / step:,.0f}", f"{step * 1e3:.2f}", f"{limit * 1e3:.2f}"]
        share = f"{limit / step:.2f} (bar {SHARE_BAR})"
        return table(["contexts", "tok/s", "ms a step", "limit, ms", "share of limit"], [[*row, share]])

    async def longest(self) -> str:
        """Compute one long prompt, and decode after it."""
        length = min(self._sizes.longest, self._room() - self._sizes.output - self._config.kv_block_size)
        (found,) = await self._all([self._prompt(length)], self._sizes.output)
        step, limit = median(found.gaps), self._limit(length + self._sizes.output // 2)
        rate = f"{length / found.ttft:,.0f}"
        row = [f"{length}", f"{found.ttft:.2f}", rate, f"{step * 1e3:.2f}", f"{limit * 1e3:.2f}", f"{limit / step:.2f}"]
        return table(["prompt", "first token, s", "prompt tok/s", "ms a step", "limit, ms", "share of limit"], [row])

    async def shared(self) -> str:
        """Decode many requests with one prefix, then as many as fit with a prefix of their own."""
        sizes = self._sizes
        prefix = self._prompt(sizes.prefix)
        await self._put_into_cache([prefix])
        rows, rates, steps = [], [], []
        for name, least in (("warm-up", None), ("cascade", None), ("no cascade", 1 << 62)):
            before = self._runner.cascades
            with self._changed("LEAST_SAVED", least):
                found = await self._all(
                    [[*prefix, *self._prompt(sizes.own)] for _ in range(sizes.sharing)], sizes.output
                )
            if name != "warm-up":
                rows.append(self._row(name, found, self._runner.cascades - before))
                rates.append(_rate_of(found))
                steps.append(_step_of_all(found))
        count = min(
            sizes.sharing, self._room() // (sizes.prefix + sizes.own + sizes.output + self._config.kv_block_size)
        )
        prefixes = [self._prompt(sizes.prefix) for _ in range(count)]
        await self._put_into_cache(prefixes)
        found = await self._all([[*prefix, *self._prompt(sizes.own)] for prefix in prefixes], sizes.output)
        rows.append(self._row("own prefixes", found, 0))
        rates.append(_rate_of(found))
        steps.append(_step_of_all(found))
        heads = [
            "prefixes",
            "requests",
            "tok/s",
            "tok/s of full steps",
            "ms a step",
            "cascade steps",
            "cached of first",
        ]
        ratios = f"cascade / no cascade: {rates[0] / rates[1]:.2f} (bar {CASCADE_BAR}), "
        ratios += f"of full steps {steps[1] / steps[0]:.2f}; cascade / own prefixes: {rates[0] / rates[2]:.2f}"
        return table(heads, rows) + "\n" + ratios

    async def short(self) -> str:
        """Go on with a conversation that is in the cache."""
        sizes, rows = self._sizes, []
        conversation = self._prompt(sizes.conversation)
        await self._put_into_cache([conversation])
        for turn in sizes.turns:
            times = []
            for most in (None, -1):
                with self._changed("MOST_READ", most):
                    asked = [[*conversation, *self._prompt(turn)] for _ in range(6)]
                    found = [(await self._all([prompt], 4))[0] for prompt in asked]
                times.append(median(request.ttft for request in found[1:]))
            cached = min(request.cached for request in found)
            ratio = f"{times[1] / times[0]:.2f}"
            rows.append([f"{turn}", f"{cached}", f"{times[0] * 1e3:.1f}", f"{times[1] * 1e3:.1f}", ratio])
        return table(["new tokens", "cached", "first token by graphs, ms", "by FlashInfer, ms", "ratio"], rows)

    def _row(self, name: str, found: list[Timed], cascades: int) -> list[str]:
        step = _step_of_all(found)
        rates = f"{_rate_of(found):,.0f}", f"{len(found) / step:,.0f}"
        return [name, f"{len(found)}", *rates, f"{step * 1e3:.2f}", f"{cascades}", f"{found[0].cached}"]

    def _room(self) -> int:
        """Return how many tokens the KV cache has room for."""
        assert self._engine.info.num_blocks is not None
        return self._engine.info.num_blocks * self._config.kv_block_size

    def _prompt(self, length: int) -> list[int]:
        return token_ids(length, self._shape.vocabulary, self._rng)

    def _limit(self, tokens: int) -> float:
        """Return how many seconds it takes to read all weights, and the keys and values of this many tokens."""
        shape = self._shape
        width = shape.heads + 2 * shape.kv_heads
        weights = shape.layers * shape.hidden * ((width + shape.heads) * shape.head_dim + 3 * shape.intermediate)
        size = 1 if self._config.quantization == "fp8" else 2
        head = 2 * shape.vocabulary * shape.hidden
        cached = 2 * shape.layers * shape.kv_heads * shape.head_dim * self._runner.cache.data.element_size()
        return (size * weights + head + tokens * cached) / self._bandwidth

    async def _put_into_cache(self, prompts: list[list[int]]) -> None:
        """Have the cache take prompts as if they had been computed."""
        with self._prompts_skipped():
            await self._all(prompts, 1)

    async def _all(self, prompts: list[list[int]], max_tokens: int) -> list[Timed]:
        return list(await asyncio.gather(*(self._one(prompt, max_tokens) for prompt in prompts)))

    async def _one(self, prompt: list[int], max_tokens: int) -> Timed:
        self._requests += 1
        sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
        request = GenerateRequest(request_id=f"{self._requests}", prompt_token_ids=tuple(prompt), sampling=sampling)
        found = Timed(sent=time.perf_counter())
        async with aclosing(self._engine.generate(request)) as deltas:
            async for delta in deltas:
                if delta.prompt is not None:
                    found.cached = delta.prompt.cached_tokens
                if delta.token_ids:
                    found.times.append(time.perf_counter())
                    found.counts.append(len(delta.token_ids))
        return found

    @contextmanager
    def _prompts_skipped(self) -> Iterator[None]:
        """Compute no step that has a prompt: it has random logits, and keys and values stay as they are."""
        runner, forward = self._runner, self._runner.forward
        device, vocabulary = runner.device, runner.vocab_size

        def skip(step: StepInput) -> torch.Tensor:
            if step.singles == len(step.lengths):
                logits: torch.Tensor = forward(step)
                return logits
            results = runner.sampler.new_results(sum(step.sampled))
            results.tokens.fill_(300)
            runner.sampler.results = results
            slots = [slot for slot, count in zip(step.slots, step.sampled, strict=True) for _ in range(count)]
            if slots:
                with torch.inference_mode():
                    runner.remember(slots, results.tokens.clone())
            return torch.zeros((len(step.rows), vocabulary), dtype=runner.dtype, device=device)

        runner.forward = skip
        try:
            yield
        finally:
            runner.forward = forward

    @contextmanager
    def _changed(self, name: str, value: int | None) -> Iterator[None]:
        """Change a threshold of the runner's choice between its graphs; None leaves it as it is."""
        from engine.embedded.models.cuda import runner as cuda_runner  # noqa: PLC0415 - it imports FlashInfer

        before = getattr(cuda_runner, name)
        setattr(cuda_runner, name, before if value is None else value)
        try:
            yield
        finally:
            setattr(cuda_runner, name, before)


Contexts.PARTS = {
    "long": Contexts.long,
    "128k": Contexts.longest,
    "shared": Contexts.shared,
    "short": Contexts.short,
}


def _step_of_all(found: list[Timed]) -> float:
    """Return the median seconds of the steps in which all requests ran."""
    first, last = max(request.times[0] for request in found), min(request.times[-1] for request in found)
    return median(
        b - a
        for request in found
        for a, b in zip(request.times, request.times[1:], strict=False)
        if a >= first and b <= last
    )


def _rate_of(found: list[Timed]) -> float:
    """Return output tokens a second, from the first request to the last token."""
    seconds = max(request.times[-1] for request in found) - min(request.sent for request in found)
    return sum(sum(request.counts) for request in found) / seconds


if __name__ == "__main__":
    main()
