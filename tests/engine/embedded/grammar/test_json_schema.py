"""JSON schemas: what their grammars accept, and which are refused because they could not be enforced in full."""

import json
from typing import Any

import pytest
from tokenizers import Tokenizer

from engine.embedded.grammar.compiler import GrammarCompiler
from engine.errors import InvalidRequest
from engine.types import Guide, GuideKind
from tests.support.grammar import check, compiler, generate, tokenizer, tokenizer_folder

__all__ = ["compiler", "tokenizer", "tokenizer_folder"]  # fixtures

pytestmark = pytest.mark.asyncio(loop_scope="module")

PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name"],
}
TREE = {
    "$defs": {
        "node~1/x": {
            "type": "object",
            "properties": {"next": {"anyOf": [{"$ref": "#/$defs/node~01~1x"}, {"type": "null"}]}},
            "required": ["next"],
        }
    },
    "$ref": "#/$defs/node~01~1x",
}
UNION = {
    "oneOf": [{"$ref": "#/$defs/cat"}, {"$ref": "#/$defs/dog"}],
    "$defs": {
        name: {
            "type": "object",
            "properties": {"kind": {"const": name}, "n": {"type": "integer"}},
            "required": ["kind"],
        }
        for name in ("cat", "dog")
    },
}
SCHEMAS: list[tuple[Any, list[str], list[str]]] = [
    (
        PERSON,
        ['{"name": "é\\n", "age": 3}', '{"name":"x"}'],
        ["{}", '{"name": 1}', '{"name": "x", "more": 1}', '{"name": "a\tb"}'],
    ),
    ({"type": "object"}, ["{}", '{"a": {"b": []}}'], ["[]"]),
    (
        {"type": "object", "properties": {"a": {"type": "object", "title": "free"}}},
        ['{"a": {"b": 1}}', "{}"],
        ['{"b": 1}'],
    ),
    (
        {"type": "object", "required": ["a"], "additionalProperties": {"type": "null"}},
        ['{"a": null, "b": null}'],
        ["{}", '{"b": null}', '{"a": 1}'],
    ),
    ({"type": "object", "additionalProperties": False}, ["{}"], ['{"a": 1}']),
    (
        {"type": "object", "patternProperties": {"^x[0-9]+$": {"type": "integer"}}},
        ['{"x1": 1}', "{}"],
        ['{"y": 1}', '{"x1": "a"}'],
    ),
    ({"type": "object", "propertyNames": {"pattern": "^[a-c]+$"}}, ['{"abc": 1}'], ['{"d": 1}']),
    ({"type": "array"}, ["[]", '[1, "a"]'], ["{}"]),
    (
        {"type": "array", "items": {"type": "integer"}, "minItems": 1, "maxItems": 2},
        ["[1]", "[1, 2]"],
        ["[]", "[1,2,3]", '["a"]'],
    ),
    (
        {"type": "array", "prefixItems": [{"type": "string"}, {"type": "null"}]},
        ['["a", null]', "[]"],
        ['["a", null, 1]', "[1]"],
    ),
    (
        {"type": "string", "minLength": 1, "maxLength": 3},
        ['"a"', '"日本x"'],
        ['""', '"abcd"', '"\t"', '"\n"', '"\x01"', '"""', '"\\"'],
    ),
    ({"type": "string", "pattern": "^[a-z]{2}$"}, ['"ab"'], ['"abc"', '"a"']),
    ({"type": "string", "pattern": '[^"]+'}, ['"ab"'], ['"a\nb"', '"\x01"', '""']),
    ({"type": "string", "format": "date"}, ['"2025-01-31"'], ['"2025"']),
    ({"type": "integer", "minimum": 3, "exclusiveMaximum": 12}, ["3", "11"], ["2", "12", "3.0"]),
    ({"type": "integer", "multipleOf": 7}, ["0", "14", "-21"], ["15"]),
    ({"type": "number", "minimum": 0.5}, ["0.5", "2"], ["0.4", "-1"]),
    ({"type": ["string", "null"], "maxLength": 2}, ["null", '"ab"'], ['"abc"', "1"]),
    ({"type": "string", "enum": ["a/b", 'é"', 3]}, ['"a/b"', '"é\\""'], ["3", '"c"']),
    ({"const": {"a": [1, None]}}, ['{"a":[1,null]}'], ['{"a":[1]}']),
    ({"enum": [1, 2, True], "const": 1.0}, ["1"], ["true", "2"]),
    ({"anyOf": [{"minLength": 2}, {"pattern": "^x$"}], "type": "string"}, ['"ab"', '"x"'], ['"y"', "1"]),
    ({"allOf": [{"type": "null"}], "description": "one"}, ["null"], ["1"]),
    ({"properties": {"a": True}}, ['{"a": [1]}'], ["1"]),
    ({"description": "anything", "x-mine": 1}, ["1", '"a"', "[{}]"], ["a"]),
    (TREE, ['{"next": {"next": null}}'], ['{"next": 1}', "null"]),
    ({"type": "array", "items": {"$ref": "#"}}, ["[[], [[]]]"], ["[1]"]),
    (UNION, ['{"kind": "cat", "n": 1}', '{"kind": "dog"}'], ['{"kind": "cow"}']),
    (
        {"oneOf": [{"type": "integer"}, {"enum": ["a", None]}, {"type": ["boolean", "array"]}]},
        ["1", '"a"', "[]"],
        ['"b"', "{}"],
    ),
]


