"""Prepare a JSON schema for xgrammar, or reject it: no constraint is ever silently ignored.

xgrammar ignores unknown keywords and many keywords next to `$ref`, `enum` or `anyOf`. `prepare` walks the schema first:

- It drops annotations (`title`, `default`, `x-...`, unknown keywords) and keywords that cannot apply to the `type`.
- It rejects by name what xgrammar would not fully enforce: `not`, `if`/`then`/`else`, `dependent*`, `uniqueItems`,
  `contains`, `multipleOf` of a number, several `allOf` branches, `oneOf` branches that may overlap, references outside
  the schema, and some combinations of keywords.
- It closes objects, as OpenAI's strict mode does, unless `additionalProperties` opens them. An object without
  `properties` and an array without `items` are free. Properties come in the order of the schema. A `pattern` describes
  the whole string.

The result accepts a subset of what the schema accepts.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from engine.embedded.grammar.json_disjoint import disjoint, equals, resolve, type_matches

Schema = dict[str, Any]

FORMATS = frozenset(
    ("date", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "json-pointer", "relative-json-pointer",
     "time", "uri", "uri-reference", "uri-template", "uuid")
)  # fmt: skip
_REFUSED = ("not", "if", "then", "else", "dependentRequired", "dependentSchemas", "dependencies", "contains",
            "minContains", "maxContains", "additionalItems", "$dynamicRef", "$recursiveRef")  # fmt: skip
_COMBINATORS = ("anyOf", "oneOf", "allOf")
_FAMILIES: Mapping[str, tuple[str, ...]] = {
    "string": ("minLength", "maxLength", "pattern", "format"),
    "number": ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
    "array": ("items", "prefixItems", "unevaluatedItems", "minItems", "maxItems", "uniqueItems"),
    "object": ("properties", "required", "additionalProperties", "unevaluatedProperties", "patternProperties",
               "propertyNames", "minProperties", "maxProperties"),
    "boolean": (),
    "null": (),
}  # fmt: skip
_ASSERTIONS = {"type", "const", "enum", "$ref", *_COMBINATORS}.union(*_FAMILIES.values())
_MAX_COUNT = 2**31 - 1
# xgrammar's own rule for bounded strings allows raw control characters, which JSON forbids. This pattern excludes them.
# The noncharacter U+10FFFF makes xgrammar expand it to counted repetition, which is much faster to follow than the
# automaton of an ASCII pattern.
_BOUNDED = '^[^"\\\\\\x00-\\x1f\U0010ffff]{%d,%s}$'


class UnsupportedSchemaError(ValueError):
    """The schema cannot be enforced as written; the message says what and where."""


def prepare(text: str, is_exact: Callable[[str], bool]) -> str:
    """Return the schema to pass to xgrammar. `is_exact` tells whether xgrammar fully enforces a pattern.

    Raises UnsupportedSchemaError.
    """
    try:
        root = json.loads(text, parse_constant=_no_constant)
        return json.dumps(_Preparation(root, is_exact).run())
    except json.JSONDecodeError as error:
        raise UnsupportedSchemaError(f"the schema is not valid JSON: {error.msg} at character {error.pos}") from None
    except RecursionError:
        raise UnsupportedSchemaError("the schema is nested too deeply") from None


class _Preparation:
    def __init__(self, root: Any, is_exact: Callable[[str], bool]) -> None:
        self._root = root
        self._is_exact = is_exact
        self._names: dict[str, str] = {}
        self._definitions: dict[str, Schema] = {}

    def run(self) -> Schema:
        prepared = self._schema(self._root, "#")
        return {**prepared, "$defs": self._definitions} if self._definitions else prepared

    def _schema(self, schema: Any, path: str) -> Schema:
        if schema is True:
            return {}
        if not isinstance(schema, dict):
            reason = "a false schema matches nothing" if schema is False else "a schema must be an object"
            raise UnsupportedSchemaError(f"{path}: {reason}")
        for keyword in _REFUSED:
            if keyword in schema:
                raise UnsupportedSchemaError(f"{path}: {keyword} is not supported")
        asserted = {keyword: value for keyword, value in schema.items() if keyword in _ASSERTIONS}
        if "$ref" in asserted:
            self._alone(asserted, "$ref", (), path)
            return self._reference(asserted["$ref"], path)
        if "const" in asserted or "enum" in asserted:
            return self._values(asserted, path)
        for keyword in _COMBINATORS:
            if keyword in asserted:
                self._alone(asserted, keyword, ("type",), path)
                return self._combined(keyword, asserted[keyword], asserted.get("type"), path)
        kind = asserted.pop("type", None) or self._inferred(asserted, path)
        if isinstance(kind, list):
            return {"anyOf": [self._typed(each, asserted, path) for each in kind]}
        return self._typed(kind, asserted, path) if kind else {}

    def _alone(self, asserted: Schema, keyword: str, beside: Sequence[str], path: str) -> None:
        others = [other for other in asserted if other != keyword and other not in beside]
        if others:
            raise UnsupportedSchemaError(f"{path}: {others[0]} beside {keyword} is not supported")

    def _inferred(self, asserted: Schema, path: str) -> str | None:
        kinds = [kind for kind, keywords in _FAMILIES.items() if any(keyword in asserted for keyword in keywords)]
        if len(kinds) > 1:
            raise UnsupportedSchemaError(f"{path}: type is missing, and the keywords belong to {' and '.join(kinds)}")
        return kinds[0] if kinds else None

    def _reference(self, reference: Any, path: str) -> Schema:
        """Point to a definition under a new name.

        xgrammar does not decode JSON pointers, and if the root refers to itself, it wrongly masks tokens that end an
        inner occurrence and continue.
        """
        target = resolve(self._root, reference)
        if target is None:
            raise UnsupportedSchemaError(
                f"{path}: $ref must point into the schema, as in #/$defs/name, and {str(reference)[:80]!r} does not"
            )
        if reference not in self._names:
            name = self._names[reference] = f"d{len(self._names)}"
            self._definitions[name] = {}
            self._definitions[name] = self._schema(target, reference)
        return {"$ref": f"#/$defs/{self._names[reference]}"}

    def _values(self, asserted: Schema, path: str) -> Schema:
        self._alone(asserted, "enum" if "enum" in asserted else "const", ("const", "type"), path)
        values = asserted.get("enum", [asserted.get("const")])
        if not isinstance(values, list):
            raise UnsupportedSchemaError(f"{path}: enum must be an array")
        if "const" in asserted:
            values = [value for value in values if equals(value, asserted["const"])]
        if "type" in asserted:
            values = [value for value in values if type_matches(value, asserted["type"])]
        if not values:
            raise UnsupportedSchemaError(f"{path}: no value of enum or const fits")
        return {"enum": values}

    def _combined(self, keyword: str, branches: Any, kind: Any, path: str) -> Schema:
        if not isinstance(branches, list) or not branches:
            raise UnsupportedSchemaError(f"{path}: {keyword} must be a non-empty array")
        if keyword == "allOf" and len(branches) > 1:
            raise UnsupportedSchemaError(f"{path}: allOf with several branches is not supported")
        if keyword == "oneOf" and not disjoint(self._root, branches):
            raise UnsupportedSchemaError(
                f"{path}: the branches of oneOf may overlap, which is not supported; use anyOf, or a required constant"
            )
        if kind is not None:
            branches = [_narrowed(branch, kind, f"{path}/{keyword}/{index}") for index, branch in enumerate(branches)]
        prepared = [self._schema(branch, f"{path}/{keyword}/{index}") for index, branch in enumerate(branches)]
        return prepared[0] if len(prepared) == 1 else {"anyOf": prepared}

    def _typed(self, kind: Any, asserted: Schema, path: str) -> Schema:
        family = "number" if kind == "integer" else kind
        if not isinstance(kind, str) or family not in _FAMILIES:
            raise UnsupportedSchemaError(f"{path}: type {str(kind)[:40]!r} is unknown")
        own = {keyword: value for keyword, value in asserted.items() if keyword in _FAMILIES[family]}
        if kind == "string":
            own = self._string(own, path)
        elif kind == "array":
            own = self._array(own, path)
        elif kind == "object":
            own = self._object(own, path)
        elif kind == "number" and "multipleOf" in own:
            raise UnsupportedSchemaError(f"{path}: multipleOf is supported for integers only")
        return {"type": kind, **own}

    def _string(self, own: Schema, path: str) -> Schema:
        if len(own.keys() - {"minLength"} if "maxLength" in own else own) > 1:
            raise UnsupportedSchemaError(
                f"{path}: {' with '.join(own)} is not supported for a string; give one of pattern, format and lengths"
            )
        if "format" in own and own["format"] not in FORMATS:
            raise UnsupportedSchemaError(f"{path}: format must be one of {', '.join(sorted(FORMATS))}")
        if "pattern" in own:
            return {"pattern": self._pattern(own["pattern"], path)}
        if "minLength" in own or "maxLength" in own:
            low = _count(own.get("minLength", 0), "minLength", path)
            high = _count(own["maxLength"], "maxLength", path) if "maxLength" in own else ""
            return {"pattern": _BOUNDED % (low, high)}
        return own

    def _pattern(self, pattern: Any, path: str) -> str:
        if not isinstance(pattern, str):
            raise UnsupportedSchemaError(f"{path}: pattern must be a string")
        if not self._is_exact(pattern):
            raise UnsupportedSchemaError(
                f"{path}: the pattern cannot be enforced inside a JSON string; it must be ASCII, without look-around, "
                "back-references and word boundaries, with anchors only around the whole, and must not require quotes, "
                "backslashes or control characters"
            )
        return pattern

    def _array(self, own: Schema, path: str) -> Schema:
        if own.pop("uniqueItems", False):
            raise UnsupportedSchemaError(f"{path}: uniqueItems is not supported")
        rest = own.pop("unevaluatedItems", None)
        if "items" not in own and rest is not None:
            own["items"] = rest
        for keyword in ("minItems", "maxItems"):
            if keyword in own:
                _count(own[keyword], keyword, path)
        if not own.get("prefixItems", True):
            del own["prefixItems"]
        if "prefixItems" in own:
            if not isinstance(own["prefixItems"], list):
                raise UnsupportedSchemaError(f"{path}: prefixItems must be an array")
            own["prefixItems"] = [
                self._schema(item, f"{path}/prefixItems/{index}") for index, item in enumerate(own["prefixItems"])
            ]
            own.setdefault("items", False)
        if own.get("items", True) is not False:
            own["items"] = self._schema(own.get("items", True), f"{path}/items")
        return own

    def _object(self, own: Schema, path: str) -> Schema:
        rest = own.pop("unevaluatedProperties", None)
        if "additionalProperties" not in own and rest is not None:
            own["additionalProperties"] = rest
        named = [keyword for keyword in ("properties", "patternProperties", "propertyNames") if own.get(keyword)]
        for keyword in ("properties", "patternProperties"):
            if not isinstance(own.get(keyword, {}), dict):
                raise UnsupportedSchemaError(f"{path}: {keyword} must be an object")
        additional = own.get("additionalProperties", named in ([], ["propertyNames"]))
        self._check_names(own, named, additional, path)
        for keyword in ("minProperties", "maxProperties"):
            if keyword in own:
                _count(own[keyword], keyword, path)
        for keyword in ("properties", "patternProperties"):
            if own.get(keyword):
                own[keyword] = {
                    name: self._schema(value, f"{path}/{keyword}/{name[:64]}") for name, value in own[keyword].items()
                }
        if own.get("patternProperties"):
            patterns = own["patternProperties"]
            own["patternProperties"] = {self._pattern(name, path): value for name, value in patterns.items()}
        if "propertyNames" in own:
            own["propertyNames"] = {"type": "string", **self._schema(own["propertyNames"], f"{path}/propertyNames")}
        own["additionalProperties"] = (
            False if additional is False else self._schema(additional, f"{path}/additionalProperties")
        )
        return own

    def _check_names(self, own: Schema, named: Sequence[str], additional: Any, path: str) -> None:
        """Reject names that several keywords constrain at once; names that are only `required` become properties."""
        required = own.get("required", [])
        if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
            raise UnsupportedSchemaError(f"{path}: required must be an array of strings")
        missing = [name for name in required if name not in own.get("properties", {})]
        unnamed = missing and named not in ([], ["properties"])
        if len(named) > 1 or unnamed or len(own.get("patternProperties", {})) > 1:
            raise UnsupportedSchemaError(
                f"{path}: properties or required with patternProperties or propertyNames, or several patterns, "
                "are not supported"
            )
        if "patternProperties" in named and additional is not False and "additionalProperties" in own:
            raise UnsupportedSchemaError(f"{path}: patternProperties with additionalProperties is not supported")
        if "propertyNames" in named and additional is False and "additionalProperties" in own:
            raise UnsupportedSchemaError(f"{path}: propertyNames with additionalProperties false is not supported")
        if missing and additional is False:
            raise UnsupportedSchemaError(f"{path}: {missing[0][:64]!r} is required but not among the properties")
        if missing:
            own["properties"] = own.get("properties", {}) | dict.fromkeys(missing, additional)


def _narrowed(branch: Any, kind: Any, path: str) -> Any:
    """Return a branch of a combinator with the `type` that stands next to the combinator."""
    if not isinstance(branch, dict) or branch.get("type", kind) != kind:
        raise UnsupportedSchemaError(f"{path}: its type differs from the one beside the combinator")
    return {**branch, "type": kind}


def _count(value: Any, keyword: str, path: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= _MAX_COUNT:
        raise UnsupportedSchemaError(f"{path}: {keyword} must be an integer from 0 to {_MAX_COUNT}")
    return value


def _no_constant(name: str) -> Any:
    raise UnsupportedSchemaError(f"the schema is not valid JSON: {name}")
