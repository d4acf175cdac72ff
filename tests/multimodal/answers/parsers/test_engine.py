"""The incremental engine: when text is streamed, the state in which a parser starts, and special tokens."""

import json
import time
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from tokenizers import AddedToken

from multimodal.answers.parsers.choose import family
from multimodal.answers.parsers.engine import FamilyParser
from multimodal.answers.parsers.formats import OutputFormat
from multimodal.answers.parts import Part, Reasoning, Text, ToolCall
from multimodal.text.tokenizer import Detokenizer, Tokenizer, byte_tokenizer
from tests.support.waiting import slowness

WRITE: Mapping[str, Any] = {
    "write": {"type": "object", "properties": {"text": {"type": "string"}, "times": {"type": "integer"}}}
}


def parser(tools: str | None = "hermes", reasoning: str | None = None, **arguments: Any) -> FamilyParser:
    return FamilyParser(family(tools, reasoning), WRITE, **arguments)


def read(found: FamilyParser, *pieces: str) -> list[Part]:
    parts: list[Part] = []
    for piece in pieces:
        parts += found.feed((), piece)
    return parts + found.finish()


def names_and_arguments(parts: Sequence[Part]) -> list[tuple[str | None, str]]:
    return [(part.name, part.arguments) for part in parts if isinstance(part, ToolCall)]


def marked(*markers: str) -> Tokenizer:
    backend = byte_tokenizer().backend
    backend.add_special_tokens([AddedToken(marker, special=True) for marker in markers])
    return Tokenizer(backend, {})


def test_text_is_held_back_only_while_it_can_become_a_marker() -> None:
    found = parser()
    assert found.feed((), "a < b") == [Text("a < b")]
    assert found.feed((), " <tool") == []
    assert found.feed((), "box>") == [Text(" <toolbox>")]


def test_arguments_stream_as_they_come() -> None:
    found = parser()
    assert found.feed((), '<tool_call>\n{"name": "write", "argum') == [ToolCall(0, found._call.id, "write")]
    assert found.feed((), 'ents": {"text": "one ') == [ToolCall(0, arguments='{"text": "one ')]
    assert found.feed((), "two") == [ToolCall(0, arguments="two")]
    assert found.feed((), '"}}') == [ToolCall(0, arguments='"}')]
    assert found.feed((), "\n</tool_call>") == []
    assert found.finish() == []


@pytest.mark.parametrize(
    ("name", "begin", "then", "streamed"),
    [
        ("qwen3_coder", "<tool_call>\n<function=write>\n<parameter=text>\nsay ", '"hi"', '\\"hi\\"'),
        ("glm45", "<tool_call>write\n<arg_key>text</arg_key>\n<arg_value>say ", '"hi"', '\\"hi\\"'),
        ("gemma4", '<|tool_call>call:write{text:<|"|>say ', '"hi"', '\\"hi\\"'),
        ("mistral", '[TOOL_CALLS]write[ARGS]{"text": "say ', "hi", "hi"),
        ("gpt_oss", '<|channel|>commentary to=functions.write<|message|>{"text": "say ', "hi", "hi"),
    ],
)
def test_strings_stream_in_every_notation(name: str, begin: str, then: str, streamed: str) -> None:
    found = parser(name)
    parts = found.feed((), begin)
    assert isinstance(parts[-1], ToolCall)
    assert parts[-1].arguments.endswith('{"text": "say ')
    assert found.feed((), then) == [ToolCall(0, arguments=streamed)]


def test_whole_calls_come_at_once_and_cut_ones_as_text() -> None:
    found = parser(whole_calls=True)
    assert found.feed((), '<tool_call>\n{"name": "write", "arguments": {"text": "a') == []
    assert names_and_arguments(found.feed((), '"}}')) == [("write", '{"text": "a"}')]
    assert found.feed((), '\n</tool_call>\n<tool_call>{"name": "wri') == []
    assert found.finish() == [Text('\n<tool_call>{"name": "wri')]
    assert found.malformed == 1


def test_a_call_that_breaks_off_in_a_stream_stays_as_far_as_it_went() -> None:
    found = parser()
    parts = read(found, '<tool_call>{"name": "write", "arguments": {"text": "a')
    assert names_and_arguments(parts) == [("write", '{"text": "a')]
    assert found.malformed == 1


