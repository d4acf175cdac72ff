"""Reads embeddings that clients send as safetensors files. Every bound is checked, and nothing in a file is executed.

The reader is our own: `safetensors` is installed with the embedded engine only, and reads any number of tensors.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Literal

import msgspec

from multimodal.errors import InvalidMedia

MAIN = "mm_embeddings"
"""The embeddings' name in a file of several tensors."""
_GRID = "image_grid_thw"
_MAX_HEADER = 1 << 16
_MAX_TENSORS = 16
_SIZES = {1: ("BOOL", "U8", "I8"), 2: ("I16", "U16", "F16", "BF16"), 4: ("I32", "U32", "F32"), 8: ("I64", "F64")}
_ITEM_BYTES = {dtype: size for size, dtypes in _SIZES.items() for dtype in dtypes}
_DTYPES: dict[str, Literal["float16", "bfloat16", "float32"]] = {"F16": "float16", "BF16": "bfloat16", "F32": "float32"}
# The highest byte of what is no number: exact for float16; for the others, also that of what is beyond 2**127.
_NO_NUMBER = {"F16": bytes([*range(0x7C, 0x80), *range(0xFC, 0x100)]), "BF16": b"\x7f\xff", "F32": b"\x7f\xff"}
_CHUNK = 1 << 20

Dimension = Annotated[int, msgspec.Meta(ge=0, le=1 << 31)]
Offset = Annotated[int, msgspec.Meta(ge=0, le=1 << 40)]


class _Entry(msgspec.Struct, forbid_unknown_fields=True):
    dtype: str
    shape: Annotated[tuple[Dimension, ...], msgspec.Meta(max_length=8)]
    data_offsets: tuple[Offset, Offset]


_headers = msgspec.json.Decoder(dict[str, msgspec.Raw])
_entries = msgspec.json.Decoder(_Entry)


@dataclass(frozen=True)
class Tensor:
    """Contiguous, little-endian; `dtype` as safetensors spells it."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes


@dataclass(frozen=True)
class Embeddings:
    """Embeddings that take the place of an image's encoding: `data` is contiguous [rows, hidden size] of `dtype`."""

    rows: int
    dtype: Literal["float16", "bfloat16", "float32"]
    data: bytes
    auxiliary: Mapping[str, Tensor]
    """The file's other tensors."""
    file: bytes
    """The unchanged file, from which the key for caches is made."""

    @property
    def grid(self) -> tuple[int, int, int]:
        """Patches in time, height and width from `image_grid_thw`, for models with mRoPE; zeros without.

        Raises InvalidMedia.
        """
        tensor = self.auxiliary.get(_GRID)
        if tensor is None:
            return 0, 0, 0
        if tensor.dtype not in ("I32", "I64") or math.prod(tensor.shape) != 3:
            raise InvalidMedia(f"{_GRID!r} of an image's embeddings is not three integers.")
        step = _ITEM_BYTES[tensor.dtype]
        time, height, width = (
            int.from_bytes(tensor.data[at : at + step], "little", signed=True) for at in range(0, 3 * step, step)
        )
        if not all(0 < count <= 1 << 16 for count in (time, height, width)):
            raise InvalidMedia(f"{_GRID!r} of an image's embeddings is out of range.")
        return time, height, width


def read_embeddings(file: bytes, hidden_size: int) -> Embeddings:
    """Return the embeddings in a safetensors file: its only tensor or `mm_embeddings`, [rows, hidden size] or [1, rows,
    hidden size]. Raises InvalidMedia.
    """
    tensors = _tensors(file)
    name = MAIN if MAIN in tensors else next(iter(tensors))
    main = tensors.pop(name)
    if tensors and name != MAIN:
        raise InvalidMedia(f"An image's embeddings have several tensors and none is named {MAIN!r}.")
    if main.dtype not in _DTYPES:
        raise InvalidMedia("An image's embeddings are not of type float16, bfloat16 or float32.")
    shape = main.shape[1:] if len(main.shape) == 3 and main.shape[0] == 1 else main.shape
    if len(shape) != 2 or shape[0] < 1 or shape[1] != hidden_size:
        raise InvalidMedia(f"An image's embeddings must have the shape [rows, {hidden_size}].")
    if not _finite(main):
        raise InvalidMedia("An image's embeddings have values that are not finite.")
    return Embeddings(shape[0], _DTYPES[main.dtype], main.data, tensors, file)


def _tensors(file: bytes) -> dict[str, Tensor]:
    """Return all tensors, which fill the file without gap or overlap; at least one."""
    length = int.from_bytes(file[:8], "little")
    if not 2 <= length <= min(_MAX_HEADER, len(file) - 8) or file[8:9] != b"{":
        raise InvalidMedia("An image's embeddings are not a safetensors file.")
    try:
        header = _headers.decode(file[8 : 8 + length])
        header.pop("__metadata__", None)
        if not 1 <= len(header) <= _MAX_TENSORS:
            raise InvalidMedia(f"A file of embeddings may have 1 to {_MAX_TENSORS} tensors.")
        entries = {name: _entries.decode(entry) for name, entry in header.items()}
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidMedia("The header of an image's embeddings is broken.") from error
    body, tensors, at = 8 + length, dict[str, Tensor](), 0
    for name, entry in sorted(entries.items(), key=lambda item: item[1].data_offsets):
        begin, end = entry.data_offsets
        size = math.prod(entry.shape) * _ITEM_BYTES.get(entry.dtype, 0)
        if begin != at or end - begin != size or entry.dtype not in _ITEM_BYTES:
            raise InvalidMedia("A tensor of an image's embeddings is not at the offset in its header.")
        tensors[name] = Tensor(entry.dtype, entry.shape, file[body + begin : body + end])
        at = end
    if body + at != len(file):
        raise InvalidMedia("A file of embeddings is longer or shorter than its header states.")
    return tensors


def _finite(tensor: Tensor) -> bool:
    step = _ITEM_BYTES[tensor.dtype]
    for start in range(0, len(tensor.data), _CHUNK):
        highest = tensor.data[start + step - 1 : start + _CHUNK : step]
        if len(highest.translate(None, _NO_NUMBER[tensor.dtype])) != len(highest):
            return False
    return True
