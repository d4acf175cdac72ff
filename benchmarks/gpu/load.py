"""Load a server over HTTP from several processes, so that the client is not the bottleneck at 256 streams."""

import asyncio
import multiprocessing
import random
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Self

import uvloop

from benchmarks.gpu.cells import WORKLOADS, Workload
from benchmarks.gpu.model import FIRST_WORD
from benchmarks.report import Cell
from server.bench.client import LoadRun, Target, exchange
from server.bench.summary import Sample, Summary, summarise

LEAD_SECONDS = 0.3
"""Time for all processes to prepare their requests before they start together: enough for 256 x 4,096 tokens."""


def token_ids(count: int, vocabulary: int, rng: random.Random) -> list[int]:
    """Return a random prompt, which shares no prefix with others except by chance."""
    return [rng.randrange(FIRST_WORD, vocabulary) for _ in range(count)]


@dataclass(frozen=True, slots=True)
class Part:
    """Requests of one process, the first of each stream sent at `start` on the monotonic clock."""

    target: Target
    workload: str
    streams: int
    requests: int
    prompt_tokens: int
    max_tokens: int
    vocabulary: int
    seed: str
    start: float


class Clients:
    """Client processes that load a server together."""

    def __init__(self, processes: int, vocabulary: int) -> None:
        self._processes, self._vocabulary = processes, vocabulary
        self._pool = ProcessPoolExecutor(processes, mp_context=multiprocessing.get_context("spawn"))

    def __enter__(self) -> Self:
        for begun in [self._pool.submit(time.sleep, 0.1) for _ in range(self._processes)]:
            begun.result()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._pool.shutdown()

    def run(self, target: Target, workload: Workload, cell: Cell, seed: str, rounds: int = 1) -> Summary:
        """Send `rounds` requests of a workload in each of `cell.concurrency` streams. Equal seeds and numbers of
        processes give equal requests."""
        start = time.monotonic() + LEAD_SECONDS * rounds
        shares = [len(range(i, cell.concurrency, self._processes)) for i in range(self._processes)]
        parts = [
            Part(
                target,
                workload.name,
                streams,
                streams * rounds,
                cell.prompt_tokens,
                cell.max_tokens,
                self._vocabulary,
                f"{seed}/{index}",
                start,
            )
            for index, streams in enumerate(shares)
            if streams
        ]
        outcomes = list(self._pool.map(send, parts))
        samples = [sample for outcome in outcomes for sample in outcome[0]]
        began, ended = min(outcome[1] for outcome in outcomes), max(outcome[2] for outcome in outcomes)
        return summarise(samples, ended - began)


def send(part: Part) -> tuple[list[Sample], float, float]:
    """Send a part from a client process; return the samples, and the times of the first request and the last end."""
    rng = random.Random(part.seed)
    target, workload = part.target, WORKLOADS[part.workload]
    requests = [
        replace(target, extra=target.extra | workload.fields(rng, part.max_tokens)).request(
            token_ids(part.prompt_tokens, part.vocabulary, rng), part.max_tokens
        )
        for _ in range(part.requests)
    ]
    load = LoadRun(part.streams, part.requests, part.prompt_tokens, part.max_tokens, timeout=300.0)
    time.sleep(max(0.0, part.start - time.monotonic()))
    began = time.monotonic()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        samples = runner.run(exchange(part.target, load, requests))
    return samples, began, time.monotonic()
