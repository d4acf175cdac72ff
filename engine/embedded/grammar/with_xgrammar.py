"""EBNF grammars and structural tags by xgrammar."""

from __future__ import annotations

import json
import os
import re
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import xgrammar
from tokenizers import Tokenizer

from engine.embedded.grammar.library import MAX_WHITESPACE, Bitmask, Setup, UnsupportedGuideError
from engine.types import Guide

_REPEATABLE_SECONDS = 0.5
"""The engine repeats compilations that take no longer: the result is large, and deserialising it is slow."""
_RULE_CACHE_BYTES = 64 << 20
_MAX_COMPILERS = 4
_START = "start_of_output"
_LITERAL = re.compile(r'"(?:[^"\\]|\\.)*"|\[(?:[^\]\\]|\\.)*\]', re.DOTALL)
"""A text or a class of characters in xgrammar's EBNF."""
_CARET_FIRST = re.compile(r"(?<!\\)(?:\\\\)*\[\\(?:\^|x5[eE]|u005[eE]|u\{0*5[eE]\})")
"""A class of a regular expression that begins with an escaped ^: xgrammar writes [^a] for it, the opposite."""
_CALL = re.compile(r"\w+\(")
_CHARACTER = re.compile(r"\\(x[0-9a-fA-F]{1,2}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8})|\\(.)|(.)", re.DOTALL)
_LETTERS = {"n": 10, "t": 9, "r": 13, "f": 12, "v": 11, "b": 8, "a": 7, "e": 27, "0": 0}
_ESCAPED = (*range(0x20), ord('"'), ord("\\"))
"""Characters that JSON escapes."""
_SURROGATES, _LAST = (0xD800, 0xDFFF), 0x10FFFF
_NOISE = re.compile(r"\[[\d:]+\] \S+:\d+: (Warning: )?")
_ASSERTION = re.compile(r"Check failed: \(.*?\)( is false)?:? ?")


class Xgrammar:
    """The `Library` for one tokenizer. Its C++ code releases the GIL and cannot be interrupted."""

    def __init__(self, setup: Setup) -> None:
        tokenizer = Tokenizer.from_file(str(Path(setup.tokenizer_folder) / "tokenizer.json"))
        self._setup = setup
        self._metadata = xgrammar.TokenizerInfo._detect_metadata_from_hf(tokenizer.to_str())
        self._special = {
            token.content: token_id
            for token_id, token in tokenizer.get_added_tokens_decoder().items()
            if token.special and token_id < setup.vocab_size and token_id not in setup.eos_token_ids
        }
        added = {token_id for token_id, token in tokenizer.get_added_tokens_decoder().items() if token.special}
        self._encoded = [""] * setup.vocab_size
        for text, token_id in tokenizer.get_vocab(with_added_tokens=True).items():
            if token_id < setup.vocab_size and token_id not in added:
                self._encoded[token_id] = text
        self._compilers: dict[tuple[str, ...], tuple[xgrammar.TokenizerInfo, xgrammar.GrammarCompiler]] = {}
        self._lock = threading.Lock()

    def prepare(self, guide: Guide) -> tuple[XgrammarGrammar, bytes]:
        """See `Library`. A grammar is refused if xgrammar warns about what it ignores."""
        started = time.monotonic()
        with _warnings() as warnings:
            compiled = self._compile(guide)
        if warnings:
            raise UnsupportedGuideError(f"it cannot be enforced in full: {explained(chr(10).join(warnings))}")
        slow = time.monotonic() - started > _REPEATABLE_SECONDS
        return XgrammarGrammar(compiled), compiled.serialize_json().encode() if slow else b""

    def build(self, guide: Guide, prepared: bytes) -> XgrammarGrammar:
        """See `Library`."""
        with self._lock:
            if prepared:
                info, _ = self._compiler(guide)
                return XgrammarGrammar(xgrammar.CompiledGrammar.deserialize_json(prepared.decode(), info))
            return XgrammarGrammar(self._compile(guide))

    def _compile(self, guide: Guide) -> xgrammar.CompiledGrammar:
        """Compile EBNF under a separate start rule.

        If the start rule refers to itself, xgrammar wrongly masks tokens that end an inner occurrence and continue.
        """
        _, compiler = self._compiler(guide)
        try:
            if guide.kind == "structural_tag":
                return compiler.compile_structural_tag(json.dumps(_bounded(json.loads(guide.spec))))
            return compiler.compile_grammar(f"{guide.spec}\n{_START} ::= root", root_rule_name=_START)
        except (RuntimeError, ValueError) as error:
            raise UnsupportedGuideError(explained(str(error))) from error

    def _compiler(self, guide: Guide) -> tuple[xgrammar.TokenizerInfo, xgrammar.GrammarCompiler]:
        """Return a vocabulary that has, of the special tokens, those whose texts a tag has, and its compiler."""
        tags = json.loads(guide.spec) if guide.kind == "structural_tag" else ""
        texts = "\n".join(_texts(tags))
        shown = tuple(text for text in self._special if text in texts)
        if (found := self._compilers.get(shown)) is None:
            encoded = self._encoded.copy()
            for text in shown:
                encoded[self._special[text]] = text
            info = xgrammar.TokenizerInfo(
                encoded,
                vocab_type=self._metadata["vocab_type"],
                vocab_size=self._setup.vocab_size,
                stop_token_ids=list(self._setup.eos_token_ids),
                add_prefix_space=self._metadata["add_prefix_space"],
            )
            found = info, xgrammar.GrammarCompiler(info, max_threads=1, cache_limit_bytes=_RULE_CACHE_BYTES)
            while len(self._compilers) >= _MAX_COMPILERS:
                del self._compilers[next(iter(self._compilers))]
            self._compilers[shown] = found
        return found


