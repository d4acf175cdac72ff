"""Visual generation as a hosted service (`engine/process/`), and the client of it."""

from collections.abc import AsyncIterator, Awaitable, Callable

from engine.base import Latest
from engine.errors import EngineError
from engine.process.client import ServiceClient
from engine.process.service import Interface, Method, Topic
from engine.visual.base import VisualEngine, VisualPipeline, VisualStream
from engine.visual.engine import QueuedVisualEngine
from engine.visual.types import VisualConfig, VisualDelta, VisualInfo, VisualRequest, VisualStats


def create_visual_engine(config: VisualConfig) -> QueuedVisualEngine:
    """Return the engine for `config`, not yet started. The only place that imports the pipelines."""
    return QueuedVisualEngine(config, _pipeline(config))


def _pipeline(config: VisualConfig) -> VisualPipeline:
    if config.backend == "fake":
        from engine.fake.visual import FakePipeline  # noqa: PLC0415

        return FakePipeline(config)
    if config.backend == "trtllm":
        from engine.trtllm.visual import TrtllmVisualPipeline  # noqa: PLC0415

        return TrtllmVisualPipeline(config)
    from engine.visual.with_diffusers import DiffusersPipeline  # noqa: PLC0415

    return DiffusersPipeline(config)


VISUAL: Interface[VisualConfig, VisualEngine] = Interface(
    name="engine.visual.service:VISUAL",
    noun="visual engine",
    config=VisualConfig,
    create=create_visual_engine,
    info=VisualInfo,
    methods={
        "generate": Method(
            VisualRequest,
            VisualDelta,
            lambda engine, request: engine.generate(request),
            VisualRequest.detach,
            VisualRequest.attach,
            too_large="the picture to change is too large",
            parameter="image",
        )
    },
    topics={"stats": Topic(VisualStats, lambda engine: engine.stats(), 0.1)},
    more_stop_seconds=lambda _: 5.0,
    hang_seconds=lambda config: config.hang_seconds,
)


class VisualClient(ServiceClient[VisualInfo]):
    """A `VisualEngine` that lives in another process."""

    def __init__(self, address: str, failed: Callable[[], Awaitable[str]] | None = None) -> None:
        super().__init__(VISUAL, address, failed)
        self._stats: Latest[VisualStats] = Latest()

    def generate(self, request: VisualRequest) -> VisualStream:
        key = -1
        stream = VisualStream(lambda: self.end(key, cancel=True))
        try:
            key = self.begin("generate", request, stream.put, stream.fail)
        except EngineError as error:
            return VisualStream.failed(error)
        stream.when_done(lambda: self.end(key, cancel=False))
        return stream

    def stats(self) -> AsyncIterator[VisualStats]:
        self.subscribe("stats", self._stats.publish)
        return self._stats.values()

    async def close(self) -> None:
        await super().close()
        self._stats.close()
