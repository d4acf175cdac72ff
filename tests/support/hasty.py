"""Engines whose host processes wait less for what never comes: `ServiceProcess(HASTY, config)`."""

from dataclasses import replace

from engine.base import Engine
from engine.config import EngineConfig
from engine.process.engine_service import ENGINE

STOP_SECONDS = 1.0
"""Instead of the ten that TensorRT-LLM may take to close."""


def _create(config: EngineConfig) -> Engine:
    """Runs in the host process alone."""
    from engine.trtllm import watching  # noqa: PLC0415 - the constants of the tests' process stay

    watching.BLOCKED_SECONDS = 1.0
    return ENGINE.create(config)


HASTY = replace(ENGINE, name="tests.support.hasty:HASTY", create=_create, more_stop_seconds=lambda config: STOP_SECONDS)
