"""The embedded engine as an `Engine`. One thread runs the steps of its core."""

import asyncio
import contextlib
import logging
import os
import queue
import random
import threading
import time
from collections.abc import Callable, Collection, Coroutine
from functools import partial
from pathlib import Path
from typing import Any

import torch

from engine.base import DeltaStream
from engine.config import EmbeddedConfig, Tag
from engine.embedded.core import EngineCore
from engine.embedded.grammar.compiler import GrammarCompiler, Matcher
from engine.embedded.handoff.remote_source import resume
from engine.embedded.loaded_model import LoadedModel
from engine.embedded.sampling.state import SamplerState
from engine.embedded.sequence import Sequence
from engine.embedded.threaded_engine import ThreadedEngine
from engine.embedded.threads import compute_threads
from engine.embedded.vision.kept import RowsReader
from engine.errors import EngineError, EngineFailure, EngineNotReady, EngineUnavailable, InvalidRequest
from engine.kit.checks import check_embeddings, check_prompt
from engine.kv_events import KvEvent
from engine.types import GUIDE_KINDS, EngineInfo, GenerateRequest, Guide, Handoff, NextHandoff

log = logging.getLogger(__name__)

_SHORTEST_PAUSE, _LONGER_PAUSE = 0.0002, 1.05
"""Seconds between two polls of transfers while nothing else runs, and the factor by which each pause is longer than
the last."""
_HEAD_START_SECONDS = 0.03
"""Seconds that a prompt waits for its guide. After that, all but its last token is computed without the guide, and the
last token takes a step of its own; most guides are compiled sooner."""
_RELEASE_PAUSE = 0.002
"""Seconds between two attempts to release memory that something is still copied from or to."""
_WARM_UP_PAUSE = 2.0
"""Seconds from the start to that of processes for guides, which take the cores for a second: requests that wait for a
restarted engine come first. A guide that comes sooner starts them."""
_NO_TRANSFER = "this engine moves no KV blocks: its setting kv_transfer is empty"


