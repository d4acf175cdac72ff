"""The engine as a hosted service."""

from collections.abc import Coroutine
from typing import Any

from engine.base import Engine
from engine.config import EngineConfig
from engine.create import create_engine
from engine.kv_events import KvEvent
from engine.process.service import Interface, Method, Topic
from engine.stats import IterationStats
from engine.types import Delta, EngineInfo, GenerateRequest

_STATS_SECONDS = 0.1
"""Each report wakes five threads of two processes, which a step on a few cores feels."""


async def _done(operation: Coroutine[Any, Any, None]) -> bool:
    await operation
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
        "reset_prefix_cache": Method(bool, bool, lambda engine, _: _done(engine.reset_prefix_cache())),
        "start_profile": Method(bool, bool, lambda engine, _: _done(engine.start_profile())),
        "stop_profile": Method(str, bool, lambda engine, trace: _done(engine.stop_profile(trace))),
    },
    topics={
        "stats": Topic(IterationStats, lambda engine: engine.stats(), _STATS_SECONDS),
        "kv_events": Topic(list[KvEvent], lambda engine: engine.kv_events()),
    },
    more_stop_seconds=lambda config: config.extra_stop_seconds,
    hang_seconds=lambda config: config.hang_seconds,
)
