"""The incremental parser: token ids and text of one choice in, parts of its answer out.

It is written as generators that read a buffer, and yield where they need more of the output. What they have read leaves
the buffer, so that the work per token does not grow with the answer.
"""

import html
import json
import re
import secrets
import string
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from functools import lru_cache

import regex

from multimodal.answers.parsers.formats import (
    Bare,
    Family,
    JsonCall,
    Malformed,
    Messages,
    Params,
    Pythonic,
    Reasoning,
    Region,
    Schema,
    Tools,
)
from multimodal.answers.parsers.values import cast, property_of, python_value, types_of
from multimodal.answers.parts import Part, Text, ToolCall
from multimodal.answers.parts import Reasoning as Thought
from multimodal.text.tokenizer import Detokenizer, Tokenizer

Reading = Generator[None, None, None]
Sink = Callable[[str], None]

_LITERAL = re.compile("«(.*?)»", re.DOTALL)
_FIRST_STAND_IN = 0xDC00  # lone surrogates, which decoded text never has, stand for special tokens
_STAND_IN = re.compile("[\ud800-\udfff]")
_NEGATED = re.compile(r"(?<!\\)\[\^")
_CHARACTERS = re.compile(r'[^"\\\x00-\x1f\ud800-\udfff]+')
_HEX = re.compile(r"[0-9a-fA-F]{4}")
_SCALAR = re.compile(r"[\w.+\-]{1,1000}")
_NUMBER = re.compile(r"-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][+\-]?\d+)?")
_LITERALS = {"true": "true", "false": "false", "null": "null", "True": "true", "False": "false", "None": "null"}
_BARE = re.compile(r"[^,:{}\[\]\ud800-\udfff]+")
_PYTHON = re.compile(r"""[^"'\[\](){},\\]+""")
_NAME = re.compile(r"[A-Za-z_][\w.\-]*")
_LONGEST_NAME = 256
_LONGEST_MATCH = 4096
_ALPHANUMERIC = string.ascii_letters + string.digits


class Pattern:
    """A family's pattern, compiled for the middle and for the end of an output."""

    def __init__(self, source: str, stand_ins: Mapping[str, str]) -> None:
        source = _NEGATED.sub("[^\ud800-\udfff", source)  # a special token is in no class
        source = _LITERAL.sub(lambda found: stand_ins.get(found[1]) or regex.escape(found[1]), source)
        self._middle = regex.compile(source.replace("EOS", "(?!)"), regex.DOTALL)
        self._end = regex.compile(source.replace("EOS", r"\Z"), regex.DOTALL)
        characters = {*map(chr, range(128)), *source}
        starts = [one for one in characters if self._middle.match(one, partial=True) is not None]
        self._starts = re.compile(f"[{re.escape(''.join(sorted(starts)))}]" if starts else "(?!)")

    def search(self, text: str, start: int, final: bool) -> "regex.Match[str] | None":
        """Return the first match. One that more output may complete, or end, is partial."""
        if final:
            return self._end.search(text, start)
        if self._starts.search(text, start) is None:  # much faster, and almost always so
            return None
        return _bounded(self._middle.search(text, start, partial=True), text)

    def all(self, text: str) -> "Iterator[regex.Match[str]]":
        """Yield the matches in a whole text."""
        yield from self._end.finditer(text)

    def match(self, text: str, start: int, final: bool) -> "regex.Match[str] | None":
        """Return the match right here, as `search` does."""
        return self._end.match(text, start) if final else _bounded(self._middle.match(text, start, partial=True), text)


def _bounded(found: "regex.Match[str] | None", text: str) -> "regex.Match[str] | None":
    """Give up on a match that is still open after many characters: they would be read again with every token."""
    return None if found is not None and found.partial and len(text) - found.start() > _LONGEST_MATCH else found


