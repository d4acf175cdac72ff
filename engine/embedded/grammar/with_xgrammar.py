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
_NOISE = re.compile(r"^\[[\d:]+\] \S+:\d+: (Warning: )?", re.MULTILINE)
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
        self.num_bytes: int = compiled.memory_size_bytes

    def start(self) -> XgrammarPosition:
        """See `Compiled`."""
        return XgrammarPosition(xgrammar.GrammarMatcher(self._compiled))


class XgrammarPosition:
    """See `Position`."""

    error = ""

    def __init__(self, matcher: xgrammar.GrammarMatcher) -> None:
        self._matcher = matcher

    def fill(self, bitmask: Bitmask, row: int) -> None:
        """See `Position`."""
        self._matcher.fill_next_token_bitmask(bitmask, row)

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


def _bounded(tags: Any) -> Any:
    """Return a structural tag in which JSON has no endless white space, which a model may go on with for ever."""
    if isinstance(tags, list):
        return [_bounded(tag) for tag in tags]
    if not isinstance(tags, dict):
        return tags
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
