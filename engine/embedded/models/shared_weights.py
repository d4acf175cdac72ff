"""Weights in memory of the memory service (`engine/memory/`), which other engines of the host map too."""

import ctypes
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Self

import torch
from blake3 import blake3

from engine.config import EmbeddedConfig
from engine.embedded.kv.disk_tier import digest_of
from engine.memory.client import DevicePages, HostPages, Pages, acquire, rounded
from engine.memory.device import Driver
from engine.memory.wire import MemoryServiceError

log = logging.getLogger(__name__)

_ALIGNMENT = 256
"""Bytes to which tensors are aligned: as by CUDA's allocator, and more than any instruction needs."""


class SharedWeights:
    """The weights that one engine has in the memory service.

    Load weights inside this context manager: those that are filled there are shared when it ends without an error. If
    the service cannot be used, the engine has weights of its own, which is logged once and counted.
    """

    def __init__(self, config: EmbeddedConfig) -> None:
        self._service = config.memory_service
        self._folder = Path(config.model)
        self._pages: Pages | None = None
        self.bytes = 0
        """Bytes of weights that the service owns."""
        self.failure = ""
        """Reason why the service could not be used; empty if it could, or if none is configured."""

    def pages(self, size: int, device: torch.device, *layout: object) -> Pages | None:
        """Return memory on a device for weights in a layout; None if this process has to allocate it."""
        if not self._service:
            return None
        try:
            self._pages = self._leased(size, device, repr(layout))
        except MemoryServiceError as error:
            self.give_up(str(error))
            return None
        self.bytes = self._pages.size
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
            self._pages.close()  # others wait for this memory
            self.give_up(str(failure))

    def _leased(self, size: int, device: torch.device, layout: str) -> Pages:
        """Lease weights from the memory service. Raises MemoryServiceError."""
        service, folder = Path(self._service), self._folder
        try:
            facts = _facts(folder)
            if device.type == "cpu":
                size = rounded(size)
                return HostPages(acquire(service, size, layout, facts, lambda: digest_of(folder)), size)
            driver, ordinal = Driver(), device.index or 0
            size = rounded(size, driver.granularity(ordinal))
            uuid = driver.uuid(ordinal)
            lease = acquire(service, size, layout, facts, lambda: digest_of(folder), uuid)
            return DevicePages(lease, driver, ordinal, size)
        except OSError as error:
            raise MemoryServiceError(f"the weights in {folder} cannot be read: {error}") from error

    def give_up(self, reason: str) -> None:
        """Note that this engine keeps weights of its own, if it was to share them."""
        if self._service:
            self.bytes = 0
            self.failure = reason
            log.warning("this engine keeps weights of its own; the memory service is of no use: %s", reason)


Move = Callable[[Callable[[torch.Tensor], torch.Tensor]], None]
"""Replaces each of some tensors by the result of a function for it, always in the same order."""


class TensorLayout:
    """Places of tensors one behind the other, known from their shapes alone: they may be on torch's device `meta`."""

    def __init__(self, move: Move) -> None:
        self._tensors: list[tuple[torch.Size, torch.dtype]] = []
        self.size = 0

        def note(tensor: torch.Tensor) -> torch.Tensor:
            self._tensors.append((tensor.shape, tensor.dtype))
            self.size += rounded(tensor.numel() * tensor.dtype.itemsize, _ALIGNMENT)
            return tensor

        move(note)

    def views(self, pages: Pages, device: torch.device) -> Callable[[torch.Tensor], torch.Tensor]:
        """Return a function that returns the tensors in leased memory, in order."""
        places = self._places(pages, device)
        return lambda _: next(places)

    def copy(self, move: Move, pages: Pages, device: torch.device) -> None:
        """Copy tensors into leased memory and replace them by the copies."""
        assert TensorLayout(move)._tensors == self._tensors, "the layout was made of tensors of other shapes"
        places = self._places(pages, device)
        move(lambda tensor: next(places).copy_(tensor))

    def _places(self, pages: Pages, device: torch.device) -> Iterator[torch.Tensor]:
        offset = 0
        for shape, dtype in self._tensors:
            size = shape.numel() * dtype.itemsize
            yield bytes_at(pages.address + offset, size, device).view(dtype).view(shape)
            offset += rounded(size, _ALIGNMENT)


class _DeviceBytes:
    """Bytes of a CUDA device, as torch takes other libraries' arrays."""

    def __init__(self, address: int, size: int) -> None:
        self.__cuda_array_interface__ = {"shape": (size,), "typestr": "|u1", "data": (address, False), "version": 3}


def bytes_at(address: int, size: int, device: torch.device) -> torch.Tensor:
    """Return memory as uint8 [size]; whoever uses it keeps it mapped."""
    if device.type == "cpu":
        return torch.frombuffer((ctypes.c_char * size).from_address(address), dtype=torch.uint8)
    return torch.as_tensor(_DeviceBytes(address, size), device=device)


def _facts(folder: Path) -> bytes:
    """Return what differs once a file of the weights, or config.json, has been written to. Raises OSError."""
    paths = sorted([folder / "config.json", *folder.glob("*.safetensors"), *folder.glob("*.gguf")])
    stats = [(path.name, path.stat()) for path in paths]
    facts = [(name, stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns) for name, stat in stats]
    return blake3(repr(facts).encode()).digest()
