"""Weights on a GPU whose memory is given back while their addresses stay, so that CUDA graphs remain valid
(docs/decisions/0019).

The CUDA driver separates addresses from memory: addresses are reserved once, and memory is mapped behind them, unmapped
when the engine sleeps and mapped again when it wakes.
"""

import torch

from engine.embedded.kv.host_tier import Device
from engine.embedded.models.shared_weights import bytes_at
from engine.errors import EngineFailure
from engine.memory.device import ReservedDeviceMemory
from engine.memory.wire import MemoryServiceError
from engine.transfer.base import TransferError

_SMALL = 1 << 20
"""Bytes of tensors that stay where they are, such as norms: memory is mapped in pieces of two MiB."""


class ReleasableWeights:
    """Tensors of one device whose memory can be released. Raises EngineFailure if the driver refuses."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._memory: dict[ReservedDeviceMemory, int] = {}
        """Memory of each tensor, and its size."""
        self._released = False
        self._kept: dict[ReservedDeviceMemory, int] = {}
        """Addresses of copies in memory of the host, while that is where the contents are."""
        self._host = Device(device)

    def place(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a copy that can be released; a small tensor as it is."""
        if tensor.nbytes < _SMALL:
            return tensor
        self._settle()  # the tensor that was placed before is used no more
        try:
            memory = ReservedDeviceMemory(tensor.nbytes, self._device.index or 0)
            memory.take()
        except MemoryServiceError as error:
            raise EngineFailure(f"memory for weights that can be given back cannot be had: {error}") from error
        self._memory[memory] = tensor.nbytes
        return bytes_at(memory.address, tensor.nbytes, self._device).view(tensor.dtype).view(tensor.shape).copy_(tensor)

    def release(self, *, keep: bool) -> None:
        """Give the memory back, with a copy of the contents in memory of the host if they are to be kept. If they were
        kept and need not be any more, drop the copy. Nothing may use the memory."""
        if self._released:
            if not keep:
                self._forget()
            return
        self._settle()
        try:
            if keep:
                self._kept = {memory: self._host.allocate(size) for memory, size in self._memory.items()}
                self._copy(to_host=True)
            self._released = True
            for memory in self._memory:
                memory.release()
        except (MemoryServiceError, TransferError, OSError) as error:
            if not self._released:
                self._forget()
            raise EngineFailure(f"the memory of weights cannot be given back: {error}") from error

    def resume(self) -> bool:
        """Take memory again; return whether the contents are there, which otherwise are undefined. What was not
        released is there."""
        if not self._released:
            return True
        kept = bool(self._kept)
        try:
            for memory in self._memory:
                memory.take()
            if kept:
                self._copy(to_host=False)
        except (MemoryServiceError, TransferError) as error:
            for memory in self._memory:
                memory.release()
            raise EngineFailure(f"memory for weights cannot be had again: {error}") from error
        self._released = False
        self._forget()
        return kept

    def _copy(self, *, to_host: bool) -> None:
        with self._host.copies() as copies:
            for memory, host in self._kept.items():
                ends = (host, memory.address) if to_host else (memory.address, host)
                copies.copy(*ends, self._memory[memory])
            copies.wait()

    def _forget(self) -> None:
        self._kept = {}
        self._host.close()

    def _settle(self) -> None:
        """Wait for the device, and give back what torch keeps for later."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
            torch.cuda.empty_cache()
