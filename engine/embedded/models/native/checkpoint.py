"""A checkpoint as compiled code computes with it: matrices that bfloat16 holds, and blocks of 8 or 4 bits from the
GGUF file that the folder was converted from."""

from functools import cached_property
from pathlib import Path

import numpy as np
import torch

from engine.checkpoints.conversions import source_of
from engine.checkpoints.gguf.families import GgufModel
from engine.checkpoints.gguf.file import GgufFile
from engine.embedded.models.checkpoint import Checkpoint
from engine.embedded.models.devices import UnsupportedModelError
from engine.embedded.models.native.structures import Kind


class _GgufTensors:
    """The tensors of a GGUF file under their names in a folder made of it."""

    def __init__(self, path: Path | None) -> None:
        self._model = None if path is None else GgufModel(GgufFile(path))
        parts = self._model.parts if self._model else {}
        self._names = {part.name: name for name, part in parts.items()}
        stored = self._model.file.tensors if self._model else {}
        self.tensors = {name: stored[own] for name, own in self._names.items() if own in stored}

    def blocks(self, name: str) -> "np.ndarray[tuple[int, int], np.dtype[np.uint8]]":
        """Return the bytes of a tensor, its rows in the folder's order."""
        assert self._model is not None
        own = self._names[name]
        part = own.split(".", 2)[-1] if own.startswith("blk.") else own
        rows = self._model.family.restore(part, self._model.file.blocks(own), self._model.sizes)
        return np.array(rows)  # aligned, and not of a file that may shrink


class NativeCheckpoint(Checkpoint):
    """A `Checkpoint` whose matrices are bfloat16 or rows of blocks."""

    def weight(self, name: str) -> torch.Tensor:
        """Return a matrix as bfloat16 [outputs, inputs]. Raises UnsupportedModelError if that would change it."""
        tensor = self.tensor(name)
        narrow = tensor.bfloat16()
        if tensor.dtype != torch.bfloat16 and not torch.equal(narrow.to(tensor.dtype), tensor):
            raise UnsupportedModelError(f"weights are {tensor.dtype}, and bfloat16 would change them")
        return narrow.contiguous()

    def block_kind(self, name: str) -> Kind | None:
        """Return the kind of blocks of a matrix in the GGUF file from which the folder was converted.

        None if that file is not there, or if `decoder.cpp` does not compute this kind.
        """
        stored = self._gguf.tensors.get(name)
        return Kind[stored.type] if stored and stored.type in Kind.__members__ else None

    @property
    def source(self) -> str:
        """Path, size and times of the GGUF file that `blocks` reads, which identify its contents; empty without one."""
        if (path := source_of(self.folder)) is None:
            return ""
        stat = path.stat()
        return f"{path} {stat.st_size} {stat.st_mtime_ns} {stat.st_ctime_ns}"

    def blocks(self, name: str) -> torch.Tensor:
        """Return a matrix of a `block_kind` as rows of blocks [outputs, bytes]."""
        return torch.from_numpy(self._gguf.blocks(name))

    @cached_property
    def _gguf(self) -> _GgufTensors:
        return _GgufTensors(source_of(self.folder))
