"""Grammars of requests with tools, checked by xgrammar itself."""

import json
from dataclasses import replace
from typing import Any

import pytest
import xgrammar
from xgrammar.testing import _is_grammar_accept_string as accepts

from engine.types import GUIDE_KINDS, ReasoningBudget
from multimodal.answers.formats import AnswerFormat
from multimodal.answers.parsers.choose import family
from multimodal.errors import RequestError
from multimodal.request import Ask, TextGrammar, Tool, Tools
from multimodal.text.tokenizer import byte_tokenizer
from tests.support.requests import ask_of

CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": "weather", "parameters": CITY}},
    {"type": "function", "function": {"name": "time"}},
]
STRICT = [{"type": "function", "function": TOOLS[0]["function"] | {"strict": True}}, TOOLS[1]]
ANSWER = {"type": "object", "properties": {"degrees": {"type": "integer"}}, "required": ["degrees"]}


def call(name: str = "weather", arguments: str = '{"city": "Paris"}') -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def guided(reasoning: str | None = None, opening: str = "", **fields: Any) -> Ask:
    ask = ask_of({"messages": [{"role": "user", "content": "Hi"}], **fields})
    answers = AnswerFormat(family("hermes", reasoning))
    answers.check(ask, GUIDE_KINDS)
    return answers.guided(ask, GUIDE_KINDS, answers.parser(ask, GUIDE_KINDS, byte_tokenizer(), opening))


def allows(text: str, **fields: Any) -> bool:
    """Whether the grammar of a request with these fields allows an answer."""
    (guide,) = guided(**fields).guides
    assert guide.kind == "structural_tag"
    return bool(accepts(xgrammar.Grammar.from_structural_tag(json.dumps(guide.value)), text))


def test_without_need_there_is_no_grammar() -> None:
    assert guided(tools=TOOLS).guides == ()
    assert guided("qwen3", "<think>\n", tools=TOOLS, parallel_tool_calls=False).guides == ()


def test_a_required_call_is_a_call_and_nothing_else() -> None:
    fields = {"tools": TOOLS, "tool_choice": "required"}
    assert allows(call(), **fields) and allows(f"{call()}\n{call('time', '{}')}", **fields)
    for wrong in ("Sunny.", f"Well: {call()}", call("other", "{}"), call(arguments='{"town": 1}')):
        assert not allows(wrong, **fields), wrong
    assert not allows(f"{call()}\n{call()}", **fields, parallel_tool_calls=False)


def test_the_grammar_of_a_text_needs_an_engine_that_knows_it() -> None:
    text = TextGrammar("lark", "start: /a/", "tools.0.format")
    tools = Tools(offered={"f": Tool("f", {}, True, text)}, mode="required", guided="tool_choice")
    ask = replace(ask_of({"messages": [{"role": "user", "content": "Hi"}]}), tools=tools)
    answers = AnswerFormat(family("hermes"))
    answers.check(ask, GUIDE_KINDS, True)
    parser = answers.parser(ask, GUIDE_KINDS, byte_tokenizer(), "")
    (guide,) = answers.guided(ask, GUIDE_KINDS, parser, True).guides
    assert guide.field == "tools.0.format" and "text_grammar" in json.dumps(guide.value)
    with pytest.raises(RequestError, match="Lark grammar") as refused:
        answers.check(ask, GUIDE_KINDS)
    assert refused.value.param == "tools.0.format"


def test_a_named_function_is_called_once() -> None:
    fields = {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "weather"}}}
    assert allows(call(), **fields)
    assert not allows(call("time", "{}"), **fields) and not allows(f"{call()}\n{call()}", **fields)


def test_strict_tools_hold_calls_to_their_schemas_alone() -> None:
    assert allows("Sunny.", tools=STRICT) and allows(f"Well: {call()}", tools=STRICT)
    assert allows(call("time", '{"zone": 1}'), tools=STRICT)
    assert not allows(call(arguments='{"town": 1}'), tools=STRICT)
    assert not allows('<tool_call>{"name": "weather"}', tools=STRICT), "any marker of a call begins one"


