"""The one reader of GGUF files: metadata, and tensors as the blocks that the file has. It dequantises nothing.

The format is described in ggml's docs/gguf.md, the block types in ggml's ggml-common.h. A model may be split into
several files; they are read as one. Everything is checked against the files' sizes before it is used.
"""

import mmap
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from engine.checkpoints.gguf.split import parts_of
from engine.errors import EngineFailure

Metadata = Mapping[str, Any]

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
"""Format codes of `struct` by the type numbers of metadata."""
_STRING, _ARRAY = 8, 9
_MOST_DIMENSIONS = 4


class BlockType(NamedTuple):
    """A storage format of weights, in blocks of a fixed size."""

    number: int
    """Type number in files (ggml.h)."""
    weights: int
    """Number of weights in a block."""
    size: int
    """Number of bytes in a block."""


BLOCK_TYPES = {
    "F32": BlockType(0, 1, 4),
    "F16": BlockType(1, 1, 2),
    "BF16": BlockType(30, 1, 2),
    "Q8_0": BlockType(8, 32, 34),
    "Q4_0": BlockType(2, 32, 18),
    "Q4_1": BlockType(3, 32, 20),
    "Q5_0": BlockType(6, 32, 22),
    "Q5_1": BlockType(7, 32, 24),
    "Q2_K": BlockType(10, 256, 84),
    "Q3_K": BlockType(11, 256, 110),
    "Q4_K": BlockType(12, 256, 144),
    "Q5_K": BlockType(13, 256, 176),
    "Q6_K": BlockType(14, 256, 210),
}
_TYPE_NAMES = {kind.number: name for name, kind in BLOCK_TYPES.items()}


class GgufTensor(NamedTuple):
    """Location, type and shape of a tensor."""

    name: str
    type: str
    """A key of BLOCK_TYPES."""
    shape: tuple[int, ...]
    """Shape in transformers' order, [outputs, inputs]; files list the last dimension first."""
    path: Path
    offset: int
    """Position of the tensor's first byte in the file."""

    @property
    def row_bytes(self) -> int:
        """Number of bytes in a row (the last dimension), which consists of whole blocks."""
        kind = BLOCK_TYPES[self.type]
        return self.shape[-1] // kind.weights * kind.size

    @property
    def rows(self) -> int:
        """Number of rows; a vector has one."""
        return int(np.prod(self.shape[:-1], dtype=np.int64))


class GgufFile:
    """The metadata and tensors of a GGUF model, in one file or split into several, mapped into memory."""

    def __init__(self, path: Path) -> None:
        """Open the file, or all files of a split model. Raises EngineFailure for a file that is truncated, damaged or
        of an unsupported type; the message names the file and the tensor.
        """
        self.paths = parts_of(path)
        self.metadata: dict[str, Any] = {}
        self.tensors: dict[str, GgufTensor] = {}
        self._maps: dict[Path, np.ndarray] = {}
        for number, part in enumerate(self.paths):
            metadata, tensors, self._maps[part] = _read(part)
            if metadata.get("split.count", 1) != len(self.paths) or metadata.get("split.no", number) != number:
                raise EngineFailure(
                    f"{part} says that it is part {metadata.get('split.no', 0) + 1} of "
                    f"{metadata.get('split.count', 1)}, and its name says {number + 1} of {len(self.paths)}: give the "
                    "parts the names that they were made with"
                )
            self.metadata = metadata | self.metadata
            for tensor in tensors:
                if tensor.name in self.tensors:
                    raise EngineFailure(f"{part} has the tensor {tensor.name} a second time")
                self.tensors[tensor.name] = tensor

    @property
    def path(self) -> Path:
        """The first file."""
        return self.paths[0]

    @property
    def weights(self) -> int:
        """Number of weights in all tensors."""
        return sum(tensor.rows * tensor.shape[-1] for tensor in self.tensors.values())

    def blocks(self, name: str, first: int = 0, rows: int | None = None) -> np.ndarray:
        """Return the stored bytes of a tensor, or of some of its rows, as uint8 [rows, row_bytes], without a copy."""
        tensor = self.tensors[name]
        count = tensor.rows - first if rows is None else min(rows, tensor.rows - first)
        start = tensor.offset + first * tensor.row_bytes
        return self._maps[tensor.path][start : start + count * tensor.row_bytes].reshape(count, tensor.row_bytes)


