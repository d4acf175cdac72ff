"""Tell two JSON schemas apart: `oneOf`, `not` and `if` need what matches one of them and surely not the other."""

from __future__ import annotations

import json
from typing import Any
from urllib.parse import unquote

Schema = dict[str, Any]

_TYPES = {
    str: "string",
    bool: "boolean",
    int: "number",
    float: "number",
    type(None): "null",
    list: "array",
    dict: "object",
}
_ANY = frozenset(_TYPES.values())
_DEPTH = 8


class Exclusion:
    """Tells schemas apart that may refer to parts of `root`."""

    def __init__(self, root: Any) -> None:
        self._root = root

    def narrowing(self, schema: Any, other: Any, depth: int = 0) -> Schema | None:
        """Return a schema that excludes `other` from the values that match `schema`; None if this code cannot express
        it.

        It may exclude more than is needed. An empty schema says that nothing matches both.
        """
        ours, theirs = self._merged(schema), self._merged(other)
        if theirs is None or ours is None or self.apart(ours, theirs):
            return {}
        if isinstance(branches := theirs.get("anyOf"), list) and depth < _DEPTH:
            parts = [self.narrowing(schema, branch, depth + 1) for branch in branches]
            return None if None in parts else {"allOf": [part for part in parts if part]}
        values = _values(ours)
        if values is not None:
            remaining = [value for value in values if self.apart({"enum": [value]}, theirs)]
            return {"enum": remaining} if remaining else None
        shared, own = _types(ours) & _types(theirs), _types(ours) - _types(theirs)
        if "object" in shared and depth < _DEPTH and (options := self._object(ours, theirs, depth)):
            return {"type": sorted({"object", *own}), **(options[0] if len(options) == 1 else {"anyOf": options})}
        if "array" in shared and self._items_apart(ours, theirs):
            return {"type": sorted({"array", *own}), "minItems": 1}
        return {"type": sorted(own)} if own else None

    def apart(self, left: Any, right: Any, depth: int = 0) -> bool:
        """Return True only if no value can match both."""
        left, right = self._merged(left), self._merged(right)
        if left is None or right is None or not _types(left) & _types(right):
            return True
        for one, two in ((left, right), (right, left)):
            branches = one.get("anyOf") or one.get("oneOf")
            if isinstance(branches, list) and branches and depth < _DEPTH:
                siblings = {key: value for key, value in one.items() if key not in ("anyOf", "oneOf")}
                if all(self.apart({"allOf": [siblings, branch]}, two, depth + 1) for branch in branches):
                    return True
        ours, theirs = _values(left), _values(right)
        if ours is not None and theirs is not None:
            return not any(equals(a, b) for a in ours for b in theirs)
        if ours is not None or theirs is not None:
            values, schema = (ours, right) if ours is not None else (theirs, left)
            return all(self._rejects(schema, value, depth) for value in values or ())
        if _types(left) & _types(right) != {"object"} or depth >= _DEPTH:
            return False
        mine, other = _required(left), _required(right)
        if any(
            self.apart(_properties(left)[name], _properties(right)[name], depth + 1)
            for name in (mine | other) & _properties(left).keys() & _properties(right).keys()
        ):
            return True
        return _lacks(right, mine) or _lacks(left, other)

    def _rejects(self, schema: Schema, value: Any, depth: int) -> bool:
        """Return True only if a value with a type of the schema surely does not match it."""
        if _type_of(value) not in _types(schema):
            return True
        if isinstance(value, float) and not value.is_integer() and schema.get("type") == "integer":
            return True
        if isinstance(value, str):
            return bool(len(value) < schema.get("minLength", 0) or len(value) > schema.get("maxLength", len(value)))
        if not isinstance(value, dict) or depth >= _DEPTH:
            return False
        return (
            not _required(schema) <= value.keys()
            or _lacks(schema, frozenset(value))
            or any(
                self.apart({"enum": [value[name]]}, _properties(schema)[name], depth + 1)
                for name in value.keys() & _properties(schema).keys()
            )
        )

    def _object(self, ours: Schema, theirs: Schema, depth: int) -> list[Schema]:
        """Return ways to keep an object of `ours` from matching `theirs`."""
        mine, others = _properties(ours), _properties(theirs)
        options: list[Schema] = [_with(name, False) for name in sorted(_required(theirs) - _required(ours))]
        for name in sorted(mine.keys() & others.keys()):
            if (narrowing := self.narrowing(mine[name], others[name], depth + 1)) is not None:
                options.append({"required": [name], **_with(name, narrowing)})
        if theirs.get("additionalProperties") is False and not theirs.get("patternProperties"):
            options += [{"required": [name]} for name in sorted(mine.keys() - others.keys())]
        return options

    def _items_apart(self, ours: Schema, theirs: Schema) -> bool:
        items, others = ours.get("items"), theirs.get("items")
        plain = "prefixItems" not in ours and "prefixItems" not in theirs
        return plain and isinstance(items, dict) and isinstance(others, dict) and self.apart(items, others)

    def _merged(self, schema: Any) -> Schema | None:
        """Return a schema with its references and `allOf` merged into it, in part; None if nothing matches it.

        Omissions only make the result accept more.
        """
        return _merge(self._root, schema, _DEPTH)


