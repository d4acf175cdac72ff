"""JSON schemas: what their grammars accept, and which are refused because they could not be enforced in full."""

import json
import random
from typing import Any

import pytest
from jsonschema import Draft7Validator, Draft202012Validator
from tokenizers import Tokenizer

from engine.embedded.grammar.compiler import GrammarCompiler
from engine.errors import InvalidRequest
from engine.types import Guide
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
        {"type": "array", "prefixItems": [{"type": "string"}, {"type": "null"}], "items": False},
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
    (
        {"oneOf": [{"required": ["a"]}, {"required": ["b"]}], "properties": {"a": {}, "b": {}}},
        ['{"a": 1}', '{"b": 1}'],
        ['{"a": 1, "b": 1}', "{}"],
    ),
    (
        {"oneOf": [{"type": "array", "items": {"type": "string"}}, {"type": "array", "items": {"type": "null"}}]},
        ['["a"]', "[null]"],
        ["[]", '["a", null]'],
    ),
    ({"oneOf": [{"type": "integer"}, {"type": ["number", "null"]}]}, ["null"], ["1"]),
    ({"oneOf": [{"enum": [1, 2]}, {"enum": [2, 3]}]}, ["1", "3"], ["2", "4"]),
    (
        {"type": "object", "properties": {"a": {}, "b": {}}, "dependentRequired": {"a": ["b"]}},
        ["{}", '{"b": 1}', '{"a": 1, "b": 1}'],
        ['{"a": 1}'],
    ),
    (
        {"type": "object", "dependencies": {"a": {"properties": {"b": {"type": "null"}}, "required": ["b"]}}},
        ["{}", '{"b": 1}', '{"b": null, "a": 1}'],
        ['{"a": 1}', '{"b": 1, "a": 1}'],
    ),
    (
        {
            "properties": {"k": {"enum": ["x", "y"]}, "n": {}},
            "required": ["k"],
            "if": {"properties": {"k": {"const": "x"}}},
            "then": {"required": ["n"]},
        },
        ['{"k": "x", "n": 1}', '{"k": "y"}'],
        ['{"k": "x"}', "{}"],
    ),
    (
        {"type": "object", "properties": {"a": {}, "b": {}}, "not": {"required": ["a", "b"]}},
        ["{}", '{"a": 1}', '{"b": 1}'],
        ['{"a": 1, "b": 1}'],
    ),
    ({"type": "object", "not": {"anyOf": [{"required": ["a"]}, {"required": ["b"]}]}}, ['{"c": 1}'], ['{"b": 1}']),
    ({"type": "object", "properties": {"a": {"not": {}}, "b": {}}}, ['{"b": 1}'], ['{"a": 1}']),
    ({"not": {"type": ["object", "array"]}}, ["1", '"a"'], ["[]", "{}"]),
    ({"type": "object", "propertyNames": {"enum": ["a", "b"]}}, ['{"a": 1}'], ['{"c": 1}']),
    (
        {"type": "object", "properties": {"a": {}, "b": {}, "c": {}}, "minProperties": 2},
        ['{"a": 1, "c": 1}'],
        ['{"a": 1}', "{}"],
    ),
    ({"type": "number", "multipleOf": 0.1}, ["0.3", "2"], ["0.35"]),
    ({"type": "integer", "multipleOf": 2, "minimum": 3}, ["4"], ["2", "5"]),
    ({"$ref": "#/$defs/a", "minLength": 2, "$defs": {"a": {"type": "string"}}}, ['"ab"'], ['"a"', "1"]),
    ({"allOf": [{"type": "string"}, {"minLength": 2}]}, ['"ab"'], ['"a"', "1"]),
    ({"type": "string", "pattern": "a", "maxLength": 2}, ['"xa"'], ['"xya"', '"x"']),
    ({"type": "string", "pattern": 'é|"'}, ['"é"', '"x\\""'], ['"x"']),
    ({"type": "string", "format": "iri"}, ['"anything"'], ["1"]),
    (
        {"type": "object", "properties": {"ab": {}}, "patternProperties": {"^x": {"type": "null"}}},
        ['{"ab": 1, "xy": null}'],
        ['{"xy": 1}', '{"b": 1}'],
    ),
    ({"type": "object", "required": ["b"], "properties": {"a": {}}}, ['{"a": 1, "b": 2}'], ['{"a": 1}']),
    (
        {"allOf": [{"properties": {"a": {"type": "null"}}}, {"properties": {"b": {"type": "null"}}}]},
        ['{"a": null, "b": null}'],
        ['{"a": 1}'],
    ),
    ({"type": "string", "maxLength": 20_000}, ['"a"'], ["1"]),
    (
        {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(1100)}},
        ['{"p1": "a", "p1099": "b"}'],
        ['{"p1": 1}'],
    ),
]


@pytest.mark.parametrize(
    ("schema", "good", "bad"), SCHEMAS, ids=lambda value: json.dumps(value)[:60] if isinstance(value, dict) else ""
)
async def test_schemas(
    compiler: GrammarCompiler, tokenizer: Tokenizer, schema: Any, good: list[str], bad: list[str]
) -> None:
    await check(compiler, tokenizer, "json_schema", schema, good, bad)


