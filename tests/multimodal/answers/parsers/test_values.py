"""Casting of arguments that are text."""

from typing import Any

import pytest

from multimodal.answers.parsers.values import cast, property_of, types_of


@pytest.mark.parametrize(
    ("text", "schema", "value"),
    [
        ("3", {"type": "integer"}, 3),
        (" 3\n", {"type": "integer"}, 3),
        ("3.0", {"type": "integer"}, 3),
        ("3.5", {"type": "integer"}, "3.5"),
        ("3", {"type": "number"}, 3),
        ("1e20", {"type": "number"}, 1e20),
        ("1e999", {"type": "number"}, "1e999"),
        ("NaN", {"type": "number"}, "NaN"),
        ("3", {"type": "string"}, "3"),
        (" a ", {"type": "string"}, " a "),
        ("null", {"type": ["string", "null"]}, None),
        ("null", {"type": "string"}, "null"),
        ("5", {"anyOf": [{"type": "integer"}, {"type": "null"}]}, 5),
        ("5", {"type": "integer", "nullable": True}, 5),
        ("None", {"type": "integer", "nullable": True}, None),
        ("True", {"type": "boolean"}, True),
        ("yes", {"type": "boolean"}, "yes"),
        ("[1, 'a', None]", {"type": "array"}, [1, "a", None]),
        ("{'a': True}", {"type": "object"}, {"a": True}),
        ("{1: 2}", {"type": "object"}, "{1: 2}"),
        ("[1]", {"type": "object"}, "[1]"),
        ("2", {"enum": [1, 2]}, 2),
        ("2", {"enum": ["1", "2"]}, "2"),
        ("2", {"const": 2}, 2),
        ("12", {"$ref": "#/$defs/size"}, 12),
        ("12", {}, 12),
        ("0042", {}, "0042"),
        ("123_456", {}, "123_456"),
        ("{", {}, "{"),
        ("[" * 10_000, {}, "[" * 10_000),
    ],
)
def test_a_text_is_cast_to_what_the_schema_says(text: str, schema: dict[str, Any], value: Any) -> None:
    parameters = {"properties": {"x": schema}, "$defs": {"size": {"type": "integer"}}}
    result = cast(text, types_of(property_of(parameters, "x")))
    assert result == value
    assert type(result) is type(value)


def test_schemas_that_say_nothing_are_no_errors() -> None:
    for parameters in ({}, {"properties": []}, {"properties": {"x": True}}, {"properties": {"x": {"$ref": "#/a"}}}):
        assert property_of(parameters, "x") is None
    assert types_of({"type": 3, "anyOf": [True], "oneOf": None}) == set()
    endless = {"properties": {"x": {"$ref": "#/properties/x"}}}
    assert types_of(property_of(endless, "x")) == set()
