"""Weights on a GPU whose memory is given back while their addresses stay, so that CUDA graphs remain valid
(docs/decisions/0019).

The CUDA driver separates addresses from memory: addresses are reserved once, and memory is mapped behind them, unmapped
when the engine sleeps and mapped again when it wakes.
"""

from collections.abc import Callable

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
        """Addresses of copies in memory of the host. Pinning it takes seconds, so it stays for the next sleep."""
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
        """Give the memory back, with a copy of the contents in memory of the host if they are to be kept, and without
        an earlier copy if they need not be. Nothing may use the memory."""
        try:
            if not keep:
                self.forget()
            if self._released:
                return
            self._settle()
            if keep and not self._kept:
                self._kept = {memory: self._host.allocate(size) for memory, size in self._memory.items()}
                with self._host.copies() as copies:
                    for memory, host in self._kept.items():
                        copies.copy(host, memory.address, self._memory[memory])
                    copies.wait()
            self._released = True
            for memory in self._memory:
                memory.release()
        except (MemoryServiceError, TransferError, OSError) as error:
            if not self._released:
                self.forget()
            raise EngineFailure(f"the memory of weights cannot be given back: {error}") from error

    def resume(self, meanwhile: Callable[[], None] = lambda: None) -> bool:
        """Take memory again; return whether the contents are there, which otherwise are undefined. What was not
        released is there. `meanwhile` is called while they are copied."""
        if not self._released:
            meanwhile()
            return True
        try:
            for memory in self._memory:
                memory.take()
            with self._host.copies() as copies:
                for memory, host in self._kept.items():
                    copies.copy(memory.address, host, self._memory[memory])
                if self._kept:
                    meanwhile()
                copies.wait()
        except (MemoryServiceError, TransferError) as error:
            for memory in self._memory:
                memory.release()
            raise EngineFailure(f"memory for weights cannot be had again: {error}") from error
        self._released = False
        return bool(self._kept)

    def forget(self) -> None:
        """Drop the copy, which is not what the contents will be."""
        self._kept = {}
        self._host.close()

    def _settle(self) -> None:
        """Wait for the device, and give back what torch keeps for later."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
            torch.cuda.empty_cache()
