"""Tiny GGUF files of every architecture, the same on every machine: weights that follow from a seed, and a vocabulary
of bytes with a few merges."""

from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter, TokenType, quantize

from engine.checkpoints.gguf.families import GGUF_FAMILIES

SIZES = {"hidden": 64, "inner": 96, "heads": 4, "kv_heads": 2, "head": 16, "layers": 3}
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<unk>"]
MERGES = [
    "1 2", "12 3", "3 4", "123 4", "Ġ 1", "a 1", "1 a", "h e", "Ġ t", "t he", "Ġt he", "e Ġ", "Ġ Ġ", "ĠĠ ĠĠ",
    "Ċ Ċ", "Ċ Ġ", "ĠĠ a", "i n", "' s", "' S", "' t", "n 't", "! a", "! !", "= =", ". .", "Ġ =", "Ġ= =", "( )",
    ") :", ": Ċ", "Ã ¼", "a b", "ab c", "Ġ a", "A b", "A B", "b A", "c Ġ", "ĉ ĉ", "/ /", "/ a", "$ 1", "+ 1",
    "Ġ +", "č Ċ", "Â ½", "Ġ $",
]  # fmt: skip
"""Some join what pre-tokenizers keep apart: a letter and a digit, a word and the space behind it."""
PIECES = [
    "▁",
    "a",
    "b",
    "c",
    "t",
    "h",
    "e",
    "\n",
    "1",
    "2",
    "ab",
    "▁a",
    "bc",
    "▁ab",
    "he",
    "the",
    "▁the",
    "▁▁",
    "12",
    "abc",
]
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def alphabet() -> list[str]:
    """Return the characters that byte-level tokenizers write bytes as, in the order of the bytes."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]


def byte_level() -> dict[str, Any]:
    tokens = [*SPECIAL, *alphabet(), *(merge.replace(" ", "") for merge in MERGES)]
    kinds = [int(TokenType.CONTROL)] * len(SPECIAL) + [int(TokenType.NORMAL)] * (len(tokens) - len(SPECIAL))
    return {"model": "gpt2", "tokens": tokens, "token_type": kinds, "merges": MERGES, "bos": 1, "eos": 2, "padding": 0}


def pieces() -> dict[str, Any]:
    """A SentencePiece vocabulary: among the pieces that can be joined, the last ones come first."""
    tokens = ["<pad>", "<eos>", "<bos>", "<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), *PIECES]
    kinds = [TokenType.CONTROL] * 3 + [TokenType.UNKNOWN] + [TokenType.BYTE] * 256 + [TokenType.NORMAL] * len(PIECES)
    scores = [0.0] * 260 + [float(index - 100) for index in range(len(PIECES))]
    return {
        "model": "llama", "tokens": tokens, "token_type": [int(kind) for kind in kinds], "scores": scores,
        "bos": 2, "eos": 1, "padding": 0, "unknown": 3,
    }  # fmt: skip


def write_gguf(
    path: Path,
    architecture: str = "llama",
    *,
    kind: str = "F32",
    layers: int | None = None,
    vocabulary: dict[str, Any] | None = None,
    tied: bool = False,
    settings: dict[str, Any] | None = None,
    tokenizer: dict[str, Any] | None = None,
    tensors: dict[str, np.ndarray | None] | None = None,
    seed: int = 0,
) -> Path:
    """Write a model with random weights, which bfloat16 holds. `kind` is the type of its matrices. `settings` of the
    architecture, keys of `tokenizer` and `tensors` are added, replaced, or left out if they are None.
    """
    words = vocabulary or (pieces() if architecture == "gemma3" else byte_level())
    sizes = SIZES | {"vocabulary": len(words["tokens"]), "layers": layers or (7 if architecture == "gemma3" else 3)}
    sizes |= {"queries": sizes["heads"] * sizes["head"], "keys": sizes["kv_heads"] * sizes["head"]}
    made = random_weights(architecture, sizes, tied, seed) | (tensors or {})
    writer = GGUFWriter(path, architecture)
    known: dict[str, Any] = {
        "block_count": sizes["layers"],
        "context_length": 512,
        "embedding_length": sizes["hidden"],
        "feed_forward_length": sizes["inner"],
        "attention.head_count": sizes["heads"],
        "attention.head_count_kv": sizes["kv_heads"],
        "attention.key_length": sizes["head"],
        "attention.value_length": sizes["head"],
        "attention.layer_norm_rms_epsilon": 1e-5,
        "rope.freq_base": 5e4,
        **({"attention.sliding_window": 16} if architecture == "gemma3" else {}),
        **(settings or {}),
    }
    for key, value in known.items():
        add(writer, key if key.startswith("general.") else f"{architecture}.{key}", value)
    given = {"chat_template": TEMPLATE} | words | (tokenizer or {})
    for key, value in given.items():
        ids = key in ("bos", "eos", "eot", "padding", "unknown")
        name = "tokenizer.chat_template" if key == "chat_template" else f"tokenizer.ggml.{key}"
        add(writer, f"{name}_token_id" if ids else name, value)
    for name, weights in made.items():
        if weights is not None:
            stored = kind if weights.ndim > 1 else "F32"
            number = GGMLQuantizationType[stored]
            writer.add_tensor(name, quantize(weights, number), raw_dtype=number)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def random_weights(architecture: str, sizes: dict[str, int], tied: bool, seed: int) -> dict[str, np.ndarray | None]:
    """Return weights by their names in the file; RandomState gives the same ones in every version of numpy."""
    rng = np.random.RandomState(seed)
    shapes = {"token_embd.weight": ("vocabulary", "hidden"), "output_norm.weight": ("hidden",)}
    shapes |= {} if tied else {"output.weight": ("vocabulary", "hidden")}
    for layer in range(sizes["layers"]):
        shapes |= {f"blk.{layer}.{name}": part.shape for name, part in GGUF_FAMILIES[architecture].layer.items()}
    weights: dict[str, np.ndarray | None] = {}
    for name, shape in shapes.items():
        values = rng.standard_normal([sizes[size] for size in shape]).astype(np.float32)
        values = 1 + 0.1 * values if "norm" in name else 0.3 * values
        weights[name] = (values.view(np.uint32) & 0xFFFF0000).view(np.float32)
    return weights


def add(writer: GGUFWriter, key: str, value: Any) -> None:
    """Add metadata of the type that llama.cpp expects; None adds nothing."""
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    elif isinstance(value, list):
        writer.add_array(key, value)
