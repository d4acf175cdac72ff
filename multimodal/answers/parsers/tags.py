"""Calls that are valid by construction: what a grammar lets a model write, from the description its parser reads."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from multimodal.answers.parsers.formats import OutputFormat, Schema


@dataclass(frozen=True)
class Tag:
    """A call of one tool: fixed text, the arguments by a schema, fixed text."""

    begin: str
    schema: Schema
    end: str
    style: str
    """How the arguments are written: "json", or one of xgrammar's other styles."""
    number: str | None = None
    """Text behind a number that follows `begin`, where the model counts its calls."""

    def xgrammar(self) -> dict[str, Any]:
        """Return this as xgrammar's tag."""
        content: dict[str, Any] = {"type": "json_schema", "json_schema": self.schema, "style": self.style}
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
    """Before all calls."""
    end: str = ""
    """After all calls."""
    separator: str = ""

    def xgrammar(self, at_least_one: bool = False, stop_after_first: bool = False) -> dict[str, Any]:
        """Return this as xgrammar's structural tag: text with calls; one may be demanded, or only one allowed."""
        tags = [tag.xgrammar() for tag in self.tags]
        if self.begin or self.end:
            calls = {
                "type": "tags_with_separator",
                "tags": tags,
                "separator": self.separator,
                "at_least_one": True,
                "stop_after_first": stop_after_first,
            }
            tags = [{"type": "tag", "begin": self.begin, "content": calls, "end": self.end}]
            stop_after_first = True
        return {
            "type": "structural_tag",
            "format": {
                "type": "triggered_tags",
                "triggers": list(self.triggers),
                "tags": tags,
                "at_least_one": at_least_one,
                "stop_after_first": stop_after_first,
            },
        }


def structural_tags(family: OutputFormat, tools: Mapping[str, Schema]) -> StructuralTags | None:
    """Return what calls of these tools look like; None if no grammar describes how the family writes arguments."""
    form = family.tools or family.messages
    if form is None or not form.xgrammar or not form.write:
        return None
    begin, end = ("", "") if family.tools is None else family.tools.write_section
    separator = "" if family.tools is None else family.tools.separator
    before = form.write.partition("NAME")[0]
    tags = tuple(_tag(form.write, name, schema, form.xgrammar) for name, schema in tools.items())
    return StructuralTags((begin or before,), tags, begin, end, separator)


def _tag(written: str, name: str, schema: Schema, style: str) -> Tag:
    before, _, after = written.partition("ARGUMENTS")
    before = before.replace("NAME", name)
    begin, counted, number = before.partition("INDEX")
    return Tag(begin, schema or {"type": "object"}, after, style, number if counted else None)
