"""The executor behind an LLM: one of our engines for each rank with a KV cache of its own, on an event loop in a thread
of its own.
"""

import asyncio
import contextlib
import itertools
import os
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Coroutine
from typing import Any

from engine.base import Engine
from engine.config import EngineConfig
from engine.create import create_engine
from engine.kv_events import Cleared
from engine.types import EngineInfo
from tensorrt_llm import _test
from tensorrt_llm._contract import NEWEST
from tensorrt_llm._feeds import Buffer, event_item, stats_item
from tensorrt_llm._jobs import Job
from tensorrt_llm._test import faults
from tensorrt_llm._workers import Workers

SHUT_DOWN = "LLM is shutting down"


class Executor:
    """Runs jobs until it is shut down or dies.

    Without a configuration it has no engine, which is enough for an encoder.
    """

    def __init__(self, config: EngineConfig | None, args: Any) -> None:
        self.args = args
        self.info: EngineInfo
        self.is_shutdown = False
        cache = args.kv_cache_config
        self.stats = Buffer(args.max_stats_len) if args.enable_iter_perf_stats else Buffer(0)
        self.events = Buffer(cache.event_buffer_max_size if cache.enable_block_reuse else 0)
        self._config = config
        self._ranks = args.tensor_parallel_size if getattr(args, "enable_attention_dp", False) else 1
        self._engines: list[Engine] = []
        self._active: Counter[int] = Counter()
        """Jobs of each rank."""
        self.jobs: dict[int, Job] = {}
        self._ids = itertools.count(1)
        self._filled: set[tuple[str, tuple[int, ...]]] = set()
        self.generator = random.Random(42)
        self._tasks: set[asyncio.Task[None]] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="fake-trtllm", daemon=True)
        self._ending = threading.Lock()
        self._thawed = threading.Event()
        self._hangs = False
        count = int(os.environ.get("FAKE_TRTLLM_WORKERS", "0"))
        self._workers = Workers(count, self._lose_worker) if count else None
        self.worker_pids = [] if self._workers is None else self._workers.pids
        self.asked = 0
        self.released: set[str] = set()
        """Memory that a sleep has released."""

    def start(self) -> None:
        """Blocks until the engine is ready, for ever if a worker is killed. Raises what the engine raises."""
        self._thread.start()
        try:
            time.sleep(faults.construction_seconds)
            if (message := faults.take("construction_error")) is not None:
                raise RuntimeError(message)
            asyncio.run_coroutine_threadsafe(self._start(), self._loop).result()
        except BaseException:
            asyncio.run_coroutine_threadsafe(self._close(), self._loop).result()
            self._stop()
            raise
        _test.executors.add(self)

    def new_id(self) -> int:
        self.asked += 1
        return next(self._ids)

    def submit(self, job: Job) -> None:
        """Raises RuntimeError once the executor is no more."""
        if self.is_shutdown:
            raise RuntimeError(SHUT_DOWN)
        self.jobs[job.id] = job
        self._loop.call_soon_threadsafe(self._run, job)

    def reuse(self, cache_salt: str, prompt: list[int]) -> int:
        """Tokens of a prompt in blocks that an earlier one with this salt has filled; note its own blocks."""
        cache = self.args.kv_cache_config
        ends = range(cache.tokens_per_block, len(prompt), cache.tokens_per_block) if cache.enable_block_reuse else ()
        keys = [(cache_salt, tuple(prompt[:end])) for end in ends]
        cached = sum(key in self._filled for key in keys) * cache.tokens_per_block
        self._filled.update(keys)
        return cached

    def abort(self, request_id: int) -> None:
        """Without effect on a request that has ended."""
        if not self.is_shutdown:
            self._loop.call_soon_threadsafe(self._abort, request_id)

    def die(self, error: Exception) -> None:
        """What follows a background exception: the executor shuts itself down, and running results raise."""
        if not self.is_shutdown:
            self.is_shutdown = True
            for job in list(self.jobs.values()):
                job.push(error)
            self.jobs.clear()

    def answer(self, result: Any, response: Any) -> None:
        """Give a result a response that needs no engine."""
        self._loop.call_soon_threadsafe(result._push, response)

    def freeze(self) -> None:
        """What follows a worker's death by SIGKILL: silence. Nobody is told, and a shutdown waits for ever."""
        self._hangs = True
        self._loop.call_soon_threadsafe(self._thawed.wait)

    def thaw(self) -> None:
        """Let tests end an executor that hangs, or died and was not shut down."""
        if self._hangs or self.is_shutdown:
            self._thawed.set()
            self.shutdown()

    def waits(self, job: Job) -> bool:
        """Return whether a request is in the waiting queue: as many as run at once came before it."""
        return job.id in list(self.jobs)[self.args.max_batch_size or len(self.jobs) :]

    def shutdown(self) -> None:
        """Idempotent, and right after a death too."""
        with self._ending:
            if self._loop.is_closed():
                return
            self.die(RuntimeError(SHUT_DOWN))
            asyncio.run_coroutine_threadsafe(self._close(), self._loop).result()
            self._stop()
            _test.executors.discard(self)

    def _lose_worker(self) -> None:
        if NEWEST:  # main watches its workers (#16338)
            self.die(RuntimeError("an MPI worker was killed"))
        else:
            self.freeze()

    # In the executor's thread.

    async def _start(self) -> None:
        if self._config is None:
            return
        for rank in range(self._ranks):
            engine = create_engine(self._config)
            self._engines.append(engine)
            await engine.start()
            self._spawn(self._collect_stats(engine, rank))
            self._spawn(self._collect_events(engine, rank))
        self.info = self._engines[0].info

    async def _close(self) -> None:
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)
        for engine in self._engines:
            await engine.close()
        await self._loop.shutdown_default_executor()

    def _stop(self) -> None:
        if self._workers is not None:
            self._workers.close()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _spawn(self, work: Coroutine[Any, Any, None], then: Callable[[], object] = lambda: None) -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(lambda _: then())
        task.add_done_callback(self._fatal)

    def _fatal(self, task: "asyncio.Task[None]") -> None:
        """An exception that no job has handled is the end of the executor."""
        if not task.cancelled() and isinstance(error := task.exception(), Exception):
            self.die(error)

    def _run(self, job: Job) -> None:
        try:
            rank = self._rank(job.scheduling)
        except (IndexError, TypeError) as error:  # the workers' loop has no rank of that number
            self.die(RuntimeError(f"Error in event loop: {error}"))
            return
        job.rank = rank
        self._active[rank] += 1

        def ended() -> None:
            self._active[rank] -= 1
            self.jobs.pop(job.id, None)

        self._spawn(job.run(self._engines[rank], self), ended)

    def _rank(self, scheduling: Any) -> int:
        """The rank that is asked for, else the one with the fewest requests.

        Requests are sorted by `attention_dp_relax`, which must not be None (#14276).
        """
        least = min(range(self._ranks), key=lambda rank: self._active[rank])
        if self._ranks == 1 or scheduling is None or scheduling.attention_dp_rank is None:
            return least
        if scheduling.attention_dp_relax is None:
            raise TypeError("'<' not supported between instances of 'NoneType' and 'bool'")
        return range(self._ranks)[scheduling.attention_dp_rank]

    def _abort(self, request_id: int) -> None:
        if job := self.jobs.get(request_id):
            self._spawn(job.abort(self))

    async def _collect_stats(self, engine: Engine, rank: int) -> None:
        """Of the first rank alone, as 1.2.1 does; newer versions have a row for each rank, with its number (#13199)."""
        async for stats in engine.stats():
            if stats.iteration and (rank == 0 or _test.stats_of_all_ranks):
                item = stats_item(stats, self.args)
                self.stats.put(item | {"attentionDpRank": rank} if _test.stats_of_all_ranks else item)

    async def _collect_events(self, engine: Engine, rank: int) -> None:
        with contextlib.suppress(asyncio.CancelledError):
            async for batch in engine.kv_events():
                for event in batch:
                    assert not isinstance(event.data, Cleared), "TensorRT-LLM has no such event"
                    item = event_item(event, self.args, engine.info.vocab_size)
                    if self._ranks > 1:
                        item["attention_dp_rank"] = rank
                    self.events.put(item)
