"""Values of arguments: text cast by a tool's schema, and Python literals."""

import ast
import json
import math
import re
from typing import Any

from multimodal.answers.parsers.formats import Malformed, Schema

_DEPTH = 64
_CONSTANTS = {"true": True, "false": False, "null": None, "True": True, "False": False, "None": None}


def property_of(schema: Schema, key: str) -> Schema | None:
    """Return the schema of an object's property, its reference resolved; None if it is not described."""
    properties = schema.get("properties")
    found = properties.get(key) if isinstance(properties, dict) else None
    for _ in range(8):
        if not (isinstance(found, dict) and isinstance(reference := found.get("$ref"), str)):
            break
        found = schema
        for step in reference.removeprefix("#").strip("/").split("/"):
            found = found.get(step) if isinstance(found, dict) else None
    return found if isinstance(found, dict) else None


def types_of(schema: Schema | None) -> set[str]:
    """Return the JSON types that a schema allows; empty if it does not say."""
    if schema is None:
        return set()
    declared = schema.get("type")
    types = {declared} if isinstance(declared, str) else set()
    if isinstance(declared, list):
        types.update(name for name in declared if isinstance(name, str))
    if not types:
        values = [*schema["enum"]] if isinstance(schema.get("enum"), list) else []
        values += [schema["const"]] if "const" in schema else []
        types.update(_type_of(value) for value in values)
    for union in ("anyOf", "oneOf"):
        for choice in schema.get(union) or ():
            types |= types_of(choice if isinstance(choice, dict) else None)
    if schema.get("nullable") is True:
        types.add("null")
    return types


def cast(text: str, types: set[str]) -> Any:
    """Return the value of a text by its types. A text that matches no type stays a text."""
    stripped = text.strip()
    if "string" in types and not ("null" in types and stripped in ("null", "None")):
        return text
    try:
        value = _CONSTANTS[stripped] if stripped in _CONSTANTS else json_value(stripped)
    except (ValueError, RecursionError):
        if not stripped.startswith(("[", "{", "(")):
            return text
        try:
            value = python_value(stripped)
        except Malformed:
            return text
    if isinstance(value, float) and "integer" in types and "number" not in types and value.is_integer():
        return int(value)
    kind = _type_of(value)
    if not types or kind in types or (kind == "integer" and "number" in types):
        return value
    return text


def json_value(source: str) -> Any:
    """Return the value of JSON. Raises ValueError, also for numbers that JSON cannot represent, and RecursionError."""
    return json.loads(source, parse_constant=_finite, parse_float=_finite)


def python_value(source: str) -> Any:
    """Return the value of a Python literal, or of the same in JSON. Raises Malformed."""
    if re.search(r"[-+~]{4}|(?:\bnot\s+){4}", source) or _nesting(source) > _DEPTH:
        raise Malformed
    try:
        return _literal(ast.parse(source.strip(), mode="eval").body)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise Malformed from error


def _literal(node: ast.expr) -> Any:
    match node:
        case ast.Constant(value=str() | int() | float() | None as value):
            if isinstance(value, float):
                _finite(value)
            elif isinstance(value, int):
                str(value)  # raises ValueError if it has too many digits
            return value
        case ast.Name(id=name) if name in _CONSTANTS:
            return _CONSTANTS[name]
        case ast.List(elts=items) | ast.Tuple(elts=items):
            return [_literal(item) for item in items]
        case ast.Dict(keys=keys, values=values):
            pairs = [
                (_literal(key) if key is not None else None, _literal(value))
                for key, value in zip(keys, values, strict=True)
            ]
            if any(not isinstance(key, str) for key, _ in pairs):
                raise Malformed
            return dict(pairs)
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float()) as number):
            return -_literal(number)
    raise Malformed


def _nesting(source: str) -> int:
    depth = deepest = 0
    for bracket in re.findall(r"[\[{()}\]]", source):
        depth += 1 if bracket in "[{(" else -1
        deepest = max(deepest, depth)
    return deepest


def _type_of(value: Any) -> str:
    match value:
        case None:
            return "null"
        case bool():
            return "boolean"
        case int():
            return "integer"
        case float():
            return "number"
        case str():
            return "string"
        case list():
            return "array"
    return "object"


def _finite(number: str | float) -> float:
    value = float(number)
    if not math.isfinite(value):
        raise ValueError(f"JSON has no {number}")
    return value
