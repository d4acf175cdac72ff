"""Reading of the output of a choice piece by piece, and of the calls in it. The reader is a generator that pulls from a
buffer, and yields when it needs more output. Read text leaves the buffer, so that the work per token does not grow with
the answer.
"""

import html
import json
import re
import secrets
import string
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any

import regex

from multimodal.answers.parsers.formats import (
    Bare,
    JsonCall,
    Malformed,
    OutputFormat,
    Params,
    Pythonic,
    Schema,
    ToolFormat,
    WholeCalls,
)
from multimodal.answers.parsers.markers import STAND_INS, Pattern, SpecialTokens, compiled, without_surrogates
from multimodal.answers.parsers.values import cast, json_value, property_of, python_value, types_of
from multimodal.answers.parts import Part, ToolCall

Reading = Generator[None, None, None]
Sink = Callable[[str], None]

_CHARACTERS = re.compile(rf'[^"\\\x00-\x1f{STAND_INS}]+')
_HIGH, _LOW = r"[dD][89abAB][0-9a-fA-F]{2}", r"[dD][c-fC-F][0-9a-fA-F]{2}"
_NO_LOW = r"(?=[^\\]|\\[^u]|\\u[^dD]|\\u[dD][^c-fC-F]|EOS)"
_UNICODE = Pattern(
    rf"u(?:{_HIGH}\\u{_LOW}|(?P<half>{_HIGH}{_NO_LOW}|{_LOW})|(?:[0-9a-cefA-CEF][0-9a-fA-F]|[dD][0-7])[0-9a-fA-F]{{2}})",
    {},
)
"""The escape of a character behind its backslash, or `half` of one: a surrogate without the other."""
_SCALAR = re.compile(r"[\w.+\-]{1,300}")
_NUMBER = re.compile(r"-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][+\-]?\d+)?")
_LITERALS = {"true": "true", "false": "false", "null": "null", "True": "true", "False": "false", "None": "null"}
_BARE = re.compile(rf"[^,:{{}}\[\]{STAND_INS}]+")
_PYTHON = re.compile(r"""[^"'\[\](){},\\]+""")
_NAME = re.compile(r"[A-Za-z_][\w.\-]*")
_LONGEST_NAME = 256
_DEEPEST = 128  # further levels, like longer numbers than `_SCALAR`, could not be sent back in a body
_encode = json.JSONEncoder(ensure_ascii=False, allow_nan=False).encode
_ALPHANUMERIC = string.ascii_letters + string.digits


class CallState:
    """A call that is being read."""

    def __init__(self, id_length: int = 0) -> None:
        self.id_length = id_length
        self.id = ""
        self.name: str | None = None
        self.arguments: list[str] = []
        self.given = False

    def begin(self, name: str, call_id: str | None) -> None:
        self.name = name
        if call_id is not None:
            self.id = call_id
        elif self.id_length:
            self.id = "".join(secrets.choice(_ALPHANUMERIC) for _ in range(self.id_length))
        else:
            self.id = f"call_{secrets.token_hex(12)}"


