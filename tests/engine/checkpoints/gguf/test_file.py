"""The reader of GGUF files: what it finds is what was written, and damage is refused with the file's name."""

import random
import struct
from pathlib import Path

import numpy as np
import pytest
from gguf import GGUFReader

from engine.checkpoints.gguf.file import GgufFile
from engine.checkpoints.gguf.split import parts_of, stem_of
from engine.errors import EngineFailure
from tests.support.gguf_files import write_gguf


def test_as_ggmls_own_reader(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "mine.gguf", "qwen3", kind="Q8_0")
    file, theirs = GgufFile(path), GGUFReader(path)
    of_header = {f"GGUF.{name}" for name in ("version", "tensor_count", "kv_count")}
    assert file.metadata == {name: field.contents() for name, field in theirs.fields.items() if name not in of_header}
    assert list(file.tensors) == [tensor.name for tensor in theirs.tensors]
    for tensor in theirs.tensors:
        mine = file.tensors[tensor.name]
        assert (mine.type, list(mine.shape)) == (
            tensor.tensor_type.name,
            [int(size) for size in reversed(tensor.shape)],
        )
        np.testing.assert_array_equal(file.blocks(tensor.name).ravel(), tensor.data.view(np.uint8).ravel())
    assert file.blocks("token_embd.weight", 5, 2).shape == (2, 64 // 32 * 34)
    assert file.weights == sum(int(tensor.n_elements) for tensor in theirs.tensors)


def test_a_torn_file_names_the_tensor_or_the_header(tmp_path: Path) -> None:
    content = write_gguf(tmp_path / "mine.gguf").read_bytes()
    torn = tmp_path / "torn.gguf"
    torn.write_bytes(content[:-1])
    with pytest.raises(EngineFailure, match=rf"^{torn} is truncated: the tensor blk\.2\.ffn_down\.weight ends at byte"):
        GgufFile(torn)
    for size in [*range(4, 40), *range(40, 12_000, 97)]:
        torn.write_bytes(content[:size])
        with pytest.raises(EngineFailure, match=rf"^{torn} is truncated"):
            GgufFile(torn)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "is not a GGUF file: it is empty"),
        (b"PK\3\4 a zip", r"is not a GGUF file: it begins with b'PK\\x03\\x04' instead of b'GGUF'"),
        (b"GGUF" + struct.pack("<IQQ", 1, 0, 0), "is a GGUF file of version 1; only little-endian ones"),
        (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "is a GGUF file big-endian; only"),
        (b"GGUF" + struct.pack("<IQQ", 3, 1 << 60, 1 << 60), "is truncated or damaged"),
    ],
)
def test_foreign_files(tmp_path: Path, content: bytes, said: str) -> None:
    path = tmp_path / "mine.gguf"
    path.write_bytes(content)
    with pytest.raises(EngineFailure, match=f"^{path} {said}"):
        GgufFile(path)


@pytest.mark.parametrize(("number", "name"), [(23, "IQ4_XS"), (24, "I8"), (99, "99")])
def test_an_unknown_type_is_named(tmp_path: Path, number: int, name: str) -> None:
    path = write_gguf(tmp_path / "mine.gguf")
    content = path.read_bytes()
    at = content.index(b"token_embd.weight") + len(b"token_embd.weight") + 4 + 2 * 8
    path.write_bytes(content[:at] + struct.pack("<I", number) + content[at + 4 :])
    with pytest.raises(EngineFailure, match=f"the tensor token_embd.weight in {path} has the type {name}; supported"):
        GgufFile(path)


def test_flipped_bits_are_read_or_refused(tmp_path: Path) -> None:
    """Whatever a header says, the answer is EngineFailure or a file whose tensors are within it."""
    path = write_gguf(tmp_path / "mine.gguf")
    content = path.read_bytes()
    header = content.index(b"blk.2.ffn_down.weight") + 60
    rng, refused = random.Random(0), 0
    for _ in range(150):
        damaged = bytearray(content)
        for _ in range(rng.choice([1, 1, 4, 30])):
            damaged[rng.randrange(header)] ^= 1 << rng.randrange(8)
        path.write_bytes(damaged)
        try:
            file = GgufFile(path)
        except EngineFailure as error:
            refused += str(path) in str(error)
        else:
            assert all(
                file.blocks(name).size == file.tensors[name].rows * file.tensors[name].row_bytes
                for name in file.tensors
            )
    assert refused > 20


def split(path: Path, folder: Path) -> list[Path]:
    """Split a file into two, as llama-gguf-split does: the metadata in the first, tensors in both."""
    from gguf import GGUFWriter  # noqa: PLC0415

    tensors = GGUFReader(path).tensors
    parts = []
    for number, chosen in enumerate((tensors[:7], tensors[7:])):
        writer = GGUFWriter(folder / f"mine-{number + 1:05}-of-00002.gguf", "llama")
        writer.add_uint16("split.no", number)
        writer.add_uint16("split.count", 2)
        if number == 0:
            writer.add_uint32("llama.block_count", 3)
        for tensor in chosen:
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        parts.append(folder / f"mine-{number + 1:05}-of-00002.gguf")
    return parts


def test_a_split_model_is_read_as_one(tmp_path: Path) -> None:
    whole = GgufFile(write_gguf(tmp_path / "mine.gguf"))
    parts = split(tmp_path / "mine.gguf", tmp_path)
    for part in parts:
        file = GgufFile(part)
        assert (file.paths, stem_of(part), file.metadata["llama.block_count"]) == (parts, "mine", 3)
        assert list(file.tensors) == list(whole.tensors)
        assert all(np.array_equal(file.blocks(name), whole.blocks(name)) for name in whole.tensors)
    assert parts_of(tmp_path / "mine.gguf") == [tmp_path / "mine.gguf"] and stem_of(tmp_path / "mine.gguf") == "mine"
    swapped = [part.rename(part.with_suffix(".tmp")) for part in parts]
    for part, other in zip(parts, reversed(swapped), strict=True):
        other.rename(part)
    with pytest.raises(EngineFailure, match="says that it is part 2 of 2, and its name says 1 of 2"):
        GgufFile(parts[0])
    parts[1].unlink()
    with pytest.raises(EngineFailure, match=f"lacks {parts[1].name}: download all parts into one folder"):
        GgufFile(parts[0])
