"""Rewrite a JSON schema into one that llguidance enforces in full; it refuses the keywords that it does not implement.

The result accepts a subset of what the schema accepts:

- `oneOf`, `not`, `if`, `dependentRequired`, `dependentSchemas`, `dependencies` and `propertyNames` become unions of
  what can be told apart (`json_exclusion.py`). A branch that cannot be told from the others is left out.
- Objects are closed, as in OpenAI's strict mode, unless `additionalProperties` opens them or the schema composes
  objects of several parts.
- A `format` that llguidance does not know is an annotation, as the specification has it, and dropped; so are keywords
  that cannot apply to the `type`.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping
from typing import Any

from engine.embedded.grammar.json_exclusion import Exclusion, Schema, resolve
from engine.embedded.grammar.library import UnsupportedGuideError

FORMATS = frozenset(("date", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "time", "uri", "uuid"))
"""Formats that are enforced."""
_MAPS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas", "dependencies")
_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
_SINGLE = ("items", "additionalProperties", "additionalItems", "unevaluatedItems", "unevaluatedProperties",
           "propertyNames", "contains", "not", "if", "then", "else")  # fmt: skip
_COMPOSING = frozenset(("allOf", "if", "not", "dependentSchemas", "dependencies"))
_FAMILIES: Mapping[str, tuple[str, ...]] = {
    "string": ("minLength", "maxLength", "pattern", "format"),
    "number": ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
    "array": ("items", "prefixItems", "additionalItems", "unevaluatedItems", "minItems", "maxItems", "uniqueItems",
              "contains", "minContains", "maxContains"),
    "object": ("properties", "required", "additionalProperties", "unevaluatedProperties", "patternProperties",
               "propertyNames", "minProperties", "maxProperties", "dependentRequired", "dependentSchemas",
               "dependencies"),
}  # fmt: skip
_MAX_CHOICES = 64
_TYPES = frozenset((*_FAMILIES, "integer", "boolean", "null"))
_IDLE: Mapping[str, Any] = {"uniqueItems": False, "unevaluatedItems": True, "unevaluatedProperties": True}
"""Keywords that llguidance does not implement, with values that mean nothing."""


class UnsupportedSchemaError(UnsupportedGuideError):
    """The schema cannot be enforced as written; the message says what and where."""


def prepare(text: str, *, close: bool = True) -> Schema:
    """Return the schema to pass to llguidance; unless `close`, no object is closed. Raises UnsupportedSchemaError."""
    try:
        root = _parsed(text)
        prepared = _Preparation(root, close=close).schema(root, "#")
    except UnsupportedSchemaError:
        raise
    except RecursionError:
        raise UnsupportedSchemaError("the schema is nested too deeply") from None
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise UnsupportedSchemaError("the value of a keyword has the wrong type") from error
    if prepared is False:
        raise UnsupportedSchemaError("#: nothing can match it")
    return {} if prepared is True else prepared


def _parsed(text: str) -> Any:
    try:
        return json.loads(text, parse_constant=_no_constant)
    except json.JSONDecodeError as error:
        raise UnsupportedSchemaError(f"the schema is not valid JSON: {error.msg} at character {error.pos}") from None


class _Preparation:
    def __init__(self, root: Any, *, close: bool) -> None:
        self._root = root
        self._exclusion = Exclusion(root)
        self._closes = close and not any(_composes(schema) for schema in _walk(root))

    def schema(self, schema: Any, path: str) -> Schema | bool:
        if isinstance(schema, bool):
            return schema
        if not isinstance(schema, dict):
            raise UnsupportedSchemaError(f"{path}: a schema must be an object")
        own = self._applicable(schema, path)
        parts: list[Schema | bool] = [*self._dependent(own), *self._names(own, path), *self._least(own, path)]
        if isinstance(own.get("oneOf"), list) and len(own["oneOf"]) > 1:
            parts.append(self._one_of(own.pop("oneOf"), path))
        if "if" in own:
            condition, then, other = own.pop("if"), own.pop("then", True), own.pop("else", True)
            parts.append(self._conditional(own, condition, then, other))
        else:
            own.pop("then", None)
            own.pop("else", None)
        if "not" in own:
            parts.append(self._excluded(own, own.pop("not"), path))
        if False in parts:
            return False
        parts = [part for part in parts if part]
        if parts:
            own["allOf"] = [*own.get("allOf", []), *parts]
        if self._closes and _may_be_closed(own):
            own["additionalProperties"] = False
        return self._inner(own, path)

    def _applicable(self, schema: Schema, path: str) -> Schema:
        """Return the schema without keywords that mean nothing here, and with a type if its keywords imply one."""
        kinds = schema.get("type", [])
        kinds = [kinds] if isinstance(kinds, str) else kinds
        if not isinstance(kinds, list) or not _TYPES.issuperset(kinds):
            raise UnsupportedSchemaError(f"{path}: type {str(schema['type'])[:40]!r} is unknown")
        if not kinds and not schema.keys() & {"const", "enum", "anyOf", "oneOf", "$ref", *_COMPOSING}:
            kinds = [family for family, keywords in _FAMILIES.items() if schema.keys() & set(keywords)]
            if len(kinds) == 1:
                schema = {**schema, "type": kinds[0]}
        families = {"number" if kind == "integer" else kind for kind in kinds} or set(_FAMILIES)
        if isinstance(target := resolve(self._root, schema.get("$ref")), dict):
            # llguidance refuses keywords beside a reference that leads back to itself.
            schema = {
                keyword: value
                for keyword, value in schema.items()
                if keyword == "$ref" or target.get(keyword, schema) != value
            }
        useless = {keyword for family in _FAMILIES.keys() - families for keyword in _FAMILIES[family]}
        if "format" in schema and schema["format"] not in FORMATS:
            useless.add("format")
        return {
            keyword: value
            for keyword, value in schema.items()
            if keyword not in useless and not (keyword in _IDLE and value == _IDLE[keyword])
        }

    def _inner(self, own: Schema, path: str) -> Schema:
        """Prepare the schemas inside a schema."""
        for keyword in own.keys() & set(_MAPS):
            if isinstance(own[keyword], dict):
                own[keyword] = {
                    name: self.schema(value, f"{path}/{keyword}/{name[:64]}") for name, value in own[keyword].items()
                }
        for keyword in own.keys() & set(_LISTS):
            if isinstance(own[keyword], list):
                own[keyword] = [
                    self.schema(value, f"{path}/{keyword}/{index}") for index, value in enumerate(own[keyword])
                ]
        for keyword in own.keys() & set(_SINGLE):
            if isinstance(own[keyword], dict):
                own[keyword] = self.schema(own[keyword], f"{path}/{keyword}")
        return own

    def _dependent(self, own: Schema) -> Iterator[Schema]:
        for keyword in ("dependentRequired", "dependentSchemas", "dependencies"):
            for name, needed in own.pop(keyword, {}).items():
                needs = {"required": [name, *needed]} if isinstance(needed, list) else {"allOf": [needed]}
                yield {"anyOf": [{"properties": {name: False}, "additionalProperties": True}, needs]}

    def _names(self, own: Schema, path: str) -> Iterator[Schema]:
        names = own.pop("propertyNames", True)
        if names is False:
            yield {"maxProperties": 0}
        elif isinstance(names, dict):
            names = {keyword: value for keyword, value in names.items() if keyword in _ASSERTING}
            names.pop("type", None)
            match names:
                case {"pattern": pattern} if len(names) == 1:
                    yield {"patternProperties": {pattern: True}, "additionalProperties": False}
                case {"enum": list(allowed)} if len(names) == 1:
                    yield {
                        "properties": {name: True for name in allowed if isinstance(name, str)},
                        "additionalProperties": False,
                    }
                case _ if names:
                    raise UnsupportedSchemaError(f"{path}: propertyNames is supported with pattern or enum alone")

    def _least(self, own: Schema, path: str) -> Iterator[Schema]:
        """Turn `minProperties` into required names, where it is above 1: an object might repeat a name."""
        least, required = own.get("minProperties", 0), own.get("required", [])
        named = own["properties"] if isinstance(own.get("properties"), dict) else {}
        if least <= len(required):
            own.pop("minProperties", None)
        elif named:
            names = [name for name, value in named.items() if value is not False and name not in required]
            choices = itertools.combinations(names, own.pop("minProperties") - len(required))
            yield {"anyOf": [{"required": list(choice)} for choice in itertools.islice(choices, _MAX_CHOICES)]}
        elif least > 1:
            raise UnsupportedSchemaError(f"{path}: minProperties above 1 needs properties to choose from")

    def _one_of(self, branches: list[Any], path: str) -> Schema:
        kept = []
        for index, branch in enumerate(branches):
            others = branches[:index] + branches[index + 1 :]
            narrowings = [self._exclusion.narrowing(branch, other) for other in others]
            if None not in narrowings:
                kept.append(_all([branch, *filter(None, narrowings)]))
        if not kept:
            raise UnsupportedSchemaError(
                f"{path}: the branches of oneOf overlap, which is not supported; use anyOf, or a required constant"
            )
        return {"anyOf": kept}

    def _conditional(self, own: Schema, condition: Any, then: Any, other: Any) -> Schema:
        """Return `if` with `then`, or what `if` surely rejects with `else`; failing that, `then` with `else`."""
        narrowing = self._exclusion.narrowing(own, condition)
        return {"anyOf": [_all([condition, then]), _all([then if narrowing is None else narrowing, other])]}

    def _excluded(self, own: Schema, unwanted: Any, path: str) -> Schema | bool:
        if unwanted in ({}, True):
            return False
        narrowing = self._exclusion.narrowing(own, unwanted)
        if narrowing is None:
            raise UnsupportedSchemaError(f"{path}: this use of not is not supported")
        return narrowing


_ASSERTING = {"type", "enum", "const", "not", "anyOf", "oneOf", "allOf", "$ref", *_FAMILIES["string"]}


def _all(parts: list[Any]) -> Any:
    parts = [part for part in parts if part not in ({}, True)]
    return {"allOf": parts} if len(parts) > 1 else parts[0] if parts else True


def _walk(schema: Any) -> Iterator[Schema]:
    """Yield a schema and all schemas in it."""
    waiting = [schema]
    while waiting:
        if not isinstance(schema := waiting.pop(), dict):
            continue
        yield schema
        for keyword in schema.keys() & set(_MAPS):
            if isinstance(schema[keyword], dict):
                waiting += schema[keyword].values()
        for keyword in schema.keys() & {*_LISTS, *_SINGLE}:
            value = schema[keyword]
            waiting += value if isinstance(value, list) else [value]


def _composes(schema: Schema) -> bool:
    """Return whether several parts of a schema may speak of the same object."""
    return bool(schema.keys() & _COMPOSING) or len(schema.keys() & {"properties", "anyOf", "oneOf", "$ref"}) > 1


def _may_be_closed(own: Schema) -> bool:
    named = own.get("properties")
    if not isinstance(named, dict) or not named:
        return bool(own.get("patternProperties")) and not own.keys() & {"additionalProperties", "unevaluatedProperties"}
    return not own.keys() & {"additionalProperties", "unevaluatedProperties"} and named.keys() >= set(
        own.get("required", ())
    )


def _no_constant(name: str) -> Any:
    raise UnsupportedSchemaError(f"the schema is not valid JSON: {name}")