class CallReader:
    """Reads calls from a buffer of output. A subclass reads the rest, and handles text."""

    def __init__(
        self, family: OutputFormat, tools: Mapping[str, Schema], tokens: SpecialTokens, whole_calls: bool
    ) -> None:
        self.malformed = 0
        """Number of calls that became text or broke off."""
        self._family = family
        self._schemas = tools
        self._tokens = tokens
        self._stand_ins = tuple(tokens.stand_ins.items())
        self._whole = whole_calls
        self._buffer = ""
        self._position = 0
        self._silent = 0  # characters of the buffer that belong to the prompt
        self._final = False
        self._parts: list[Part] = []
        self._spaces: list[str] = []  # white space that is dropped if a marker follows
        self._blank = True  # only white space so far
        self._after_call = False
        self._record: list[str] | None = None  # what a call was made of, to give it back as text
        self._index = 0
        self._call = CallState()
        self._list: list[ToolCall] | None = None  # calls that count only together

    def _text(self, text: str) -> None:
        """Pass on text of the answer."""
        raise NotImplementedError

    # Reading the buffer.

    def _pattern(self, source: str) -> Pattern:
        return compiled(source, self._stand_ins)

    def _take(self, end: int) -> str:
        """Read the buffer up to `end`; return the text that is shown."""
        text = self._buffer[self._position : end]
        self._position = end
        if self._silent:
            hidden = min(self._silent, len(text))
            self._silent -= hidden
            text = text[hidden:]
        if self._stand_ins and not text.isascii():
            text = self._tokens.show(text)
        if self._record is not None:
            self._record.append(text)
        return text

    def _match(self, pattern: Pattern) -> Generator[None, None, "regex.Match[str] | None"]:
        """Return the match at the start of the buffer, once it is clear whether there is one."""
        while True:
            found = pattern.match(self._buffer, self._position, self._final)
            if found is None or not found.partial:
                return found
            yield

    def _until(self, pattern: Pattern, sink: Sink) -> Generator[None, None, "regex.Match[str] | None"]:
        """Pass on text up to the first match, and return that; None at the end of the output."""
        while True:
            found = pattern.search(self._buffer, self._position, self._final)
            stop = len(self._buffer) if found is None else found.start()
            if stop > self._position:
                sink(self._take(stop))
            if found is not None and not found.partial:
                return found
            if self._final:
                return None
            yield

    def _more(self) -> Reading:
        """Wait for output. Raises Malformed at its end."""
        while self._position >= len(self._buffer):
            if self._final:
                raise Malformed
            yield

    def _next(self) -> Generator[None, None, str]:
        """Return the next character that is not white space, unread. Raises Malformed at the end of the output."""
        while True:
            end, length = self._position, len(self._buffer)
            while end < length and self._buffer[end].isspace():
                end += 1
            if end > self._position:
                self._take(end)
            if end < length:
                return self._buffer[end]
            yield from self._more()

    def _expect(self, characters: str) -> Generator[None, None, str]:
        """Read one of these characters behind white space and return it. Raises Malformed for another."""
        found = yield from self._next()
        if found not in characters:
            raise Malformed
        return self._take(self._position + 1)

    # Calls.
    def _calls(
        self, tools: ToolFormat, found: "regex.Match[str]", before: Sequence[str] = (), unmarked: bool = False
    ) -> Generator[None, None, bool]:
        """Read a call, or a list of calls. Return whether it was one; otherwise it is text. An `unmarked` call has to
        name a tool of the request. If the format has markers, it comes out whole, together with all calls of its list.
        """
        groups = found.groupdict()
        whole, self._whole = self._whole, self._whole or (unmarked and bool(tools.loose))
        name, call_id = groups.get("name"), groups.get("id")
        self._record = list(before)
        self._take(found.end())
        self._call = CallState(tools.id_length)
        self._list = [] if unmarked and tools.loose else None
        try:
            if name is not None and not isinstance(tools.content, WholeCalls):
                self._begin(self._tokens.show(name), call_id)
            match tools.content:
                case JsonCall() as content if name is None:
                    yield from self._json_calls(content, unmarked)
                case Pythonic():
                    self._list = [] if self._whole else None
                    yield from self._python_calls(unmarked)
                case Params() as content:
                    yield from self._params(content)
                case Bare(quote):
                    yield from self._bare_object(quote)
                case WholeCalls() as content:
                    yield from self._region(content, groups)
                case _:
                    yield from self._arguments()
            if self._call.name is not None:
                self._end()
            if self._list is not None:
                self._emit(self._list)
                self._list = []
                self._after_call = True
            yield from self._leave_out(self._pattern(tools.end))
        except Malformed:
            self._break(malformed=not unmarked or self._call.name is not None)
            return False
        finally:
            self._record = self._list = None
            self._whole = whole
        return True

    def _leave_out(self, pattern: Pattern) -> Reading:
        """Drop a marker at the start of the buffer, or the beginning of one at the end of the output."""
        while (found := pattern.match(self._buffer, self._position, False)) is not None and found.partial:
            if self._final:
                break
            yield
        if found is not None:
            self._take(found.end())

    def _begin(self, name: str, call_id: str | None = None) -> None:
        name = without_surrogates(name)
        self._call.begin(name, call_id)
        if not self._whole:
            self._spaces.clear()
            self._parts.append(ToolCall(self._index, self._call.id, name, "".join(self._call.arguments)))

    def _pass(self, arguments: str) -> None:
        if self._whole or self._call.name is None:
            self._call.arguments.append(arguments)
        else:
            self._parts.append(ToolCall(self._index, arguments=arguments))

    def _end(self) -> None:
        call = self._call
        if self._whole:
            part = ToolCall(self._index, call.id, call.name, "".join(call.arguments))
            if self._list is not None:
                self._list.append(part)
            else:
                self._emit([part])
        self._index += 1
        self._call = CallState(call.id_length)
        self._blank = False
        self._after_call = self._record is not None
        if self._record is not None and self._list is None:
            self._record.clear()

    def _emit(self, calls: Sequence[ToolCall]) -> None:
        self._spaces.clear()
        self._parts.extend(calls)

    def _break(self, malformed: bool = True) -> None:
        """Pass on the rest of the text of a `malformed` call, or of text that never was a call."""
        self.malformed += malformed
        record, self._record = self._record, None
        if self._list is not None:
            self._index -= len(self._list)
        if self._call.name is not None and not self._whole:
            self._index += 1
            self._blank = False
        elif record is not None:
            self._text("".join(record))

    def _json_calls(self, content: JsonCall, unmarked: bool) -> Reading:
        if (yield from self._next()) == "{":
            yield from self._json_call(content, unmarked)
            return
        yield from self._expect("[")
        while (yield from self._next()) != "]":
            yield from self._json_call(content, unmarked)
            if (yield from self._next()) != "]":
                yield from self._expect(",")
        yield from self._expect("]")

    def _json_call(self, content: JsonCall, unmarked: bool) -> Reading:
        """Read an object with a name and arguments, in any order; it may be the value of `function` in another
        object."""
        yield from self._expect("{")
        depth = 1
        while depth:
            if (yield from self._expect('"}')) == "}":
                depth -= 1
            else:
                key = yield from self._word()
                yield from self._expect(":")
                first = yield from self._next()
                if key == "function" and first == "{":
                    yield from self._expect("{")
                    depth += 1
                    continue
                yield from self._json_field(content, key, unmarked)
            if depth and (yield from self._next()) == ",":
                yield from self._expect(",")
        if self._call.name is None or (unmarked and not self._call.given):
            raise Malformed
        if not self._call.given:
            self._pass("{}")
        self._end()

    def _json_field(self, content: JsonCall, key: str, unmarked: bool) -> Reading:
        if (key in content.names or key == "function") and self._call.name is None:
            yield from self._expect('"')
            name = yield from self._word()
            if not name or (unmarked and name not in self._schemas):
                raise Malformed
            self._begin(name)
        elif key in content.arguments and not self._call.given:
            yield from self._arguments()
        elif unmarked and key not in ("id", "type"):
            raise Malformed
        else:
            ignored: list[str] = []
            yield from self._json(ignored.append)

    def _word(self) -> Generator[None, None, str]:
        """Read the rest of a short string in JSON."""
        pieces: list[str] = []
        yield from self._string(pieces.append, _LONGEST_NAME)
        return str(json.loads(f'"{"".join(pieces)}"'))

    def _arguments(self) -> Reading:
        """Read the arguments of a call: a JSON object, which may be written as a string, or null."""
        self._call.given = True
        first = yield from self._next()
        if first == "{":
            yield from self._json(self._pass)
            return
        pieces: list[str] = []
        yield from self._json(pieces.append)
        try:
            value = json_value("".join(pieces))
            value = json_value(value) if isinstance(value, str) and value.strip() else value or {}
        except (ValueError, RecursionError):
            raise Malformed from None
        if not isinstance(value, dict):
            raise Malformed
        self._pass(_encoded(value))

    def _json(self, sink: Sink) -> Reading:
        """Read a JSON value, and pass it on incrementally, without white space between tokens. Some mistakes of models
        are corrected: control characters and unknown escapes in strings, superfluous commas, and Python's constants.
        """
        closers: list[str] = []
        state = "value"
        comma = ""
        while True:
            character = self._buffer[self._position : self._position + 1]
            if character <= " ":
                character = yield from self._next()
            if character == '"' and state not in (":", ","):
                self._take(self._position + 1)
                sink(comma + '"')
                yield from self._string(sink)
                sink('"')
                state = ":" if state == "key" else ","
            elif character in "{[" and state in ("value", "item"):
                if len(closers) == _DEEPEST:
                    raise Malformed
                self._take(self._position + 1)
                sink(comma + character)
                closers.append("}" if character == "{" else "]")
                state = "key" if character == "{" else "item"
                comma = ""
                continue
            elif closers and character == closers[-1] and state in (",", "key", "item"):
                self._take(self._position + 1)
                sink(closers.pop())
                state = ","
            elif character == ":" and state == ":":
                self._take(self._position + 1)
                sink(": ")
                state = "value"
                comma = ""
                continue
            elif character == "," and state == "," and closers:
                self._take(self._position + 1)
                state = "key" if closers[-1] == "}" else "item"
                comma = ", "
                continue
            elif state in ("value", "item"):
                sink(comma + (yield from self._scalar()))
                state = ","
            else:
                raise Malformed
            comma = ""
            if not closers:
                return

    def _scalar(self) -> Generator[None, None, str]:
        """Read a number or a constant."""
        while True:
            found = _SCALAR.match(self._buffer, self._position)
            if found is None:
                raise Malformed
            if found.end() < len(self._buffer) or self._final:
                break
            yield
        word = self._take(found.end())
        if word in _LITERALS:
            return _LITERALS[word]
        if _NUMBER.fullmatch(word) is None:
            raise Malformed
        return word

    def _string(self, sink: Sink, longest: int | None = None) -> Reading:
        """Read a JSON string behind its first quote, and pass on the text between the quotes."""
        length = 0
        while True:
            if self._position >= len(self._buffer):
                yield from self._more()
            found = _CHARACTERS.match(self._buffer, self._position)
            if found is not None:
                text = self._take(found.end())
                sink(text)
                length += len(text)
                if longest is not None and length > longest:
                    raise Malformed
                continue
            character = self._take(self._position + 1)
            if character == '"':
                return
            if character != "\\":
                sink(_quoted(character))
                continue
            yield from self._more()
            escape = (yield from self._match(_UNICODE)) if self._buffer[self._position] == "u" else None
            if escape is not None:
                text = self._take(escape.end())
                sink("\\" + text if escape["half"] is None else "\\ufffd")
                continue
            character = self._take(self._position + 1)
            if character in '"\\/bfnrt':
                sink("\\" + character)
            elif character == "'":
                sink("'")
            else:
                sink("\\\\" + _quoted(character))

    def _params(self, content: Params) -> Reading:
        """Read arguments between markers up to the end of the call, and pass them on as an object of JSON."""
        pattern = self._pattern(f"(?P<begin>{content.begin})|(?P<end>{content.end})")
        close = self._pattern(content.close)
        schema = self._schemas.get(self._call.name or "", {})
        seen: set[str] = set()
        self._pass("{")
        while True:
            yield from self._next()
            found = yield from self._match(pattern)
            if found is None:
                raise Malformed
            groups = found.groupdict()
            self._take(found.end())
            if groups["end"] is not None:
                break
            key = self._tokens.show(groups["key"])
            key = html.unescape(key) if content.escaped else key
            if content.newline:
                yield from self._more()
                if self._buffer[self._position] == "\n":
                    self._take(self._position + 1)
            types = _declared(groups, types_of(property_of(schema, key)))
            pieces: list[str] = []
            streamed = types == {"string"} and key not in seen
            if key not in seen:
                self._pass(f"{', ' if seen else ''}{_encoded(key)}: " + '"' * streamed)
            found = yield from self._until(close, self._pass_quoted if streamed else pieces.append)
            if found is None:
                raise Malformed
            self._take(found.end())
            if streamed:
                self._pass('"')
            elif key not in seen:
                self._pass(_encoded(cast("".join(pieces), types)))
            seen.add(key)
        self._pass("}")

    def _pass_quoted(self, text: str) -> None:
        self._pass(_quoted(text))

    def _bare_object(self, quote: str) -> Reading:
        """Read an object whose keys have no quotes, and pass it on as JSON."""
        delimiter = self._pattern(f"«{quote}»")
        sink = self._pass
        closers: list[str] = []
        state = "value"
        comma = ""
        while True:
            character = yield from self._next()
            found = None
            if state != ",":
                found = yield from self._match(delimiter)
            if closers and character == closers[-1] and state in (",", "key", "item"):
                self._take(self._position + 1)
                sink(closers.pop())
                state = ","
            elif character == "," and state == ",":
                self._take(self._position + 1)
                state = "key" if closers[-1] == "}" else "item"
                comma = ", "
                continue
            elif state == "key":
                if character == '"':
                    self._take(self._position + 1)
                    key = yield from self._word()
                else:
                    key = yield from self._bare_word(delimiter, ":")
                yield from self._expect(":")
                sink(f"{comma}{_encoded(key)}: ")
                state, comma = "value", ""
                continue
            elif state == ",":
                raise Malformed
            elif found is not None:
                self._take(found.end())
                sink(comma + '"')
                ended = yield from self._until(delimiter, lambda text: sink(_quoted(text)))
                if ended is None:
                    raise Malformed
                self._take(ended.end())
                sink('"')
                state = ","
            elif character == '"' and closers:
                self._take(self._position + 1)
                sink(comma + '"')
                yield from self._string(sink)
                sink('"')
                state = ","
            elif character in "{[":
                if len(closers) == _DEEPEST:
                    raise Malformed
                self._take(self._position + 1)
                sink(comma + character)
                closers.append("}" if character == "{" else "]")
                state, comma = ("key" if character == "{" else "item"), ""
                continue
            elif not closers:
                raise Malformed
            else:
                word = yield from self._bare_word(delimiter, ",}]")
                sink(comma + _encoded(cast(word, set())))
                state = ","
            comma = ""
            if not closers:
                return

    def _bare_word(self, delimiter: Pattern, ends: str) -> Generator[None, None, str]:
        """Read a word without quotes, or with the family's, up to one of `ends`."""
        pieces: list[str] = []
        while True:
            yield from self._more()
            if self._buffer[self._position] in ends:
                return "".join(pieces).strip()
            found = yield from self._match(delimiter)
            if found is not None:
                self._take(found.end())
                continue
            plain = _BARE.match(self._buffer, self._position)
            if plain is None or sum(map(len, pieces)) > 4 * _LONGEST_NAME:
                raise Malformed
            pieces.append(self._take(plain.end()))

    def _region(self, content: WholeCalls, groups: Mapping[str, str | None]) -> Reading:
        """Read calls as a whole, and cast arguments that are text."""
        pieces: list[str] = []
        found = yield from self._until(self._pattern(content.close), pieces.append)
        if found is None:
            raise Malformed
        self._take(found.end())
        captured = {key: self._tokens.show(value) for key, value in groups.items() if value is not None}
        for name, arguments in content.read("".join(pieces), captured):
            schema = self._schemas.get(name, {})
            for key, value in arguments.items():
                types = types_of(property_of(schema, key))
                if isinstance(value, str) and types:
                    arguments[key] = cast(value, types)
            self._begin(name)
            self._pass(_encoded(arguments))
            self._end()

    def _python_calls(self, unmarked: bool) -> Reading:
        """Read a list of Python calls. They count when the list is complete."""
        yield from self._expect("[")
        while True:
            if (yield from self._next()) == "]":
                raise Malformed
            name = (yield from self._python_until("(")).strip()
            if _NAME.fullmatch(name) is None or (unmarked and name not in self._schemas):
                raise Malformed
            self._begin(name)
            yield from self._python_arguments()
            self._end()
            if (yield from self._expect(",]")) == "]":
                break

    def _python_arguments(self) -> Reading:
        yield from self._expect("(")
        self._pass("{")
        seen: set[str] = set()
        while (yield from self._next()) != ")":
            argument = yield from self._python_until(",)")
            key, equals, value = argument.partition("=")
            key = key.strip()
            if not equals or _NAME.fullmatch(key) is None:
                raise Malformed
            if key not in seen:
                written = _encoded(python_value(value))
                self._pass(f"{', ' if seen else ''}{_encoded(key)}: {written}")
            seen.add(key)
            if (yield from self._next()) == ",":
                yield from self._expect(",")
        yield from self._expect(")")
        self._pass("}")

    def _python_until(self, ends: str) -> Generator[None, None, str]:
        """Read Python up to one of `ends` outside strings and brackets."""
        pieces: list[str] = []
        depth, quote = 0, ""
        while True:
            yield from self._more()
            plain = _PYTHON.match(self._buffer, self._position)
            if plain is not None:
                pieces.append(self._take(plain.end()))
                if ends == "(" and sum(map(len, pieces)) > _LONGEST_NAME:
                    raise Malformed
                continue
            character = self._buffer[self._position]
            if not quote and not depth and character in ends:
                return "".join(pieces)
            pieces.append(self._take(self._position + 1))
            if character == "\\":
                yield from self._more()
                pieces.append(self._take(self._position + 1))
            elif quote:
                quote = "" if character == quote else quote
            elif character in "\"'":
                quote = character
            elif character in "([{":
                depth += 1
            elif character in ")]}":
                depth -= 1
                if depth < 0:
                    raise Malformed


def _declared(groups: Mapping[str, str | None], types: set[str]) -> set[str]:
    """Return the types named by an argument's own marker, otherwise those of the schema."""
    if groups.get("string") == "true" or groups.get("type") == "string":
        return {"string"}
    if groups.get("string") == "false" or groups.get("type") is not None:
        return types - {"string"}
    return types


def _encoded(value: Any) -> str:
    """Return a value as JSON in valid Unicode. Raises Malformed."""
    try:
        return without_surrogates(_encode(value))
    except (ValueError, RecursionError):  # a number that JSON does not have, or that is too large to be printed
        raise Malformed from None


def _quoted(text: str) -> str:
    """Return text in the escaped form of a JSON string."""
    return _encoded(text)[1:-1]
