"""A model's own `response_template` as a family: the format of transformers 5.13 and later, version 1.

https://huggingface.co/docs/transformers/chat_response_parsing
"""

import json
from collections.abc import Callable, Mapping
from typing import Any

import regex

from multimodal.answers.parsers.formats import (
    Bare,
    Json,
    JsonCall,
    Malformed,
    OutputFormat,
    ReasoningFormat,
    ToolFormat,
    WholeCalls,
)

RESPONSE_TEMPLATE = "response_template"
"""The name of parsers that are a model's own."""
_REASONING = ("reasoning_content", "thinking", "reasoning")
_PLACEHOLDER = regex.compile(r"\{(\w+(?:\.\w+)*)\}")
_WHOLE_CALL = ({"type": "function", "function": "{content}"}, {"function": "{content}"})
_NAMED_CALL = {"name": "{name}", "arguments": "{content}"}
_NAMED_CALLS = ({"type": "function", "function": _NAMED_CALL}, {"function": _NAMED_CALL})

Field = Mapping[str, Any]


def family_of(template: Any) -> OutputFormat:
    """Return the family that a response template describes. Raises ValueError if it cannot be understood.

    Its fields `content`, `tool_calls` and `reasoning_content` (or `thinking`) are the parts of an answer. Its other
    fields are dropped from the answer, as is text outside any field if `content` has markers.
    """
    if not isinstance(template, dict) or not isinstance(template.get("fields"), dict):
        raise ValueError("a response template is an object with fields")
    if template.get("version", 1) != 1:
        raise ValueError(f"response templates of version {template['version']} are unknown")
    try:
        return _family(template, template["fields"])
    except (regex.error, TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"the response template cannot be understood: {error}") from error


def _family(template: Mapping[str, Any], fields: Mapping[str, Field]) -> OutputFormat:
    content = fields.get("content", {})
    thoughts = next((fields[name] for name in _REASONING if name in fields), None)
    calls = fields.get("tool_calls")
    begin, end = _anchor(content, "open"), _anchor(content, "close")
    dropped = [
        f"(?:{_anchor(field, 'open')})(?s:.*?)(?:{_anchor(field, 'close') or 'EOS'})"
        for name, field in fields.items()
        if name not in ("content", "tool_calls", *_REASONING) and _anchor(field, "open")
    ]
    if end and not begin:
        dropped.append(end)
    markup = "|".join(dropped)
    reasoning = None
    if thoughts is not None:
        reasoning = ReasoningFormat(
            RESPONSE_TEMPLATE,
            _anchor(thoughts, "open") or "(?!)",
            _anchor(thoughts, "close") or "(?!)",
            markup=markup,
        )
    elif markup:
        reasoning = ReasoningFormat(RESPONSE_TEMPLATE, "(?!)", "(?!)", markup=markup)
    return OutputFormat(
        reasoning=reasoning,
        tools=_tools(calls) if calls is not None else None,
        start=_anchor(template, "start_anchor"),
        says=(begin, end or "(?!)") if begin else None,
    )


def _anchor(field: Mapping[str, Any], key: str) -> str:
    """Return the pattern of an anchor, which is a text, one of several texts, or a pattern already."""
    if f"{key}_pattern" in field:
        return str(regex.compile(field[f"{key}_pattern"]).pattern)
    literals = field.get(key, [])
    literals = [literals] if isinstance(literals, str) else literals
    return "|".join(f"«{literal}»" for literal in sorted(literals, key=len, reverse=True))


def _tools(field: Field) -> ToolFormat:
    begin, close = _anchor(field, "open"), _anchor(field, "close") or "EOS"
    kind, arguments, transform = field.get("content", "text"), field.get("content_args", {}), field.get("transform")
    content: Json | JsonCall | Bare | WholeCalls = WholeCalls(close, _reader(field))
    end = "(?!)"
    if kind == "json" and not field.get("transform_each"):
        delimiters = arguments.get("string_delims") or []
        streamed: Json | JsonCall | Bare | None = None
        if not arguments and transform in _WHOLE_CALL:
            streamed = JsonCall()
        elif not arguments and transform in _NAMED_CALLS:
            streamed = Json()
        elif transform in _NAMED_CALLS and arguments.get("unquoted_keys") and len(delimiters) == 1:
            streamed = Bare(delimiters[0][0]) if delimiters[0][0] == delimiters[0][1] else None
        if streamed is not None:
            content, end = streamed, rf"\s{{0,16}}(?:{close})"
    return ToolFormat(RESPONSE_TEMPLATE, begin=begin, content=content, end=end, write="", trim=True, xgrammar="")


