"""Text to token ids and back, by the `tokenizers` library alone: nothing here imports transformers."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers

SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


class Tokenizer:
    """A tokenizer.json, and the bytes that each of its tokens stands for."""

    def __init__(self, backend: tokenizers.Tokenizer, special_tokens: dict[str, str], chat_template: str | None = None) -> None:
        self._backend = backend
        self.special_tokens = special_tokens
        """Names that templates use (`bos_token`, …) and their texts."""
        self.chat_template = chat_template
        """The model's own template, if it has one."""
        added = backend.get_added_tokens_decoder()
        self.special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self.token_bytes: list[bytes] = _token_bytes(backend, {token_id: token.content for token_id, token in added.items()})
        """For each id what it adds to the text; several may make one character."""

    @classmethod
    def load(cls, folder: Path) -> "Tokenizer":
        """Read tokenizer.json, tokenizer_config.json and the chat template of a model folder."""
        config = _read_json(folder / "tokenizer_config.json")
        special = {name: _text(config[name]) for name in SPECIAL_NAMES if config.get(name)}
        return cls(tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json")), special, _chat_template(folder, config))

    @property
    def vocab_size(self) -> int:
        """Number of ids, added tokens included."""
        return len(self.token_bytes)

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        """Token ids of a text; special tokens written in it are recognised."""
        ids: list[int] = self._backend.encode(text, add_special_tokens=add_special_tokens).ids
        return ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        """The text of token ids; bytes that are not UTF-8 become U+FFFD."""
        text: str = self._backend.decode(list(ids), skip_special_tokens=skip_special_tokens)
        return text

    def bytes_of(self, token_id: int) -> bytes:
        """The bytes of one token; none for an id that only pads the vocabulary."""
        return self.token_bytes[token_id] if token_id < len(self.token_bytes) else b""


def byte_tokenizer() -> Tokenizer:
    """A tokenizer without a model's files: ids 0 to 2 are special, then one for each byte; ChatML is its template."""
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    alphabet = sorted(_byte_of_character().items(), key=lambda item: item[1])
    vocabulary = {text: index for index, text in enumerate([*special, *(character for character, _ in alphabet)])}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(text, special=True) for text in special])
    return Tokenizer(backend, {"bos_token": special[1], "eos_token": special[2]}, CHATML)


def _byte_of_character() -> dict[str, int]:
    """The byte that each character of GPT-2's byte-level alphabet stands for (openai/gpt-2, encoder.py)."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + index): byte for index, byte in enumerate(others)}


def _token_bytes(backend: tokenizers.Tokenizer, added: dict[int, str]) -> list[bytes]:
    """By the decoder: byte-level alphabets spell bytes; the others spell text, with `▁` for a space and `<0x0A>` for a lone byte."""
    byte_level = "ByteLevel" in repr(backend.decoder)
    alphabet = _byte_of_character()

    def convert(token: str) -> bytes:
        if byte_level:
            return bytes(alphabet[c] for c in token) if all(c in alphabet for c in token) else token.encode()
        if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            return bytes([int(token[3:5], 16)])
        return token.replace("▁", " ").encode()

    table = [b""] * (max(backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1)
    for token, token_id in backend.get_vocab(with_added_tokens=True).items():
        table[token_id] = added[token_id].encode() if token_id in added else convert(token)
    return table


def _chat_template(folder: Path, config: dict[str, Any]) -> str | None:
    path = folder / "chat_template.jinja"
    if path.exists():
        return path.read_text(encoding="utf-8")
    template = config.get("chat_template")
    if isinstance(template, list):
        named: dict[str, str] = {entry["name"]: entry["template"] for entry in template}
        return named.get("default")
    return template if isinstance(template, str) else None


def _read_json(path: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    return content


def _text(token: str | dict[str, Any]) -> str:
    return token if isinstance(token, str) else str(token["content"])
