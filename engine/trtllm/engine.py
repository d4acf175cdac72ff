"""TensorRT-LLM as an `Engine`: one `LLM`, its results followed as deltas, its events and statistics polled, its health watched."""

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from pathlib import Path
from typing import Any, Self

import msgspec
from msgspec.structs import replace

from engine.checkpoints.facts import ModelFacts, read_model_facts
from engine.config import TrtllmConfig
from engine.errors import EngineDied, EngineError, EngineFailure, EngineNotReady, EngineUnavailable, InvalidRequest
from engine.kit.checks import check_prompt
from engine.kit.kv_log import KvEventLog
from engine.kit.stream import DeltaStream, Latest
from engine.kv_events import KvEvent
from engine.media import MediaFiles
from engine.stats import IterationStats
from engine.trtllm import library
from engine.trtllm.events import iteration_stats, kv_capacity
from engine.trtllm.media import Deferred
from engine.trtllm.outputs import Outputs
from engine.trtllm.polling import poll_kv_events, poll_stats
from engine.trtllm.run import Run
from engine.types import GUIDE_KINDS, EngineInfo, GenerateRequest

HEALTH_SECONDS = 1.0

log = logging.getLogger(__name__)


class TrtllmEngine:
    """TensorRT-LLM on the GPUs of this machine, behind the Engine protocol."""

    def __init__(self, config: TrtllmConfig) -> None:
        self._config = config
        self.llm: Any = None
        """TensorRT-LLM's LLM, from start to close."""
        self._info: EngineInfo | None = None
        self._dead = False
        self._facts: ModelFacts
        self.streams: set[DeltaStream] = set()
        """Streams of requests that have not ended."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._stats: Latest[IterationStats] = Latest()
        self._events = KvEventLog()
        self.running = 0
        """Requests that TensorRT-LLM computes."""
        self.aborted = 0
        self._newest: IterationStats
        self._stop_watching = threading.Event()

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
    def healthy(self) -> bool:
        return self._info is not None and not self._dead

    async def start(self) -> None:
        """Blocks the event loop while the model loads: `LLM` starts its worker processes from the main thread, as NVIDIA's server does."""
        self._loop = asyncio.get_running_loop()
        self._facts = read_model_facts(Path(self._config.model))
        self._facts.check()
        started = time.monotonic()
        self.llm = library.load(self._config)
        seconds = time.monotonic() - started
        log.info("TensorRT-LLM has loaded %s in %.1f s", self._config.model, seconds)
        try:
            first = await self._first_stats()
            self._info = self._describe(kv_capacity(first), seconds)
            stats = iteration_stats(first)
        except BaseException:
            await self.close()
            raise
        if self._config.arguments.get("kv_cache_config", {}).get("event_buffer_max_size"):
            self._spawn(poll_kv_events(self.llm, self._events.put))
        self._publish(stats)
        self._spawn(poll_stats(self.llm, self._publish))
        threading.Thread(target=self._watch, args=(self.llm,), name="trtllm-health", daemon=True).start()

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

    async def close(self) -> None:
        self._dead = True
        self._stop_watching.set()
        self._fail_all(EngineNotReady("the engine is closing"))
        while self._tasks:  # Python 3.11's wait_for, which the library waits with, can lose a cancellation
            for task in self._tasks:
                task.cancel()
            await asyncio.wait(self._tasks, timeout=0.2)
        llm, self.llm = self.llm, None
        if llm is not None:
            await asyncio.to_thread(library.shutdown, llm)
        self._stats.close()
        self._events.close()

    def _decode_first(self, request: GenerateRequest, media: MediaFiles) -> DeltaStream:
        """The stream of a request that begins when its images are decoded."""

        def begin(images: list[Any]) -> DeltaStream:
            self._check(request)  # again: the engine may have died meanwhile
            return self._begin(request, images)

        deferred = Deferred(media.files, self._config.max_image_pixels, begin)
        self._keep(deferred.stream)
        self._spawn(deferred.run())
        return deferred.stream

    def _begin(self, request: GenerateRequest, images: Sequence[Any] = ()) -> DeltaStream:
        """Raises InvalidRequest, EngineUnavailable and EngineFailure."""
        context_only = request.prefill_only and request.sampling.max_tokens > 1  # else there is nothing to hand over
        try:
            result = library.submit(self.llm, request, self._facts, images, context_only=context_only)
        except EngineDied as error:
            self._die(error)
            raise
        run = Run(result, context_only=context_only, transferring=request.handoff is not None)
        run.stream = DeltaStream(lambda: self._abort(run))
        self._keep(run.stream)
        self._spawn(self._follow(request, run))
        return run.stream

    def _keep(self, stream: DeltaStream) -> None:
        """Know of a stream for as long as it is open."""
        self.streams.add(stream)
        stream.when_done(lambda: self.streams.discard(stream))

    def _check(self, request: GenerateRequest) -> None:
        if not self.healthy:
            raise EngineNotReady("the engine is not running")
        info = self.info
        check_prompt(request, info.vocab_size, info.context_length)
        if request.spans:
            raise InvalidRequest("TensorRT-LLM encodes images itself: it takes no embeddings of others", "prompt")
        if request.sampling.guide is not None and request.sampling.guide.kind not in info.guides:
            raise InvalidRequest("the engine was started without a guided_decoding_backend", "guide")

    async def _follow(self, request: GenerateRequest, run: Run) -> None:
        """The request to its end, an aborted one too: the engine has finished with it only then."""
        outputs = Outputs(request, self._facts.eos_token_ids)
        stream = run.stream
        started = False
        self.running += 1
        try:
            async for response in run.result:
                run.transferred()
                if (delta := outputs.feed(response)) is not None:
                    started = True
                    await run.deliver(delta, request)
            stream.fail(EngineFailure("the engine ended the request without a reason"))
        except EngineError as error:
            stream.fail(error)
            run.abandon()
        except (
            Exception
        ) as error:  # of TensorRT-LLM's making: one kind is about this request, all others are the engine's end
            failure = library.translate(error, started=started)
            stream.fail(failure)
            if isinstance(failure, EngineDied):
                self._die(failure, error)
        finally:
            self.running -= 1
            self._publish(self._newest)

    def _abort(self, run: Run) -> None:
        if not run.result.finished:  # else its blocks were held
            self.aborted += 1
            run.abort()

    def _publish(self, stats: IterationStats) -> None:
        """With our own count of aborts. The engine reports on steps alone: that it has become idle is for us to say."""
        self._newest = replace(stats, num_aborted_requests=self.aborted, timestamp=stats.timestamp or time.time())
        if not self.running:
            cache = stats.kv_cache_stats
            freed = replace(cache, used_num_blocks=0, free_num_blocks=cache.max_num_blocks)
            self._newest = replace(self._newest, num_active_requests=0, num_queued_requests=0, kv_cache_stats=freed)
        self._stats.publish(self._newest)

    async def _first_stats(self) -> dict[str, Any]:
        """Run one token: events and statistics exist from the first request on, and the statistics know the size of the KV cache. Empty if
        there are none, or none that can be read.
        """
        prompt = (self._facts.eos_token_ids[0] if self._facts.eos_token_ids else 0,)
        try:
            await library.warm_up(self.llm, prompt, self._facts)
            first: dict[str, Any] = await anext(aiter(self.llm.get_stats_async(timeout=2)), {})
        except Exception as error:
            raise EngineFailure(f"TensorRT-LLM has started but does not answer: {error}") from error
        try:
            iteration_stats(first)
        except (AttributeError, msgspec.ValidationError, TypeError, ValueError) as error:
            log.warning("the engine's first statistics cannot be read: %s", error)
            return {}
        return first

    def _describe(self, capacity: tuple[int, int] | None, seconds: float) -> EngineInfo:
        """`capacity` is in blocks, and tokens in one."""
        arguments, facts = self.llm.args, self._facts
        if capacity is None:
            log.warning(
                "the engine does not report the size of its KV cache (is enable_iter_perf_stats off?): it is shown as 0"
            )
            capacity = 0, arguments.kv_cache_config.tokens_per_block
        return EngineInfo(
            backend="trtllm",
            model=self._config.model,
            dtype=str(arguments.dtype),
            device="cuda",
            context_length=arguments.max_seq_len or facts.context_length,
            vocab_size=facts.vocab_size,
            eos_token_ids=facts.eos_token_ids,
            num_blocks=capacity[0],
            block_size=capacity[1],
            tensor_parallel_size=1 if arguments.enable_attention_dp else arguments.tensor_parallel_size,
            data_parallel_size=arguments.tensor_parallel_size if arguments.enable_attention_dp else 1,
            max_num_seqs=arguments.max_batch_size or 2048,
            max_num_tokens=arguments.max_num_tokens or 8192,
            load_seconds=seconds,
            guides=GUIDE_KINDS if arguments.guided_decoding_backend else (),
        )

    def _watch(self, llm: Any) -> None:
        """In a thread of its own, so that a loop that is stuck inside the engine is no obstacle."""
        while not self._stop_watching.wait(HEALTH_SECONDS):
            if not library.is_alive(llm):
                with contextlib.suppress(RuntimeError):  # the loop has gone
                    self._loop.call_soon_threadsafe(self._die, EngineDied("the engine has shut itself down"))
                return

    def _die(self, failure: EngineDied, cause: BaseException | None = None) -> None:
        if not self._dead and self._info is not None:
            self._dead = True
            log.critical("%s", failure, exc_info=cause)
            self._fail_all(failure)

    def _fail_all(self, error: EngineUnavailable) -> None:
        for stream in list(self.streams):
            stream.fail(error)

    def _spawn(self, work: Any) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: "asyncio.Task[None]") -> None:
        """What follows requests and polls handles all that can go wrong there: one that ends by an error is a bug, and not a silent one."""
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._die(EngineDied(f"the engine is not watched any more: {type(error).__name__}: {error}"), error)
