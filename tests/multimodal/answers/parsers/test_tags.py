"""Structural tags: a grammar lets a model write what its parser reads, and nothing that breaks the schema."""

import json
from typing import Any

import pytest
import xgrammar
from xgrammar.testing import _is_grammar_accept_string as accepts

from multimodal.answers.parsers.choose import TOOL_PARSERS, family
from multimodal.answers.parsers.engine import FamilyParser
from multimodal.answers.parsers.tags import structural_tags
from multimodal.answers.parts import ToolCall
from multimodal.request import TextGrammar

WEATHER: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOLS = {"get_weather": WEATHER, "stop": {"type": "object", "properties": {}, "additionalProperties": False}}
ARGUMENTS = {
    "json": '{"city": "Paris", "days": 2}',
    "qwen_xml": "<parameter=city>Paris</parameter><parameter=days>2</parameter>",
    "glm_xml": "<arg_key>city</arg_key><arg_value>Paris</arg_value><arg_key>days</arg_key><arg_value>2</arg_value>",
    "minimax_xml": '<parameter name="city">Paris</parameter><parameter name="days">2</parameter>',
    "deepseek_xml": '<｜DSML｜parameter name="city" string="true">Paris</｜DSML｜parameter>\n'
    '<｜DSML｜parameter name="days" string="false">2</｜DSML｜parameter>\n',
    "deepseek_v4_1_xml": '<｜DSML｜ parameter name="city" string="true">Paris</｜DSML｜ parameter>\n'
    '<｜DSML｜ parameter name="days" string="false">2</｜DSML｜ parameter>\n',
    "kimi_k3_xml": '<|open|>argument key="city" type="string"<|sep|>Paris<|close|>argument<|sep|>'
    '<|open|>argument key="days" type="number"<|sep|>2<|close|>argument<|sep|>',
}
NO_GRAMMAR = {"llama4_pythonic"}


def grammar(name: str, **choice: bool) -> Any:
    tags = structural_tags(family(name), TOOLS)
    assert tags is not None
    return xgrammar.Grammar.from_structural_tag(json.dumps(tags.xgrammar(**choice)))


@pytest.mark.parametrize("name", sorted({*TOOL_PARSERS} - NO_GRAMMAR))
def test_a_call_with_one_text_is_read_as_that_text(name: str) -> None:
    texts = {"shell": TextGrammar("lark", "start: /.+/", "tools.0.format")}
    schema = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}
    tags = structural_tags(family(name), {"shell": schema}, texts)
    assert tags is not None
    (tag,) = tags.tags
    content: Any = tag.xgrammar()["content"]
    inner = content["elements"][-1] if content["type"] == "sequence" else content
    assert inner["content"] | {"json": True} == {
        "type": "text_grammar",
        "syntax": "lark",
        "definition": "start: /.+/",
        "json": True,
    }
    said = 'say "a"\n  é < b'
    written = json.dumps(said, ensure_ascii=False)[1:-1] if inner["content"]["json"] else said
    number = "" if tag.number is None else f"0{tag.number}"
    call = f"{tag.begin}{number}{inner['begin']}{written}{inner['end']}{tag.end}"
    text = f"{tags.begin}{call}{tags.end}"
    prompt = "<|start|>assistant" if family(name).messages is not None else ""
    parser = FamilyParser(family(name), {"shell": schema}, prompt=prompt, whole_calls=True)
    parts = [part for part in parser.feed((), text) + parser.finish() if isinstance(part, ToolCall)]
    assert [json.loads(part.arguments) for part in parts] == [{"input": said}]


def calls(name: str, arguments: list[str], tool: str = "get_weather") -> str:
    """Return calls of a tool, as the grammar has them."""
    tags = structural_tags(family(name), TOOLS)
    assert tags is not None
    tag = next(tag for tag in tags.tags if tool in tag.begin)
    number = "" if tag.number is None else f"0{tag.number}"
    return tags.begin + tags.separator.join(f"{tag.begin}{number}{each}{tag.end}" for each in arguments) + tags.end


@pytest.mark.parametrize("name", sorted({*TOOL_PARSERS} - NO_GRAMMAR))
def test_a_grammar_lets_calls_through_that_the_parser_reads(name: str) -> None:
    tags = structural_tags(family(name), TOOLS)
    assert tags is not None
    right = ARGUMENTS[tags.tags[0].style]
    once, twice = calls(name, [right]), calls(name, [right, right])
    wrong = calls(name, [right.replace("days", "weeks")])
    required = grammar(name, at_least_one=True)
    assert accepts(required, once)
    assert not accepts(required, "Paris is sunny.")
    assert not accepts(required, wrong)
    free = grammar(name)
    assert accepts(free, "Paris is sunny.")
    assert accepts(free, once)
    if tags.begin or tags.separator == "":
        assert accepts(free, twice)
        assert not accepts(grammar(name, stop_after_first=True), twice)

    prompt = "<|start|>assistant" if name == "gpt_oss" else ""
    parser = FamilyParser(family(name), TOOLS, prompt=prompt, whole_calls=True)
    parts = parser.feed((), twice) + parser.finish()
    found = [(part.name, json.loads(part.arguments)) for part in parts if isinstance(part, ToolCall)]
    assert found == [("get_weather", {"city": "Paris", "days": 2})] * 2


def test_no_grammar_writes_python() -> None:
    assert {name for name in TOOL_PARSERS if structural_tags(family(name), TOOLS) is None} == NO_GRAMMAR


def test_a_family_without_tools_has_no_tags() -> None:
    assert structural_tags(family(None, "qwen3"), TOOLS) is None
