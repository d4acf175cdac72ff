"""The engine as a hosted service."""

import msgspec

from engine.base import Engine, Preparable
from engine.config import EmbeddedConfig, EngineConfig
from engine.create import create_engine
from engine.kv_events import KvEvent
from engine.process.service import Interface, Method, Topic
from engine.stats import IterationStats
from engine.types import Delta, EngineInfo, GenerateRequest

_STATS_SECONDS = 0.1
"""Each report wakes five threads of two processes, which a step on a few cores feels."""


async def _prepare(engine: Engine) -> None:
    if isinstance(engine, Preparable):
        await engine.prepare()


def _successor(config: EngineConfig, engine: Engine) -> EngineConfig:
    """On a GPU the KV blocks of an engine that stands by take the place of those of the one that serves."""
    if not isinstance(config, EmbeddedConfig) or not engine.info.device.startswith("cuda"):
        return config
    return msgspec.structs.replace(config, num_blocks=engine.info.num_blocks, kv_memory_later=True)


async def _reset(engine: Engine) -> bool:
    await engine.reset_prefix_cache()
    return True


ENGINE: Interface[EngineConfig, Engine] = Interface(
    name="engine.process.engine_service:ENGINE",
    noun="engine",
    config=EngineConfig,
    create=create_engine,
    info=EngineInfo,
    methods={
        "generate": Method(
            GenerateRequest,
            Delta,
            lambda engine, request: engine.generate(request),
            GenerateRequest.detach,
            GenerateRequest.attach,
            too_large="the prompt, images included, is too large",
            parameter="prompt",
        ),
        "reset_prefix_cache": Method(bool, bool, lambda engine, _: _reset(engine)),
    },
    topics={
        "stats": Topic(IterationStats, lambda engine: engine.stats(), _STATS_SECONDS),
        "kv_events": Topic(list[KvEvent], lambda engine: engine.kv_events()),
    },
    prepare=_prepare,
    successor=_successor,
    more_stop_seconds=lambda config: config.extra_stop_seconds,
    hang_seconds=lambda config: config.hang_seconds,
)