class XgrammarGrammar:
    """See `Compiled`."""

    def __init__(self, compiled: xgrammar.CompiledGrammar) -> None:
        self._compiled = compiled
        self._textless = frozenset(compiled.tokenizer_info.special_token_ids)
        self.num_bytes: int = compiled.memory_size_bytes

    def start(self) -> XgrammarPosition:
        """See `Compiled`."""
        return XgrammarPosition(xgrammar.GrammarMatcher(self._compiled), self._textless)


class XgrammarPosition:
    """See `Position`."""

    error = ""
    together = None

    def __init__(self, matcher: xgrammar.GrammarMatcher, textless: frozenset[int]) -> None:
        """`textless`: ids without text. xgrammar does not accept them either, but writes a warning each time."""
        self._matcher = matcher
        self._textless = textless

    def fill(self, bitmask: Bitmask, row: int) -> None:
        """See `Position`."""
        self._matcher.fill_next_token_bitmask(bitmask, row)

    def allows(self, token_id: int) -> bool:
        """See `Position`."""
        if token_id in self._textless or not self.accept(token_id):
            return False
        self._matcher.rollback(1)
        return True

    def accept(self, token_id: int) -> bool:
        """See `Position`."""
        return bool(self._matcher.accept_token(token_id))

    def may_end(self) -> bool:
        """See `Position`."""
        return bool(self._matcher.is_completed())


def explained(message: str) -> str:
    """Return xgrammar's message without timestamps, source lines, assertions and repeated lines."""
    lines = (_ASSERTION.sub("", line).strip() for line in _NOISE.sub("", message).splitlines())
    return "; ".join(dict.fromkeys(line for line in lines if line)) or "it is not valid"


def _texts(tags: Any) -> Iterator[str]:
    """Yield the texts of a structural tag that are to be written as they are."""
    if isinstance(tags, str):
        yield tags
    elif isinstance(tags, list):
        for tag in tags:
            yield from _texts(tag)
    elif isinstance(tags, dict):
        for key, value in tags.items():
            if key not in ("json_schema", "schema"):
                yield from _texts(value)


