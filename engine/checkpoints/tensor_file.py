"""Write and read safetensors files of 16-bit floats without torch: a header, then the bytes of the tensors in order."""

import json
import struct
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np

Progress = Callable[[int, int], None]
"""Called repeatedly with the bytes written so far, and the total."""


def write_tensors(
    path: Path, shapes: dict[str, list[int]], blocks: Iterable[bytes], progress: Progress, dtype: str = "BF16"
) -> None:
    """Write tensors of these names and shapes, in BF16 or F16. `blocks` are their bytes in order, split anywhere."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    total = 0
    for name, shape in shapes.items():
        end = total + 2 * int(np.prod(shape))
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [total, end]}
        total = end
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(encoded)) + encoded)
        done = 0
        for block in blocks:
            done += file.write(block)
            progress(done, total)


class TensorFile:
    """Tensors of a safetensors file, mapped into memory."""

    def __init__(self, path: Path) -> None:
        """Open a file. Raises ValueError if a tensor is not BF16 or F16, OSError if the file cannot be read."""
        with path.open("rb") as file:
            (size,) = struct.unpack("<Q", file.read(8))
            header = json.loads(file.read(size))
        self.metadata: dict[str, str] = header.pop("__metadata__", {})
        if others := {entry["dtype"] for entry in header.values()} - {"BF16", "F16"}:
            raise ValueError(f"{path} has tensors of {', '.join(sorted(others))}; only BF16 and F16 are supported")
        self._entries: dict[str, Any] = header
        self._bytes = np.memmap(path, np.uint8, "r", offset=8 + size)

    @property
    def shapes(self) -> dict[str, list[int]]:
        return {name: entry["shape"] for name, entry in self._entries.items()}

    def bits(self, name: str) -> np.ndarray:
        """Return a tensor's 16-bit values as uint16, in its shape."""
        entry = self._entries[name]
        begin, end = entry["data_offsets"]
        return self._bytes[begin:end].view(np.uint16).reshape(entry["shape"])

    def floats(self, name: str) -> np.ndarray:
        """Return a tensor as float32."""
        bits = self.bits(name)
        if self._entries[name]["dtype"] == "F16":
            return bits.view(np.float16).astype(np.float32)
        return (bits.astype(np.uint32) << 16).view(np.float32)


def bfloat16(weights: np.ndarray) -> bytes:
    """Return finite float32 weights as bfloat16 bytes, rounded to nearest, ties to even."""
    bits = np.ascontiguousarray(weights, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype("<u2").tobytes()
