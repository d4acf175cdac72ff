"""Text to token ids and back, by the `tokenizers` library; transformers only converts tokenizers of other kinds."""

import codecs
import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers

_LONE_BYTE = re.compile("<0x([0-9A-Fa-f]{2})>")
SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
IMAGE = "<image>"
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}{{ '<image>' if part['type'] == 'image' else part['text'] }}{% endfor %}"
    "{% endif %}"
    "{{ '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


class Tokenizer:
    """A tokenizer.json, and the bytes that each of its tokens stands for."""

    def __init__(
        self, backend: tokenizers.Tokenizer, special_tokens: dict[str, str], chat_template: str | None = None
    ) -> None:
        self.backend = backend
        self.special_tokens = special_tokens
        """Names that templates use (`bos_token`, …) and their texts."""
        self.chat_template = chat_template
        """The model's own template, if it has one."""
        added = backend.get_added_tokens_decoder().items()
        self.special_ids = frozenset(token_id for token_id, token in added if token.special)
        self.special_texts = frozenset(
            token.content for _, token in added if token.special or token.content in special_tokens.values()
        )
        """Texts of the special tokens, as templates write them."""
        self.token_bytes: list[bytes] = _token_bytes(backend)
        """Bytes that each id adds to the text; a character may take several ids."""
        self.longest_token = max(map(len, self.token_bytes), default=0)
        """Bytes of the longest token: a text has at least one token per this many characters."""

    @classmethod
    def load(cls, folder: Path) -> "Tokenizer":
        """Read the tokenizer and the chat template of a model folder. Raises ValueError if it cannot use them."""
        config = _read_json(folder / "tokenizer_config.json")
        names = _read_json(folder / "special_tokens_map.json") | config
        special = {name: _text(names[name]) for name in SPECIAL_NAMES if names.get(name)}
        path = folder / "tokenizer.json"
        backend = _read_tokenizer(path) if path.exists() else _converted(folder)
        backend.no_truncation()
        backend.no_padding()
        return cls(backend, special, _chat_template(folder, config))

    @property
    def vocab_size(self) -> int:
        """Number of ids, including added tokens."""
        return len(self.token_bytes)

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        """Return the token ids of a text; special tokens written in it are recognised."""
        # The batch call releases the GIL, which `encode` holds: a long text in a thread would stop the event loop.
        ids: list[int] = self.backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
        return ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        """Return the text of token ids; bytes that are not UTF-8 become U+FFFD."""
        text: str = self.backend.decode(list(ids), skip_special_tokens=skip_special_tokens)
        return text

    def bytes_of(self, token_id: int) -> bytes:
        """Return the bytes of one token; none for an id that only pads the vocabulary."""
        return self.token_bytes[token_id] if token_id < len(self.token_bytes) else b""


class Detokenizer:
    """The text of one sequence. What `feed` and a last `flush` return, joined, is the text of all the ids.

    A token's bytes go through an incremental UTF-8 decoder: an unfinished character is held back until its last byte,
    and bytes that can never become one turn into U+FFFD.

    The text is what `Tokenizer.decode` returns for the prompt and these ids, less the prompt's text: a leading space,
    which decoders strip from the start of a text, stays.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool) -> None:
        self._bytes = tokenizer.token_bytes
        self._skipped = tokenizer.special_ids if skip_special_tokens else frozenset()
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, ids: Sequence[int]) -> str:
        """Return the text that is complete after these ids."""
        table, skipped = self._bytes, self._skipped
        return self._decoder.decode(b"".join(table[i] for i in ids if i not in skipped and i < len(table)))

    @property
    def unfinished(self) -> bool:
        """Whether a character waits for its last byte."""
        return bool(self._decoder.getstate()[0])

    def flush(self) -> str:
        """Return the end of the text: an unfinished character becomes U+FFFD."""
        return self._decoder.decode(b"", final=True)


def byte_tokenizer() -> Tokenizer:
    """Return a tokenizer that needs no files: ids 0 to 2 are special, then bytes, then one for images; its template is
    ChatML.
    """
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    alphabet = sorted(_byte_of_character().items(), key=lambda item: item[1])
    vocabulary = {
        text: index for index, text in enumerate([*special, *(character for character, _ in alphabet), IMAGE])
    }
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(text, special=True) for text in [*special, IMAGE]])
    return Tokenizer(backend, {"bos_token": special[1], "eos_token": special[2]}, CHATML)


def _byte_of_character() -> dict[str, int]:
    """Return the byte that each character of GPT-2's byte-level alphabet stands for (openai/gpt-2, encoder.py)."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + index): byte for index, byte in enumerate(others)}


def _token_bytes(backend: tokenizers.Tokenizer) -> list[bytes]:
    """Apply the decoder to each token alone, without what it does to the start and end of a text."""
    convert = _converter(steps_of(backend.decoder, "decoders") or [{"type": "none"}])
    vocabulary = backend.get_vocab(with_added_tokens=True)
    table = [b""] * (max(vocabulary.values(), default=-1) + 1)
    for token, token_id in vocabulary.items():
        table[token_id] = convert(token)
    return table


def steps_of(part: Any, name: str) -> list[dict[str, Any]]:
    """Return the steps of a normalizer, pre-tokenizer or decoder, each with its `type`."""
    if part is None:
        return []
    state: dict[str, Any] = json.loads(part.__getstate__())
    return list(state[name]) if state["type"] == "Sequence" else [state]


def _converter(steps: list[dict[str, Any]]) -> Callable[[str], bytes]:
    """Return a function from a token, as the vocabulary spells it, to its bytes."""
    kinds = {step["type"] for step in steps}
    if unknown := kinds - {"ByteLevel", "ByteFallback", "Fuse", "Metaspace", "Replace", "Strip"}:
        raise ValueError(
            f"the tokenizer's decoder ({', '.join(sorted(unknown))}) is not one whose tokens have bytes of their own"
        )
    alphabet = _byte_of_character()
    spellings = [(step["replacement"], " ") for step in steps if step["type"] == "Metaspace"]
    spellings += [(step["pattern"]["String"], step["content"]) for step in steps if step["type"] == "Replace"]

    def convert(token: str) -> bytes:
        if "ByteFallback" in kinds and (match := _LONE_BYTE.fullmatch(token)):
            return bytes([int(match[1], 16)])
        for spelling, text in spellings:
            token = token.replace(spelling, text)
        if "ByteLevel" in kinds and all(c in alphabet for c in token):
            return bytes(alphabet[c] for c in token)
        return token.encode()

    return convert


def _read_tokenizer(path: Path) -> tokenizers.Tokenizer:
    try:
        return tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises nothing narrower
        raise ValueError(f"{path} cannot be read: {error}") from error


def _converted(folder: Path) -> tokenizers.Tokenizer:
    """Convert a tokenizer of another kind to `tokenizers`."""
    from transformers import AutoTokenizer  # noqa: PLC0415 - slow to import, and rarely needed

    return tokenizers.Tokenizer.from_str(AutoTokenizer.from_pretrained(folder).backend_tokenizer.to_str())


def response_template(folder: Path) -> Any:
    """Return the model's own description of its answers; None if it has none. Raises ValueError for a broken file."""
    return _read_json(folder / "tokenizer_config.json").get("response_template")


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
    if not path.exists():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} must hold a JSON object")
    return content


def _text(token: str | dict[str, Any]) -> str:
    return token if isinstance(token, str) else str(token["content"])