@pytest.mark.parametrize(
    ("schema", "good", "bad"), SCHEMAS, ids=lambda value: json.dumps(value)[:60] if isinstance(value, dict) else ""
)
async def test_schemas(
    compiler: GrammarCompiler, tokenizer: Tokenizer, schema: Any, good: list[str], bad: list[str]
) -> None:
    await check(compiler, tokenizer, "json_schema", schema, good, bad)


REFUSED: list[tuple[GuideKind, Any, str]] = [
    ("json_schema", "{", "not valid JSON"),
    ("json_schema", '{"const": NaN}', "not valid JSON"),
    ("json_schema", [], "must be an object"),
    ("json_schema", {"not": {"type": "string"}}, "#: not is not supported"),
    ("json_schema", {"if": {}, "then": {}}, "#: if is not"),
    (
        "json_schema",
        {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}},
        "#/properties/a: uniqueItems",
    ),
    ("json_schema", {"type": "array", "contains": {}}, "contains"),
    ("json_schema", {"type": "number", "multipleOf": 0.1}, "multipleOf"),
    ("json_schema", {"type": "integer", "multipleOf": 2, "minimum": 3}, "multipleOf"),
    ("json_schema", {"type": "object", "dependentRequired": {"a": ["b"]}}, "dependentRequired"),
    ("json_schema", {"$ref": "https://example.com/schema"}, r"\$ref must point into the schema"),
    ("json_schema", {"$ref": "#/$defs/none"}, r"\$ref must point into the schema"),
    (
        "json_schema",
        {"$ref": "#/$defs/a", "minLength": 2, "$defs": {"a": {"type": "string"}}},
        r"minLength beside \$ref",
    ),
    ("json_schema", {"anyOf": [{"type": "object"}], "properties": {"a": {}}}, "properties beside anyOf"),
    ("json_schema", {"enum": ["a"], "minLength": 2}, "minLength beside enum"),
    ("json_schema", {"type": "string", "enum": [1]}, "no value"),
    ("json_schema", {"allOf": [{"type": "string"}, {"minLength": 2}]}, "allOf with several"),
    ("json_schema", {"oneOf": [{"type": "integer"}, {"type": "number"}]}, "oneOf may overlap"),
    ("json_schema", {"oneOf": [{"type": "object", "properties": {"a": {}}}, {"type": "object"}]}, "oneOf may overlap"),
    ("json_schema", {"type": "string", "pattern": "a", "maxLength": 2}, "pattern with maxLength"),
    ("json_schema", {"type": "string", "format": "iri"}, "format must be one of"),
    ("json_schema", {"type": "string", "pattern": "(?=a)b"}, "Lookahead"),
    ("json_schema", {"type": "string", "pattern": "a$|^b"}, "is ignored"),
    ("json_schema", {"type": "string", "pattern": 'a"b'}, "pattern cannot be enforced"),
    ("json_schema", {"type": "string", "pattern": "é"}, "pattern cannot be enforced"),
    ("json_schema", {"type": "string", "pattern": r"(a)\1"}, "Backreference"),
    ("json_schema", {"type": "string", "minLength": 3, "maxLength": 2}, "."),
    ("json_schema", {"type": "string", "maxLength": -1}, "maxLength must be an integer"),
    ("json_schema", {"type": "integer", "minimum": 3, "maximum": 2}, "minimum greater than maximum"),
    ("json_schema", {"type": "object", "properties": {"ab": {}}, "patternProperties": {"^a": {}}}, "patternProperties"),
    (
        "json_schema",
        {"type": "object", "required": ["b"], "properties": {"a": {}}, "additionalProperties": False},
        "'b' is required",
    ),
    ("json_schema", {"type": "object", "required": ["b"], "properties": {"a": {}}}, "'b' is required"),
    ("json_schema", {"minLength": 2, "minItems": 2}, "type is missing"),
    ("json_schema", {"type": "text"}, "'text' is unknown"),
    ("json_schema", {"$defs": {"a": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}, "nothing that the model can write"),
]


@pytest.mark.parametrize(("kind", "spec", "reason"), REFUSED, ids=lambda value: json.dumps(value)[:50])
async def test_what_cannot_be_enforced_is_refused(
    compiler: GrammarCompiler, kind: GuideKind, spec: Any, reason: str
) -> None:
    with pytest.raises(InvalidRequest, match=reason) as caught:
        await compiler.compile(Guide(kind, spec if isinstance(spec, str) else json.dumps(spec)))
    assert caught.value.param == "guide"
    assert len(str(caught.value)) < 450
    assert "/project/" not in str(caught.value)


@pytest.mark.parametrize(
    "schema",
    [PERSON, UNION, TREE, {"type": "object", "additionalProperties": {"type": "number"}}],
    ids=lambda s: str(s)[:40],
)
async def test_whatever_the_masks_let_through_is_json(
    compiler: GrammarCompiler, tokenizer: Tokenizer, schema: Any
) -> None:
    guide = await compiler.compile(Guide("json_schema", json.dumps(schema)))
    finished = [text for seed in range(15) if (text := generate(guide, tokenizer, seed)) is not None]
    assert finished
    for text in finished:
        value = json.loads(text)
        assert isinstance(value, dict)
        if schema is PERSON:
            assert (
                isinstance(value["name"], str)
                and isinstance(value.get("age", 0), int)
                and value.keys() <= {"name", "age"}
            )
        if schema is UNION:
            assert value["kind"] in ("cat", "dog")
