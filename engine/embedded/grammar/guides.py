"""Compile a guide with xgrammar, in the same way in the grammar worker and in the engine."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING

import xgrammar
from tokenizers import Tokenizer

from engine.embedded.grammar.json_schema import UnsupportedSchemaError, prepare
from engine.types import Guide

if TYPE_CHECKING:
    from engine.embedded.grammar.worker import Setup

MAX_WHITESPACE = 16
"""Maximum whitespace characters between two JSON tokens.

This is enough for indented output, and stops a model that generates whitespace forever."""

_FREE_OBJECT = '{"type": "object"}'
_RULE_CACHE_BYTES = 64 << 20
_START = "start_of_output"
_NOISE = re.compile(r"^\[[\d:]+\] \S+:\d+: (Warning: )?", re.MULTILINE)


class UnsupportedGuideError(ValueError):
    """The guide cannot be compiled; the message is shown to the user."""


def load_compiler(setup: Setup) -> tuple[xgrammar.TokenizerInfo, xgrammar.GrammarCompiler]:
    """Return what xgrammar needs to know about the tokenizer, and a compiler of grammars for it.

    A grammar never allows ids without text (vocabulary padding, special tokens), except for the end-of-sequence ids
    once the grammar is complete.
    """
    tokenizer = Tokenizer.from_file(str(Path(setup.tokenizer_folder) / "tokenizer.json"))
    vocabulary = tokenizer.get_vocab(with_added_tokens=True)
    special = {token_id for token_id, token in tokenizer.get_added_tokens_decoder().items() if token.special}
    encoded = [""] * setup.vocab_size
    for text, token_id in vocabulary.items():
        if token_id < setup.vocab_size and token_id not in special:
            encoded[token_id] = text
    metadata = xgrammar.TokenizerInfo._detect_metadata_from_hf(tokenizer.to_str())
    info = xgrammar.TokenizerInfo(
        encoded,
        vocab_type=metadata["vocab_type"],
        vocab_size=setup.vocab_size,
        stop_token_ids=list(setup.eos_token_ids),
        add_prefix_space=metadata["add_prefix_space"],
    )
    return info, xgrammar.GrammarCompiler(info, max_threads=1, cache_limit_bytes=_RULE_CACHE_BYTES)


def compile_guide(compiler: xgrammar.GrammarCompiler, guide: Guide) -> xgrammar.CompiledGrammar:
    """Compile in this thread: xgrammar releases the GIL but cannot be interrupted. Raises UnsupportedGuideError."""
    try:
        match guide.kind:
            case "json_schema":
                return _compile_schema(compiler, guide.spec)
            case "json_object":
                return _compile_schema(compiler, _FREE_OBJECT)
            case "regex":
                return compiler.compile_regex(guide.spec)
            case "grammar":
                return _compile_ebnf(compiler, guide.spec)
            case "choice":
                return compiler.compile_grammar(_choices(guide.spec))
    except UnsupportedSchemaError as error:
        raise UnsupportedGuideError(str(error)) from None
    except RuntimeError as error:
        raise UnsupportedGuideError(plain(str(error))) from error


def plain(message: str) -> str:
    """Return xgrammar's message without timestamps, source lines and repeated lines."""
    return "; ".join(dict.fromkeys(line.strip() for line in _NOISE.sub("", message).splitlines() if line.strip()))


def _compile_schema(compiler: xgrammar.GrammarCompiler, schema: str) -> xgrammar.CompiledGrammar:
    prepared = prepare(schema, _is_exact)
    return compiler.compile_json_schema(prepared, strict_mode=True, max_whitespace_cnt=MAX_WHITESPACE)


def _compile_ebnf(compiler: xgrammar.GrammarCompiler, grammar: str) -> xgrammar.CompiledGrammar:
    """Compile under a separate start rule.

    If the start rule refers to itself, xgrammar wrongly masks tokens that end an inner occurrence and continue.
    """
    return compiler.compile_grammar(f"{grammar}\n{_START} ::= root", root_rule_name=_START)


def _is_exact(pattern: str) -> bool:
    """Return whether xgrammar compiles a pattern to one automaton over JSON-safe characters.

    Other patterns are expanded without escaping, so their matches may not be valid JSON strings.
    """
    if not pattern.isascii() or not pattern.isprintable():
        return False
    grammar = xgrammar.Grammar.from_json_schema(json.dumps({"type": "string", "pattern": pattern}))
    return "json_string=true" in str(grammar)


def _choices(spec: str) -> str:
    try:
        choices = json.loads(spec)
    except json.JSONDecodeError:
        raise UnsupportedGuideError("the choices are not valid JSON") from None
    if not isinstance(choices, list) or not choices or not all(isinstance(choice, str) for choice in choices):
        raise UnsupportedGuideError("the choices must be a non-empty array of strings")
    return "root ::= " + " | ".join(f'"{"".join(map(_escaped, choice))}"' for choice in choices)


def _escaped(character: str) -> str:
    if character.isascii() and character.isalnum():
        return character
    if 0xD800 <= ord(character) < 0xE000:
        raise UnsupportedGuideError("a choice contains half of a surrogate pair")
    return f"\\U{ord(character):08x}"
