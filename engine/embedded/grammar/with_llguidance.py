"""JSON schemas, regular expressions and choices by llguidance."""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path

from llguidance import LLExecutor, LLMatcher, LLParserLimits, LLTokenizer, regex_to_lark
from llguidance.numpy import fill_next_token_bitmask_par
from tokenizers import Tokenizer

from engine.embedded.grammar.json_exclusion import Schema
from engine.embedded.grammar.json_schema import prepare
from engine.embedded.grammar.library import MAX_WHITESPACE, Bitmask, Setup, UnsupportedGuideError, choices_of
from engine.types import Guide

_LIMITS = LLParserLimits(max_lexer_states=50_000, max_items_in_row=20_000, step_max_items=200_000, verbose_errors=False)
"""A state takes 1 or 2 kB. An object of 1,000 optional properties has 4,000 items in a row."""
_BYTES = 64 << 10
"""Bytes of a compiled grammar in addition to its text: the average over public schemas."""
_MOST_THREADS = 8
_COPIES_SECONDS = 0.01
"""Time to compile a grammar once more for each further thread that fills masks. Large ones have fewer copies."""
_NO_FORCING = '%llguidance {"no_forcing": true}\nstart: '
"""llguidance would write text that has no alternative in the tokenizer's own way, which may be a special token."""
_JSON = {"whitespace_pattern": rf"[\x20\x0A\x0D\x09]{{0,{MAX_WHITESPACE}}}"}
_SPECIAL = re.compile(r"[^\w]", re.ASCII)
_PLAIN = r'[^"\\\x00-\x1F\x7F]'
_SLICES = [r"[\x20\x0A\x0D\x09]+", *(f"{_PLAIN}{{1,{most}}}" for most in (3, 6, 10, 15, 20, 30, 60)), f"{_PLAIN}+"]
"""Texts whose tokens llguidance allows together, if all such texts may follow. By itself it knows strings of up to 10
and 30 characters, and of any number: where `maxLength` bounds a string, these save almost half of the time of masks."""
_PLACE = re.compile(r"^at \d+\(\d+\): (failed to compile JSON schema: )?")
_REASONS = (
    (r'^Unimplemented keys: \["(.+?)"', "{} is not supported"),
    (r"^oneOf constraints", "the branches of oneOf overlap, which is not supported; use anyOf, or a required constant"),
    (r"^Unsatisfiable schema: (?!Regex)(.+)", "nothing can match it: {}"),
    (r"^Unsatisfiable schema|NoExtension", "nothing that the model can write matches it"),
    (r"^min/maxProperties", "minProperties and maxProperties are supported only where all properties are required"),
    (r"^circular references with sibling", "a $ref that leads back to itself cannot have other keywords beside it"),
    (r"^patternProperty regexes (.+?) and (.+?) are not disjoint",
     "one property name may match two of patternProperties, {} and {}"),
    (r"^Resource '(.+?)'", "$ref must point into the schema, as in #/$defs/name, and {} does not"),
    (r"^Pointer '(.+?)' does not exist", "$ref points to #{}, which does not exist"),
    (r"^recursion limit", "it is nested too deeply"),
    (r"^schema too large|stack level exceeded", "it is too large once its parts are combined"),
    (r"lookarounds not supported yet; (?:End|Start)", "^ and $ are supported only around a whole regular expression"),
    (r"lookarounds not supported yet; Word", "word boundaries are not supported in a regular expression"),
    (r"look-?around", "look-around is not supported in a regular expression"),
    (r"backreferences", "backreferences are not supported in a regular expression"),
    (r"\nerror: (.+)", "the regular expression is not valid: {}"),
    (r"^invalid regex|^regex parse error", "the regular expression is not valid"),
    (r"^lexer|too many|fuel|TooComplex|InternalError|limits|^Parser Error|Current row",
     "it is too complex to be followed token by token"),
)  # fmt: skip
"""Patterns of llguidance's messages, and what to tell the user instead."""


