"""Weights in memory of the memory service (`engine/memory/`), which other engines of the host map too."""

import logging
from pathlib import Path
from types import TracebackType
from typing import Self

from blake3 import blake3

from engine.config import EmbeddedConfig
from engine.embedded.kv.disk_tier import digest_of
from engine.memory.client import HostPages, Lease, acquire, rounded
from engine.memory.wire import MemoryServiceError

log = logging.getLogger(__name__)


class SharedWeights:
    """The share that one engine has in the memory service. A context manager, inside which weights are loaded: what is
    filled there is shared at its end, unless it ends with an error.

    Where the service is of no use the engine keeps weights of its own. That is logged once, and counted.
    """

    def __init__(self, config: EmbeddedConfig) -> None:
        self._service = config.memory_service
        self._folder = Path(config.model)
        self._pages: HostPages | None = None
        self.bytes = 0
        """Bytes of weights that the service owns."""
        self.failure = ""
        """Why the service was of no use; empty if it was, or if there is none."""

    def host_pages(self, size: int, *layout: object) -> HostPages | None:
        """Return memory of the host for weights in a layout; None if it has to be this process's own."""
        if not self._service:
            return None
        size = rounded(size)
        try:
            self._pages = HostPages(self._lease(size, layout), size)
        except MemoryServiceError as error:
            self.give_up(str(error))
            return None
        self.bytes = size
        return self._pages

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._pages is None or self._pages.filled:
            return
        if error is not None:
            self._pages.close()  # the next engine begins again
            return
        try:
            self._pages.done()
        except MemoryServiceError as failure:
            self.give_up(str(failure))

    def _lease(self, size: int, layout: tuple[object, ...], device: str = "") -> Lease:
        try:
            files, folder = _facts(self._folder), self._folder
            return acquire(Path(self._service), size, repr(layout), files, lambda: digest_of(folder), device)
        except OSError as error:
            raise MemoryServiceError(f"the weights in {self._folder} cannot be read: {error}") from error

    def give_up(self, reason: str) -> None:
        """Note that this engine keeps weights of its own, if it was to share them."""
        if self._service:
            self.bytes = 0
            self.failure = reason
            log.warning("this engine keeps weights of its own; the memory service is of no use: %s", reason)


def _facts(folder: Path) -> bytes:
    """Return what differs once a file of the weights, or config.json, has been written to. Raises OSError."""
    paths = sorted([folder / "config.json", *folder.glob("*.safetensors"), *folder.glob("*.gguf")])
    stats = [(path.name, path.stat()) for path in paths]
    facts = [(name, stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns) for name, stat in stats]
    return blake3(repr(facts).encode()).digest()