def _merge(root: Any, schema: Any, depth: int) -> Schema | None:
    if schema is False:
        return None
    if not isinstance(schema, dict):
        return {}
    result = {keyword: value for keyword, value in schema.items() if keyword not in ("allOf", "$ref")}
    parts = list(schema["allOf"]) if isinstance(schema.get("allOf"), list) else []
    if "$ref" in schema:
        parts.append(resolve(root, schema["$ref"]))
    for part in parts if depth else ():
        merged = _merge(root, part, depth - 1)
        if merged is None:
            return None
        result = _both(result, merged)
    return result


def _both(one: Schema, two: Schema) -> Schema:
    """Return a schema that accepts at least what both accept."""
    result = {**two, **one}
    if "type" in one and "type" in two:
        result["type"] = sorted(_types({"type": one["type"]}) & _types({"type": two["type"]})) or one["type"]
    left, right = _values(one), _values(two)
    if left is not None and right is not None:
        result.pop("const", None)
        result["enum"] = [value for value in left if any(equals(value, other) for other in right)]
    for keyword in ("properties",):
        if keyword in one and keyword in two:
            mine, other = _properties(one), _properties(two)
            result[keyword] = {
                **other,
                **{name: {"allOf": [value, other[name]]} if name in other else value for name, value in mine.items()},
            }
    if "required" in one or "required" in two:
        result["required"] = sorted(_required(one) | _required(two))
    if "additionalProperties" in one or "additionalProperties" in two:
        # Closed by one part, an object may still have what that part names; the other's names are then too many.
        closing = [part for part in (one, two) if part.get("additionalProperties") is False]
        if closing:
            result["additionalProperties"] = False
            result["patternProperties"] = closing[0].get("patternProperties", {})
    return result


def resolve(root: Any, reference: Any) -> Any | None:
    """Return the target of a local reference (`#`, `#/$defs/name`); None if it is not local or has no target."""
    if reference == "#":
        return root
    if not isinstance(reference, str) or not reference.startswith("#/"):
        return None
    node = root
    for part in unquote(reference[2:]).split("/"):
        key = part.replace("~1", "/").replace("~0", "~")
        if isinstance(node, dict) and key in node:
            node = node[key]
        elif isinstance(node, list) and key.isdecimal() and int(key) < len(node):
            node = node[int(key)]
        else:
            return None
    return node


def equals(left: Any, right: Any) -> bool:
    """Compare two values as JSON does: 1 equals 1.0 but not true."""
    return bool(left == right) and json.dumps(_canonical(left), sort_keys=True) == json.dumps(
        _canonical(right), sort_keys=True
    )


def _canonical(value: Any) -> Any:
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, list):
        return [_canonical(item) for item in value]
    if isinstance(value, dict):
        return {key: _canonical(item) for key, item in value.items()}
    return value


def _type_of(value: Any) -> str:
    return _TYPES[type(value)]


def _with(name: str, value: Schema | bool) -> Schema:
    return {"properties": {name: value}, "additionalProperties": True}


def _values(schema: Schema) -> list[Any] | None:
    if "const" in schema:
        return [schema["const"]]
    values = schema.get("enum")
    return values if isinstance(values, list) else None


def _types(schema: Schema) -> frozenset[str]:
    kinds = schema.get("type")
    names = [name for name in (kinds if isinstance(kinds, list) else [kinds]) if isinstance(name, str)]
    types = frozenset("number" if name == "integer" else name for name in names) or _ANY
    values = _values(schema)
    return types if values is None else types & frozenset(_type_of(value) for value in values)


def _lacks(schema: Schema, names: frozenset[str]) -> bool:
    """Return whether the schema forbids at least one of the properties `names`."""
    closed = schema.get("additionalProperties") is False and not schema.get("patternProperties")
    return any(_properties(schema).get(name) is False for name in names) or (
        closed and not names <= _properties(schema).keys()
    )


def _required(schema: Schema) -> frozenset[str]:
    required = schema.get("required")
    return frozenset(name for name in required if isinstance(name, str)) if isinstance(required, list) else frozenset()


def _properties(schema: Schema) -> Schema:
    properties = schema.get("properties")
    return properties if isinstance(properties, dict) else {}
