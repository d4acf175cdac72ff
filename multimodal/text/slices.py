"""Texts tokenised off the event loop, long ones in slices: other requests get their turns in between, memory stays
small, and the work ends with its waiter.

A text is cut only where its tokens come out the same as those of the whole. That is before a space, if the tokenizer
shows one of these:

- Its pre-tokenizer always splits there. It is made of regular expressions none of which matches a space after anything
  else within one match (`_splits_at_spaces`), as those of GPT-2, Llama 3, Qwen, DeepSeek and Mistral.
- Its pre-tokenizer never splits, and no token of its vocabulary has a space after the character before the cut, so that
  no merge of byte-pair encoding crosses the cut. Gemma's is one.

Other texts, and those with no place to cut, are tokenised whole, up to a length.
"""

import re
from collections.abc import Callable, Iterator
from functools import lru_cache
from itertools import pairwise
from typing import Any

from tokenizers import models

from engine.kit.work import INLINE_LENGTH, NATIVE, WHOLE
from multimodal.errors import RequestError
from multimodal.text.tokenizer import Tokenizer, steps_of

Encode = Callable[[str, bool], list[int]]
"""Return the token ids of a text, with the special tokens that the tokenizer adds or without."""

SLICE_CHARACTERS = 1 << 15
"""Characters after which a text is cut as soon as it can be; takes about 20 ms."""
MAX_WHOLE_CHARACTERS = 1 << 20
"""Length of the longest text, or part of one, that is tokenised whole."""
_BYTES_PER_CHARACTER = 128
"""Memory that tokenising takes, measured."""

_VISIBLE = range(ord("!"), ord("~") + 1)
_OF_SPACES = {r"\s+(?!\S)", r"\s+", r"\s*[\r\n]+", r"\s*[\r\n]", r"\s+$"}
"""Alternatives that match nothing but white space, and look ahead no further than one character."""
_ATOM = re.compile(r"\\[pP]\{[^}]*\}|\\.|\[(?:\\.|[^\]\\])*\]|\(\?i?:|.", re.DOTALL)
_NEVER_A_SPACE = re.compile(r"\\[rntdwS]|\\[^\sa-zA-Z0-9]|\\p\{[LMNPS][a-z]?\}|\(\?i?:|[^\\\[ .]")
_CLASS_WITHOUT_SPACE = re.compile(
    r"\[\^(?:\\.|[^\]\\\[&])*\\s(?:\\.|[^\]\\\[&])*\]"
    r"|\[(?!\^)(?:\\[rntdw](?!-)|\\[^\sa-zA-Z0-9]|\\p\{[LMNPS][a-z]?\}|[^\\\[\]\x00-\x20&]|&(?!&))+\]"
)


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
    for step in steps_of(backend.normalizer, "normalizers"):
        if step["type"] == "Replace" and step["pattern"] == {"String": " "}:
            space = step["content"]
        elif step["type"] not in ("NFC", "NFD", "NFKC", "NFKD"):
            return None
    for token in backend.get_added_tokens_decoder().values():
        content = token.content.replace(space, " ")
        if token.rstrip or token.single_word or re.search(r"\S ", content):
            return None
    steps = steps_of(backend.pre_tokenizer, "pretokenizers")
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