def test_several_calls_and_text_around_them() -> None:
    call = '<tool_call>{"name": "write", "arguments": {}}</tool_call>'
    parts = read(parser(), f"before\n{call}\n{call}\nafter")
    assert [type(part) for part in parts] == [Text, ToolCall, ToolCall, Text]
    assert [part.index for part in parts if isinstance(part, ToolCall)] == [0, 1]
    assert len({part.id for part in parts if isinstance(part, ToolCall)}) == 2
    assert "".join(part.text for part in parts if isinstance(part, Text)) == "before\nafter"


def test_without_tools_calls_are_text() -> None:
    output = '<tool_call>{"name": "write", "arguments": {}}</tool_call>'
    assert read(FamilyParser(family("hermes"), {}), output) == [Text(output)]


@pytest.mark.parametrize(
    ("tools", "reasoning", "prompt", "output", "expected"),
    [
        ("hermes", "qwen3", "<|im_start|>assistant\n<think>\n", "so\n</think>\n\nyes", [Reasoning("so"), Text("yes")]),
        ("hermes", "qwen3", "<|im_start|>assistant\n<think>\n\n</think>\n\n", "yes", [Text("yes")]),
        ("hermes", "qwen3", "<|im_start|>assistant\n", "<think>so</think>yes", [Reasoning("so"), Text("yes")]),
        ("hermes", "deepseek_r1", "", "so</think>yes", [Reasoning("so"), Text("yes")]),
        ("hermes", "deepseek_r1", "<think>\n\n</think>", "yes", [Text("yes")]),
        ("hermes", "qwen3", "<think>\n", "<think>so</think>yes", [Reasoning("so"), Text("yes")]),
        ("gpt_oss", None, "<|start|>assistant", "<|channel|>final<|message|>yes", [Text("yes")]),
        ("gpt_oss", None, "<|start|>assistant<|channel|>analysis<|message|>", "so<|end|>", [Reasoning("so")]),
        ("kimi_k3", "kimi_k3", "<|open|>think<|sep|>", "so<|close|>think<|sep|>", [Reasoning("so")]),
    ],
)
def test_a_parser_starts_where_the_prompt_ends(
    tools: str, reasoning: str | None, prompt: str, output: str, expected: list[Part]
) -> None:
    parts = read(parser(tools, reasoning, prompt=prompt), output)
    assert [part if isinstance(part, Text) else Reasoning(part.text) for part in parts if part.text] == expected


def test_a_marker_that_is_a_special_token_is_known_by_its_id() -> None:
    """The same text in other tokens is text, wherever the markers are shown."""
    tokenizer = marked("[TOOL_CALLS]", "[ARGS]")
    spelled = [token for text in ("[TOOL", "_CALLS]") for token in tokenizer.encode(text)]
    ids = [*spelled, *tokenizer.encode('write[TOOL_CALLS]write[ARGS]{"text": "[TOOL_CALLS]"}')]
    for skip in (False, True):
        found = parser("mistral", tokenizer=tokenizer, skip_special_tokens=skip, whole_calls=True)
        parts = found.feed(ids, Detokenizer(tokenizer, skip).feed(ids)) + found.finish()
        assert parts[0] == Text("[TOOL_CALLS]write")
        assert names_and_arguments(parts) == [("write", '{"text": "[TOOL_CALLS]"}')]
        assert parts[1].id is not None and len(parts[1].id) == 9  # as Mistral's templates want them


def test_a_stop_token_inside_a_call_leaves_text() -> None:
    tokenizer = marked("<tool_call>", "</tool_call>")
    ids = tokenizer.encode('<tool_call>{"name": "write", "arguments": {"text": "a')
    found = parser(tokenizer=tokenizer, skip_special_tokens=True, whole_calls=True)
    parts = found.feed(ids, Detokenizer(tokenizer, True).feed(ids)) + found.finish()
    assert parts == [Text('<tool_call>{"name": "write", "arguments": {"text": "a')]


@pytest.mark.parametrize(
    ("reasoning", "written"),
    [
        ("qwen3", "<think>abc</think>defg"),
        ("gpt_oss", "<|channel|>analysis<|message|>abc<|end|><|start|>assistant<|channel|>final<|message|>defg"),
    ],
)
def test_tokens_of_reasoning_are_counted(reasoning: str, written: str) -> None:
    tokenizer = marked("<think>", "</think>", "<|channel|>", "<|message|>", "<|end|>", "<|start|>")
    for size in (1, 2, 3, 50):
        found = parser(reasoning=reasoning, tokenizer=tokenizer)
        detokenizer = Detokenizer(tokenizer, False)
        ids = tokenizer.encode(written)
        parts: list[Part] = []
        for start in range(0, len(ids), size):
            parts += found.feed(ids[start : start + size], detokenizer.feed(ids[start : start + size]))
        parts += found.finish()
        assert sum(part.tokens for part in parts if isinstance(part, Reasoning)) == 3, "markers do not count"