REFUSED: list[tuple[Any, str]] = [
    ("{", "not valid JSON"),
    ('{"const": NaN}', "not valid JSON"),
    ([], "must be an object"),
    (False, "nothing can match"),
    ({"type": "string", "not": {"pattern": "a"}}, "#: this use of not"),
    ({"type": "string", "not": {}}, "nothing can match"),
    ({"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}, "uniqueItems is not supported"),
    ({"type": "array", "contains": {}}, "contains is not supported"),
    ({"type": "object", "propertyNames": {"minLength": 2}}, "#: propertyNames is supported with pattern or enum"),
    ({"type": "object", "minProperties": 2}, "#: minProperties above 1"),
    ({"type": "object", "minProperties": "2"}, "wrong type"),
    ({"$ref": "https://example.com/schema"}, r"\$ref must point into the schema"),
    ({"$ref": "#/$defs/none"}, r"\$ref points to #/\$defs/none, which does not exist"),
    ({"enum": ["a"], "minLength": 2}, "length constraints"),
    ({"type": "string", "enum": [1]}, "incompatible types"),
    ({"oneOf": [{"type": "string"}, {"type": "string", "maxLength": 4}]}, "branches of oneOf overlap"),
    ({"type": "string", "pattern": "(?=a)b"}, "look-around"),
    ({"type": "string", "pattern": "a$b"}, "only around a whole"),
    ({"type": "string", "pattern": r"a\b"}, "word boundaries"),
    ({"type": "string", "pattern": r"(a)\1"}, "backreferences"),
    ({"type": "string", "pattern": "(a"}, "unclosed group"),
    ({"type": "string", "minLength": 3, "maxLength": 2}, "minLength"),
    ({"type": "string", "maxLength": -1}, "positive integer for 'maxLength'"),
    ({"type": "integer", "minimum": 3, "maximum": 2}, "minimum .3. is greater than maximum"),
    ({"type": "object", "required": ["b"], "properties": {"a": {}}, "additionalProperties": False}, "'b' is unsat"),
    ({"type": "text"}, "#: type 'text' is unknown"),
    ({"$defs": {"a": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}, "nothing that the model can write"),
    ({"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(30_000)}}, "too complex|too large"),
    ({"x-guidance": {"lenient": True}, "type": "array", "uniqueItems": True}, "uniqueItems"),
]


@pytest.mark.parametrize(("schema", "reason"), REFUSED, ids=lambda value: json.dumps(value)[:50])
async def test_schemas_that_cannot_be_enforced_are_refused(compiler: GrammarCompiler, schema: Any, reason: str) -> None:
    with pytest.raises(InvalidRequest, match=reason) as caught:
        await compiler.compile(Guide("json_schema", schema if isinstance(schema, str) else json.dumps(schema)))
    assert caught.value.param == "guide"
    assert len(str(caught.value)) < 450
    assert "llguidance" not in str(caught.value) and "failed to compile" not in str(caught.value)


async def test_random_tokens_under_the_masks_make_valid_json(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    """Whenever the output ends by itself; those that do not end are few."""
    ended = 0
    for schema, *_ in SCHEMAS:
        guide = await compiler.compile(Guide("json_schema", json.dumps(schema)))
        draft = Draft7Validator if "dependencies" in schema else Draft202012Validator
        for seed in range(3):
            text = generate(guide, tokenizer, seed)
            if text is not None:
                ended += 1
                assert [error.message for error in draft(schema).iter_errors(json.loads(text))] == [], (schema, text)
    assert ended > 2 * len(SCHEMAS)


CONDITION = {"properties": {"a": {"enum": [1, 2]}, "b": {"type": ["string", "null"]}}, "required": ["a"]}
PARTS = [
    True,
    {"type": "integer"},
    {"type": ["number", "null"]},
    {"enum": [1, "x", None, {"a": 1}]},
    {"const": "x"},
    {"type": "string", "minLength": 2},
    {"required": ["a"]},
    {"type": "object", "required": ["b"]},
    CONDITION,
    {"type": "object", "properties": {"a": {"const": 3}}, "required": ["a"], "additionalProperties": False},
    {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"const": "x"}}, "required": ["a", "b"]},
    {"type": "array", "items": {"type": "integer"}},
    {"type": "array", "items": {"type": "string"}, "minItems": 1},
    {"anyOf": [{"required": ["a"]}, {"type": "null"}]},
    {"allOf": [{"required": ["a"]}, {"properties": {"b": {"type": "null"}}}]},
    {"$ref": "#/$defs/part"},
]


def combinations() -> list[dict[str, Any]]:
    """Schemas of every two parts, which may or may not be told apart."""
    defs = {"$defs": {"part": {"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"]}}}
    pairs = [(one, two) for one in PARTS for two in PARTS if one is not two]
    return [
        {**schema, **defs}
        for one, two in random.Random(0).sample(pairs, 40)
        for schema in ({"oneOf": [one, two]}, {"allOf": [one], "not": two}, {"if": one, "then": two, "else": CONDITION})
    ]


async def test_combined_schemas_hold_for_all_output(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    accepted = 0
    for schema in combinations():
        try:
            guide = await compiler.compile(Guide("json_schema", json.dumps(schema)))
        except InvalidRequest:
            continue
        accepted += 1
        for seed in range(2):
            if (text := generate(guide, tokenizer, seed, limit=80)) is not None:
                errors = [error.message for error in Draft202012Validator(schema).iter_errors(json.loads(text))]
                assert errors == [], (schema, text)
    assert accepted > 60, accepted
