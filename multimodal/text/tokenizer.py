"""Text to token ids and back, by the `tokenizers` library; transformers only converts tokenizers of other kinds.

Texts are tokenised off the event loop (`encoded`), long ones in slices: other requests get their turns in between,
memory stays small, and the work ends with its waiter.

A text is cut only where the tokens of the slices equal those of the whole text. That is before a space, for two kinds
of tokenizers:

- Its pre-tokenizer always splits there. It is made of regular expressions none of which matches a space after anything
  else within one match (`_splits_at_spaces`), as those of GPT-2, Llama 3, Qwen, DeepSeek and Mistral.
- Its pre-tokenizer never splits, and no token of its vocabulary has a space after the character before the cut, so that
  no merge of byte-pair encoding crosses the cut. Gemma's is one.

Other texts, and those with no place to cut, are tokenised whole, up to a length.
"""

import codecs
import json
import re
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from engine.kit.work import INLINE_LENGTH, NATIVE, WHOLE
from multimodal.errors import RequestError

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

Encode = Callable[[str, bool], list[int]]
"""Return the token ids of a text, with the special tokens that the tokenizer adds or without."""

SLICE_CHARACTERS = 1 << 15
"""Characters after which a text is cut at the next possible place; they take about 20 ms."""
MAX_WHOLE_CHARACTERS = 1 << 20
"""Maximum length of a text, or part of one, that is tokenised whole."""
_BYTES_PER_CHARACTER = 128
"""Bytes of memory that tokenising takes for each character, measured."""

_VISIBLE = range(ord("!"), ord("~") + 1)
_OF_SPACES = {r"\s+(?!\S)", r"\s+", r"\s*[\r\n]+", r"\s*[\r\n]", r"\s+$"}
"""Alternatives that match nothing but white space, and look ahead no further than one character."""
_ATOM = re.compile(r"\\[pP]\{[^}]*\}|\\.|\[(?:\\.|[^\]\\])*\]|\(\?i?:|.", re.DOTALL)
_NEVER_A_SPACE = re.compile(r"\\[rntdwS]|\\[^\sa-zA-Z0-9]|\\p\{[LMNPS][a-z]?\}|\(\?i?:|[^\\\[ .]")
_CLASS_WITHOUT_SPACE = re.compile(
    r"\[\^(?:\\.|[^\]\\\[&])*\\s(?:\\.|[^\]\\\[&])*\]"
    r"|\[(?!\^)(?:\\[rntdw](?!-)|\\[^\sa-zA-Z0-9]|\\p\{[LMNPS][a-z]?\}|[^\\\[\]\x00-\x20&]|&(?!&))+\]"
)


class Tokenizer:
    """A tokenizer.json, and the bytes of each of its tokens."""

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
    """The text of one sequence. The joined results of `feed` and a last `flush` are the text of all ids.

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
    """Apply the decoder to each token alone, without its rules for the start and end of a text."""
    convert = _converter(_steps_of(backend.decoder, "decoders") or [{"type": "none"}])
    vocabulary = backend.get_vocab(with_added_tokens=True)
    table = [b""] * (max(vocabulary.values(), default=-1) + 1)
    for token, token_id in vocabulary.items():
        table[token_id] = convert(token)
    return table


def _steps_of(part: Any, name: str) -> list[dict[str, Any]]:
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


async def encoded(
    tokenizer: Tokenizer,
    text: str,
    add_special_tokens: bool = False,
    *,
    encode: Encode | None = None,
    last: int | None = None,
    most: int = 1 << 62,
) -> list[int]:
    """Return the token ids of a text, those of its end if only the `last` ones are wanted.

    `encode`, if given, is used in place of the tokenizer's own: that of its control tokens (`control.py`), say. A cut
    is neither in one of these nor in the marks around it.

    It may end early once there are more than `most`. Raises RequestError.
    """
    encode = encode or tokenizer.encode
    if len(text) <= INLINE_LENGTH:
        return encode(text, add_special_tokens)
    pieces = [text]
    if (cuts := cuts_of(tokenizer)) is not None:
        pieces = list(pieces_of(text, cuts.at))
    if len(pieces) == 1:
        return await _piece(encode, text, add_special_tokens)
    assert cuts is not None
    before, after = cuts.special if add_special_tokens else ([], [])
    if last is None:
        ids = [*before]
        for piece in pieces:
            ids += await _piece(encode, piece)
            if len(ids) > most:
                return ids
        return ids + after
    found = [after]
    count = len(after)
    for piece in reversed(pieces):
        if count >= last:
            break
        found.append(await _piece(encode, piece))
        count += len(found[-1])
    else:
        found.append(before)
    return [token for ids in reversed(found) for token in ids]


async def _piece(encode: Encode, text: str, add_special_tokens: bool = False) -> list[int]:
    if len(text) > MAX_WHOLE_CHARACTERS:
        raise RequestError(
            f"A text of {len(text)} characters without a space where it can be cut is too long to tokenise; "
            f"it may have {MAX_WHOLE_CHARACTERS}."
        )
    lane = NATIVE if len(text) <= 2 * SLICE_CHARACTERS else WHOLE
    return await lane.run(lambda: encode(text, add_special_tokens), _BYTES_PER_CHARACTER * len(text))


def pieces_of(text: str, cut: re.Pattern[str]) -> Iterator[str]:
    start = 0
    while len(text) - start > SLICE_CHARACTERS and (match := cut.search(text, start + SLICE_CHARACTERS)):
        yield text[start : match.start()]
        start = match.start()
    yield text[start:]


class _Cuts:
    """Pattern of places at which a tokenizer's texts may be cut, and the special tokens that it adds around a text."""

    def __init__(self, before: str, special: tuple[list[int], list[int]]) -> None:
        self.at = re.compile(rf"(?<=[{before}]) ")
        self.special = special


