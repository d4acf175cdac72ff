"""TensorRT-LLM as an `Engine`: one `LLM`, whose results become deltas.

Its KV-cache events and statistics are polled, and its health is checked.
"""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Collection, Sequence
from pathlib import Path
from typing import Any, Self

import msgspec
from msgspec.structs import replace

from engine.base import DeltaStream, Latest
from engine.checkpoints.facts import ModelFacts, read_model_facts
from engine.config import Tag, TrtllmConfig
from engine.errors import (
    EngineDied,
    EngineError,
    EngineFailure,
    EngineNotReady,
    EngineUnavailable,
    InvalidRequest,
    NotSupported,
)
from engine.kit.checks import check_prompt
from engine.kit.kv_log import KvEventLog
from engine.kv_events import KvEvent
from engine.media import MediaFiles, Unexpanded
from engine.stats import IterationStats
from engine.trtllm import library
from engine.trtllm.disaggregation import held_of, recomputed
from engine.trtllm.media import Deferred
from engine.trtllm.outputs import Outputs
from engine.trtllm.performance import TransferCounts
from engine.trtllm.polling import Poller, iteration_stats, kv_capacity, kv_event_poller, stats_poller
from engine.trtllm.ranks import Ranks, idle, summed
from engine.trtllm.sampling import guides_of
from engine.trtllm.support import Support
from engine.trtllm.versions import PackageVersion
from engine.trtllm.watching import Watch
from engine.types import Delta, EngineInfo, GenerateRequest, NextHandoff

ABORT_SECONDS = 10.0
"""Time the engine may take to confirm an abort. 1.2.1 never does if the request waited in its queue."""
_RELEASE_PAUSE = 0.01
MANY_FAILURES = 10
"""Requests that may fail in a row for unknown reasons, while single tokens can be generated."""

log = logging.getLogger(__name__)


class ActiveRequest:
    """One request in TensorRT-LLM.

    An abort is delayed while KV blocks are being transferred to the request: it could take as long as the transfer's
    time limit, and leave the blocks held on the other side.
    """

    stream: DeltaStream

    def __init__(self, result: Any, version: PackageVersion, *, context_only: bool, transferring: bool) -> None:
        self.result = result
        self._version = version
        self._context_only = context_only
        self._transferring = transferring
        self._task: asyncio.Task[None]
        self.fetched = transferring
        """Whether its KV blocks come from another replica."""
        self.aborted = False

    @property
    def owed(self) -> bool:
        """Whether the engine is to compute something: not while KV blocks are awaited, or held for others."""
        return not self._transferring and not self.result.finished

    async def deliver(self, delta: Delta, request: GenerateRequest) -> None:
        """Pass on a delta.

        A context-only request holds its KV blocks; this then waits until the stream ends. The engine has finished the
        request by then, and frees the blocks when they have been read or after the transceiver's time limit.
        """
        if self._context_only:
            delta = held_of(self.result, delta, request, self._version)
        self.stream.put(delta)
        if delta.held is not None:
            over = asyncio.Event()
            self.stream.when_done(over.set)
            await over.wait()

    @property
    def fetching(self) -> bool:
        """Whether its KV blocks have not arrived yet."""
        return self._transferring

    def follow(self, task: "asyncio.Task[None]") -> None:
        """Take the task that reads the result."""
        self._task = task

    def abort(self) -> None:
        self.aborted = True
        if not self._transferring:
            self.result.abort()
            asyncio.get_running_loop().call_later(ABORT_SECONDS, self._give_up)

    def _give_up(self) -> None:
        """End the task, again and again: Python 3.11's wait_for, which the library uses, can lose a cancellation."""
        if not self._task.done():
            self._task.cancel()
            asyncio.get_running_loop().call_later(0.2, self._give_up)

    def abandon(self) -> None:
        """Abort a result whose stream has been closed."""
        if not self.result.finished:
            self.result.abort()

    def transferred(self) -> None:
        """Note that the engine has answered, so the blocks have arrived."""
        waited, self._transferring = self._transferring, False
        if waited and self.aborted:
            self.abort()


