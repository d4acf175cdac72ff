"""TensorRT-LLM's encoder as an `Engine`, so that a process of its own can host it: loading it takes minutes, and its processor runs on
the loop of whoever calls it. A request with media yields one delta, which holds their encoding.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator

from engine import handoff
from engine.config import TrtllmEncoderConfig
from engine.errors import EngineError, EngineFailure, EngineNotReady, InvalidRequest
from engine.kit.stream import DeltaStream, EventFeed, Latest
from engine.kv_events import KvEvent
from engine.stats import IterationStats
from engine.trtllm.disaggregation import BACKEND
from engine.trtllm.encoder import TrtllmEncoder
from engine.trtllm.media import inputs_of
from engine.types import Delta, EngineInfo, GenerateRequest, Held, Media

log = logging.getLogger(__name__)


class EncodingEngine:
    """What an encode replica's engine process runs. It has no tokens, no KV blocks, and nothing to tell of them."""

    def __init__(self, config: TrtllmEncoderConfig) -> None:
        self._config = config
        self._inner = TrtllmEncoder(config)
        self._info: EngineInfo | None = None
        self._tasks: dict[DeltaStream, asyncio.Task[None]] = {}
        self._stats: Latest[IterationStats] = Latest()
        self._events: EventFeed[KvEvent] = EventFeed()

    @property
    def info(self) -> EngineInfo:
        if self._info is None:
            raise EngineNotReady("the encoder has not started")
        return self._info

    @property
    def healthy(self) -> bool:
        return self._inner.healthy

    async def start(self) -> None:
        await self._inner.start()
        self._info = EngineInfo(
            backend=BACKEND,
            model=self._config.model,
            dtype=str(self._config.arguments.get("dtype", "auto")),
            device="cuda",
            context_length=0,
            vocab_size=0,
            eos_token_ids=(),
            block_size=0,
            num_blocks=0,
            max_num_seqs=0,
            max_num_tokens=0,
            load_seconds=self._inner.load_seconds,
        )

    def generate(self, request: GenerateRequest) -> DeltaStream:
        if request.media is None:
            return DeltaStream.failed(InvalidRequest("an encode replica takes prompts with images alone", "prompt"))
        stream = DeltaStream(lambda: self._tasks[stream].cancel())
        task = self._tasks[stream] = asyncio.create_task(self._encode(request.media, stream))
        task.add_done_callback(lambda _: self._tasks.pop(stream))
        return stream

    def kv_events(self) -> AsyncGenerator[list[KvEvent], None]:
        return self._events.batches()

    def stats(self) -> AsyncIterator[IterationStats]:
        return self._stats.values()

    async def close(self) -> None:
        for stream, task in list(self._tasks.items()):
            stream.fail(EngineNotReady("the encoder is closing"))
            task.cancel()
        if self._tasks:
            await asyncio.wait(list(self._tasks.values()))
        await self._inner.close()
        self._stats.close()
        self._events.close()

    async def _encode(self, media: Media, stream: DeltaStream) -> None:
        try:
            encoding = await self._inner.encode(media.text, inputs_of(media))
            stream.put(Delta((), finish_reason="stop", held=Held(handoff.encode(encoding))))
        except EngineError as error:
            stream.fail(error)
        except Exception as error:  # a bug, or no memory: whoever waits has to get to know
            log.exception("images could not be encoded")
            stream.fail(EngineFailure(f"the images could not be encoded: {type(error).__name__}"))
