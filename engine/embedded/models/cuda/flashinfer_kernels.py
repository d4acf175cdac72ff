"""FlashInfer's kernels for attention of prompts, which are compiled when a machine first needs them: that takes more
than a minute, beside everything else. Until then the engine computes prompts in small steps, with kernels of its own.
"""

import logging
import threading
import time
from importlib.util import find_spec

import torch

from engine.embedded.models.devices import UnsupportedModelError

log = logging.getLogger(__name__)


class FlashInferKernels:
    """Imports FlashInfer, and compiles and loads its kernels, in a thread of its own. Compilers are children of this
    process."""

    def __init__(self, device: torch.device, dtype: torch.dtype, cache_dtype: torch.dtype, head_dim: int) -> None:
        """`dtype` is that of queries, and of keys and values of a prompt's first step; `cache_dtype` that of the KV
        cache. Raises ImportError without FlashInfer."""
        if find_spec("flashinfer") is None:
            raise ImportError("flashinfer is not installed")
        self._device = device
        self._dtype = dtype
        self._kinds = list(dict.fromkeys((dtype, cache_dtype)))
        self._head_dim = head_dim
        self._error = ""
        self._missing = False
        """Whether a kernel has to be compiled; known once `_looked` is set."""
        self._looked, self._done = threading.Event(), threading.Event()
        threading.Thread(target=self._load, name="flashinfer", daemon=True).start()

    @property
    def ready(self) -> bool:
        """Whether all kernels are loaded."""
        return self._done.is_set() and not self._error

    def soon(self) -> bool:
        """Wait until it is known whether kernels have to be compiled; return whether they do not."""
        self._looked.wait()
        return not self._missing

    def wait(self) -> None:
        """Wait for the kernels. Raises UnsupportedModelError if they cannot be compiled."""
        self._done.wait()
        if self._error:
            raise UnsupportedModelError(f"FlashInfer's kernels cannot be had: {self._error}")

    def _load(self) -> None:
        started = time.monotonic()
        try:
            # Slow to import, so this thread does it. The first two are not part of FlashInfer's public interface: its
            # wrappers call them, with these arguments, when a step is planned.
            from flashinfer.jit import gen_batch_prefill_module  # noqa: PLC0415
            from flashinfer.prefill import get_batch_prefill_module  # noqa: PLC0415
            from flashinfer.utils import determine_attention_backend  # noqa: PLC0415

            kernels = []
            for kind in self._kinds:
                backend = determine_attention_backend(self._device, 0, False, False, self._dtype, kind)
                types = self._dtype, kind, self._dtype, torch.int32
                kernels.append((backend, *types, self._head_dim, self._head_dim, 0, False, False, False))
            self._missing = not all(gen_batch_prefill_module(*kernel).is_compiled for kernel in kernels)
            self._looked.set()
            for kernel in kernels:
                get_batch_prefill_module(*kernel)
        except Exception as error:  # whatever a compiler, its files or the package run into
            self._error = f"{type(error).__name__}: {error}"
            log.warning("FlashInfer's kernels cannot be had, so prompts are computed in small steps: %s", self._error)
        else:
            if self._missing:
                log.info("FlashInfer's kernels are compiled after %.1f s", time.monotonic() - started)
        finally:
            self._looked.set()
            self._done.set()