class FamilyParser:
    """Finds reasoning and tool calls as a family of models writes them.

    `tools` maps the names of the request's tools to the schemas of their arguments; without any, calls are text.
    `prompt` is the end of the prompt, from where the answer's message begins: the parser starts where it leaves off,
    say inside reasoning. `tokenizer` and `skip_special_tokens` are what made the text: by them, special tokens are
    known by their ids, shown or not.

    With `whole_calls`, a call is one part, and one that never completes comes out as text. Without, its arguments are
    passed on as they come, and a call that breaks off stays as far as it went: what was sent cannot be taken back.
    """

    def __init__(
        self,
        family: Family,
        tools: Mapping[str, Schema],
        *,
        tokenizer: Tokenizer | None = None,
        skip_special_tokens: bool = False,
        prompt: str = "",
        whole_calls: bool = False,
    ) -> None:
        self.malformed = 0
        """Calls that came out as text or broke off."""
        self._family = family
        self._schemas = tools
        self._trim = bool(tools) and family.tools is not None and family.tools.trim
        self._whole = whole_calls
        self._tokens = _SpecialTokens(family, tokenizer, skip_special_tokens)
        self._stand_ins = tuple(self._tokens.stand_ins.items())
        self._buffer = ""
        self._position = 0
        self._silent = 0  # characters of the buffer that belong to the prompt
        self._final = False
        self._parts: list[Part] = []
        self._spaces: list[str] = []  # white space that is dropped if a marker follows
        self._blank = True  # only white space so far
        self._after_reasoning = False
        self._after_call = False
        self._inside = False  # of reasoning
        self._saying = False  # inside the markers of text, if the family has some
        self._interrupted = False  # reasoning, by a call: its end is still to come
        self._record: list[str] | None = None  # what a call was made of, to give it back as text
        self._index = 0
        self._call = _Call()
        self._list: list[ToolCall] | None = None  # calls that count only together
        self._reading = self._read()
        self._start(family.reasoning, prompt)

    def feed(self, token_ids: Sequence[int], text: str) -> list[Part]:
        """Return the parts that the next output completes or continues."""
        return self._feed(self._tokens.place(token_ids, text))

    def finish(self) -> list[Part]:
        """Return what was held back. Nothing more comes."""
        self._final = True
        return self._feed(self._tokens.rest())

    def _read(self) -> Reading:
        family = self._family
        if family.messages is not None:
            return self._messages(family.messages)
        return self._answer(family.reasoning, family.tools if self._schemas else None)

    def _start(self, reasoning: Reasoning | None, prompt: str) -> None:
        prompt = self._tokens.hide(prompt)
        if prompt and self._family.start:
            starts = list(self._pattern(self._family.start).all(prompt))
            prompt = prompt[starts[-1].end() :] if starts else ""
        if reasoning is not None and reasoning.implied:
            marks = self._pattern(f"{reasoning.begin}|{reasoning.end}")
            self._inside = marks.search(prompt, 0, True) is None
        if prompt:
            self._feed(prompt)
            self._silent = len(self._buffer) - self._position
            self._parts, self._spaces = [], []
            self._blank = True
            if self._family.messages is None:  # a call without a marker may begin here
                self._reading = self._read()

    def _feed(self, text: str) -> list[Part]:
        self._buffer = self._buffer[self._position :] + text
        self._position = 0
        next(self._reading, None)
        self._count()
        parts, self._parts = self._parts, []
        return _joined(parts) if len(parts) > 1 else parts

    def _count(self) -> None:
        """Note how many tokens the reasoning took, and forget those that were read."""
        tokens = self._tokens.read_up_to(len(self._buffer) - self._position)
        if self._inside and tokens and not self._silent:
            self._parts.append(Thought("", tokens))

    # Reading the buffer.

    def _pattern(self, source: str) -> Pattern:
        return _compiled(source, self._stand_ins)

    def _take(self, end: int) -> str:
        """Read the buffer up to `end`; return what is seen of it."""
        text = self._buffer[self._position : end]
        self._position = end
        if self._silent:
            hidden = min(self._silent, len(text))
            self._silent -= hidden
            text = text[hidden:]
        if self._stand_ins:
            text = self._tokens.show(text)
        if self._record is not None:
            self._record.append(text)
        return text

    def _match(self, pattern: Pattern) -> Generator[None, None, "regex.Match[str] | None"]:
        """Return the match right here, once it is clear that there is one, or not."""
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

    # Parts.

    def _text(self, text: str) -> None:
        if self._family.says is not None and not self._saying:
            return
        if self._after_reasoning:
            text = text.lstrip()
        if not text:
            return
        body = text.rstrip() if self._trim or (self._blank and text.isspace()) else text
        if body:
            self._parts.append(Text("".join(self._spaces) + body))
            self._spaces.clear()
            self._blank = self._after_reasoning = self._after_call = False
        if len(body) < len(text):
            self._spaces.append(text[len(body) :])

    def _think(self, text: str) -> None:
        if self._blank:
            text = text.lstrip()
        body = text.rstrip()
        if body:
            self._parts.append(Thought("".join(self._spaces) + body))
            self._spaces.clear()
            self._blank = False
        if len(body) < len(text):
            self._spaces.append(text[len(body) :])

    def _flush(self) -> None:
        """Pass on white space that the output ends with."""
        if self._spaces and not self._after_call:
            text = "".join(self._spaces)
            self._spaces.clear()
            self._parts.append(Thought(text) if self._inside else Text(text))

    # The answer: text, reasoning and calls between markers.

    def _answer(self, reasoning: Reasoning | None, tools: Tools | None) -> Reading:
        pattern = {stray: self._pattern(_anchors(self._family, tools, stray)) for stray in (False, True)}
        bare = self._pattern(tools.bare) if tools is not None and tools.bare else None
        marker = self._pattern(rf"(?:{tools.marker})\s*\Z") if tools is not None and tools.marker else None
        while True:
            if self._inside and reasoning is not None:
                yield from self._reason(reasoning)
            if bare is not None and tools is not None and (self._blank or self._after_call):
                yield from self._bare_calls(tools, bare)
            found = yield from self._until_anchor(pattern[self._interrupted], marker)
            if found is None:
                self._flush()
                return
            groups = found.groupdict()
            if groups.get("think") is not None:
                self._skip(found)
                self._count()
                self._inside, self._blank = True, True
            elif groups.get("say") is not None:
                self._skip(found)
                self._saying = True
            elif groups.get("said") is not None:
                self._skip(found)
                self._saying = False
            elif groups.get("section") is not None and tools is not None:
                yield from self._section(tools, found)
            elif groups.get("call") is not None and tools is not None:
                yield from self._calls(tools, found)
            else:
                self._interrupted &= groups.get("close") is None
                self._skip(found)

    def _until_anchor(
        self, pattern: Pattern, marker: Pattern | None
    ) -> Generator[None, None, "regex.Match[str] | None"]:
        """Pass on text up to an anchor. A marker of calls right at the end of the output is dropped."""
        while True:
            found = pattern.search(self._buffer, self._position, self._final)
            if found is None and marker is not None and self._final:
                last = marker.search(self._buffer, self._position, True)
                if last is not None:
                    self._text(self._take(last.start()))
                    self._position = len(self._buffer)
            stop = len(self._buffer) if found is None else found.start()
            if stop > self._position:
                self._text(self._take(stop))
            if found is not None and not found.partial:
                return found
            if self._final:
                return None
            yield

    def _skip(self, found: "regex.Match[str]") -> None:
        """Leave out a marker, and white space before it."""
        self._take(found.end())
        self._spaces.clear()

    def _reason(self, reasoning: Reasoning) -> Reading:
        pattern = self._pattern(f"(?P<end>{reasoning.end})|(?P<begin>{reasoning.begin})")
        while True:
            found = yield from self._until(pattern, self._think)
            if found is None:
                self._flush()
                self._count()
                self._inside = False
                return
            if found["end"] is not None:
                break
            if self._blank:
                self._skip(found)
            else:
                self._think(self._take(found.end()))
        self._interrupted = found.start() == found.end()
        self._skip(found)
        self._count()
        self._inside = False
        self._blank = self._after_reasoning = True

    def _section(self, tools: Tools, found: "regex.Match[str]") -> Reading:
        """Read all calls of a section. Other text in it is dropped if a call follows."""
        assert tools.section is not None
        pattern = self._pattern(f"(?P<call>{tools.begin})|(?P<end>{tools.section[1]})")
        others = [self._take(found.end())]
        calls = self._index
        while True:
            found = yield from self._until(pattern, others.append)
            if found is not None and found["call"] is not None:
                called = yield from self._calls(tools, found, before=others)
                others = []
                if not called and self._index == calls:
                    return
                continue
            ending = self._take(found.end()) if found is not None else ""
            if any(text.strip() for text in others[self._index == calls :]):
                self._text("".join(others) + ending)
            return

    # Calls.

    def _bare_calls(self, tools: Tools, pattern: Pattern) -> Reading:
        """Read calls that have no marker, as long as there are some right here."""
        while True:
            found = yield from self._match(pattern)
            if found is None or not (yield from self._calls(tools, found, known=True)):
                return

    def _calls(
        self, tools: Tools, found: "regex.Match[str]", before: Sequence[str] = (), known: bool = False
    ) -> Generator[None, None, bool]:
        """Read a call, or a list of some. Return whether it was one; otherwise it is text."""
        groups = found.groupdict()
        name, call_id = groups.get("name"), groups.get("id")
        self._record = list(before)
        self._take(found.end())
        self._call = _Call(tools.id_length)
        self._list = None
        try:
            if name is not None and not isinstance(tools.content, Region):
                self._begin(self._tokens.show(name), call_id)
            match tools.content:
                case JsonCall() as content if name is None:
                    yield from self._json_calls(content, known)
                case Pythonic():
                    self._list = [] if self._whole else None
                    yield from self._python_calls(known)
                case Params() as content:
                    yield from self._params(content)
                case Bare(quote):
                    yield from self._bare_object(quote)
                case Region() as content:
                    yield from self._region(content, groups)
                case _:
                    yield from self._arguments()
            if self._call.name is not None:
                self._end()
            yield from self._leave_out(self._pattern(tools.end))
        except Malformed:
            self._break()
            return False
        finally:
            self._record = self._list = None
        return True

    def _leave_out(self, pattern: Pattern) -> Reading:
        """Leave out a marker right here, if there is one, or the beginning of one that ends the output."""
        while (found := pattern.match(self._buffer, self._position, False)) is not None and found.partial:
            if self._final:
                break
            yield
        if found is not None:
            self._take(found.end())

    def _begin(self, name: str, call_id: str | None = None) -> None:
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
        self._call = _Call(call.id_length)
        self._blank = False
        self._after_call = self._record is not None
        if self._record is not None and self._list is None:
            self._record.clear()

    def _emit(self, calls: Sequence[ToolCall]) -> None:
        self._spaces.clear()
        self._parts.extend(calls)

    def _break(self) -> None:
        """Give a call that is none back as text, as far as it was not passed on."""
        self.malformed += 1
        record, self._record = self._record, None
        if self._list is not None:
            self._index -= len(self._list)
        if self._call.name is not None and not self._whole:
            self._index += 1
            self._blank = False
        elif record is not None:
            self._text("".join(record))

    def _json_calls(self, content: JsonCall, known: bool) -> Reading:
        if (yield from self._next()) == "{":
            yield from self._json_call(content, known)
            return
        yield from self._expect("[")
        while (yield from self._next()) != "]":
            yield from self._json_call(content, known)
            if (yield from self._next()) != "]":
                yield from self._expect(",")
        yield from self._expect("]")

    def _json_call(self, content: JsonCall, known: bool) -> Reading:
        """Read an object with a name and arguments, in any order; also one inside another's `function`."""
        yield from self._expect("{")
        depth, key = 1, ""
        while depth:
            if (yield from self._expect('"}' if key != "," else '"')) == "}":
                depth -= 1
                key = ""
                if depth and (yield from self._next()) == ",":
                    key = yield from self._expect(",")
                continue
            key = yield from self._word()
            yield from self._expect(":")
            first = yield from self._next()
            if key == "function" and first == "{":
                self._take(self._position + 1)
                depth += 1
                key = ""
                continue
            if (key in content.names or key == "function") and self._call.name is None:
                yield from self._expect('"')
                name = yield from self._word()
                if not name or (known and name not in self._schemas):
                    raise Malformed
                self._begin(name)
            elif key in content.arguments and not self._call.given:
                yield from self._arguments()
            elif known and key not in ("id", "type"):
                raise Malformed
            else:
                ignored: list[str] = []
                yield from self._json(ignored.append)
            key = ""
            if (yield from self._next()) == ",":
                key = yield from self._expect(",")
        if self._call.name is None or (known and not self._call.given):
            raise Malformed
        if not self._call.given:
            self._pass("{}")
        self._end()

    def _word(self) -> Generator[None, None, str]:
        """Read the rest of a short string in JSON."""
        pieces: list[str] = []
        yield from self._string(pieces.append, _LONGEST_NAME)
        return str(json.loads(f'"{"".join(pieces)}"'))

    def _arguments(self) -> Reading:
        """Read the arguments of a call, an object in JSON; also one that is written as a string, or null."""
        self._call.given = True
        first = yield from self._next()
        if first == "{":
            yield from self._json(self._pass)
            return
        pieces: list[str] = []
        yield from self._json(pieces.append)
        try:
            value = json.loads("".join(pieces))
            value = json.loads(value) if isinstance(value, str) and value.strip() else value or {}
        except (ValueError, RecursionError):
            raise Malformed from None
        if not isinstance(value, dict):
            raise Malformed
        self._pass(json.dumps(value, ensure_ascii=False))

    def _json(self, sink: Sink) -> Reading:
        """Read a value in JSON, and pass it on as it comes, without white space of its own.

        Some mistakes of models are mended: control characters and unknown escapes in strings, a comma too many, and
        Python's spelling of constants.
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
        """Read a string of JSON behind its first quote, and pass on what is between the quotes."""
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
            character = self._take(self._position + 1)
            if character == "u":
                while len(self._buffer) < self._position + 4 and not self._final:
                    yield
                found = _HEX.match(self._buffer, self._position)
                sink("\\u" + self._take(found.end()) if found is not None else "\\\\u")
            elif character in '"\\/bfnrt':
                sink("\\" + character)
            elif character == "'":
                sink("'")
            else:
                sink("\\\\" + _quoted(character))

    def _params(self, content: Params) -> Reading:
        """Read arguments between markers up to the end of the call, and pass them on as an object of JSON."""
        pattern = self._pattern(rf"\s{{0,64}}(?:(?P<begin>{content.begin})|(?P<end>{content.end}))")
        close = self._pattern(content.close)
        schema = self._schemas.get(self._call.name or "", {})
        seen: set[str] = set()
        self._pass("{")
        while True:
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
            sink: Sink = pieces.append
            if key not in seen:
                self._pass(f"{', ' if seen else ''}{_json_string(key)}: ")
                if types == {"string"}:
                    self._pass('"')
                    sink = self._pass_quoted
            found = yield from self._until(close, sink)
            if found is None:
                raise Malformed
            self._take(found.end())
            if sink is not pieces.append and key not in seen and types == {"string"}:
                self._pass('"')
            elif key not in seen:
                self._pass(json.dumps(cast("".join(pieces), types), ensure_ascii=False))
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
                sink(f"{comma}{_json_string(key)}: ")
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
                self._take(self._position + 1)
                sink(comma + character)
                closers.append("}" if character == "{" else "]")
                state, comma = ("key" if character == "{" else "item"), ""
                continue
            elif not closers:
                raise Malformed
            else:
                word = yield from self._bare_word(delimiter, ",}]")
                sink(comma + json.dumps(cast(word, set()), ensure_ascii=False))
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

    def _region(self, content: Region, groups: Mapping[str, str | None]) -> Reading:
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
            self._pass(json.dumps(arguments, ensure_ascii=False))
            self._end()

    def _python_calls(self, known: bool) -> Reading:
        """Read a list of Python calls. They count when the list is complete."""
        yield from self._expect("[")
        while True:
            if (yield from self._next()) == "]":
                raise Malformed
            name = (yield from self._python_until("(")).strip()
            if _NAME.fullmatch(name) is None or (known and name not in self._schemas):
                raise Malformed
            self._begin(name)
            yield from self._python_arguments()
            self._end()
            if (yield from self._expect(",]")) == "]":
                break
        if self._list is not None:
            self._emit(self._list)
            self._list = []
            self._after_call = True

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
                written = json.dumps(python_value(value), ensure_ascii=False)
                self._pass(f"{', ' if seen else ''}{_json_string(key)}: {written}")
            seen.add(key)
            if (yield from self._next()) == ",":
                yield from self._expect(",")
        yield from self._expect(")")
        self._pass("}")

    def _python_until(self, ends: str) -> Generator[None, None, str]:
        """Read Python up to one of `ends` that is in no string and no bracket."""
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

    # Messages with headers.

    def _messages(self, messages: Messages) -> Reading:
        header = self._pattern(messages.header)
        restart = self._pattern(messages.restart)
        while True:
            self._blank = True
            self._after_reasoning = self._after_call = False
            self._record = []
            found = yield from self._match(header)
            if found is None:
                yield from self._malformed_message(messages, restart)
                if self._final and self._position >= len(self._buffer):
                    self._flush()
                    return
                continue
            captures = found.capturesdict()
            self._take(found.end())
            yield from self._message(messages, captures)

    def _malformed_message(self, messages: Messages, restart: Pattern) -> Reading:
        """Pass on as text what begins with no header. A header at the end of the output says nothing."""
        rest = self._buffer[self._position :]
        if self._final and self._pattern(messages.unfinished).match(rest, 0, True) is not None:
            self._position = len(self._buffer)
            return
        self._record = None
        if self._position < len(self._buffer):
            self._text(self._take(self._position + 1))
        yield from self._until(restart, self._text)

    def _message(self, messages: Messages, captures: Mapping[str, Sequence[str]]) -> Reading:
        channel = captures["channel"][-1] if captures["channel"] else ""
        recipient = next(iter(captures["to"]), "")
        call = self._pattern(messages.call).match(recipient, 0, True) if recipient else None
        kind = dict(messages.kinds).get(channel, "text")
        end = self._pattern(messages.end)
        if call is not None and self._schemas:
            self._call = _Call()
            try:
                self._begin(call["name"])
                yield from self._arguments()
                self._end()
            except Malformed:
                self._break()
            kind = "text"
        elif recipient and recipient not in messages.readers:
            self._record = None
            yield from self._close_message(end, lambda text: None)
            return
        self._record = None
        if kind == "reasoning" and call is None:
            self._inside = True
            end = self._pattern(messages.reasoning_end)
            yield from self._close_message(end, self._think)
            self._count()
            self._inside = False
        else:
            yield from self._close_message(end, self._text)

    def _close_message(self, end: Pattern, sink: Sink) -> Reading:
        found = yield from self._until(end, sink)
        self._flush()
        self._spaces.clear()
        if found is not None:
            self._take(found.end())


class _Call:
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


class _SpecialTokens:
    """Where a family's markers are special tokens: puts one character that stands for the token into the text."""

    def __init__(self, family: Family, tokenizer: Tokenizer | None, skipped: bool) -> None:
        special = {} if tokenizer is None else _special_ids(tokenizer)
        literals = [literal for literal in family.markers if literal in special]
        self.stand_ins = {literal: chr(_FIRST_STAND_IN + n) for n, literal in enumerate(literals)}
        self._shown = {stand_in: literal for literal, stand_in in self.stand_ins.items()}
        self._marks = {special[literal]: (literal, stand_in) for literal, stand_in in self.stand_ins.items()}
        self._skipped = skipped
        self._detokenizer = None
        if tokenizer is not None and (literals or family.reasoning is not None or family.messages is not None):
            self._detokenizer = Detokenizer(tokenizer, skipped)
            self._widths = _widths(tokenizer, skipped)
        self._unfinished = False  # a character
        self._made = 0  # characters that the ids made
        self._placed = 0  # the same, with stand-ins
        self._seen = 0  # characters that came
        self._due: deque[tuple[int, str, str]] = deque()  # special tokens whose text has not come
        self._held = ""
        self._ends: deque[int] = deque()  # where tokens end that were not read
        self._total = 0

    def place(self, ids: Sequence[int], text: str) -> str:
        """Return the text with stand-ins."""
        if self._detokenizer is None:
            text = _without_surrogates(text)
            self._total += len(text)
            self._ends.extend([self._total] * len(ids))
            return text
        for token in ids:
            made = self._width(token)
            self._made += made
            self._placed += made
            mark = self._marks.get(token)
            if mark is not None:
                literal, stand_in = mark
                width = 0 if self._skipped else len(literal)
                self._due.append((self._made - width, literal[:width], stand_in))
                self._placed += 1 - width
            self._ends.append(self._placed)
        text = self._put(text) if self._due or self._held else self._pass(text)
        self._total += len(text)
        return text

    def _width(self, token: int) -> int:
        """Return how many characters a token adds to the text."""
        width = None if self._unfinished else self._widths.get(token)
        if width is None:
            assert self._detokenizer is not None
            width = len(self._detokenizer.feed((token,)))
            before, self._unfinished = self._unfinished, self._detokenizer.unfinished
            if not before and not self._unfinished:
                self._widths[token] = width
        return width

    def _pass(self, text: str) -> str:
        self._seen += len(text)
        return text

    def _put(self, text: str) -> str:
        text = self._held + text
        start = self._seen
        self._held = ""
        pieces: list[str] = []
        position = 0
        while self._due:
            offset, shown, stand_in = self._due[0]
            at = offset - start
            if at > len(text):
                break
            if at + len(shown) > len(text):
                self._held = text[at:]
                text = text[:at]
                break
            self._due.popleft()
            pieces += (text[position:at], stand_in)
            position = at + len(shown)
        self._seen = start + len(text)
        return "".join(pieces) + text[position:]

    def rest(self) -> str:
        """Return the text of a token that was cut off."""
        self._total += len(self._held)
        held, self._held = self._held, ""
        return held

    def hide(self, text: str) -> str:
        """Return a prompt's text with stand-ins."""
        for literal, stand_in in self.stand_ins.items():
            text = text.replace(literal, stand_in)
        return text

    def show(self, text: str) -> str:
        """Return text as it is without stand-ins."""
        if not self._shown or _STAND_IN.search(text) is None:
            return text
        return _STAND_IN.sub(lambda found: self._shown.get(found[0], ""), text)

    def read_up_to(self, left: int) -> int:
        """Return how many tokens were read since the last time; `left` characters are unread."""
        count, ends, read = 0, self._ends, self._total - left
        while ends and ends[0] <= read:
            ends.popleft()
            count += 1
        return count