def test_only_allowed_tools_are_called() -> None:
    choice = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [TOOLS[1]]}}
    assert allows("Sunny.", tools=TOOLS, tool_choice=choice)
    assert allows(call("time", "{}"), tools=TOOLS, tool_choice=choice)
    assert not allows(call(), tools=TOOLS, tool_choice=choice)
    choice["allowed_tools"] = {"mode": "required", "tools": [TOOLS[1]]}
    assert not allows("Sunny.", tools=TOOLS, tool_choice=choice)


def test_an_answer_has_its_format_unless_it_calls() -> None:
    fields = {"tools": TOOLS, "response_format": {"type": "json_schema", "json_schema": {"schema": ANSWER}}}
    assert allows('{"degrees": 20}', **fields) and allows(call(), **fields)
    assert not allows("Sunny.", **fields) and not allows(f'{{"degrees": 20}}{call()}', **fields)


@pytest.mark.parametrize(
    ("field", "good", "bad"),
    [
        ({"response_format": {"type": "json_object"}}, "{}", "[]"),
        ({"guided_json": json.dumps(ANSWER)}, '{"degrees": 1}', "{}"),
        ({"guided_regex": "[0-9]+"}, "12", "x"),
        ({"guided_choice": ["yes", "no"]}, "no", "maybe"),
        ({"guided_grammar": 'root ::= "a" | "b"'}, "b", "c"),
    ],
)
def test_reasoning_comes_before_a_format(field: dict[str, Any], good: str, bad: str) -> None:
    thinks = {"reasoning": "qwen3", "opening": "<think>\n", **field}
    assert allows(f"Hm [1].\n</think>\n\n{good}", **thinks)
    assert not allows(f"Hm [1].\n</think>\n\n{bad}", **thinks) and not allows(good, **thinks)
    assert guided("qwen3", "", **field).guides[0].kind != "structural_tag", "without reasoning nothing changes"


def test_reasoning_comes_before_calls() -> None:
    fields = {"tools": TOOLS, "tool_choice": "required", "reasoning": "qwen3"}
    assert allows(f"Hm.</think>\n\n{call()}", opening="<think>\n", **fields)
    assert allows(f"<think>\nHm.</think>\n\n{call()}", **fields) and allows(call(), **fields)


def test_gpt_oss_reasons_then_calls() -> None:
    ask = ask_of({"messages": [{"role": "user", "content": "Hi"}], "tools": TOOLS, "tool_choice": "required"})
    answers = AnswerFormat(family("gpt_oss"))
    parser = answers.parser(ask, GUIDE_KINDS, byte_tokenizer(), "<|start|>assistant")
    tag = answers.guided(ask, GUIDE_KINDS, parser).guides[0].value
    grammar = xgrammar.Grammar.from_structural_tag(json.dumps(tag))
    thought = "<|channel|>analysis<|message|>Hm.<|end|>"
    called = "<|start|>assistant to=functions.weather<|channel|>commentary <|constrain|>json<|message|>"
    assert accepts(grammar, thought + called + '{"city": "Paris"}')
    assert not accepts(grammar, thought + "<|start|>assistant<|channel|>final<|message|>Sunny.")


def test_errors_name_what_asked_for_the_grammar() -> None:
    assert guided(tools=STRICT).spelled("guide") == "tools"
    ask = guided(tools=TOOLS, response_format={"type": "json_object"})
    assert ask.spelled("guide") == "response_format"


def test_a_budget_that_the_engine_cannot_keep() -> None:
    tokenizer, form = byte_tokenizer(), AnswerFormat(family(None, "qwen3"), reasoning_budget=7)

    def budget(refused: tuple[str, ...] = (), **fields: Any) -> ReasoningBudget | None:
        ask = replace(ask_of({"messages": [{"role": "user", "content": "Hi"}]}), **fields)
        return form.budget(ask, ask, form.parser(ask, GUIDE_KINDS, tokenizer, "<think>\n"), tokenizer, refused)

    assert budget() == budget(reasoning_budget=7) and budget(reasoning_budget=-1) is None
    assert budget(needs_budget=False) == budget(), "it can"
    assert budget(("reasoning_budget",)) == budget(), "the engine refuses it by name"
    assert budget(("reasoning_budget",), needs_budget=False) is None
