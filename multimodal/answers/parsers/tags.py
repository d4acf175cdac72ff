"""Structural tags, with which a grammar makes calls valid, from the same description that the parser uses."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from multimodal.answers.parsers.formats import OutputFormat, Schema
from multimodal.request import TextGrammar

TEXT_ARGUMENTS = {
    "json": ('{"input": "', '"}'),
    "qwen_xml": ("<parameter=input>\n", "\n</parameter>"),
    "glm_xml": ("<arg_key>input</arg_key>\n<arg_value>", "</arg_value>"),
    "minimax_xml": ('<parameter name="input">', "</parameter>"),
    "deepseek_xml": ('<｜DSML｜parameter name="input" string="true">', "</｜DSML｜parameter>\n"),
    "deepseek_v4_1_xml": ('<｜DSML｜ parameter name="input" string="true">', "</｜DSML｜ parameter>\n"),
    "kimi_k3_xml": ('<|open|>argument key="input" type="string"<|sep|>', "<|close|>argument<|sep|>"),
}
"""Texts before and after the argument `input`, by style, for calls that have no other argument."""

_NO_TEXTS: Mapping[str, TextGrammar] = {}


@dataclass(frozen=True)
class Tag:
    """A call of one tool: fixed text, the arguments by a schema, fixed text."""

    begin: str
    schema: Schema
    end: str
    style: str
    """Notation of the arguments: "json", or one of xgrammar's other styles."""
    number: str | None = None
    """Text behind a number that follows `begin`, where the model counts its calls."""
    text: TextGrammar | None = None
    """A grammar for the only argument, the text `input`."""

    def xgrammar(self) -> dict[str, Any]:
        """Return this as xgrammar's tag, in which the format `text_grammar` is ours."""
        content: dict[str, Any] = {"type": "json_schema", "json_schema": self.schema}
        if self.style != "json":  # older versions of xgrammar do not know the key
            content["style"] = self.style
        if self.text is not None:
            before, after = TEXT_ARGUMENTS[self.style]
            text: dict[str, Any] = {"type": "text_grammar", "syntax": self.text.syntax}
            text["definition"] = self.text.definition
            text["json"] = self.style == "json"
            content = {"type": "tag", "begin": before, "content": text, "end": after}
        if self.number is not None:
            counted = [{"type": "regex", "pattern": "[0-9]{1,9}"}, {"type": "const_string", "value": self.number}]
            content = {"type": "sequence", "elements": [*counted, content]}
        return {"type": "tag", "begin": self.begin, "content": content, "end": self.end}


@dataclass(frozen=True)
class StructuralTags:
    """Text in which a trigger begins calls."""

    triggers: tuple[str, ...]
    tags: tuple[Tag, ...]
    begin: str = ""
    """Text before all calls."""
    end: str = ""
    """Text after all calls."""
    separator: str = ""

    def xgrammar(self, at_least_one: bool = False, stop_after_first: bool = False) -> dict[str, Any]:
        """Return this as xgrammar's structural tag: text with calls, or calls alone if one is demanded. With
        `stop_after_first` there is one at most.
        """
        tags = [tag.xgrammar() for tag in self.tags]
        calls = {
            "type": "tags_with_separator",
            "tags": tags,
            "separator": self.separator,
            "at_least_one": True,
            "stop_after_first": stop_after_first,
        }
        if self.begin or self.end:
            calls = {"type": "tag", "begin": self.begin, "content": calls, "end": self.end}
            tags = [calls]
            stop_after_first = True
        if not at_least_one:
            calls = {
                "type": "triggered_tags",
                "triggers": list(self.triggers),
                "tags": tags,
                "stop_after_first": stop_after_first,
            }
        return {"type": "structural_tag", "format": calls}


def structural_tags(
    family: OutputFormat, tools: Mapping[str, Schema], texts: Mapping[str, TextGrammar] = _NO_TEXTS
) -> StructuralTags | None:
    """Return the structural tags of calls of these tools; None if no grammar describes how the family writes arguments.
    `texts` are grammars of tools with one argument, the text `input`.
    """
    form = family.tools or family.messages
    if form is None or not form.xgrammar or not form.write:
        return None
    begin, end = ("", "") if family.tools is None else family.tools.write_section
    separator = "" if family.tools is None else family.tools.separator
    written = form.write if family.messages is None else _up_to_end(form.write)
    if texts and form.xgrammar not in TEXT_ARGUMENTS:
        return None
    tags = tuple(_tag(written, name, schema, form.xgrammar, texts.get(name)) for name, schema in tools.items())
    return StructuralTags((_trigger(family, begin or written.partition("NAME")[0]),), tags, begin, end, separator)


def _trigger(family: OutputFormat, written: str) -> str:
    """Return the shortest beginning of `written` that begins a call for the parser: its first marker, if it has one."""
    if family.tools is None:
        return written
    pattern = family.tools.section[0] if family.tools.section is not None else family.tools.begin
    markers = re.findall("(?s)«(.*?)»", pattern)
    return next((marker for marker in markers if written.startswith(marker)), written)


def _up_to_end(written: str) -> str:
    """Return a call without the last marker, which ends the output: it is the model's end-of-sequence token."""
    return written.partition("ARGUMENTS")[0] + "ARGUMENTS"


def _tag(written: str, name: str, schema: Schema, style: str, text: TextGrammar | None) -> Tag:
    before, _, after = written.partition("ARGUMENTS")
    before = before.replace("NAME", name)
    begin, counted, number = before.partition("INDEX")
    return Tag(begin, schema or {"type": "object"}, after, style, number if counted else None, text)
