"""The incremental parser: token ids and text of one choice in, parts of its answer out."""

from collections.abc import Generator, Mapping, Sequence
from itertools import groupby

import regex

from multimodal.answers.parsers.calls import CallReader, CallState, Reading, Sink
from multimodal.answers.parsers.formats import (
    Malformed,
    MessagesFormat,
    OutputFormat,
    ReasoningFormat,
    Schema,
    ToolFormat,
)
from multimodal.answers.parsers.markers import Pattern, SpecialTokens
from multimodal.answers.parts import Part, Reasoning, Text, ToolCall
from multimodal.text.tokenizer import Tokenizer


class FamilyParser(CallReader):
    """Finds reasoning and tool calls as a family of models writes them.

    `tools` maps the names of the request's tools to the schemas of their arguments; without any, calls are text.
    `prompt` is the end of the prompt, from the beginning of the answer's message: the parser starts in the state at its
    end, for example inside reasoning. `tokenizer` and `skip_special_tokens` are those that made the text: with them,
    special tokens are recognised by id, whether or not the text shows them.

    With `whole_calls`, a call is one part, and one that never completes becomes text. Without it, arguments are passed
    on incrementally, and a call that breaks off stays incomplete: sent parts cannot be taken back. `forced` says that a
    grammar lets nothing but calls follow the reasoning: what breaks off before a call has its name is left out.
    """

    def __init__(
        self,
        family: OutputFormat,
        tools: Mapping[str, Schema],
        *,
        tokenizer: Tokenizer | None = None,
        skip_special_tokens: bool = False,
        prompt: str = "",
        whole_calls: bool = False,
        forced: bool = False,
    ) -> None:
        super().__init__(family, tools, SpecialTokens(family, tokenizer, skip_special_tokens), whole_calls)
        self._forced = forced
        self._trim = bool(tools) and family.tools is not None and family.tools.trim
        self._after_reasoning = False
        self._inside = False  # of reasoning
        self._saying = False  # inside the markers of text, if the family has some
        self._interrupted = False  # reasoning, by a call: its end is still to come
        self._reading = self._read()
        self._start(family.reasoning, prompt)

    @property
    def reasons(self) -> bool:
        """Whether the output is inside reasoning now."""
        return self._inside

    def feed(self, token_ids: Sequence[int], text: str) -> list[Part]:
        """Return the parts that the next output completes or continues."""
        return self._feed(self._tokens.place(token_ids, text))

    def finish(self) -> list[Part]:
        """Return the parts that were held back. The output has ended."""
        self._final = True
        parts = self._feed(self._tokens.rest())
        return [part for part in parts if not isinstance(part, Text)] if self._forced else parts

    def _read(self) -> Reading:
        family = self._family
        if family.messages is not None:
            return self._messages(family.messages)
        return self._answer(family.reasoning, family.tools if self._schemas else None)

    def _start(self, reasoning: ReasoningFormat | None, prompt: str) -> None:
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
            self._blank, self._index, self.malformed = True, 0, 0
            if self._family.messages is None:  # a call without a marker may begin here
                self._record = self._list = None
                self._reading = self._read()

    def _feed(self, text: str) -> list[Part]:
        self._buffer = self._buffer[self._position :] + text
        self._position = 0
        next(self._reading, None)
        self._count()
        parts, self._parts = self._parts, []
        return _joined(parts) if len(parts) > 1 else parts

    def _count(self) -> None:
        """Count the tokens of reasoning, and drop the read ones."""
        tokens = self._tokens.read_up_to(len(self._buffer) - self._position)
        if self._inside and tokens and not self._silent:
            self._parts.append(Reasoning("", tokens))

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
            self._parts.append(Reasoning("".join(self._spaces) + body))
            self._spaces.clear()
            self._blank = False
        if len(body) < len(text):
            self._spaces.append(text[len(body) :])

    def _flush(self) -> None:
        """Pass on white space at the end of the output."""
        if self._spaces and not self._after_call:
            text = "".join(self._spaces)
            self._spaces.clear()
            self._parts.append(Reasoning(text) if self._inside else Text(text))

    # The answer: text, reasoning and calls between markers.

    def _answer(self, reasoning: ReasoningFormat | None, tools: ToolFormat | None) -> Reading:
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
            if found.start() == found.end():  # the pattern matches nothing, which a model's own may
                if self._position < len(self._buffer):
                    self._text(self._take(self._position + 1))
                elif not self._final:
                    yield
                else:
                    self._flush()
                    return
                continue
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
            elif groups.get("loose") is not None and tools is not None:
                yield from self._calls(tools, found, unmarked=True)
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
        """Drop a marker, and white space before it."""
        self._take(found.end())
        self._spaces.clear()

    def _reason(self, reasoning: ReasoningFormat) -> Reading:
        cut = f"|(?={reasoning.cut})" if reasoning.cut else ""
        pattern = self._pattern(f"(?P<end>{reasoning.end}{cut})|(?P<begin>{reasoning.begin})")
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
        self._count()
        self._inside = False
        self._interrupted = found.start() == found.end()
        self._skip(found)
        self._blank = self._after_reasoning = True

    def _section(self, tools: ToolFormat, found: "regex.Match[str]") -> Reading:
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

    def _bare_calls(self, tools: ToolFormat, pattern: Pattern) -> Reading:
        """Read calls that have no marker, as long as there are some right here."""
        while True:
            found = yield from self._match(pattern)
            if found is None or not (yield from self._calls(tools, found, unmarked=True)):
                return

    # Messages with headers.

    def _messages(self, messages: MessagesFormat) -> Reading:
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

    def _malformed_message(self, messages: MessagesFormat, restart: Pattern) -> Reading:
        """Pass on output without a header as text. A header at the end of the output is dropped."""
        rest = self._buffer[self._position :]
        if self._final and self._pattern(messages.unfinished).match(rest, 0, True) is not None:
            self._position = len(self._buffer)
            return
        self._record = None
        if self._position < len(self._buffer):
            self._text(self._take(self._position + 1))
        yield from self._until(restart, self._text)

    def _message(self, messages: MessagesFormat, captures: Mapping[str, Sequence[str]]) -> Reading:
        channel = captures["channel"][-1] if captures["channel"] else ""
        recipient = next(iter(captures["to"]), "")
        call = self._pattern(messages.call).match(recipient, 0, True) if recipient else None
        kind = dict(messages.kinds).get(channel, "text")
        end = self._pattern(messages.end)
        if call is not None and self._schemas:
            self._call = CallState()
            try:
                self._begin(call["name"])
                yield from self._arguments()
                self._end()
            except Malformed:
                self._break()
            kind = "text"
        elif recipient and call is None and recipient not in messages.readers:
            self._record = None
            yield from self._close_message(end, lambda text: None)
            return
        self._record = None
        if kind == "reasoning" and call is None:
            self._count()
            self._inside = True
            end = self._pattern(messages.reasoning_end)
            yield from self._close_message(end, self._think)
        else:
            yield from self._close_message(end, self._text)

    def _close_message(self, end: Pattern, sink: Sink) -> Reading:
        found = yield from self._until(end, sink)
        self._flush()
        self._count()
        self._inside = False
        self._spaces.clear()
        if found is not None:
            self._take(found.end())


