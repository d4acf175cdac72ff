"""Creation of the engine of a configuration. Only this module imports the backends, each only when it is chosen."""

from pathlib import Path

from engine.base import Engine
from engine.checkpoints.facts import transcribes
from engine.config import EmbeddedConfig, EngineConfig, FakeConfig, TrtllmConfig
from engine.kit.processors import register_all
from engine.sleep import ReleasableEngine, SleepingEngine


def create_engine(config: EngineConfig) -> Engine:
    """Return the engine for `config`, not yet started."""
    backend = _backend(config)
    return backend if config.sleep is None else SleepingEngine(backend, config.sleep)


def preload(config: EngineConfig) -> None:
    """Import the slow modules that the engine imports when it starts."""
    if isinstance(config, EmbeddedConfig) and not transcribes(Path(config.model)):
        from engine.embedded.models.load import import_runner  # noqa: PLC0415

        import_runner(config)


def _backend(config: EngineConfig) -> ReleasableEngine:
    if isinstance(config, FakeConfig):
        from engine.fake.engine import FakeEngine  # noqa: PLC0415

        return FakeEngine(config)
    register_all(config.processors)
    if isinstance(config, TrtllmConfig):
        from engine.trtllm.engine import TrtllmEngine  # noqa: PLC0415

        return TrtllmEngine(config)
    if transcribes(Path(config.model)):
        from engine.embedded.whisper.engine import WhisperEngine  # noqa: PLC0415

        return WhisperEngine(config)
    from engine.embedded.engine import EmbeddedEngine  # noqa: PLC0415

    return EmbeddedEngine(config)
