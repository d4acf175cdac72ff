"""Measure guided decoding: accepted schemas, valid outputs, speed and first tokens.

    python -m benchmarks.grammars MODEL                              # speed and first tokens on the embedded engine
    python -m benchmarks.grammars MODEL --schemas FOLDER --sample 20 # and every 20th schema of a folder

A folder of public schemas is `data` of github.com/guidance-ai/jsonschemabench: 9,558 from GitHub, SchemaStore,
Kubernetes, Snowplow and others. Nothing else should run on the machine.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import aclosing
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from llguidance import LLMatcher
from tokenizers import Tokenizer

from engine.config import EmbeddedConfig
from engine.embedded.engine import EmbeddedEngine
from engine.embedded.grammar.library import Compiled, Setup, UnsupportedGuideError
from engine.embedded.grammar.with_llguidance import Llguidance
from engine.errors import EngineError
from engine.types import GenerateRequest, Guide, SamplingParams
from multimodal.answers.parsers.choose import family
from multimodal.answers.parsers.tags import structural_tags
from server.bench.machine import describe_machine

ENDLESS = {
    "type": "array",
    "minItems": 500,
    "items": {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 40}, "age": {"type": "integer"}},
        "required": ["name", "age"],
        "additionalProperties": False,
    },
}
"""A schema whose output does not end within a measurement."""
LONG, TRIES = 300, 3


class Timing(NamedTuple):
    first: float
    """Seconds to the first token."""
    rate: float
    """Tokens per second after it."""


def guided_kinds() -> dict[str, Guide]:
    """Return a JSON schema, and what the server makes of tools: calls of a function that the request demands, of one
    that it names, and text in which the model may begin a call, of a strict function.
    """
    arguments = {"type": "object", "properties": {"people": ENDLESS}, "required": ["people"]}
    other = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
    hermes = family("hermes")
    both = structural_tags(hermes, {"write_people": arguments, "write_more_people": arguments})
    one = structural_tags(hermes, {"write_people": arguments})
    strict = structural_tags(hermes, {"get_weather": other, "write_people": arguments})
    assert both is not None and one is not None and strict is not None
    tags = {
        "tool_choice required": both.xgrammar(at_least_one=True),
        "tool_choice named": one.xgrammar(at_least_one=True, stop_after_first=True),
        "strict tools, free to call": strict.xgrammar(),
    }
    kinds = {"JSON schema": Guide("json_schema", json.dumps(ENDLESS))}
    return kinds | {kind: Guide("structural_tag", json.dumps(tag)) for kind, tag in tags.items()}


def schema(index: int) -> str:
    """Return a new small schema."""
    return json.dumps({"type": "object", "properties": {f"field{index}": {"type": "integer"}}, "title": str(index)})


async def timed(engine: EmbeddedEngine, prompt: tuple[int, ...], name: str, guide: Guide | None, count: int) -> Timing:
    """Generate `count` tokens greedily."""
    sampling = SamplingParams(max_tokens=count, temperature=0, ignore_eos=True, guide=guide)
    request = GenerateRequest(request_id=name, prompt_token_ids=prompt, sampling=sampling)
    began = first = last = time.perf_counter()
    total = 0
    async with aclosing(engine.generate(request)) as stream:
        async for delta in stream:
            last = time.perf_counter()
            first = first if total else last
            total += len(delta.token_ids)
    return Timing(first - began, (total - 1) / max(last - first, 1e-9))


class Bench:
    """Measurements on one engine; prompts are new each time, so that the cache does not help."""

    def __init__(self, engine: EmbeddedEngine) -> None:
        self._engine = engine
        self._random = random.Random(0)
        self._count = 0

    async def run(self, guide: Guide | None, count: int, prompt: int = 60) -> Timing:
        self._count += 1
        ids = tuple(self._random.randrange(1000, 20_000) for _ in range(prompt))
        return await timed(self._engine, ids, str(self._count), guide, count)

    async def speed(self, batch: int, tokens: int, kind: str, guide: Guide) -> None:
        """Print the speed of guided and of free requests, in turns."""
        rates: dict[str, list[float]] = {"free": [], "guided": []}
        costs: dict[str, list[float]] = {"free": [], "guided": []}
        await self.run(guide, 4)
        for _ in range(TRIES):
            for name, asked in (("free", None), ("guided", guide)):
                began = time.process_time()
                timings = await asyncio.gather(*(self.run(asked, tokens) for _ in range(batch)))
                costs[name].append(time.process_time() - began)
                rates[name].append(sum(timing.rate for timing in timings))
        ratio = statistics.median(g / f for g, f in zip(rates["guided"], rates["free"], strict=True))
        free, guided = (statistics.median(rates[name]) for name in ("free", "guided"))
        work = statistics.median(f / g for g, f in zip(costs["guided"], costs["free"], strict=True))
        print(
            f"{kind}, batch {batch}: free {free:.1f}, guided {guided:.1f} tokens/s, ratio {ratio:.2f} "
            f"(by processor time {work:.2f})",
            flush=True,
        )

    async def first_tokens(self, guides: list[Guide]) -> None:
        """Print the time to the first token with and without a guide that is new each time, in turns."""
        plain, guided = [], []
        for guide in guides:
            plain.append((await self.run(None, 1)).first * 1e3)
            try:
                guided.append((await self.run(guide, 1)).first * 1e3)
            except EngineError:
                continue
        print(
            f"first token: plain {statistics.median(plain):.0f} ms (worst {max(plain):.0f}), guided "
            f"{statistics.median(guided):.0f} ms (worst {max(guided):.0f}) over {len(guided)} new schemas",
            flush=True,
        )

    async def hostile(self, seconds: float) -> None:
        """Print how long new small schemas take while others send expressions, of two sizes, that are slow to
        compile."""
        stop = time.monotonic() + seconds

        async def attack(index: int) -> None:
            while time.monotonic() < stop:
                index += 4
                try:
                    await self.run(Guide("regex", ".*" * ((2000, 4000)[index % 2] + index)), 1)
                except EngineError:
                    continue

        attacks = [asyncio.create_task(attack(index)) for index in range(4)]
        await asyncio.sleep(0.5)
        taken = []
        while time.monotonic() < stop - 1:
            plain = (await self.run(None, 1)).first
            taken.append(((await self.run(Guide("json_schema", schema(len(taken) + 10_000)), 1)).first, plain))
        await asyncio.gather(*attacks)
        worst = max(guided for guided, _ in taken)
        print(
            f"4 clients send bad expressions: new schema {statistics.median(g for g, _ in taken):.2f} s "
            f"(worst {worst:.2f}), plain {statistics.median(p for _, p in taken):.2f} s",
            flush=True,
        )


async def engine_figures(model: Path, guides: list[Guide], tokens: int, threads: int) -> None:
    """Print the figures that need an engine."""
    engine = EmbeddedEngine(EmbeddedConfig(model=str(model), threads=threads))
    await engine.start()
    bench = Bench(engine)
    try:
        await bench.run(None, 2)
        print(f"first guided request: {(await bench.run(Guide('json_schema', schema(0)), 1)).first:.2f} s", flush=True)
        grammar = Guide("grammar", 'root ::= "a" | "b"')
        print(f"first EBNF grammar: {(await bench.run(grammar, 1)).first:.2f} s", flush=True)
        for kind, guide in guided_kinds().items():
            for batch in (1, 8):
                await bench.speed(batch, tokens, kind, guide)
        await bench.first_tokens(guides)
        await bench.hostile(15)
    finally:
        await engine.close()


def coverage(library: Llguidance, files: list[Path]) -> list[tuple[Path, Compiled]]:
    """Print how many schemas are accepted, next to what the libraries compile without our rewriting."""
    import xgrammar  # noqa: PLC0415

    accepted, either, seconds, reasons = [], set[Path](), list[float](), Counter[str]()
    for file in files:
        text = file.read_text(encoding="utf-8")
        began = time.perf_counter()
        try:
            accepted.append((file, library.prepare(Guide("json_schema", text))[0]))
        except UnsupportedGuideError as error:
            reasons[str(error).rpartition(": ")[2][:70]] += 1
        seconds.append(time.perf_counter() - began)
        bad, notes = LLMatcher.validate_grammar_with_warnings(LLMatcher.grammar_from_json_schema(text))
        if not bad and not notes:
            either.add(file)
        else:
            try:
                xgrammar.Grammar.from_json_schema(text, strict_mode=False)
                either.add(file)
            except RuntimeError:
                pass
    known = {file for file, _ in accepted}
    print(f"{len(known)} of {len(files)} schemas accepted ({len(known) / len(files):.1%})")
    print(f"{len(known & either)} of the {len(either)} that a library takes ({len(known & either) / len(either):.1%})")
    print(f"compiled in {statistics.median(seconds) * 1e3:.1f} ms, worst {max(seconds) * 1e3:.0f} ms")
    for reason, count in reasons.most_common(12):
        print(f"  {count:4} {reason}")
    return accepted


def validity(accepted: list[tuple[Path, Compiled]], model: Path, setup: Setup, seeds: int) -> None:
    """Write random output under the masks, and print how much of what ended by itself validates."""
    from jsonschema import Draft202012Validator, validators  # noqa: PLC0415

    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    closing = [token for text, token in tokenizer.get_vocab().items() if set(text) <= set('"}],:{[0123456789')]
    outcomes, masks = Counter[str](), list[float]()
    for file, compiled in accepted:
        content = json.loads(file.read_text(encoding="utf-8"))
        validator = validators.validator_for(content, default=Draft202012Validator)(content)
        for seed in range(seeds):
            output = written(compiled, setup, closing, random.Random(seed), masks)
            if output is None:
                outcomes["did not end"] += 1
                continue
            try:
                error: Any = next(validator.iter_errors(json.loads(tokenizer.decode(output))), None)
            except Exception as failure:
                error = failure
            outcomes["valid" if error is None else "INVALID"] += 1
            if error is not None:
                print(f"  {file.name}: {str(error)[:200]!r}")
    ordered = sorted(masks)
    print(f"random output: {dict(outcomes)}; masks {ordered[len(ordered) // 2] * 1e6:.0f} us, "
          f"99 % {ordered[len(ordered) * 99 // 100] * 1e6:.0f} us")  # fmt: skip


def written(
    compiled: Compiled, setup: Setup, closing: list[int], choose: random.Random, masks: list[float]
) -> list[int] | None:
    """Return random tokens of an output that ends; None for one that does not. Closing tokens are preferred."""
    position, output, stop = compiled.start(), list[int](), setup.eos_token_ids[0]
    bitmask = np.zeros((1, -(-setup.vocab_size // 32)), dtype=np.int32)
    preferred = np.zeros(setup.vocab_size, dtype=bool)
    preferred[closing] = True
    while len(output) < LONG:
        began = time.perf_counter()
        position.fill(bitmask, 0)
        masks.append(time.perf_counter() - began)
        allowed = np.unpackbits(bitmask[0].view(np.uint8), bitorder="little")[: setup.vocab_size].astype(bool)
        if position.may_end() and (choose.random() < 0.5 or len(output) > 60 or allowed.sum() == 1):
            return output
        allowed[stop] = False
        options = np.flatnonzero(allowed & preferred) if choose.random() < (0.6 if len(output) < 40 else 0.97) else []
        options = options if len(options) else np.flatnonzero(allowed)
        if position.error or not len(options):
            return None
        output.append(int(choose.choice(options)))
        position.accept(output[-1])
    return None


def files_of(folder: Path, step: int) -> Iterator[Path]:
    """Yield every `step`th schema of a folder."""
    yield from sorted(folder.rglob("*.json"))[::step]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="folder of a model")
    parser.add_argument("--schemas", type=Path, help="folder of schemas")
    parser.add_argument("--sample", type=int, default=1, help="take every Nth schema")
    parser.add_argument("--seeds", type=int, default=3, help="outputs per schema")
    parser.add_argument("--tokens", type=int, default=96, help="tokens per request when speed is measured")
    parser.add_argument("--threads", type=int, default=0, help="threads of the engine; 0 takes all cores")
    options = parser.parse_args()
    print("\n".join(f"- {key}: {value}" for key, value in describe_machine().items()))
    guides = [Guide("json_schema", schema(index + 1)) for index in range(40)]
    if options.schemas is not None:
        config = json.loads((options.model / "config.json").read_text(encoding="utf-8"))
        setup = Setup("llguidance", str(options.model), config["vocab_size"], (config["eos_token_id"],))
        files = list(files_of(options.schemas, options.sample))
        accepted = coverage(Llguidance(setup), files)
        validity(accepted, options.model, setup, options.seeds)
        step = max(1, len(accepted) // 100)
        guides = [Guide("json_schema", file.read_text(encoding="utf-8")) for file, _ in accepted[::step]]
    with torch.inference_mode():
        asyncio.run(engine_figures(options.model, guides, options.tokens, options.threads))


if __name__ == "__main__":
    main()