@pytest.mark.parametrize(
    ("written", "read_as"),
    [
        ('{"text": "a\nb"}', {"text": "a\nb"}),
        (r'{"text": "\d+\'"}', {"text": "\\d+'"}),
        ('{"text": "a", "times": 1,}', {"text": "a", "times": 1}),
        ('{"flag": True, "none": None}', {"flag": True, "none": None}),
        ('"{\\"text\\": \\"a\\"}"', {"text": "a"}),
        ("null", {}),
        ('{"text": "\\ud83d\\ude00"}', {"text": "😀"}),
        ('{"text": "\\ud83d \\ude00\\n", "\\udc00": 1}', {"text": "\ufffd \ufffd\n", "\ufffd": 1}),
    ],
)
def test_mistakes_of_models_are_mended(written: str, read_as: dict[str, Any]) -> None:
    output = f'<tool_call>{{"name": "write", "arguments": {written}}}</tool_call>'
    parts = read(parser(), *output)
    assert names_and_arguments(read(parser(whole_calls=True), output)) == [
        ("write", "".join(arguments for _, arguments in names_and_arguments(parts)))
    ]
    (call,) = {part.index for part in parts if isinstance(part, ToolCall)}
    assert call == 0
    assert json.loads("".join(part.arguments for part in parts if isinstance(part, ToolCall))) == read_as


@pytest.mark.parametrize(
    "arguments",
    [
        *('{"text": }', '{"text" "a"}', '{"times": 01}', "[1]", "{1: 2}", '{"a": [1}', '{"times": NaN}', '"x"'),
        '{"a": ' + "[" * 128 + "]" * 128 + "}",
        '{"a": ' + "9" * 301 + "}",
    ],
)
def test_arguments_that_are_not_a_json_object_make_no_call(arguments: str) -> None:
    output = f'<tool_call>{{"name": "write", "arguments": {arguments}}}</tool_call>'
    assert read(parser(whole_calls=True), output) == [Text(output)]


def test_calls_without_a_marker_name_a_known_tool() -> None:
    for output in (
        '{"name": "Bob", "arguments": {}}',
        '{"name": "write"}',
        '{"write": {}}',
        '{"name": "write", "age": 3}',
    ):
        assert read(parser("llama3_json", whole_calls=True), output) == [Text(output)]
    both = read(parser("llama3_json"), '{"name": "write", "parameters": {}}; {"name": "write", "parameters": {}}')
    assert [name for name, _ in names_and_arguments(both)] == ["write", "write"]


def test_a_list_of_python_calls_counts_as_a_whole() -> None:
    output = "[write(text='a', times=-2), write("
    assert read(parser("pythonic", whole_calls=True), output) == [Text(output)]
    parts = read(parser("pythonic", whole_calls=True), output + "times=[1, {'a': (True, None)}])]")
    assert names_and_arguments(parts) == [
        ("write", '{"text": "a", "times": -2}'),
        ("write", '{"times": [1, {"a": [true, null]}]}'),
    ]


@pytest.mark.parametrize(
    "value", ["-" * 5000 + "1", "[" * 5000, "__import__('os')", "1if 1else 2", "x" * 5000, "{**{}}"]
)
def test_python_that_is_no_literal_is_no_call(value: str) -> None:
    output = f"[write(text={value})]"
    assert read(parser("pythonic", whole_calls=True), output) == [Text(output)]


