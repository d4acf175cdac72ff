"""A model's own response template, read as transformers reads it."""

import json
from typing import Any

import pytest
from transformers.cli.serving.utils import _RESPONSE_TEMPLATE_FALLBACKS
from transformers.utils.chat_parsing import parse_response

from multimodal.answers.parsers.engine import FamilyParser
from multimodal.answers.parsers.response_templates import family_of
from multimodal.answers.parts import Part, Reasoning, Text, ToolCall

QWEN, QWEN_XML, GEMMA = list(_RESPONSE_TEMPLATE_FALLBACKS.values())[:3]
HARMONY: dict[str, Any] = {
    "start_anchor": "<|start|>assistant",
    "fields": {
        "thinking": {"open": "<|channel|>analysis<|message|>", "close": "<|end|>"},
        "content": {"open": "<|channel|>final<|message|>", "close": ["<|end|>", "<|return|>"]},
        "tool_calls": {
            "open_pattern": r"to=functions\.(?P<name>\w+)<\|channel\|>commentary json<\|message\|>",
            "close": "<|call|>",
            "repeats": True,
            "content": "json",
            "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}},
        },
    },
}
LIST: dict[str, Any] = {
    "start_anchor": "A:",
    "fields": {
        "content": {},
        "tool_calls": {
            "open": "CALLS",
            "close": "END",
            "content": "json",
            "transform_each": True,
            "transform": {"type": "function", "function": {"name": "{tool}", "arguments": "{input}"}},
        },
    },
}
LINES: dict[str, Any] = {
    "start_anchor": "A:",
    "fields": {
        "content": {},
        "tool_calls": {
            "open_pattern": r"<call (?P<name>\w+)>",
            "close": "</call>",
            "repeats": True,
            "content": "kv-lines",
            "content_args": {"value_parser": {"name": "json", "args": {"allow_non_json": True}}},
            "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}},
        },
    },
}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "f",
            "parameters": {"type": "object", "properties": {"s": {"type": "string"}, "n": {"type": "integer"}}},
        },
    }
]
CASES = [
    (QWEN, "<|im_start|>assistant\n", "Hello there"),
    (QWEN, "<|im_start|>assistant\n<think>\n", "so\n</think>\n\nHello<|im_end|>"),
    (QWEN, "<|im_start|>assistant\n", '<tool_call>\n{"name": "f", "arguments": {"s": "x", "n": 1}}\n</tool_call>'),
    (
        QWEN,
        "<|im_start|>user\n<think><|im_end|><|im_start|>assistant\n",
        '<think>so</think>Look.\n<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>\n'
        '<tool_call>\n{"name": "g", "arguments": {"a": [1, {"b": null}]}}\n</tool_call><|im_end|>',
    ),
    (QWEN_XML, "<|im_start|>assistant\n<think>\n\n</think>\n\n", "Hello"),
    (
        QWEN_XML,
        "<|im_start|>assistant\n<think>\n",
        "so</think>\n\n<tool_call>\n<function=f>\n<parameter=s>\n5\n</parameter>\n<parameter=n>\n5\n</parameter>\n"
        "</function>\n</tool_call>",
    ),
    (GEMMA, "<|turn>model\n", '<|channel>thought\nso<channel|><|tool_call>call:f{s:<|"|>a "b"<|"|>,n:3}<tool_call|>'),
    (GEMMA, "<|turn>model\n", "Hello<turn|>"),
    (HARMONY, "<|start|>assistant", "<|channel|>analysis<|message|>so<|end|><|channel|>final<|message|>hi"),
    (HARMONY, "<|start|>assistant", ' to=functions.f<|channel|>commentary json<|message|>{"s": "a"}<|call|>'),
    (LIST, "A:", 'so CALLS[{"tool": "f", "input": {"n": "3"}}, {"tool": "g", "input": {}}]END'),
    (LINES, "A:", "<call f>\ns: 12\nn: 12\nother: x y\n</call>"),
]  # fmt: skip


def read(template: Any, prompt: str, pieces: list[str], **arguments: Any) -> dict[str, Any]:
    tools = {tool["function"]["name"]: tool["function"]["parameters"] for tool in TOOLS}
    parser = FamilyParser(family_of(template), tools, prompt=prompt, **arguments)
    parts: list[Part] = []
    for piece in pieces:
        parts += parser.feed((), piece)
    parts += parser.finish()
    calls: dict[int, list[str]] = {}
    for part in parts:
        if isinstance(part, ToolCall):
            calls.setdefault(part.index, [part.name or "", ""])[1] += part.arguments
    return {
        "content": "".join(part.text for part in parts if isinstance(part, Text)).strip(),
        "reasoning": "".join(part.text for part in parts if isinstance(part, Reasoning)).strip(),
        "calls": [(name, json.loads(arguments)) for name, arguments in calls.values()],
    }


@pytest.mark.parametrize("case", range(len(CASES)))
def test_a_template_means_what_transformers_reads(case: int) -> None:
    template, prompt, output = CASES[case]
    theirs = parse_response(output, template, prefix=prompt, tools=TOOLS)
    expected = {
        "content": theirs.get("content", ""),
        "reasoning": theirs.get("thinking", theirs.get("reasoning_content", "")),
        "calls": [(call["function"]["name"], call["function"]["arguments"]) for call in theirs.get("tool_calls", [])],
    }
    for whole_calls in (True, False):
        assert read(template, prompt, [output], whole_calls=whole_calls) == expected
        assert read(template, prompt, list(output), whole_calls=whole_calls) == expected


def test_arguments_stream_where_the_template_lets_them() -> None:
    parser = FamilyParser(family_of(QWEN), {"f": {}})
    parser.feed((), '<tool_call>{"name": "f", "arguments": {"s": "a')
    assert parser.feed((), "b") == [ToolCall(0, arguments="b")]


def test_patterns_that_match_nothing_stop_nothing() -> None:
    field = {"open_pattern": r"\s*", "close_pattern": "$|(?=b)"}
    template = {"start_anchor": "A:", "fields": {"thinking": field, "content": {"close_pattern": r"\s*"}}}
    assert read(template, "A:", ["a b ", "b"])["content"] == "abb"


def test_a_string_may_have_any_characters() -> None:
    calls = {
        "open_pattern": r"<call (?P<name>\w+)>",
        "close": "</call>",
        "content": "json",
        "content_args": {"unquoted_keys": True, "string_delims": [["<q>", "</q>"]]},
        "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}},
    }
    template = {"start_anchor": "A:", "fields": {"content": {}, "tool_calls": calls}}
    found = read(template, "A:", ["<call f>{s:<q>\ue0007\ue001 {n:</q>}</call>"])
    assert found["calls"] == [("f", {"s": "\ue0007\ue001 {n:"})]


def test_a_cut_call_is_text() -> None:
    output = "<tool_call>\n<function=f>\n<parameter=s>\n5"
    assert read(QWEN_XML, "<|im_start|>assistant\n", [output], whole_calls=True)["content"] == output


@pytest.mark.parametrize(
    "template",
    [
        None,
        {},
        {"fields": {"tool_calls": {"open_pattern": "("}}},
        {"fields": {"tool_calls": {"open": "a", "content": "yaml"}}},
        {"version": 2, "fields": {"content": {}}},
        {"fields": {"content": "text"}},
    ],
)
def test_a_template_that_cannot_be_understood_is_refused(template: Any) -> None:
    with pytest.raises(ValueError, match="response template"):
        family_of(template)