def _anchors(family: OutputFormat, tools: ToolFormat | None, stray: bool) -> str:
    """Return a pattern of every end of text; `stray` adds the end of reasoning that a call interrupted."""
    found = []
    reasoning = family.reasoning
    if family.says is not None:
        found += [f"(?P<say>{family.says[0]})", f"(?P<said>{family.says[1]})"]
    if reasoning is not None:
        found.append(f"(?P<think>{reasoning.begin})")
        if reasoning.markup:
            found.append(f"(?P<markup>{reasoning.markup})")
    if tools is not None:
        if tools.section is not None:
            found.append(f"(?P<section>{tools.section[0]})")
        elif tools.begin:
            found.append(f"(?P<call>{tools.begin})")
        if tools.loose:
            found.append(f"(?P<loose>{tools.loose})")
        if tools.markup:
            found.append(f"(?P<drop>{tools.markup})")
    if reasoning is not None and stray:
        found.append(f"(?P<close>{reasoning.end})")
    return "|".join(found) or "(?!)"


def _joined(parts: Sequence[Part]) -> list[Part]:
    """Join consecutive parts of the same kind."""
    joined: list[Part] = []
    for key, group in groupby(parts, key=lambda part: part.index if isinstance(part, ToolCall) else type(part)):
        same = list(group)
        first = same[0]
        if len(same) == 1:
            joined.append(first)
        elif isinstance(first, ToolCall):
            arguments = "".join(part.arguments for part in same if isinstance(part, ToolCall))
            joined.append(ToolCall(first.index, first.id, first.name, arguments))
        else:
            text = "".join(part.text for part in same if not isinstance(part, ToolCall))
            tokens = sum(part.tokens for part in same if isinstance(part, Reasoning))
            joined.append(Text(text) if key is Text else Reasoning(text, tokens))
    return joined
