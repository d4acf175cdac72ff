"""Creation of the engine of a configuration. Only this module imports the backends, each only when it is chosen."""

import ctypes
import threading
from contextlib import suppress
from importlib.metadata import version
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


def anticipate(device: str) -> None:
    """Import what the embedded engine needs on a device (`EmbeddedConfig.device`), while the driver opens the GPU."""
    if device != "cpu":
        threading.Thread(target=_open_gpu, args=(device,), daemon=True).start()
    import engine.embedded.engine  # noqa: F401, PLC0415


def preload(config: EngineConfig) -> None:
    """Import the slow modules that the engine needs: those of its own, and those that it imports when it starts."""
    if isinstance(config, EmbeddedConfig) and not transcribes(Path(config.model)):
        import engine.embedded.engine  # noqa: F401, PLC0415
        from engine.embedded.models.load import import_runner  # noqa: PLC0415

        import_runner(config)


def _open_gpu(device: str) -> None:
    """Have the driver make the context of a GPU, if there is one: that takes half a second, and no interpreter."""
    # No torch, a machine without NVIDIA's driver, no number of a GPU: whoever needs them says so.
    with suppress(ImportError, OSError, ValueError):
        if version("torch").endswith("+cpu"):
            return
        driver = ctypes.CDLL("libcuda.so.1")
        driver.cuInit(0)
        driver.cuDevicePrimaryCtxRetain(ctypes.byref(ctypes.c_void_p()), int(device.partition(":")[2] or 0))


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