def _read(path: Path) -> tuple[dict[str, Any], list[GgufTensor], np.ndarray]:
    try:
        with path.open("rb") as file:
            if (start := file.read(len(_MAGIC))) != _MAGIC:
                found = f"it begins with {start!r}" if start else "it is empty"
                raise EngineFailure(f"{path} is not a GGUF file: {found} instead of {_MAGIC!r}")
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError as error:
        raise EngineFailure(f"{path} cannot be read: {error}") from error
    reader = _Reader(path, mapped)
    try:
        metadata, tensors = reader.metadata(), reader.tensors()
    except (struct.error, UnicodeDecodeError, _TornError) as error:
        raise EngineFailure(
            f"{path} is truncated or damaged: it has {len(mapped)} bytes and no valid, complete header ({error}); "
            "download it again"
        ) from error
    begin = -(-reader.at // (alignment := _alignment(path, metadata))) * alignment
    placed = [tensor._replace(offset=tensor.offset + begin) for tensor in tensors]
    for tensor in placed:
        end = tensor.offset + tensor.rows * tensor.row_bytes
        if end > len(mapped):
            raise EngineFailure(
                f"{path} is truncated: the tensor {tensor.name} ends at byte {end}, and the file at {len(mapped)}; "
                "download it again"
            )
    return metadata, placed, np.frombuffer(mapped, np.uint8)


def _alignment(path: Path, metadata: Metadata) -> int:
    value = metadata.get("general.alignment", 32)
    if type(value) is not int or value < 1 or value > 1 << 20:
        raise EngineFailure(f"general.alignment in {path} must be a small positive integer, not {value!r}")
    return value


class _TornError(Exception):
    """The header asks for more than the file has."""


class _Reader:
    """Reads the header of one file, from its start to `at`."""

    def __init__(self, path: Path, content: mmap.mmap) -> None:
        self._path = path
        self._content = content
        self.at = len(_MAGIC)

    def metadata(self) -> dict[str, Any]:
        (version,) = self._unpack("I")
        if version not in _VERSIONS:
            swapped = int.from_bytes(version.to_bytes(4, "little"), "big")
            kind = "big-endian" if swapped in _VERSIONS else f"of version {version}"
            raise EngineFailure(
                f"{self._path} is a GGUF file {kind}; only little-endian ones of version 2 and 3 are read"
            )
        self._tensors, pairs = self._unpack("QQ")
        return {self._string(): self._value(*self._unpack("I")) for _ in range(self._counted(pairs, 12))}

    def tensors(self) -> list[GgufTensor]:
        return [self._tensor() for _ in range(self._counted(self._tensors, 24))]

    def _tensor(self) -> GgufTensor:
        name = self._string()
        (dimensions,) = self._unpack("I")
        place = f"the tensor {name} in {self._path}"
        if not 1 <= dimensions <= _MOST_DIMENSIONS:
            raise EngineFailure(f"{place} has {dimensions} dimensions")
        shape = tuple(reversed(self._unpack(f"{dimensions}Q")))
        number, offset = self._unpack("IQ")
        if number not in _TYPE_NAMES:
            raise EngineFailure(f"{place} has the type {_foreign_type(number)}; supported are {', '.join(BLOCK_TYPES)}")
        kind = _TYPE_NAMES[number]
        if not all(shape) or shape[-1] % BLOCK_TYPES[kind].weights:
            raise EngineFailure(f"{place} has the shape {list(shape)}, which {kind} cannot have")
        return GgufTensor(name, kind, shape, self._path, offset)

    def _value(self, kind: int) -> Any:
        if kind in _SCALARS:
            return self._unpack(_SCALARS[kind])[0]
        if kind == _STRING:
            return self._string()
        if kind != _ARRAY:
            raise _TornError(f"metadata of type {kind}")
        of, count = self._unpack("IQ")
        if of in _SCALARS:
            return list(self._unpack(f"{self._counted(count, struct.calcsize('<' + _SCALARS[of]))}{_SCALARS[of]}"))
        if of != _STRING:
            raise _TornError(f"an array of type {of}")
        return list(self._strings(self._counted(count, 8)))

    def _strings(self, count: int) -> Iterator[str]:
        for _ in range(count):
            yield self._string()

    def _string(self) -> str:
        (size,) = self._unpack("Q")
        text = self._content[self.at : self.at + self._counted(size, 1)].decode()
        self.at += size
        return text

    def _unpack(self, form: str) -> tuple[Any, ...]:
        values = struct.unpack_from(f"<{form}", self._content, self.at)
        self.at += struct.calcsize(f"<{form}")
        return values

    def _counted(self, count: int, size: int) -> int:
        """Return a count of items that have at least this size, if the rest of the file has room for them."""
        if count * size > len(self._content) - self.at:
            raise _TornError(f"{count} items of {size} bytes at byte {self.at}")
        return count


def _foreign_type(number: int) -> str:
    """Return the name of a type of weights that is not supported, as far as it is known."""
    from gguf.constants import GGMLQuantizationType  # noqa: PLC0415 - only for this message

    try:
        return GGMLQuantizationType(number).name
    except ValueError:
        return str(number)