class Llguidance:
    """The `Library` for one tokenizer."""

    def __init__(self, setup: Setup) -> None:
        tokenizer = Tokenizer.from_file(str(Path(setup.tokenizer_folder) / "tokenizer.json"))
        tokenizer.no_padding()
        tokenizer.no_truncation()
        ends = list(setup.eos_token_ids) or None
        self._tokenizer = LLTokenizer(tokenizer.to_str(), n_vocab=setup.vocab_size, eos_token=ends, slices=_SLICES)

    def prepare(self, guide: Guide) -> tuple[LlguidanceGrammar, bytes]:
        """See `Library`."""
        reason = ""
        for grammar in _grammars(guide):
            matcher = self._matcher(grammar)
            if not matcher.is_error() and not matcher.get_grammar_warnings():
                return LlguidanceGrammar([matcher], len(grammar)), grammar.encode()
            reason = reason or explained(matcher.get_error() or matcher.get_grammar_warnings()[0])
        raise UnsupportedGuideError(reason)

    def build(self, guide: Guide, prepared: bytes) -> LlguidanceGrammar:
        """See `Library`."""
        grammar, started = prepared.decode(), time.perf_counter()
        first = self._matcher(grammar)
        copies = min(_threads() - 1, int(_COPIES_SECONDS / (time.perf_counter() - started)))
        others = [self._matcher(grammar) for _ in range(copies)]
        return LlguidanceGrammar([first, *others], len(prepared))

    def _matcher(self, grammar: str) -> LLMatcher:
        return LLMatcher(self._tokenizer, grammar, log_level=0, limits=_LIMITS)


class LlguidanceGrammar:
    """See `Compiled`. Positions that begin at one matcher share the states of its lexer, which one thread at a time may
    use and add to. So there are several, and positions begin at each in turn."""

    def __init__(self, matchers: Sequence[LLMatcher], size: int) -> None:
        self._matchers = matchers
        self._started = 0
        self.num_bytes = len(matchers) * (size + _BYTES)

    def start(self) -> LlguidancePosition:
        """See `Compiled`."""
        lexer = self._started % len(self._matchers)
        self._started += 1
        return LlguidancePosition(self._matchers[lexer].deep_copy(), lexer)


def _threads() -> int:
    """Return the number of threads that fill masks: they work while the device computes, beside those of the API."""
    return max(1, min(_MOST_THREADS, len(os.sched_getaffinity(0)) // 2))


@cache
def _executor() -> LLExecutor:
    return LLExecutor(_threads())


def _fill_together(bitmask: Bitmask, positions: Sequence[tuple[LlguidancePosition, int]]) -> None:
    """Fill rows in several threads, which take neighbours: those that share a lexer, and would wait for each other."""
    neighbours = sorted(positions, key=lambda place: place[0].lexer)
    fill_next_token_bitmask_par(_executor(), [(position._matcher, row) for position, row in neighbours], bitmask)


class LlguidancePosition:
    """See `Position`."""

    together = staticmethod(_fill_together)

    def __init__(self, matcher: LLMatcher, lexer: int) -> None:
        """`lexer`: which one of its grammar's lexers it uses."""
        self._matcher = matcher
        self.lexer = lexer

    @property
    def error(self) -> str:
        return explained(self._matcher.get_error()) if self._matcher.is_error() else ""

    def fill(self, bitmask: Bitmask, row: int) -> None:
        """See `Position`."""
        self._matcher.unsafe_compute_mask_ptr(bitmask[row].ctypes.data, bitmask[row].nbytes)

    def allows(self, token_id: int) -> bool:
        """See `Position`."""
        return self._matcher.validate_tokens([token_id]) == 1

    def accept(self, token_id: int) -> bool:
        """See `Position`. After an error, which `error` tells, every token is accepted."""
        return self._matcher.try_consume_tokens([token_id]) == 1 or self._matcher.is_error()

    def may_end(self) -> bool:
        """See `Position`."""
        return self._matcher.is_accepting()


def explained(message: str) -> str:
    """Return a message of llguidance in words for a user, with the place in the schema if it names one."""
    message = _PLACE.sub("", message)
    where = re.search(r"while processing \S*?(#\S*)", message)
    for pattern, text in _REASONS:
        if match := re.search(pattern, message):
            reason = text.format(*match.groups())
            return f"{where[1]}: {reason}" if where else reason
    return message.partition("\n")[0][:200] or "it is not valid"


def _grammars(guide: Guide) -> Iterator[str]:
    """Yield the guide as grammars for llguidance, the best first: a schema's objects are closed if they can be."""
    match guide.kind:
        case "json_schema":
            yield _json_grammar(prepare(guide.spec))
            yield _json_grammar(prepare(guide.spec, close=False))
        case "json_object":
            yield _json_grammar({"type": "object"})
        case "regex":
            yield _regex_grammar(guide.spec)
        case "choice":
            yield _regex_grammar("|".join(_SPECIAL.sub(_escaped, choice) for choice in choices_of(guide.spec)))
        case "grammar" | "structural_tag":
            raise AssertionError("xgrammar compiles these")


def _json_grammar(schema: Schema) -> str:
    return f"{_NO_FORCING}%json {json.dumps({**schema, 'x-guidance': _JSON})}"


def _regex_grammar(pattern: str) -> str:
    return f"{_NO_FORCING}/{regex_to_lark(pattern)}/"


def _escaped(match: re.Match[str]) -> str:
    return rf"\x{{{ord(match[0]):x}}}"