@pytest.mark.parametrize(
    ("name", "piece"),
    [
        ("hermes", "<tool_call>"),
        ("hermes", '<tool_call>{"name": "write", "arguments": {"text": "'),
        ("hermes", " "),
        ("hermes", "["),
        ("qwen3_coder", "<function=write><parameter=text>"),
        ("qwen3_coder", "\n</parameter> "),
        ("glm45", "<tool_call>write<arg_key>"),
        ("deepseek_v3", "<｜tool▁calls▁begin｜>"),
        ("kimi_k2", "<|tool_call_begin|>"),
        ("gemma4", "<|tool_call>call:write{"),
        ("pythonic", "[write(text=["),
        ("gpt_oss", "<|channel|>analysis"),
    ],
)
def test_time_grows_with_the_length_only(name: str, piece: str) -> None:
    """Forty thousand characters of markers, openings or white space do not take minutes."""
    found = parser(name, "qwen3" if name == "hermes" else None, whole_calls=True)
    pieces = [piece] * (40_000 // len(piece))
    start = time.process_time()
    read(found, *pieces)
    read(parser(name, whole_calls=True), "".join(pieces))
    assert time.process_time() - start < 3 * slowness()


def test_a_prompt_that_has_a_call_leaves_nothing_behind() -> None:
    found = parser(prompt='<tool_call>{"name": "write", "arguments": {}}</tool_call>', whole_calls=True)
    parts = read(found, '<tool_call>{"name": "write", "arguments": {}}</tool_call>')
    assert [part.index for part in parts if isinstance(part, ToolCall)] == [0]


def test_without_tools_a_message_to_one_is_text() -> None:
    output = '<|channel|>commentary to=functions.write<|message|>{"text": "a"}'
    assert read(FamilyParser(family("gpt_oss"), {}), output) == [Text('{"text": "a"}')]


def test_many_parts_of_one_delta_are_joined_fast() -> None:
    numbers = ", ".join(map(str, range(50_000)))
    output = f'<tool_call>{{"name": "write", "arguments": {{"a": [{numbers}]}}}}</tool_call>'
    start = time.process_time()
    (call,) = parser().feed((), output)
    assert isinstance(call, ToolCall)
    assert call.arguments == f'{{"a": [{numbers}]}}'
    assert time.process_time() - start < 3 * slowness()


def test_each_choice_has_a_parser_of_its_own() -> None:
    both = [parser(whole_calls=True), parser(whole_calls=True)]
    for found in both:
        found.feed((), '<tool_call>{"name": "write", "arguments": {')
    assert names_and_arguments(both[0].feed((), "}}")) == [("write", "{}")]
    assert both[1].finish() == [Text('<tool_call>{"name": "write", "arguments": {')]


def test_a_family_without_formats_passes_text_on() -> None:
    assert read(FamilyParser(OutputFormat(), WRITE), "<think>", " a ") == [Text("<think>"), Text(" a ")]


@pytest.mark.parametrize("whole_calls", [False, True])
@pytest.mark.parametrize(
    ("written", "calls", "text"),
    [
        ('{"name": "write", "arguments": {"text": "a"}}', 1, ""),
        ('```json\n{\n  "name": "write",\n  "arguments": {"text": "a"}\n}\n```', 1, ""),
        ('{"name": "other", "arguments": {"text": "a"}}', 0, None),
        ('{"text": "write"}', 0, None),
        ('```json\n{"name": "Ana"}\n```', 0, None),
        ('So:\n```json\n{"name": "write", "arguments": {"text": "a"}}\n```\nDone.', 1, "So:\nDone."),
        ('So:\n```\n{"arguments": {"text": "a"}, "name": "write"}\n```', 1, "So:"),
        ('```json\n[{"name": "write", "arguments": {}}, {"name": "write", "arguments": {}}]\n```', 2, ""),
        ('Now.\n<tools>\n{"name": "write", "arguments": "{}"}\n</tools>', 1, "Now."),
        ('So:\n```json\n{"name": "write", "description": "a tool"}\n```', 0, None),
        ('So:\n```json\n{"name": "other", "arguments": {}}\n```', 0, None),
        ('```json\n{"name": "write", "arguments": {}, "response": {"done": true}}\n```', 0, None),
        ('{"name": "write", "arguments": {"text": "a', 0, None),
        ('So:\n```json\n[{"text": "a"}, 1]\n```\n', 0, None),
        ('```json\n[{"name": "write", "arguments": {}}, {"name": "write", "result": 1}]\n```', 0, None),
        ('[{"name": "write", "arguments": {}}, {"name": "wri', 0, None),
        ("So:\n```python\n{}\n```", 0, None),
        ('So, {"name": "write", "arguments": {"text": "a"}} is a call.', 0, None),
    ],
)
def test_hermes_without_markers(written: str, calls: int, text: str | None, whole_calls: bool) -> None:
    """As small models write calls: bare where the answer begins, or between other brackets; always of a tool."""
    for size in (1, 3, 100):
        pieces = [written[start : start + size] for start in range(0, len(written), size)]
        found = parser(whole_calls=whole_calls)
        parts = read(found, *pieces)
        assert len([name for name, _ in names_and_arguments(parts) if name]) == calls
        assert "".join(part.text for part in parts if isinstance(part, Text)) == (written if text is None else text)


def test_other_json_in_a_code_block_is_no_malformed_call() -> None:
    found = parser()
    read(found, 'So:\n```json\n{"a": 1}\n```\n```json\n{"name": "Ana", "arguments": {}}\n```')
    assert found.malformed == 0
