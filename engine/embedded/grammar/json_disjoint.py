"""Check whether the branches of a JSON schema's `oneOf` exclude each other, so that it means the same as `anyOf`."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from typing import Any
from urllib.parse import unquote

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


def disjoint(root: Any, branches: Sequence[Any]) -> bool:
    """Return True only if no value can match two branches."""
    resolved = [_resolved(root, branch) for branch in branches]
    return all(_apart(root, left, right) for left, right in itertools.combinations(resolved, 2))


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


def type_matches(value: Any, kinds: Any) -> bool:
    """Return whether a value has the `type`, or one of the types, of a schema."""
    names = kinds if isinstance(kinds, list) else [kinds]
    if isinstance(value, int | float) and not isinstance(value, bool):
        return "number" in names or ("integer" in names and (isinstance(value, int) or value.is_integer()))
    return _type_of(value) in names


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


def _resolved(root: Any, branch: Any) -> dict[str, Any]:
    for _ in range(32):
        if not isinstance(branch, dict) or "$ref" not in branch:
            break
        branch = resolve(root, branch["$ref"])
    return branch if isinstance(branch, dict) else {}


def _values(schema: dict[str, Any]) -> list[Any] | None:
    if "const" in schema:
        return [schema["const"]]
    values = schema.get("enum")
    return values if isinstance(values, list) else None


def _types(schema: dict[str, Any]) -> frozenset[str]:
    values = _values(schema)
    if values is not None:
        return frozenset(_type_of(value) for value in values)
    kinds = schema.get("type")
    names = [name for name in (kinds if isinstance(kinds, list) else [kinds]) if isinstance(name, str)]
    return frozenset("number" if name == "integer" else name for name in names) or _ANY


def _apart(root: Any, left: dict[str, Any], right: dict[str, Any]) -> bool:
    if not _types(left) & _types(right):
        return True
    ours, theirs = _values(left), _values(right)
    if ours is not None and theirs is not None:
        return not any(equals(a, b) for a in ours for b in theirs)
    if _types(left) | _types(right) != {"object"} or ours is not None or theirs is not None:
        return False
    mine, other = _required(left), _required(right)
    for name in mine & other:
        ours = _values(_resolved(root, _properties(left).get(name)))
        theirs = _values(_resolved(root, _properties(right).get(name)))
        if ours is not None and theirs is not None and not any(equals(a, b) for a in ours for b in theirs):
            return True
    return _lacks(right, mine) or _lacks(left, other)


def _lacks(schema: dict[str, Any], names: frozenset[str]) -> bool:
    """Return whether the schema forbids at least one of the properties `names`."""
    closed = schema.get("additionalProperties") is False and not schema.get("patternProperties")
    return closed and not names <= _properties(schema).keys()


def _required(schema: dict[str, Any]) -> frozenset[str]:
    required = schema.get("required")
    return frozenset(name for name in required if isinstance(name, str)) if isinstance(required, list) else frozenset()


def _properties(schema: dict[str, Any]) -> dict[str, Any]:
    properties = schema.get("properties")
    return properties if isinstance(properties, dict) else {}