class EmbeddedEngine(ThreadedEngine[EngineCore]):
    """The embedded engine behind the `Engine` protocol."""

    def __init__(self, config: EmbeddedConfig) -> None:
        super().__init__(config)
        self._profiler: torch.profiler.profile | None = None
        self._new_events: list[KvEvent] = []
        self._rows = RowsReader(config.embedding_memory_mb << 20, config.transfer_timeout_seconds)
        self._preparing: set[asyncio.Task[None]] = set()
        self._handoffs: dict[str, Handoff] = {}
        """The last handoffs of running requests that were begun with early ones."""
        self._started = threading.Event()
        """Set by `start` and `close`. The thread waits for it before it takes memory for which a second has no room."""
        self._closing = False

    async def prepare(self) -> None:
        """Load the model and try it. KV blocks of a CPU take memory only once they are written."""
        loaded: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._ready: asyncio.Future[EngineInfo] = asyncio.get_running_loop().create_future()
        self._start_thread(self._run, loaded, self._ready)
        await loaded

    async def start(self) -> None:
        if self._thread is None:
            await self.prepare()
        self._started.set()
        info = await self._ready
        self._compiler = GrammarCompiler(
            Path(info.model),
            info.vocab_size,
            info.eos_token_ids,
            self._config.guide_timeout_seconds,
            self._config.guide_workers,
        )
        self._preparing.add(asyncio.create_task(self._warm_up()))
        self._info = info

    def generate(self, request: GenerateRequest) -> DeltaStream:
        stream = DeltaStream(lambda: self._abort(request.request_id))
        try:
            self._check(request)
            if request.sampling.guide is None and not request.has_remote:
                self._submit(request, None)
        except EngineError as error:
            return DeltaStream.failed(error)
        self._streams[request.request_id] = stream
        if request.handoff is not None and request.handoff.early:
            self._handoffs[request.request_id] = request.handoff
        stream.when_done(lambda: self._forget(request.request_id))
        if request.has_remote:
            self._prepare_in_task(self._fetch(request, stream), stream)
        elif request.sampling.guide is not None:
            self._submit_guided(request, request.sampling.guide, stream)
        return stream

    async def continue_handoff(self, following: NextHandoff) -> bool:
        request_id, handoff = following.request_id, following.handoff
        if request_id not in self._handoffs:
            return False
        self._handoffs[request_id] = handoff

        def proceed(core: EngineCore) -> None:
            try:
                core.continue_handoff(request_id, handoff)
            except EngineError as error:
                self._call(self._deliver, [(request_id, error)], core.stats())

        self._commands.put(proceed)
        return True

    async def reset_prefix_cache(self) -> None:
        await self._ask(EngineCore.reset_prefix_cache)

    async def release_memory(self, tags: Collection[Tag], level: int) -> None:
        while not await self._ask(lambda core: core.release_memory(tags, level)):  # noqa: ASYNC110 - the thread's own
            await asyncio.sleep(_RELEASE_PAUSE)

    async def resume_memory(self, tags: Collection[Tag]) -> None:
        await self._ask(lambda core: core.resume_memory(tags))

    async def start_profile(self) -> None:
        if self._profiler is not None:
            raise InvalidRequest("a profile is being recorded: stop it first")
        self._profiler = profiler = torch.profiler.profile()  # of CPU and GPU, if there is one
        try:
            await self._ask(lambda _: _profile(profiler.start))
        except EngineFailure:
            self._profiler = None
            raise

    async def stop_profile(self, trace: str) -> None:
        profiler, self._profiler = self._profiler, None
        if profiler is None:
            raise InvalidRequest("no profile is being recorded")
        await self._ask(lambda _: _profile(profiler.stop))
        with contextlib.suppress(OSError):
            await asyncio.to_thread(_profile, partial(profiler.export_chrome_trace, trace))
        if not os.path.isfile(trace):  # noqa: ASYNC240 - a moment; torch reports some failures in its log alone
            raise EngineFailure(f"the profile cannot be written to {trace}")

    async def close(self) -> None:
        self._closing = True
        self._started.set()
        started = self._info is not None
        await super().close()
        for task in self._preparing:
            task.cancel()
        await asyncio.gather(*self._preparing, return_exceptions=True)
        await self._rows.close()
        if started:
            await self._compiler.close()

    def _forget(self, request_id: str) -> None:
        del self._streams[request_id]
        self._handoffs.pop(request_id, None)

    def _check(self, request: GenerateRequest) -> None:
        if not self.healthy:
            raise EngineNotReady("the engine is not running")
        check_prompt(request, self.info.vocab_size, min(self.info.context_length, self._capacity))
        check_embeddings(request, self._takes_images)
        if request.prefill_only and request.handoff is not None:
            raise InvalidRequest("a request with a handoff has its prompt computed already", "handoff")
        if not self._config.kv_transfer and request.prefill_only:
            raise EngineUnavailable(_NO_TRANSFER)
        if not self._config.kv_transfer and request.handoff is not None and request.handoff.state:
            raise InvalidRequest(_NO_TRANSFER, "handoff")
        if request.request_id in self._streams:
            raise InvalidRequest("a running request has the same request_id", "request_id")

    def _submit_guided(self, request: GenerateRequest, guide: Guide, stream: DeltaStream) -> None:
        """Submit a request once its guide is compiled, or without the guide if that takes long: the prompt is computed
        meanwhile. Only one that continues a handoff waits for the guide: its first token is there already."""
        matcher = self._compiler.matcher(guide)
        if matcher.ready:
            try:
                self._submit(request, matcher)
            except EngineError as error:
                stream.fail(error)
            return
        self._prepare_in_task(self._compile(request, guide, matcher, stream), stream)

    def _prepare_in_task(self, work: Coroutine[Any, Any, None], stream: DeltaStream) -> None:
        task = asyncio.create_task(work)
        self._preparing.add(task)
        task.add_done_callback(partial(self._prepared, stream))
        stream.when_done(task.cancel)

    def _prepared(self, stream: DeltaStream, task: "asyncio.Task[None]") -> None:
        self._preparing.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:  # a bug: the consumer must not wait
            log.error("a request could not be prepared", exc_info=error)
            stream.abort(EngineFailure(f"the request could not be prepared: {type(error).__name__}"))

    async def _fetch(self, request: GenerateRequest, stream: DeltaStream) -> None:
        """Submit a request once the embeddings that its encoder has kept are here."""
        try:
            request = await self._rows.fetched(request, self.info.device)
            if request.sampling.guide is None:
                self._submit(request, None)
            else:
                self._submit_guided(request, request.sampling.guide, stream)
        except EngineError as error:
            stream.fail(error)

    async def _compile(self, request: GenerateRequest, guide: Guide, matcher: Matcher, stream: DeltaStream) -> None:
        compiling = asyncio.create_task(self._compiler.compile(guide))
        ahead = False
        try:
            await asyncio.wait([compiling], timeout=_HEAD_START_SECONDS if request.handoff is None else None)
            if not compiling.done():
                self._submit(request, matcher)
                ahead = True
            compiled = await compiling
            if ahead:
                self._commands.put(lambda core: core.begin(request.request_id, compiled))
            else:
                matcher.begin(compiled)
                self._submit(request, matcher)
        except EngineError as error:
            if ahead:
                self._abort(request.request_id)
            stream.fail(error)
        finally:
            compiling.cancel()

    def _submit(self, request: GenerateRequest, matcher: Matcher | None) -> None:
        sequence = self._sequence(request, matcher)
        self._commands.put(lambda core: core.add(sequence))

    def _sequence(self, request: GenerateRequest, matcher: Matcher | None) -> Sequence:
        seed = request.sampling.seed if request.sampling.seed is not None else random.getrandbits(63)
        info, arrival = self.info, time.monotonic()
        handoff = self._handoffs.get(request.request_id, request.handoff)
        sequence = Sequence(
            request=request,
            sampler=SamplerState(
                request.sampling,
                request.prompt_token_ids,
                info.eos_token_ids,
                seed,
                matcher,
                info.vocab_size,
                torch.device(info.device),
            ),
            rank=request.rank(arrival),
            arrival=arrival,
            tokens=list(request.prompt_token_ids),
            prompt_logprobs=None if request.sampling.prompt_logprobs is None else [None],
            lacks_grammar=matcher is not None and not matcher.ready,
        )
        if handoff is not None:
            resume(sequence, handoff, self._layout)
        return sequence

    async def _warm_up(self) -> None:
        await asyncio.sleep(_WARM_UP_PAUSE)
        await self._compiler.warm_up(xgrammar=self.info.device != "cpu")  # whose cores compute answers

    def _abort(self, request_id: str) -> None:
        self._commands.put(lambda core: core.abort(request_id))

    # The engine thread.

    def _run(self, loaded: "asyncio.Future[None]", ready: "asyncio.Future[EngineInfo]") -> None:
        awaited: asyncio.Future[Any] = loaded
        try:
            began = time.monotonic()
            log.info("loading the model in %s", self._config.model)
            torch.set_num_threads(compute_threads(self._config.threads))
            model = LoadedModel.load(self._config)
            seconds = time.monotonic() - began
            self._settle(loaded, None)
            awaited = ready
            self._started.wait()
            if self._closing:
                model.runner.close()
                return
            try:
                model.runner.take_memory()
                core = EngineCore(self._config, lambda event: self._new_events.append(event), model)
            except Exception:
                model.runner.close()
                raise
            if core.remote is not None:
                core.remote.wake = lambda: self._commands.put(_poll)
            self._settle(ready, self._describe(core, seconds))
        except Exception as error:
            self._fail_start(awaited, error)
            return
        self._run_steps(core, contextlib.closing(core))

    def _step(self, core: EngineCore) -> None:
        with torch.profiler.record_function("step") if self._profiler else contextlib.nullcontext():
            outputs = core.step()
        self._call(self._deliver, outputs, core.stats(), self._take_events())

    def _obey(self, core: EngineCore) -> bool:
        """Carry out queued commands. While no step would get anywhere, wait for one and poll transfers. Returns
        False when told to stop."""
        told, pause = False, _SHORTEST_PAUSE
        while True:
            if not core.ready and not told:
                self._call(self._deliver, [], core.stats(), self._take_events())
                told = True
            elif core.ready and self._commands.empty():
                return True
            longest = core.poll_seconds
            try:
                command = self._commands.get(timeout=None if longest is None else min(pause, longest))
            except queue.Empty:
                told = not core.poll()
                pause *= _LONGER_PAUSE
                continue
            if command is None:
                return False
            command(core)
            told, pause = False, _SHORTEST_PAUSE

    def _describe(self, core: EngineCore, load_seconds: float) -> EngineInfo:
        runner, config = core.runner, self._config
        self._capacity = core.blocks.capacity
        self._layout = core.layout
        self._takes_images = runner.takes_images
        shared = runner.shared_weights
        return EngineInfo(
            backend="embedded",
            model=config.model,
            dtype=str(runner.dtype).removeprefix("torch."),
            device=str(runner.device),
            compute_path=runner.compute_path,
            instruction_set=runner.instruction_set,
            quantization=config.quantization.replace("none", ""),
            context_length=runner.context_length,
            vocab_size=runner.vocab_size,
            eos_token_ids=runner.eos_token_ids,
            block_size=core.blocks.block_size,
            num_blocks=core.blocks.pools[0].num_blocks,
            max_num_seqs=config.max_batch_size,
            max_num_tokens=config.max_num_tokens,
            load_seconds=load_seconds,
            kv_bytes=sum(blocks.nbytes for blocks in runner.memory.blocks),
            host_kv_bytes=config.kv_host_cache_mb << 20,
            disk_kv_bytes=config.kv_disk_cache_mb << 20,
            threads=compute_threads(config.threads) if runner.device.type == "cpu" else 0,
            guides=GUIDE_KINDS,
            text_grammars=True,
            capacity=self._capacity if self._capacity < runner.context_length else 0,
            kv_layout=str(core.layout),
            shared_weight_bytes=shared.bytes if shared is not None else 0,
            own_weights=shared.failure if shared is not None else "",
        )

    def _take_events(self) -> list[KvEvent]:
        """Return the KV events since the last call: they travel with the outputs of a step."""
        events, self._new_events = self._new_events, []
        return events


def _poll(core: EngineCore) -> None:
    core.poll()


def _profile(call: Callable[[], object]) -> None:
    """Call the profiler. Raises EngineFailure if it cannot do that, such as beside another profiler of the process."""
    try:
        call()
    except RuntimeError as error:
        raise EngineFailure(f"the profiler failed: {error}") from error
