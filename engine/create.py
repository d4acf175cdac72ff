"""Makes the engine of a configuration: the only module that imports the backends, each only when it is chosen."""

from engine.base import Engine
from engine.config import EngineConfig, FakeConfig, TrtllmConfig
from engine.kit.processors import register_all
from engine.sleep import ReleasableEngine, SleepingEngine


def create_engine(config: EngineConfig) -> Engine:
    """Return the engine for `config`, not yet started."""
    backend = _backend(config)
    return backend if config.sleep is None else SleepingEngine(backend, config.sleep)


def _backend(config: EngineConfig) -> ReleasableEngine:
    if isinstance(config, FakeConfig):
        from engine.fake.engine import FakeEngine  # noqa: PLC0415

        return FakeEngine(config)
    register_all(config.processors)
    if isinstance(config, TrtllmConfig):
        from engine.trtllm.engine import TrtllmEngine  # noqa: PLC0415

        return TrtllmEngine(config)
    from engine.embedded.engine import EmbeddedEngine  # noqa: PLC0415

    return EmbeddedEngine(config)