class TrtllmEngine:
    """TensorRT-LLM on the GPUs of this machine, behind the Engine protocol."""

    def __init__(self, config: TrtllmConfig) -> None:
        self._config = config
        self.llm: Any = None
        """TensorRT-LLM's LLM, from start to close."""
        self._info: EngineInfo | None = None
        self._dead = False
        self._facts: ModelFacts
        self._version: PackageVersion
        self._start_text: str
        self._support: Support
        self.streams: set[DeltaStream] = set()
        """Streams of requests that have not ended."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._pollers: list[Poller[Any]] = []
        self._stats: Latest[IterationStats] = Latest()
        self._events = KvEventLog()
        self._probe: asyncio.Task[None] | None = None
        self._runs: set[ActiveRequest] = set()
        self.aborted = 0
        self._failures = 0
        """Requests in a row that have failed for unknown reasons."""
        self._newest: IterationStats
        self._watch: Watch | None = None
        self.ranks: Ranks
        self._rows: dict[int, IterationStats] = {}
        """Newest statistics of each rank."""
        self._transfers = TransferCounts()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    @property
    def info(self) -> EngineInfo:
        if self._info is None:
            raise EngineNotReady("the engine has not started")
        return self._info

    @property
    def running(self) -> int:
        """Number of requests that TensorRT-LLM has not ended."""
        return len(self._runs)

    @property
    def healthy(self) -> bool:
        return self._info is not None and not self._dead

    async def start(self) -> None:
        """Load the model. Blocks the event loop: `LLM` must start its worker processes from the main thread."""
        self._loop = asyncio.get_running_loop()
        self._facts = read_model_facts(Path(self._config.model))
        self._facts.check()
        started = time.monotonic()
        self._watch = Watch(self._config.hang_seconds)
        try:
            self.llm = library.load(self._config)
            self._version = library.installed()
            processes = self._config.sampling == "processors"
            self._support = Support(self._config.arguments, processors=processes, newer=self._version.samples_more)
            seconds = time.monotonic() - started
            log.info("TensorRT-LLM has loaded %s in %.1f s", self._config.model, seconds)
            self._start_text = library.start_text(self.llm)
            first = await self._first_stats()
            self._info = self._describe(kv_capacity(first), seconds)
            stats = iteration_stats(first)
        except BaseException:
            await self.close()
            raise
        has_events = bool(self._config.arguments.get("kv_cache_config", {}).get("event_buffer_max_size"))
        self.ranks = Ranks(self.info.data_parallel_size, self.info.block_size, knows_caches=has_events)
        if has_events:
            self._pollers.append(kv_event_poller(self.llm, self._learn))
        self._take(stats)
        self._pollers.append(stats_poller(self.llm, self._step))
        self._watch.follow(self.llm, self._owes, lambda reason: self._die(EngineDied(reason)))

    def generate(self, request: GenerateRequest) -> DeltaStream:
        try:
            self._check(request)
            return (
                self._decode_first(request, request.media)
                if isinstance(request.media, MediaFiles)
                else self._begin(request)
            )
        except EngineError as error:
            return DeltaStream.failed(error)

    def kv_events(self) -> AsyncGenerator[list[KvEvent], None]:
        return self._events.batches()

    def stats(self) -> AsyncIterator[IterationStats]:
        return self._stats.values()

    async def reset_prefix_cache(self) -> None:
        raise InvalidRequest("TensorRT-LLM cannot be told to forget its KV blocks: restart the replica")

    def sleep_obstacle(self, level: int) -> str:
        return library.sleep_obstacle(self._config, level)

    async def release_memory(self, tags: Collection[Tag], level: int) -> None:
        while self._runs:  # noqa: ASYNC110 - an aborted request has ended once the engine says so
            await asyncio.sleep(_RELEASE_PAUSE)
        await asyncio.to_thread(library.release_memory, self.llm, tags)

    async def resume_memory(self, tags: Collection[Tag]) -> None:
        await asyncio.to_thread(library.resume_memory, self.llm, tags)

    async def continue_handoff(self, following: NextHandoff) -> bool:
        return False

    async def start_profile(self) -> None:
        raise NotSupported(
            "TensorRT-LLM cannot be told to profile: start the replica with TLLM_PROFILE_START_STOP=FIRST-LAST"
            " (iterations) and TLLM_TORCH_PROFILE_TRACE=FILE in its environment"
        )

    async def stop_profile(self, trace: str) -> None:
        await self.start_profile()

    async def close(self) -> None:
        self._dead = True
        if self._watch is not None:
            self._watch.stop()
        self._fail_all(EngineNotReady("the engine is closing"))
        while self._tasks:  # repeatedly: Python 3.11's wait_for, which the library uses, can lose a cancellation
            for task in self._tasks:
                task.cancel()
            await asyncio.wait(self._tasks, timeout=0.2)
        pollers, self._pollers = self._pollers, []
        await asyncio.gather(*(poller.stop() for poller in pollers))
        llm, self.llm = self.llm, None
        if llm is not None and not (self._watch is not None and self._watch.broken):
            await asyncio.to_thread(library.shutdown, llm)
        self._stats.close()
        self._events.close()

    def _decode_first(self, request: GenerateRequest, media: MediaFiles) -> DeltaStream:
        """Return the stream of a request that starts after its images are decoded."""

        def begin(images: list[Any]) -> DeltaStream:
            self._check(request)  # again, as the engine may have died in the meantime
            return self._begin(request, images)

        deferred = Deferred(media.files, self._config, begin)
        self._keep(deferred.stream)
        self._spawn(deferred.run())
        return deferred.stream

    def _begin(self, request: GenerateRequest, images: Sequence[Any] = ()) -> DeltaStream:
        """Start the request. Raises InvalidRequest, EngineUnavailable and EngineFailure."""
        context_only = (
            request.prefill_only and request.sampling.max_tokens > 1
        )  # otherwise there is nothing to hand off
        asked = recomputed(request) if self._is_lost(request) else request
        sampling = asked.sampling
        if context_only:
            sampling = replace(sampling, min_tokens=min(1, sampling.min_tokens))
        native, edits = self._support.split(sampling, self._facts.eos_token_ids, library.num_prompt(asked))
        if edits is not None and asked is not request:  # its prompt ends with tokens of the output
            edits = edits._replace(sampling=request.sampling, num_prompt=len(request.prompt_token_ids))
        submitted = replace(asked, sampling=native)
        rank, work = self.ranks.assign(asked)
        try:
            result = library.submit(
                self.llm,
                submitted,
                self._facts,
                images,
                edits=edits,
                context_only=context_only,
                rank=rank,
                start=self._start_text,
            )
        except EngineError as error:
            if work is not None:
                work.end()
            if isinstance(error, EngineDied):
                self._die(error)
            raise
        run = ActiveRequest(result, self._version, context_only=context_only, transferring=asked.handoff is not None)
        run.stream = DeltaStream(lambda: self._abort(run))
        if work is not None:
            run.stream.when_done(work.end)
        self._keep(run.stream)
        outputs = Outputs(request, self._facts.eos_token_ids, repeats=asked is request)
        run.follow(self._spawn(self._follow(request, run, outputs)))
        return run.stream

    def _is_lost(self, request: GenerateRequest) -> bool:
        """Return whether a handoff is of no use: its KV blocks are lost, or would come without log-probabilities.

        1.2.1's generation worker has none for the first token, and then every response of the request raises
        AssertionError. Newer versions pass it as `first_gen_log_probs` (#11727).
        """
        if request.handoff is None:
            return False
        return not request.handoff.state or (request.sampling.logprobs is not None and not self.info.handoff_logprobs)

    def _keep(self, stream: DeltaStream) -> None:
        """Track a stream until it ends."""
        self.streams.add(stream)
        stream.when_done(lambda: self.streams.discard(stream))

    def _check(self, request: GenerateRequest) -> None:
        if not self.healthy:
            raise EngineNotReady("the engine is not running")
        info = self.info
        check_prompt(request, info.vocab_size, info.context_length)
        if self._config.backend == "_autodeploy" and isinstance(request.media, Unexpanded):
            raise InvalidRequest("images are not supported with BACKEND=_autodeploy", "prompt")
        if request.spans:
            raise InvalidRequest("TensorRT-LLM encodes images itself: it takes no embeddings of others", "prompt")
        if request.sampling.prompt_logprobs is not None:
            self._check_prompt_logprobs(request)
        self._check_role(request)
        if request.sampling.guide is not None and request.sampling.guide.kind not in info.guides:
            raise InvalidRequest("the engine was started without a guided_decoding_backend", "guide")

    def _check_prompt_logprobs(self, request: GenerateRequest) -> None:
        if not self._version.prompt_logprobs:
            raise InvalidRequest(
                f"this replica's engine, TensorRT-LLM {self._version.name}, has no log-probabilities of prompts: it "
                "reports the most likely tokens of each position, which the prompt's own need not be among",
                "prompt_logprobs",
            )
        if isinstance(request.media, Unexpanded):
            raise InvalidRequest("TensorRT-LLM has no log-probabilities of prompts with images", "prompt_logprobs")

    def _check_role(self, request: GenerateRequest) -> None:
        """Refuse what this engine was not started for: asked for it, a worker of TensorRT-LLM ends."""
        arguments = self.llm.args
        transceiver = arguments.cache_transceiver_config
        if (request.prefill_only or request.handoff is not None) and (transceiver is None or not transceiver.backend):
            raise InvalidRequest(
                "this replica's engine neither hands over nor takes handoffs: it was started without "
                "cache_transceiver_config.backend",
                "handoff" if request.handoff is not None else None,
            )
        if request.prefill_only and not arguments.disable_overlap_scheduler and not self._version.overlapped_context:
            raise InvalidRequest("prefill needs an engine that was started with disable_overlap_scheduler: true")

    async def _follow(self, request: GenerateRequest, run: ActiveRequest, outputs: Outputs) -> None:
        """Follow a request until the engine has finished it, even if it was aborted."""
        stream = run.stream
        self._runs.add(run)
        try:
            async for response in run.result:
                self._progress()
                run.transferred()
                if (delta := outputs.feed(response)) is not None:
                    if run.fetched and delta.finish_reason is not None:
                        self._transfers.note(delta.performance)
                    await run.deliver(delta, request)
            self._failures = 0
            stream.fail(EngineFailure("the engine ended the request without a reason"))
        except asyncio.CancelledError:
            if run.aborted:
                self._suspect()  # the abort has not been confirmed
            raise
        except EngineError as error:
            stream.fail(error)
            run.abandon()
        except Exception as error:  # raised by TensorRT-LLM
            failure = library.translate(self.llm, error)
            self._transfers.kv_transfer_failure_total += run.fetching
            stream.fail(failure)
            if isinstance(failure, EngineDied):
                self._die(failure, error)
            else:
                run.abandon()
                if isinstance(failure, EngineFailure):
                    log.error("%s", failure, exc_info=error)
                    self._count(failure)
        finally:
            self._runs.discard(run)
            self._publish(self._newest)

    def _count(self, failure: EngineFailure) -> None:
        """End the engine if requests have failed too often without a success in between."""
        self._failures += 1
        if self._failures >= MANY_FAILURES:
            self._die(EngineDied(f"the engine died: {self._failures} requests in a row have failed: {failure}"))
        self._suspect()

    def _owes(self) -> bool:
        """Return, in any thread, whether the engine has work."""
        probing = self._probe is not None and not self._probe.done()
        return probing or any(run.owed for run in tuple(self._runs))

    def _progress(self) -> None:
        if self._watch is not None:
            self._watch.progress()

    def _step(self, stats: IterationStats) -> None:
        self._progress()
        self._take(stats)

    def _suspect(self) -> None:
        """Find out whether a failure of unknown cause is of one request or of the engine, which says it is healthy."""
        if not self._dead and (self._probe is None or self._probe.done()):
            self._probe = self._spawn(self._probe_engine())

    async def _probe_engine(self) -> None:
        try:
            await library.probe(self.llm, self._first_prompt, self._facts)
            self._progress()
        except Exception as error:
            said = f"{type(error).__name__}: {error}"
            self._die(EngineDied(f"the engine died: after a failure it cannot generate a token: {said}"), error)

    @property
    def _first_prompt(self) -> tuple[int, ...]:
        return (self._facts.eos_token_ids[0] if self._facts.eos_token_ids else 0,)

    def _abort(self, run: ActiveRequest) -> None:
        if not run.result.finished:  # a finished request may still hold blocks for decode
            self.aborted += 1
            run.abort()

    def _learn(self, event: KvEvent) -> None:
        self._events.put(event)
        self.ranks.note(event)

    def _take(self, stats: IterationStats) -> None:
        """Take new statistics, which are of one rank where there are several. 1.2.1 has those of the first alone."""
        if self.info.data_parallel_size > 1:
            self._rows[stats.attention_dp_rank or 0] = stats
            stats = summed(self._rows.values())
        self._publish(stats)

    def _publish(self, stats: IterationStats) -> None:
        """Publish statistics with our count of aborts. The engine reports only steps, so idleness is derived here."""
        self._newest = replace(
            stats,
            num_aborted_requests=self.aborted,
            timestamp=stats.timestamp or time.time(),
            **vars(self._transfers),
        )
        if not self._runs:
            self._newest = idle(self._newest)
        self._stats.publish(self._newest)

    async def _first_stats(self) -> dict[str, Any]:
        """Generate one token and return the first statistics, which tell the size of the KV cache.

        Events and statistics exist from the first request on. Empty if there are none that can be read.
        """
        try:
            await library.warm_up(self.llm, self._first_prompt, self._facts)
            first: dict[str, Any] = next(iter(await asyncio.to_thread(self.llm.get_stats, timeout=2)), {})
        except Exception as error:
            raise EngineFailure(f"TensorRT-LLM has started but does not answer: {error}") from error
        try:
            iteration_stats(first)
        except (AttributeError, msgspec.ValidationError, TypeError, ValueError) as error:
            log.warning("the engine's first statistics cannot be read: %s", error)
            return {}
        return first

    def _describe(self, capacity: tuple[int, int] | None, seconds: float) -> EngineInfo:
        """Describe the engine; `capacity` is the number of KV blocks and tokens per block."""
        arguments, facts, version = self.llm.args, self._facts, self._version
        if capacity is None:
            log.warning(
                "the engine does not report the size of its KV cache, shown as 0 (is enable_iter_perf_stats off?)"
            )
            capacity = 0, arguments.kv_cache_config.tokens_per_block
        length = arguments.max_seq_len or facts.context_length
        if capacity[0]:  # to which the worker shortens its max_seq_len, and tells nobody
            length = min(length, capacity[0] * capacity[1])
        return EngineInfo(
            backend="trtllm",
            model=self._config.model,
            dtype=str(arguments.dtype),
            device="cuda",
            context_length=length,
            vocab_size=facts.vocab_size,
            eos_token_ids=facts.eos_token_ids,
            num_blocks=capacity[0],
            block_size=capacity[1],
            tensor_parallel_size=1 if arguments.enable_attention_dp else arguments.tensor_parallel_size,
            data_parallel_size=arguments.tensor_parallel_size if arguments.enable_attention_dp else 1,
            max_num_seqs=arguments.max_batch_size or 2048,
            max_num_tokens=arguments.max_num_tokens or 8192,
            load_seconds=seconds,
            guides=guides_of(arguments.guided_decoding_backend),
            refused_parameters=tuple(self._support.refused.items()),
            kv_layout=f"TensorRT-LLM {version.name}",
            max_encoded_images=version.max_encoded_images,
            prompt_logprobs=version.prompt_logprobs,
            handoff_logprobs=version.handoff_logprobs,
        )

    def _die(self, failure: EngineDied, cause: BaseException | None = None) -> None:
        if not self._dead and self._info is not None:
            self._dead = True
            log.critical("%s", failure, exc_info=cause)
            self._fail_all(failure)

    def _fail_all(self, error: EngineUnavailable) -> None:
        for stream in list(self.streams):
            stream.fail(error)

    def _spawn(self, work: Any) -> "asyncio.Task[None]":
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: "asyncio.Task[None]") -> None:
        """Report a task that ended with an error. Tasks handle expected errors, so this is a bug."""
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._die(EngineDied(f"an internal task failed: {type(error).__name__}: {error}"), error)