def _reader(field: Field) -> Callable[[str, Mapping[str, str]], list[tuple[str, dict[str, Any]]]]:
    """Return the reader of a field's text: its content parser, then its transform."""
    kind, arguments = str(field.get("content", "text")), dict(field.get("content_args", {}))
    transform, each = field.get("transform"), bool(field.get("transform_each"))
    if kind not in _PARSERS:
        raise ValueError(f"the response template's content parser {kind} is unknown")
    pattern = arguments.get("tag_pattern")
    if pattern is not None:
        regex.compile(pattern)

    def read(text: str, groups: Mapping[str, str]) -> list[tuple[str, dict[str, Any]]]:
        try:
            value = _PARSERS[kind](text, arguments)
            if each:
                values = [_filled(transform, {**groups, **item}) for item in value]
            elif transform is not None:
                values = [_filled(transform, {**groups, "content": value})]
            else:
                values = value if isinstance(value, list) else [value]
            return [_call(value) for value in values]
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise Malformed from error

    return read


def _call(value: Any) -> tuple[str, dict[str, Any]]:
    function = value.get("function", value)
    name, arguments = function["name"], function.get("arguments", {})
    if isinstance(arguments, str):
        arguments = json.loads(arguments)
    if not isinstance(name, str) or not isinstance(arguments, dict):
        raise ValueError("not a call")
    return name, arguments


def _filled(transform: Any, scope: Mapping[str, Any]) -> Any:
    if isinstance(transform, dict):
        return {key: _filled(value, scope) for key, value in transform.items()}
    if isinstance(transform, list):
        return [_filled(value, scope) for value in transform]
    found = _PLACEHOLDER.fullmatch(transform) if isinstance(transform, str) else None
    if found is None:
        return transform
    value: Any = scope
    for key in found[1].split("."):
        value = value[key]
    return value


def _text(text: str, arguments: Field) -> str:
    return text.strip() if arguments.get("strip", True) else text


def _json(text: str, arguments: Field) -> Any:
    strings: list[str] = []

    def keep(found: "regex.Match[str]") -> str:
        strings.append(found[1])
        return f"\ud800{len(strings) - 1}\ud801"  # lone surrogates, which decoded text never has

    source = text
    for begin, end in arguments.get("string_delims", []):
        source = regex.sub(regex.escape(begin) + r"(.*?)" + regex.escape(end), keep, source, flags=regex.DOTALL)
    if arguments.get("unquoted_keys"):
        source = regex.sub(r"(?<=[{,])\s*(\w+):", r'"\1":', source)
    source = regex.sub("\ud800(\\d+)\ud801", lambda found: json.dumps(strings[int(found[1])]), source)
    try:
        return json.loads(source)
    except ValueError:
        if arguments.get("allow_non_json"):
            return _text(text, arguments)
        raise


def _nested(text: str, arguments: Field) -> Any:
    parser = arguments.get("value_parser")
    return text if parser is None else _PARSERS[parser.get("name", "text")](text, parser.get("args", {}))


def _xml(text: str, arguments: Field) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for found in regex.finditer(arguments["tag_pattern"], text, flags=regex.DOTALL):
        key, value = found["key"], _nested(found.groupdict().get("value") or "", arguments)
        if key in values and arguments.get("merge_duplicates"):
            values[key] = [*values[key], value] if isinstance(values[key], list) else [values[key], value]
        else:
            values[key] = value
    return values


def _lines(text: str, arguments: Field) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for line in text.split(arguments.get("line_sep", "\n")):
        key, separator, value = _text(line, arguments).partition(arguments.get("kv_sep", ":"))
        if separator:
            values[_text(key, arguments)] = _nested(_text(value, arguments), arguments)
    return values


_PARSERS: dict[str, Callable[[str, Field], Any]] = {
    "text": _text,
    "int": lambda text, arguments: int(_text(text, arguments)),
    "float": lambda text, arguments: float(_text(text, arguments)),
    "bool": lambda text, arguments: _text(text, arguments).lower() in ("true", "1"),
    "json": _json,
    "xml-inline": _xml,
    "kv-lines": _lines,
}
