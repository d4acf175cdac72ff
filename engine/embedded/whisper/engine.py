"""Whisper as an `Engine`: prompts steer it, and what it writes down comes beside them, as `Speech`. One thread runs the
core's steps."""

import asyncio
import contextlib
import logging
import queue
import threading
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Collection
from typing import TypeVar

import torch

from engine.base import DeltaStream, Latest
from engine.config import EmbeddedConfig, Tag
from engine.embedded.threads import compute_threads
from engine.embedded.whisper.core import Outputs, WhisperCore, WhisperModel
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
from engine.media import Speech
from engine.stats import IterationStats
from engine.types import Delta, EngineInfo, GenerateRequest

T = TypeVar("T")
log = logging.getLogger(__name__)

NOT_SPEECH = "This model transcribes speech and does nothing else: send audio to /v1/audio/transcriptions."
_NO_PROFILE = "no profile is recorded of a model that transcribes"


class WhisperEngine:
    """A Whisper model behind the `Engine` protocol. Of sampling parameters it knows the temperature, the seed, the
    number of tokens and whether log-probabilities are wanted, those of the tokens themselves."""

    def __init__(self, config: EmbeddedConfig) -> None:
        self._config = config
        self._info: EngineInfo | None = None
        self._commands: queue.SimpleQueue[Callable[[WhisperCore], None] | None] = queue.SimpleQueue()
        self._streams: dict[str, DeltaStream] = {}
        self._asked: set[asyncio.Future[None]] = set()
        self._stats: Latest[IterationStats] = Latest()
        self._events = KvEventLog()
        self._thread: threading.Thread | None = None

    @property
    def info(self) -> EngineInfo:
        if self._info is None:
            raise EngineNotReady("the engine has not started")
        return self._info

    @property
    def healthy(self) -> bool:
        return self._info is not None and self._thread is not None and self._thread.is_alive()

    async def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        ready: asyncio.Future[EngineInfo] = self._loop.create_future()
        self._thread = threading.Thread(target=self._run, args=(ready,), name="engine", daemon=True)
        self._thread.start()
        self._info = await ready

    def generate(self, request: GenerateRequest) -> DeltaStream:
        try:
            speech = self._check(request)
        except EngineError as error:
            return DeltaStream.failed(error)
        stream = DeltaStream(lambda: self._commands.put(lambda core: core.abort(request.request_id)))
        self._streams[request.request_id] = stream
        stream.when_done(lambda: self._streams.pop(request.request_id))
        self._commands.put(lambda core: core.add(request, speech))
        return stream

    def kv_events(self) -> AsyncGenerator[list[KvEvent], None]:
        return self._events.batches()

    def stats(self) -> AsyncIterator[IterationStats]:
        return self._stats.values()

    async def reset_prefix_cache(self) -> None:
        await self._ask(WhisperCore.forget)

    def sleep_obstacle(self, level: int) -> str:
        return ""

    async def release_memory(self, tags: Collection[Tag], level: int) -> None:
        await self._ask(lambda core: core.release_memory(tags))

    async def resume_memory(self, tags: Collection[Tag]) -> None:
        await self._ask(lambda core: core.resume_memory(tags))

    async def start_profile(self) -> None:
        raise NotSupported(_NO_PROFILE)

    async def stop_profile(self, trace: str) -> None:
        raise NotSupported(_NO_PROFILE)

    async def close(self) -> None:
        if self._thread is not None:
            self._commands.put(None)
            await asyncio.to_thread(self._thread.join)
            self._fail_all(EngineNotReady("the engine is closing"))
        self._info = None
        self._stats.close()
        self._events.close()

    def _check(self, request: GenerateRequest) -> Speech:
        """Return the request's speech. Raises EngineNotReady and InvalidRequest."""
        if not self.healthy:
            raise EngineNotReady("the engine is not running")
        if not isinstance(request.media, Speech):
            raise InvalidRequest(NOT_SPEECH, "prompt")
        check_prompt(request, self.info.vocab_size, self.info.context_length)
        if len(request.media.data) != self._window_bytes:
            raise InvalidRequest(
                f"the features of a window have {self._window_bytes} bytes, not {len(request.media.data)}", "prompt"
            )
        if request.request_id in self._streams:
            raise InvalidRequest("a running request has the same request_id", "request_id")
        return request.media

    async def _ask(self, function: Callable[[WhisperCore], None]) -> None:
        """Have the engine's thread call a function. Raises EngineNotReady, and EngineFailure if the function does."""
        if not self.healthy:
            raise EngineNotReady("the engine is not running")
        done: asyncio.Future[None] = self._loop.create_future()
        self._asked.add(done)
        done.add_done_callback(self._asked.discard)

        def answer(core: WhisperCore) -> None:
            try:
                function(core)
                self._call(_settle, done, None)
            except EngineFailure as error:
                self._call(_settle, done, error)

        self._commands.put(answer)
        await done

    # The engine thread.

    def _run(self, ready: "asyncio.Future[EngineInfo]") -> None:
        try:
            began = time.monotonic()
            log.info("loading the model in %s", self._config.model)
            torch.set_num_threads(compute_threads(self._config.threads))
            core = WhisperCore(self._config, WhisperModel(self._config))
            self._window_bytes = 4 * core.sizes.bins * core.sizes.frames
            self._call(_settle, ready, self._describe(core, time.monotonic() - began))
        except EngineFailure as error:
            self._call(_settle, ready, error)
            return
        except Exception as error:  # a bug, or a library's: the start must raise, or it would wait for ever
            log.exception("cannot load %s", self._config.model)
            said = " ".join(f"{type(error).__name__}: {error}".split())
            self._call(_settle, ready, EngineFailure(f"cannot load {self._config.model}: {said}"))
            return
        try:
            with torch.inference_mode():
                while self._obey(core):
                    self._call(self._deliver, core.step(), core.stats())
        except Exception as error:  # a bug of ours: the engine is lost, its requests must not hang
            log.critical("the engine thread died", exc_info=error)
            self._call(self._fail_all, EngineDied("the engine died"))

    def _obey(self, core: WhisperCore) -> bool:
        """Carry out queued commands, and wait for one while there is nothing to do. Returns False when told to stop."""
        while not core.ready or not self._commands.empty():
            if not core.ready and self._commands.empty():
                self._call(self._deliver, [], core.stats())
            command = self._commands.get()
            if command is None:
                return False
            command(core)
        return True

    def _describe(self, core: WhisperCore, load_seconds: float) -> EngineInfo:
        on_cpu = core.device.type == "cpu"
        return EngineInfo(
            backend="embedded",
            model=self._config.model,
            dtype=str(core.dtype).removeprefix("torch."),
            device=str(core.device),
            compute_path="whisper",
            instruction_set=torch.backends.cpu.get_cpu_capability().lower() if on_cpu else "",
            context_length=core.sizes.context,
            vocab_size=core.sizes.vocab_size,
            eos_token_ids=(core.tokens.end,),
            block_size=core.sizes.context,
            num_blocks=core.places,
            max_num_seqs=core.places,
            max_num_tokens=core.places * core.sizes.context,
            load_seconds=load_seconds,
            kv_bytes=core.kv_bytes,
            threads=compute_threads(self._config.threads) if on_cpu else 0,
            max_logprobs=0,
            prompt_logprobs=False,
        )

    def _call(self, function: Callable[..., object], *arguments: object) -> None:
        """Call a function on the event loop, unless the loop has been closed."""
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(function, *arguments)

    # Back on the event loop.

    def _deliver(self, outputs: Outputs, stats: IterationStats) -> None:
        self._stats.publish(stats)
        for request_id, output in outputs:
            if (stream := self._streams.get(request_id)) is None:
                continue
            if isinstance(output, Delta):
                stream.put(output)
                continue
            log.error("request %s failed in the engine", request_id, exc_info=output.__cause__)
            stream.fail(output)

    def _fail_all(self, error: EngineUnavailable) -> None:
        for stream in list(self._streams.values()):
            stream.fail(error)
        for asked in self._asked:
            if not asked.done():
                asked.set_exception(error)


def _settle(future: "asyncio.Future[T]", outcome: T | EngineFailure) -> None:
    """Give an outcome to whoever awaits it, unless that was cancelled meanwhile."""
    if future.done():
        return
    if isinstance(outcome, EngineFailure):
        future.set_exception(outcome)
    else:
        future.set_result(outcome)
