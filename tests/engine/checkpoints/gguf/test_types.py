"""The weights of every type of blocks: as llama.cpp has them, and by a second implementation, one weight at a time.

The formulas below were written from the structs and comments in ggml's ggml-common.h and ggml-quants.c.
"""

import base64
import json
import struct
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFWriter

from engine.checkpoints.gguf.convert import dequantized
from engine.checkpoints.gguf.file import BLOCK_TYPES, GgufFile

KNOWN = json.loads((Path(__file__).parent / "llama_cpp.json").read_text(encoding="utf-8"))["blocks"]
PLAIN = ("F32", "F16", "BF16")


def half(block: bytes, at: int) -> float:
    return float(struct.unpack_from("<e", block, at)[0])


def signed(byte: int) -> int:
    return byte - 256 if byte > 127 else byte


def nibbles(block: bytes) -> list[int]:
    """Of 16 bytes: 16 low halves, then 16 high ones."""
    return [byte & 15 for byte in block] + [byte >> 4 for byte in block]


def scales_of_k(packed: bytes, index: int) -> tuple[int, int]:
    """Scale and minimum, six bits each, of one of eight groups in 12 bytes."""
    if index < 4:
        return packed[index] & 63, packed[index + 4] & 63
    low = packed[index + 4]
    return (low & 15) | (packed[index - 4] >> 6) << 4, (low >> 4) | (packed[index] >> 6) << 4


def scalar(kind: str, block: bytes) -> Iterator[float]:
    match kind:
        case "F32":
            yield struct.unpack("<f", block)[0]
        case "F16":
            yield half(block, 0)
        case "BF16":
            yield struct.unpack("<f", b"\0\0" + block)[0]
        case "Q8_0":
            yield from (half(block, 0) * signed(byte) for byte in block[2:])
        case "Q4_0":
            yield from (half(block, 0) * (value - 8) for value in nibbles(block[2:]))
        case "Q4_1":
            yield from (half(block, 0) * value + half(block, 2) for value in nibbles(block[4:]))
        case "Q5_0" | "Q5_1":
            at = 2 if kind == "Q5_0" else 4
            (high,) = struct.unpack_from("<I", block, at)
            for index, low in enumerate(nibbles(block[at + 4 :])):
                value = low | (high >> index & 1) << 4
                yield half(block, 0) * (value - 16) if kind == "Q5_0" else half(block, 0) * value + half(block, 2)
        case "Q2_K":
            for index in range(256):
                scale = block[index // 16]
                value = block[16 + index // 128 * 32 + index % 32] >> index % 128 // 32 * 2 & 3
                yield half(block, 80) * (scale & 15) * value - half(block, 82) * (scale >> 4)
        case "Q3_K":
            packed = block[96:108]
            for index in range(256):
                group = index // 16
                low = packed[group % 8] >> (0 if group < 8 else 4) & 15
                scale = low | (packed[8 + group % 4] >> group // 4 * 2 & 3) << 4
                value = block[32 + index // 128 * 32 + index % 32] >> index % 128 // 32 * 2 & 3
                taken = 0 if block[index % 32] >> index // 32 & 1 else 4
                yield half(block, 108) * (scale - 32) * (value - taken)
        case "Q4_K" | "Q5_K":
            quants = 16 if kind == "Q4_K" else 48
            for index in range(256):
                group = index // 32
                scale, minimum = scales_of_k(block[4:16], group)
                value = block[quants + group // 2 * 32 + index % 32] >> group % 2 * 4 & 15
                if kind == "Q5_K":
                    value |= (block[16 + index % 32] >> group & 1) << 4
                yield half(block, 0) * scale * value - half(block, 2) * minimum
        case "Q6_K":
            for index in range(256):
                part, place = divmod(index, 128)
                row, column = divmod(place, 32)
                low = block[part * 64 + row % 2 * 32 + column] >> (row // 2 * 4) & 15
                value = low | (block[128 + part * 32 + column] >> row * 2 & 3) << 4
                yield half(block, 208) * signed(block[192 + index // 16]) * (value - 32)


def stored(tmp_path: Path, kind: str, blocks: bytes, rows: int) -> GgufFile:
    writer = GGUFWriter(tmp_path / "blocks.gguf", "llama")
    raw = np.frombuffer(blocks, np.uint8).reshape(rows, -1)
    writer.add_tensor("it", raw, raw_dtype=GGMLQuantizationType[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return GgufFile(tmp_path / "blocks.gguf")


@pytest.mark.parametrize("kind", [kind for kind in BLOCK_TYPES if kind not in PLAIN])
def test_as_llama_cpp(tmp_path: Path, kind: str) -> None:
    file = stored(tmp_path, kind, base64.b64decode(KNOWN[kind]["stored"]), 1)
    expected = np.frombuffer(base64.b64decode(KNOWN[kind]["float32"]), np.float32)
    np.testing.assert_array_equal(dequantized(file, "it")[0], expected)


@pytest.mark.parametrize("kind", BLOCK_TYPES)
def test_random_blocks(tmp_path: Path, kind: str) -> None:
    """Any bits are some weights; only the scales are kept small, where there are any."""
    size, rows = BLOCK_TYPES[kind].size, 3
    width = size * max(1, 8 // size)
    content = np.random.RandomState(3).randint(0, 256, (rows, width), np.uint8)
    halves = {"Q2_K": (80, 82), "Q3_K": (108,), "Q6_K": (208,), "F16": range(0, width, 2)}
    pairs = {"Q4_1": (0, 2), "Q5_1": (0, 2), "Q4_K": (0, 2), "Q5_K": (0, 2)}
    for at in halves.get(kind, pairs.get(kind, (0,))):
        content[:, at + 1] &= 0x3F  # no infinity
    if kind in ("F32", "BF16"):
        content[:, size - 1 :: size] &= 0x3F
    file = stored(tmp_path, kind, content.tobytes(), rows)
    found = dequantized(file, "it")
    blocks = content.reshape(-1, size)
    expected = [weight for block in blocks for weight in scalar(kind, block.tobytes())]
    np.testing.assert_allclose(found.ravel(), expected, rtol=1e-6, atol=1e-6)
    np.testing.assert_array_equal(dequantized(file, "it", 1, 1), found[1:2])