def ebnf_of(syntax: str, definition: str, *, in_json: bool) -> str:
    """Return a grammar, of syntax lark or regex, as EBNF. With `in_json` that is the grammar of the same texts inside a
    JSON string. Raises UnsupportedGuideError, ValueError and RuntimeError.
    """
    if _CARET_FIRST.search(definition) is not None:
        raise UnsupportedGuideError(r"a class of characters cannot begin with \^: put it last")
    made = xgrammar.Grammar.from_lark if syntax == "lark" else xgrammar.Grammar.from_regex
    grammar = str(made(definition))
    if (unknown := _CALL.search(_LITERAL.sub("", grammar))) is not None:
        raise UnsupportedGuideError(f"it needs {unknown[0]}…), which a tool's input cannot have")
    return _LITERAL.sub(lambda literal: _in_json(literal[0]), grammar) if in_json else grammar


def _in_json(literal: str) -> str:
    """Return a text or a class of characters of xgrammar's EBNF as JSON writes it."""
    if literal[0] == '"':
        return _quoted(json.dumps("".join(chr(code) for code, _ in _codes(literal[1:-1])), ensure_ascii=False)[1:-1])
    negated = literal.startswith("[^")
    ranges = _ranges(literal[2:-1] if negated else literal[1:-1])
    left_out = ranges if negated else _complement(ranges)
    plain = _complement([*left_out, *((code, code) for code in _ESCAPED)])
    escaped = [code for code in _ESCAPED if any(low <= code <= high for low, high in ranges) != negated]
    choices = [_quoted(json.dumps(chr(code))[1:-1]) for code in escaped]
    if plain:
        choices.insert(0, "[" + "".join(f"{_code(low)}-{_code(high)}" for low, high in plain) + "]")
    return f"({' | '.join(choices)})"


def _codes(text: str) -> list[tuple[int, bool]]:
    """Return the code points of a literal without its escapes, each with whether it was written without an escape."""
    found = []
    for number, letter, plain in _CHARACTER.findall(text):
        code = int(number[1:], 16) if number else _LETTERS.get(letter, ord(letter)) if letter else ord(plain)
        found.append((code, bool(plain)))
    return found


def _ranges(text: str) -> list[tuple[int, int]]:
    """Return the ranges of a class of characters: first and last."""
    codes = _codes(text)
    found, place = [], 0
    while place < len(codes):
        low = high = codes[place][0]
        if codes[place + 1 : place + 2] == [(ord("-"), True)] and place + 2 < len(codes):
            high = codes[place + 2][0]
            place += 2
        found.append((low, high))
        place += 1
    return found


def _complement(ranges: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return the Unicode characters outside these ranges."""
    found, start = [], 0
    for low, high in sorted([*ranges, _SURROGATES, (_LAST + 1, _LAST + 1)]):
        if low > start:
            found.append((start, low - 1))
        start = max(start, high + 1)
    return found


def _code(code: int) -> str:
    return f"\\U{code:08x}"


def _quoted(text: str) -> str:
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


def _bounded(tags: Any) -> Any:
    """Return a structural tag in which JSON has no endless white space, which a model may continue endlessly, and
    grammars of texts are EBNF.
    """
    if isinstance(tags, list):
        return [_bounded(tag) for tag in tags]
    if not isinstance(tags, dict):
        return tags
    if tags.get("type") == "text_grammar":
        return {"type": "grammar", "grammar": ebnf_of(tags["syntax"], tags["definition"], in_json=tags["json"])}
    if tags.get("type") == "json_schema":
        return {"max_whitespace_cnt": MAX_WHITESPACE, **tags}
    return {key: _bounded(value) for key, value in tags.items()}


@contextmanager
def _warnings() -> Iterator[list[str]]:
    """Divert standard error of this process; at the end, append the warnings that xgrammar wrote to the list."""
    found: list[str] = []
    saved = os.dup(2)
    with tempfile.TemporaryFile() as diverted:
        os.dup2(diverted.fileno(), 2)
        try:
            yield found
        finally:
            os.dup2(saved, 2)
            os.close(saved)
            diverted.seek(0)
            written = diverted.read().decode(errors="replace")
            found += [line for line in written.splitlines() if "Warning: " in line]
