"""Formats of reasoning and tool calls in families of models. A family is data, which `engine.py` interprets.

Patterns are regular expressions. A literal between « and » is a marker: where the tokenizer has it as a special token,
it is recognised by that token's id alone, whether or not the detokenizer shows it, and the same text in other tokens is
text. Elsewhere its text counts. `EOS` matches the end of the output only. A pattern says what can follow a marker by
looking ahead, and does not end in an unbounded repetition: text is held back while a pattern can still match.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

SPACE = r"\s{0,16}"
NAME = r"[^\s<>{}\[\]()\"']{1,256}"


class Malformed(Exception):
    """The output does not continue as it began."""


@dataclass(frozen=True)
class ReasoningFormat:
    """Text between two markers that is the model's reasoning. White space beside the markers belongs to them."""

    name: str
    begin: str
    end: str
    cut: str = ""
    """Begins another part, which ends reasoning, too."""
    implied: bool = False
    """The output begins inside, unless the prompt says otherwise: the model leaves the first marker out."""
    aliases: tuple[str, ...] = ()
    markup: str = ""
    """Markers without a meaning for the answer."""
    write: tuple[str, str] = ("", "")
    """Text that a model writes before and after its reasoning."""


@dataclass(frozen=True)
class Json:
    """The arguments, a JSON object. The pattern that begins the call has found the name."""


@dataclass(frozen=True)
class JsonCall:
    """A JSON object with the name and the arguments of a call, or a list of such objects."""

    names: tuple[str, ...] = ("name",)
    arguments: tuple[str, ...] = ("arguments", "parameters")


@dataclass(frozen=True)
class Params:
    """Arguments between markers, as XML has them: text, cast by the tool's schema."""

    begin: str
    """Begins an argument. Groups: `key`; `string`, true or false; `type`, a JSON type."""
    close: str
    """Ends an argument."""
    end: str
    """Ends the call."""
    newline: bool = False
    """A line break after `begin` belongs to the marker."""
    escaped: bool = False
    """Keys are escaped as in HTML."""


@dataclass(frozen=True)
class Bare:
    """A JSON object whose keys have no quotes, and whose strings stand between two equal markers. JSON does too."""

    quote: str


@dataclass(frozen=True)
class Pythonic:
    """A list of Python calls with keyword arguments, which is complete or nothing."""


@dataclass(frozen=True)
class WholeCalls:
    """Calls that are read as a whole, when the pattern `close` has matched."""

    close: str
    read: Callable[[str, Mapping[str, str]], list[tuple[str, dict[str, Any]]]]
    """Return names and arguments of the calls in a text, with the groups of `begin`. Raises Malformed."""


@dataclass(frozen=True)
class ToolFormat:
    """The notation of calls. Groups of `begin`: `name`, and `id` where the model chooses one."""

    name: str
    begin: str
    content: Json | JsonCall | Params | Bare | Pythonic | WholeCalls
    end: str
    """Comes behind a call; it may be missing."""
    write: str
    """A call as the model writes it: NAME, ARGUMENTS (in the content's own notation) and INDEX are filled in."""
    section: tuple[str, str] | None = None
    """Markers around all calls. Other text between them is dropped."""
    write_section: tuple[str, str] = ("", "")
    separator: str = ""
    """Text between two calls, as the model writes it."""
    bare: str = ""
    """Also begins a call, after white space only, in formats without a marker. The name must be that of a tool."""
    loose: str = ""
    """Also begins a call, anywhere, as small models write them. The name must be that of a tool. Such calls come out
    whole, since they count only if they end correctly."""
    marker: str = ""
    """Markers that begin calls. They are dropped where the output ends right behind them."""
    markup: str = ""
    trim: bool = True
    """White space around a call is not part of the text."""
    id_length: int = 0
    """Length of the ids that the model's chat template accepts; 0 takes any."""
    xgrammar: str = "json"
    """The style by which xgrammar writes arguments."""
    aliases: tuple[str, ...] = ()


@dataclass(frozen=True)
class MessagesFormat:
    """An output of several messages, each with a header that names its kind."""

    name: str
    header: str
    """Groups: `channel` and `to`, both in several places."""
    kinds: tuple[tuple[str, str], ...]
    """Pairs of a channel's name and the kind of its messages: "text" or "reasoning"."""
    end: str
    """Ends a message."""
    call: str
    """Matches the `to` of a call, with the group `name`."""
    reasoning_begin: str
    """Begins a message of reasoning, as the model writes it."""
    reasoning_end: str
    """Ends a message of reasoning, which may show other markers."""
    unfinished: str
    """Matches a header that the output ends in."""
    readers: tuple[str, ...] = ()
    """Recipients whose messages the user reads. Messages to others, such as a tool of the model's own, are dropped."""
    restart: str = ""
    """Pattern of the place at which to look for the next header after a malformed one."""
    write: str = ""
    """A call as the model writes it."""
    write_reasoning: tuple[str, str] = ("", "")
    """Text that a model writes before and after its reasoning, at the start of its answer."""
    write_next: tuple[str, str] = ("", "")
    """Text that begins the message after reasoning, and text that would begin further reasoning."""
    xgrammar: str = "json"
    aliases: tuple[str, ...] = ()


@dataclass(frozen=True)
class OutputFormat:
    """The output format of one model: reasoning, calls, or messages of both."""

    reasoning: ReasoningFormat | None = None
    tools: ToolFormat | None = None
    messages: MessagesFormat | None = None
    start: str = ""
    """Its last match in a prompt is right before the answer's message; the parser ignores the prompt up to there."""
    says: tuple[str, str] | None = None
    """Markers around text of the answer; other text is dropped."""

    @cached_property
    def markers(self) -> tuple[str, ...]:
        """The literals of all patterns that may be tokens."""
        return tuple(dict.fromkeys(re.findall("(?s)«(.*?)»", " ".join(self._patterns()))))

    def _patterns(self) -> Iterator[str]:
        yield from (self.start, *(self.says or ()))
        for record in (self.reasoning, self.tools, self.messages, self.tools and self.tools.content):
            for value in vars(record).values() if record is not None else ():
                for source in value if isinstance(value, tuple) else (value,):
                    if isinstance(source, str):
                        yield f"«{source}»" if isinstance(record, Bare) else source


Schema = dict[str, Any]