@lru_cache(maxsize=1024)
def _compiled(source: str, stand_ins: tuple[tuple[str, str], ...]) -> Pattern:
    return Pattern(source, dict(stand_ins))


@lru_cache(maxsize=8)
def _widths(tokenizer: Tokenizer, skipped: bool) -> dict[int, int]:
    """Return a table, filled by use, of how many characters tokens add to a text that ends in a whole character."""
    return {}


@lru_cache(maxsize=8)
def _special_ids(tokenizer: Tokenizer) -> dict[str, int]:
    """Return the special tokens by their texts."""
    return {tokenizer.bytes_of(token_id).decode(errors="replace"): token_id for token_id in tokenizer.special_ids}


def _anchors(family: Family, tools: Tools | None, stray: bool) -> str:
    """Return a pattern of all that ends text; `stray` adds the end of reasoning that a call interrupted."""
    found = []
    reasoning = family.reasoning
    if family.says is not None:
        found += [f"(?P<say>{family.says[0]})", f"(?P<said>{family.says[1]})"]
    if reasoning is not None:
        found.append(f"(?P<think>{reasoning.begin})")
        if stray:
            found.append(f"(?P<close>{reasoning.end})")
        if reasoning.markup:
            found.append(f"(?P<markup>{reasoning.markup})")
    if tools is not None:
        if tools.section is not None:
            found.append(f"(?P<section>{tools.section[0]})")
        elif tools.begin:
            found.append(f"(?P<call>{tools.begin})")
        if tools.markup:
            found.append(f"(?P<drop>{tools.markup})")
    return "|".join(found) or "(?!)"


def _declared(groups: Mapping[str, str | None], types: set[str]) -> set[str]:
    """Return the types that an argument's own marker names, otherwise those of the schema."""
    if groups.get("string") == "true" or groups.get("type") == "string":
        return {"string"}
    if groups.get("string") == "false" or groups.get("type") is not None:
        return types - {"string"}
    return types


def _joined(parts: Sequence[Part]) -> list[Part]:
    """Join what belongs together."""
    joined: list[Part] = [parts[0]]
    for part in parts[1:]:
        last = joined[-1]
        if isinstance(part, Text) and isinstance(last, Text):
            joined[-1] = Text(last.text + part.text)
        elif isinstance(part, Thought) and isinstance(last, Thought):
            joined[-1] = Thought(last.text + part.text, last.tokens + part.tokens)
        elif isinstance(part, ToolCall) and isinstance(last, ToolCall) and part.index == last.index:
            joined[-1] = ToolCall(last.index, last.id, last.name, last.arguments + part.arguments)
        else:
            joined.append(part)
    return joined


def _json_string(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _quoted(text: str) -> str:
    """Return text as it stands between the quotes of JSON."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _without_surrogates(text: str) -> str:
    return text if text.isascii() else _STAND_IN.sub("\ufffd", text)
