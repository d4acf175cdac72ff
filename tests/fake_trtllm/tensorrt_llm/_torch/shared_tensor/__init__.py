"""`tensorrt_llm._torch.shared_tensor`: CPU tensors in POSIX shared memory, described by a dict that is safe in JSON."""

from base64 import b64decode, b64encode
from typing import Any, Self

import torch

__all__ = ["SharedTensorContainer"]

CPU = 2
untaken: dict[str, dict[str, Any]] = {}
"""What was made in this process and not rebuilt in it, by handle."""


def free() -> None:
    """Take whatever nobody has taken."""
    for info in list(untaken.values()):
        SharedTensorContainer(CPU, info).get_local_view()


class SharedTensorContainer:
    """A tensor and the dict from which another process can rebuild it, once.

    Until then the producer's memory is held.
    """

    def __init__(self, method_key: int, tensor_info: dict[str, Any], tensor: torch.Tensor | None = None) -> None:
        self.method_key = method_key
        self.tensor_info = tensor_info
        self._tensor = tensor

    @classmethod
    def from_tensor(cls, tensor: torch.Tensor) -> Self:
        storage = tensor.cpu().untyped_storage()
        manager, handle, size = storage._share_filename_cpu_()
        storage._shared_incref()
        info = {
            "tensor_storage_offset": tensor.storage_offset(),
            "tensor_size": list(tensor.shape),
            "tensor_stride": list(tensor.stride()),
            "manager_handle": b64encode(manager).decode(),
            "storage_handle": b64encode(handle).decode(),
            "storage_size": size,
            "storage_dtype": str(tensor.dtype),
        }
        untaken[info["storage_handle"]] = info
        return cls(CPU, info, tensor)

    @classmethod
    def from_dict(cls, tensor_info: dict[str, Any]) -> Self:
        info = dict(tensor_info)
        method_key = info.pop("method_key")
        if method_key != CPU:
            raise ValueError(f"this machine has no CUDA device for a tensor of method {method_key}")
        return cls(method_key, info)

    def dump_to_dict(self) -> dict[str, Any]:
        return {"method_key": self.method_key, **self.tensor_info}

    def get_local_view(self) -> torch.Tensor:
        if self._tensor is None:
            info = self.tensor_info
            manager, handle = b64decode(info["manager_handle"]), b64decode(info["storage_handle"])
            storage = torch.UntypedStorage._new_shared_filename_cpu(manager, handle, info["storage_size"])
            storage._shared_decref()
            untaken.pop(info["storage_handle"], None)
            empty = torch.empty(0, dtype=getattr(torch, info["storage_dtype"].removeprefix("torch.")))
            self._tensor = empty.set_(
                storage, info["tensor_storage_offset"], info["tensor_size"], info["tensor_stride"]
            )
        return self._tensor
