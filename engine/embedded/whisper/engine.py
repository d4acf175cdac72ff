"""Whisper as an `Engine`: each request has a prompt of control tokens and `Speech` to transcribe."""

import asyncio
import logging
import time
from collections.abc import Collection
from contextlib import nullcontext

import torch

from engine.base import DeltaStream
from engine.config import Tag
from engine.embedded.threaded_engine import ThreadedEngine
from engine.embedded.threads import compute_threads
from engine.embedded.whisper.core import WhisperCore, WhisperModel
from engine.errors import EngineError, EngineNotReady, InvalidRequest, NotSupported
from engine.kit.checks import check_prompt
from engine.media import Speech
from engine.types import EngineInfo, GenerateRequest, NextHandoff

log = logging.getLogger(__name__)

NOT_SPEECH = "This model transcribes speech and does nothing else: send audio to /v1/audio/transcriptions."
_NO_PROFILE = "no profile is recorded of a model that transcribes"


class WhisperEngine(ThreadedEngine[WhisperCore]):
    """A Whisper model behind the `Engine` protocol. Of sampling parameters it knows the temperature, the seed, the
    number of tokens and whether log-probabilities are wanted, those of the tokens themselves."""

    async def start(self) -> None:
        ready: asyncio.Future[EngineInfo] = asyncio.get_running_loop().create_future()
        self._start_thread(self._run, ready)
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

    async def reset_prefix_cache(self) -> None:
        await self._ask(WhisperCore.forget)

    async def release_memory(self, tags: Collection[Tag], level: int) -> None:
        await self._ask(lambda core: core.release_memory(tags))

    async def resume_memory(self, tags: Collection[Tag]) -> None:
        await self._ask(lambda core: core.resume_memory(tags))

    async def continue_handoff(self, following: NextHandoff) -> bool:
        return False

    async def start_profile(self) -> None:
        raise NotSupported(_NO_PROFILE)

    async def stop_profile(self, trace: str) -> None:
        raise NotSupported(_NO_PROFILE)

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

    # The engine thread.

    def _run(self, ready: "asyncio.Future[EngineInfo]") -> None:
        try:
            began = time.monotonic()
            log.info("loading the model in %s", self._config.model)
            torch.set_num_threads(compute_threads(self._config.threads))
            core = WhisperCore(self._config, WhisperModel(self._config))
            self._window_bytes = 4 * core.sizes.bins * core.sizes.frames
            self._settle(ready, self._describe(core, time.monotonic() - began))
        except Exception as error:
            self._fail_start(ready, error)
            return
        self._run_steps(core, nullcontext())

    def _step(self, core: WhisperCore) -> None:
        self._call(self._deliver, core.step(), core.stats())

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
