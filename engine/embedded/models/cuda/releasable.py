"""Device memory that is given back while its addresses stay, so that CUDA graphs remain valid (docs/decisions/0017).

The CUDA driver separates addresses from memory: addresses are reserved once, memory is created and mapped behind them,
and unmapped when the engine sleeps.
"""

import math
from typing import NamedTuple

import torch

from engine.embedded.kv.host_tier import Device
from engine.embedded.models.shared_weights import bytes_at
from engine.errors import EngineFailure
from engine.memory.client import rounded
from engine.memory.device import READ_AND_WRITE, Driver
from engine.memory.wire import MemoryServiceError
from engine.transfer.base import TransferError


class _Segment(NamedTuple):
    address: int
    size: int


class ReleasableMemory:
    """Tensors of one device whose memory can be released. Everything raises EngineFailure if the driver refuses."""

    def __init__(self, device: torch.device, driver: Driver | None = None) -> None:
        self._device = device
        self._ordinal = device.index or 0
        self._segments: list[_Segment] = []
        self._released = False
        self._kept: dict[_Segment, int] = {}
        """Addresses of copies in memory of the host, while that is where the contents are."""
        self._host = Device(device)
        try:
            self._driver = driver or Driver()
            self._granularity = self._driver.granularity(self._ordinal)
        except MemoryServiceError as error:
            raise EngineFailure(f"this GPU cannot give memory back and keep its addresses: {error}") from error

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Allocate memory of its own for a tensor."""
        size = math.prod(shape) * dtype.itemsize
        try:
            whole = rounded(size, self._granularity)
            segment = _Segment(self._driver.reserve(whole), whole)
            self._map(segment)
        except MemoryServiceError as error:
            raise EngineFailure(f"{size} bytes of the GPU's memory cannot be had: {error}") from error
        self._segments.append(segment)
        return bytes_at(segment.address, size, self._device).view(dtype).view(shape)

    def place(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a copy here; small tensors, such as norms, as they are."""
        if tensor.nbytes < self._granularity:
            return tensor
        if self._device.type == "cuda":
            torch.cuda.empty_cache()  # of the tensor that was placed before
        return self.empty(tuple(tensor.shape), tensor.dtype).copy_(tensor)

    def release(self, *, keep: bool) -> None:
        """Give the memory back, with a copy of the contents in memory of the host if they are to be kept. If they were
        kept and need not be any more, drop the copy. Nothing may use the memory."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        if self._released:
            if not keep:
                self._forget()
            return
        try:
            if keep:
                self._kept = {segment: self._host.allocate(segment.size) for segment in self._segments}
                self._copy(to_host=True)
            for segment in self._segments:
                self._driver.unmap(*segment)
        except (MemoryServiceError, TransferError, OSError) as error:
            self._forget()
            raise EngineFailure(f"the GPU's memory cannot be given back: {error}") from error
        self._released = True
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def resume(self) -> bool:
        """Take memory again; return whether the contents are there, which otherwise are undefined. What was not
        released is there."""
        if not self._released:
            return True
        mapped: list[_Segment] = []
        kept = bool(self._kept)
        try:
            for segment in self._segments:
                self._map(segment)
                mapped.append(segment)
            if kept:
                self._copy(to_host=False)
        except (MemoryServiceError, TransferError) as error:
            for segment in mapped:
                self._driver.unmap(*segment)
            raise EngineFailure(f"the GPU's memory cannot be had again: {error}") from error
        self._released = False
        self._forget()
        return kept

    def _map(self, segment: _Segment) -> None:
        handle = self._driver.create(self._ordinal, segment.size)
        try:
            self._driver.map(segment.address, segment.size, handle)
        finally:
            self._driver.release(handle)  # the mapping keeps the memory
        self._driver.allow(segment.address, segment.size, self._ordinal, READ_AND_WRITE)

    def _copy(self, *, to_host: bool) -> None:
        with self._host.copies() as copies:
            for segment, host in self._kept.items():
                ends = (host, segment.address) if to_host else (segment.address, host)
                copies.copy(*ends, segment.size)
            copies.wait()

    def _forget(self) -> None:
        self._kept = {}
        self._host.close()
