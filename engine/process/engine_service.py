"""The engine as a hosted service."""

from collections.abc import AsyncIterator, Coroutine
from typing import Any

import msgspec

from engine.base import Engine, Preparable
from engine.config import EmbeddedConfig, EngineConfig, Tag
from engine.create import anticipate, create_engine, preload
from engine.errors import NotSupported
from engine.kv_events import KvEvent
from engine.process.service import Interface, Method, Topic
from engine.sleep import SleepingEngine, SleepOrder, SleepState
from engine.stats import IterationStats
from engine.types import Delta, EngineInfo, GenerateRequest, NextHandoff

_STATS_SECONDS = 0.1
"""Minimum time between reports: each one wakes five threads of two processes, which slows steps down on a few cores."""


async def _prepare(engine: Engine) -> None:
    if isinstance(engine, Preparable):
        await engine.prepare()


def _successor(config: EngineConfig, engine: Engine) -> EngineConfig:
    """Return a standby engine's configuration, with the size of the serving engine's KV cache, whose place on a GPU it
    takes."""
    if not isinstance(config, EmbeddedConfig) or not engine.info.device.startswith("cuda"):
        return config
    return msgspec.structs.replace(config, num_blocks=engine.info.num_blocks, kv_memory_later=True)


async def _done(operation: Coroutine[Any, Any, None]) -> bool:
    await operation
    return True


async def _sleep(engine: Engine, order: SleepOrder) -> SleepState:
    return await _sleeper(engine).sleep(order)


async def _wake_up(engine: Engine, tags: tuple[Tag, ...]) -> SleepState:
    return await _sleeper(engine).wake_up(tags)


def _sleeper(engine: Engine) -> SleepingEngine:
    if not isinstance(engine, SleepingEngine):
        raise NotSupported("The engine at ENGINE_ADDRESS was started without ADMIN_KEY and SLEEP_AFTER_IDLE_SECONDS.")
    return engine


async def _sleep_states(engine: Engine) -> AsyncIterator[SleepState]:
    if isinstance(engine, SleepingEngine):
        async for state in engine.sleep_states():
            yield state


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
        "continue_handoff": Method(NextHandoff, bool, lambda engine, following: engine.continue_handoff(following)),
        "reset_prefix_cache": Method(bool, bool, lambda engine, _: _done(engine.reset_prefix_cache())),
        "start_profile": Method(bool, bool, lambda engine, _: _done(engine.start_profile())),
        "stop_profile": Method(str, bool, lambda engine, trace: _done(engine.stop_profile(trace))),
        "sleep": Method(SleepOrder, SleepState, _sleep),
        "wake_up": Method(tuple[Tag, ...], SleepState, _wake_up),
    },
    topics={
        "stats": Topic(IterationStats, lambda engine: engine.stats(), _STATS_SECONDS),
        "kv_events": Topic(list[KvEvent], lambda engine: engine.kv_events()),
        "sleep_states": Topic(SleepState, _sleep_states),
    },
    anticipate=anticipate,
    preload=preload,
    prepare=_prepare,
    successor=_successor,
    more_stop_seconds=lambda config: config.extra_stop_seconds,
    hang_seconds=lambda config: config.hang_seconds,
)