@lru_cache(maxsize=8)
def cuts_of(tokenizer: Tokenizer) -> _Cuts | None:
    """Return None for a tokenizer whose texts cannot be cut."""
    backend = tokenizer.backend
    if not isinstance(backend.model, models.BPE) or backend.model.dropout:
        return None
    space = " "
    for step in _steps_of(backend.normalizer, "normalizers"):
        if step["type"] == "Replace" and step["pattern"] == {"String": " "}:
            space = step["content"]
        elif step["type"] not in ("NFC", "NFD", "NFKC", "NFKD"):
            return None
    for token in backend.get_added_tokens_decoder().values():
        content = token.content.replace(space, " ")
        if token.rstrip or token.single_word or re.search(r"\S ", content):
            return None
    steps = _steps_of(backend.pre_tokenizer, "pretokenizers")
    if space == " " and _splits_at_spaces(steps):
        before = "!-~"  # as `_VISIBLE`
    elif all(_never_splits(step, space) for step in steps):
        spaces = "|".join((" ", "▁", "Ġ", re.escape(space))).encode()
        joined = {pair[:1] for pair in re.findall(b"[!-~](?:%b)" % spaces, b"\n".join(tokenizer.token_bytes))}
        before = re.escape("".join(chr(code) for code in _VISIBLE if bytes([code]) not in joined))
    else:
        return None
    sample = tokenizer.encode("a")
    added = tokenizer.encode("a", add_special_tokens=True)
    at = next((at for at in range(len(added)) if added[at : at + len(sample)] == sample), None)
    if not before or at is None:
        return None
    return _Cuts(before, (added[:at], added[at + len(sample) :]))


def _splits_at_spaces(steps: list[dict[str, Any]]) -> bool:
    """Return whether a pre-tokenizer of these steps always splits before a space that follows something else.

    Every step may only have matches that end there at the latest; one has to match spaces, else what no expression
    matches would stay in one piece.
    """
    splits = False
    for step in steps:
        if step["type"] == "Digits":
            continue
        if step["type"] == "ByteLevel" and not step["add_prefix_space"]:
            splits = splits or step["use_regex"]
            continue
        if step["type"] != "Split" or "Regex" not in step["pattern"]:
            return False
        if (step["behavior"], step["invert"]) not in {("Isolated", False), ("Removed", True)}:
            return False
        alternatives = _alternatives(step["pattern"]["Regex"])
        if not all(map(_ends_at_spaces, alternatives)):
            return False
        splits = splits or [r"\s", "+"] in alternatives
    return splits


def _never_splits(step: dict[str, Any], space: str) -> bool:
    """Return whether a step of a pre-tokenizer leaves every text in one piece. Spaces are spelled as `space` then."""
    if step["type"] == "Split":
        return step["pattern"] == {"String": " "} and " " not in space
    return bool(step["type"] == "ByteLevel" and not step["use_regex"] and not step["add_prefix_space"])


def _alternatives(expression: str) -> list[list[str]]:
    """Return the atoms of each alternative of a regular expression."""
    found: list[list[str]] = [[]]
    depth = 0
    for atom in _ATOM.findall(expression.replace("\r", r"\r").replace("\n", r"\n").replace("\t", r"\t")):
        depth += atom.startswith("(") - (atom == ")")
        if atom == "|" and not depth:
            found.append([])
        else:
            found[-1].append(atom)
    return found


def _ends_at_spaces(alternative: list[str]) -> bool:
    """Return whether no match of an expression has a space after another character. It may begin with one."""
    if "".join(alternative) in _OF_SPACES:
        return True
    rest = alternative[2:] if alternative[1:2] == ["?"] and alternative[0] != "(" else alternative
    if any(pair == ("(", "?") for pair in pairwise(rest)):  # it looks around, or is of a kind unknown here
        return False
    return all((_CLASS_WITHOUT_SPACE if atom.startswith("[") else _NEVER_A_SPACE).fullmatch(atom) for atom in rest)
