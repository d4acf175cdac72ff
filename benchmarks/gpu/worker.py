"""An engine in a separate process, driven through the Engine protocol without HTTP: `python -m benchmarks.gpu.worker`.

Standard input is one `Job`, standard output one message per result. The engine's own output goes to standard error.
"""

import asyncio
import contextlib
import gc
import json
import logging
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import aclosing
from pathlib import Path
from typing import IO, Any

import msgspec

from benchmarks.gpu.cells import Fields, Workload
from benchmarks.gpu.load import token_ids
from benchmarks.report import Cell
from benchmarks.servers import ROOT, tail
from engine.base import Engine
from engine.config import EmbeddedConfig
from engine.create import create_engine
from engine.errors import EngineError
from engine.types import Delta, EngineInfo, GenerateRequest, Guide, SamplingParams, TokenLogprobs
from server.bench.summary import Sample, Summary, summarise


class Measure(msgspec.Struct, frozen=True, tag=True):
    """Send all requests of a cell at once. Answered by one `Measured` per cell, in order."""

    cells: list[tuple[Cell, str]]
    """Cells, each with the seed of its prompts."""


class Transcribe(msgspec.Struct, frozen=True, tag=True):
    """Continue prompts greedily, once per batch size in `batches`. Answered by one `Transcript` per batch size."""

    prompts: list[list[int]]
    max_tokens: int
    logprobs: int
    batches: list[int]


class Job(msgspec.Struct, frozen=True):
    config: EmbeddedConfig
    work: Measure | Transcribe


class Started(msgspec.Struct, frozen=True, tag=True):
    seconds: float
    info: EngineInfo


class Measured(msgspec.Struct, frozen=True, tag=True):
    summary: Summary


class Continuation(msgspec.Struct, frozen=True):
    """Tokens after one prompt, each with its log-probability and its top alternatives."""

    token_ids: list[int]
    logprobs: list[TokenLogprobs]


class Transcript(msgspec.Struct, frozen=True, tag=True):
    batch: int
    continuations: list[Continuation]


Message = Started | Measured | Transcript


def work(job: Job, log: Path) -> Iterator[Message]:
    """Run `job` in a process and yield its messages. Raises RuntimeError with the end of its log if it fails."""
    with log.open("wb") as errors:
        process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.gpu.worker"],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
        )
    assert process.stdin is not None
    assert process.stdout is not None
    with process:
        try:
            with contextlib.suppress(BrokenPipeError):  # it ended early: its exit status is reported below
                process.stdin.write(msgspec.json.encode(job))
                process.stdin.close()
            for line in process.stdout:
                yield msgspec.json.decode(line, type=Message)
        except BaseException:
            process.kill()
            raise
    if process.returncode:
        raise RuntimeError(f"the engine's process ended with {process.returncode}:\n{tail(log)}")


async def run(job: Job, results: IO[bytes]) -> None:
    started = time.perf_counter()
    engine = create_engine(job.config)
    try:
        await engine.start()
        gc.collect()
        gc.freeze()  # as the engine's host does
        _report(results, Started(time.perf_counter() - started, engine.info))
        if isinstance(job.work, Measure):
            for cell, seed in job.work.cells:
                _report(results, Measured(await measure(engine, cell, seed)))
        else:
            for batch in job.work.batches:
                _report(results, Transcript(batch, await transcribe(engine, job.work, batch)))
    finally:
        await engine.close()


async def measure(engine: Engine, cell: Cell, seed: str, workload: Workload | None = None) -> Summary:
    """Send all requests of a cell at once: greedy ones, or of the kind of `workload`."""
    rng = random.Random(seed)
    requests = [
        _request(
            f"{seed}/{i}",
            token_ids(cell.prompt_tokens, engine.info.vocab_size, rng),
            cell.max_tokens,
            {} if workload is None else workload.fields(rng, cell.max_tokens),
        )
        for i in range(cell.concurrency)
    ]
    started = time.perf_counter()
    samples = await asyncio.gather(*(_sample(engine, request) for request in requests))
    return summarise(samples, time.perf_counter() - started)


async def transcribe(engine: Engine, job: Transcribe, batch: int) -> list[Continuation]:
    """Return the continuations of all prompts, computed `batch` at a time."""
    places, fields = asyncio.Semaphore(batch), Fields(logprobs=job.logprobs)

    async def continuation(index: int, prompt: list[int]) -> Continuation:
        async with (
            places,
            aclosing(engine.generate(_request(f"{batch}/{index}", prompt, job.max_tokens, fields))) as stream,
        ):
            deltas = [delta async for delta in stream]
        return Continuation(
            [token for delta in deltas for token in delta.token_ids],
            [entry for delta in deltas for entry in delta.logprobs],
        )

    return list(await asyncio.gather(*(continuation(index, prompt) for index, prompt in enumerate(job.prompts))))


async def _sample(engine: Engine, request: GenerateRequest) -> Sample:
    """Run one request, timed as in the HTTP client; a delta counts as a chunk."""
    sample = Sample(prompt_tokens=len(request.prompt_token_ids))
    sent = previous = time.perf_counter()
    try:
        async with aclosing(engine.generate(request)) as deltas:
            async for delta in deltas:
                now = time.perf_counter()
                if sample.ttft:
                    sample.gaps.append(now - previous)
                elif delta.token_ids:
                    sample.ttft = now - sent
                previous = now
                _count(sample, delta)
    except EngineError as error:
        sample.error = f"{type(error).__name__}: {error}"
    sample.seconds = time.perf_counter() - sent
    return sample


def _count(sample: Sample, delta: Delta) -> None:
    sample.chunks += 1
    sample.completion_tokens += len(delta.token_ids)
    if delta.prompt is not None:
        sample.cached_tokens = delta.prompt.cached_tokens


def _request(request_id: str, prompt: list[int], max_tokens: int, fields: Fields) -> GenerateRequest:
    """Return a greedy request, changed by fields with the names of `/v1/completions`."""
    given: dict[str, Any] = {"temperature": 0.0} | fields
    if (schema := given.pop("guided_json", None)) is not None:
        given["guide"] = Guide("json_schema", json.dumps(schema))
    sampling = SamplingParams(**given, max_tokens=max_tokens, ignore_eos=True)
    return GenerateRequest(request_id=request_id, prompt_token_ids=tuple(prompt), sampling=sampling)


def _report(results: IO[bytes], message: Message) -> None:
    results.write(msgspec.json.encode(message) + b"\n")
    results.flush()


def main() -> None:
    results = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    logging.basicConfig(level="INFO", format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    asyncio.run(run(msgspec.json.decode(sys.stdin.buffer.read(), type=Job), results))


if __name__ == "__main__":
    main()
