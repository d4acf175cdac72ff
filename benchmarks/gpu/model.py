"""Create model folders with the shape of a real model, without or with random weights, and a simple tokenizer."""

import argparse
import json
from dataclasses import dataclass
from itertools import islice, product
from pathlib import Path
from string import ascii_lowercase
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

SPECIAL = ("<|begin_of_text|>", "<|end_of_text|>", "<|im_start|>", "<|im_end|>")
FIRST_WORD = len(SPECIAL) + 256
"""The first token id that is neither a special token nor a byte."""
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@dataclass(frozen=True, slots=True)
class Shape:
    """Shape of a model of the Llama kind. `spread` is the standard deviation of random weights, large enough that
    attention is not uniform."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    intermediate: int
    vocabulary: int = 49152
    max_position: int = 131072
    spread: float = 0.05
    model_type: str = "llama"

    @property
    def head_dim(self) -> int:
        return self.hidden // self.heads


LLAMA_8B = Shape(4096, 32, 32, 8, 14336)
SMALL = Shape(1024, 8, 8, 2, 2816)
"""Small enough for float32, with heads of the same size as the large shape, so that the same kernels run."""
TAME = 0.02
"""Spread that makes attention and logits as flat as in a trained model.

Larger spreads amplify rounding errors, those of eight-bit weights up to the size of bugs."""
SHAPES = {
    "llama-8b": LLAMA_8B,
    "smollm2-135m": Shape(576, 30, 9, 3, 1536, max_position=8192),
    "qwen2.5-1.5b": Shape(1536, 28, 12, 2, 8960, vocabulary=151936, max_position=32768, model_type="qwen2"),
    "qwen2.5-7b": Shape(3584, 28, 28, 4, 18944, vocabulary=152064, max_position=32768, model_type="qwen2"),
    "qwen3-8b": Shape(4096, 36, 32, 8, 12288, vocabulary=151936, max_position=40960, model_type="qwen3"),
    "small": SMALL,
    "tiny": Shape(64, 2, 4, 2, 128, vocabulary=1024, max_position=2048, spread=0.2),
}


def write_folder(folder: Path, shape: Shape) -> None:
    """Write config.json, tokenizer and chat template, for `--load-format dummy`."""
    folder.mkdir(parents=True, exist_ok=True)
    files = {
        "config.json": _config(shape),
        "generation_config.json": {"bos_token_id": 0, "eos_token_id": 1},
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": SPECIAL[0],
            "eos_token": SPECIAL[1],
            "chat_template": CHAT_TEMPLATE,
            "model_max_length": shape.max_position,
        },
    }
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content, indent=1))
    _tokenizer(shape.vocabulary).save(str(folder / "tokenizer.json"))


def write_weights(folder: Path, seed: int) -> None:
    """Write random bfloat16 weights into a folder; equal seeds give equal weights on the same kind of device."""
    import torch  # noqa: PLC0415 - seconds that other runs do not need
    from transformers import AutoConfig, AutoModelForCausalLM  # noqa: PLC0415

    torch.manual_seed(seed)
    config = AutoConfig.from_pretrained(folder, local_files_only=True)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32)  # type: ignore[no-untyped-call]
    model.to(torch.bfloat16).save_pretrained(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description="Write a folder: `python -m benchmarks.gpu.model llama-8b FOLDER`.")
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--weights", action="store_true", help="random ones, for what cannot use --load-format dummy")
    options = parser.parse_args()
    write_folder(options.folder, SHAPES[options.shape])
    if options.weights:
        write_weights(options.folder, seed=0)


def _config(shape: Shape) -> dict[str, object]:
    return {
        "architectures": [f"{shape.model_type.capitalize()}ForCausalLM"],
        "model_type": shape.model_type,
        "hidden_size": shape.hidden,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "intermediate_size": shape.intermediate,
        "vocab_size": shape.vocabulary,
        "max_position_embeddings": shape.max_position,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "initializer_range": shape.spread,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "dtype": "bfloat16",
    }


def _tokenizer(vocabulary: int) -> Tokenizer:
    """Return a byte-level tokenizer: special tokens, the 256 bytes, then made-up words, which decode on their own."""
    words = (
        "\u0120" + "".join(letters) for letters in product(ascii_lowercase, repeat=4)
    )  # U+0120 is how such a vocabulary writes a space
    texts = [*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet()), *islice(words, vocabulary - FIRST_WORD)]
    tokenizer = Tokenizer(models.BPE(vocab={text: index for index, text in enumerate(texts)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in SPECIAL])
    return tokenizer


if __name__ == "__main__":
    main()
