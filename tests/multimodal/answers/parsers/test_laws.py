"""Properties of every family and output: results do not depend on how a stream is cut, and no text is lost."""

import json
import re
from collections.abc import Sequence

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import to_builtins
from tokenizers import AddedToken

from multimodal.answers.parsers.engine import FamilyParser
from multimodal.answers.parsers.families import MESSAGES, REASONING, TOOLS
from multimodal.answers.parsers.formats import OutputFormat, Params
from multimodal.answers.parts import Part, Reasoning, Text, ToolCall
from multimodal.text.tokenizer import Detokenizer, Tokenizer, byte_tokenizer

SCHEMA = {"type": "object", "properties": {"s": {"type": "string"}, "n": {"type": ["integer", "null"]}}}
NAMES = {"f": SCHEMA, "g": {}}
FAMILIES = {
    **{record.name: OutputFormat(tools=record) for record in TOOLS},
    **{f"hermes with {record.name}": OutputFormat(record, TOOLS[0]) for record in REASONING},
    "qwen3_coder with qwen3": OutputFormat(REASONING[2], TOOLS[1]),
    **{record.name: OutputFormat(messages=record) for record in MESSAGES},
}
COMMON = [
    *' {}[]"():,=\\`<>|-.\n',
    "\n\n",
    "</",
    "'",
    "f",
    "g",
    "ü",
    "日本",
    "👩\u200d💻",
    "null",
    "1.5e3",
    "words ",
    "f(s='a')",
    "\\ud83d",
    "NaN",
    "1e999",
]
COMMON += ['{"name": "f", "arguments": {"s": "x"}}', '{"s": "a b", "n": 3}', '"s": ']
PARAMS = [
    "<parameter=s>\nv\n</parameter>",
    "<arg_key>s</arg_key>",
    "<arg_value>v</arg_value>",
    '<｜DSML｜parameter name="s" string="true">v</｜DSML｜parameter>',
    '<invoke name="f">',
    '<parameter name="s">v</parameter>',
]
HARD = [
    *(r'"\ud83d"', r'"\ud83d\ude00"', r'["\udc00x"]', r'{"\udc00": 1}', '"'),
    *("NaN", "-Infinity", "1e999", "-1e999", "[1e999]", "(NaN)", "-0x1"),
    *("9" * 5000, "-" + "9" * 5000, "0x" + "9" * 5000, "[-0x" + "9" * 5000 + "]", "9" * 400 + ".0", "[" * 2000),
]
"""Values that cannot be written in JSON, or cannot be encoded."""
NOTATIONS = [
    *('{"s": VALUE}', '{"n": VALUE}', '{"x": VALUE}', "VALUE", "s=VALUE", "{x:VALUE}"),
    "<parameter=x>VALUE</parameter>",
    "<parameter=n>\nVALUE\n</parameter>\n",
    "<arg_key>n</arg_key><arg_value>VALUE</arg_value>",
    '<|open|>argument key="n"<|sep|>VALUE<|close|>argument<|sep|>',
    '<｜DSML｜parameter name="n" string="false">VALUE</｜DSML｜parameter>',
    '<｜DSML｜ parameter name="n" string="false">VALUE</｜DSML｜ parameter>',
    '<parameter name="n">VALUE</parameter>',
]
"""Arguments as some family writes them."""


def outputs(family: OutputFormat) -> st.SearchStrategy[str]:
    """Return texts that come close to what a family writes."""
    form = family.tools or family.messages
    assert form is not None
    call = form.write.replace("NAME", "f").replace("INDEX", "0")
    pieces = [*family.markers, *re.split(r"(?=ARGUMENTS)|(?<=ARGUMENTS)", call), "WORD", "WORD"]
    pieces += [call.replace("ARGUMENTS", arguments) for arguments in ("{}", '{"s": "a b", "n": 3}', "")]
    if family.tools is not None:
        pieces += [marker for marker in family.tools.write_section if marker]
        if isinstance(family.tools.content, Params):
            pieces += PARAMS
    drawn = st.lists(st.sampled_from(pieces) | st.sampled_from(COMMON), max_size=14)
    return drawn.map(lambda found: _numbered("".join(found).replace("ARGUMENTS", "{}")))


def _numbered(text: str) -> str:
    """Make every payload word another one."""
    for number in range(text.count("WORD")):
        text = text.replace("WORD", f"zq{number} ", 1)
    return text


def cut(text: str, places: Sequence[int]) -> list[str]:
    cuts = sorted({place % (len(text) + 1) for place in places})
    return [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]


def parse(family: OutputFormat, pieces: Sequence[str], whole_calls: bool) -> list[tuple[str, ...]]:
    parser = FamilyParser(family, NAMES, whole_calls=whole_calls)
    parts: list[Part] = []
    for piece in pieces:
        parts += parser.feed((), piece)
    parts += parser.finish()
    orjson.dumps([to_builtins(part) for part in parts])  # as answers are encoded
    return joined(parts)


def joined(parts: Sequence[Part]) -> list[tuple[str, ...]]:
    """Return parts that follow each other as one; ids are left out."""
    found: list[tuple[str, ...]] = []
    for part in parts:
        match part:
            case Text(text) | Reasoning(text):
                kind = type(part).__name__
                if found and found[-1][0] == kind:
                    found[-1] = (kind, found[-1][1] + text)
                elif text:
                    found.append((kind, text))
            case ToolCall(index, _, name, arguments):
                if found and found[-1][:2] == ("ToolCall", str(index)):
                    found[-1] = (*found[-1][:3], found[-1][3] + arguments)
                else:
                    assert name is not None
                    found.append(("ToolCall", str(index), name, arguments))
    return found


@pytest.mark.parametrize("name", FAMILIES)
@settings(max_examples=12)
@given(data=st.data())
def test_cuts_do_not_matter(name: str, data: st.DataObject) -> None:
    family = FAMILIES[name]
    text = data.draw(outputs(family))
    text = text[: data.draw(st.none() | st.integers(0, len(text)))]
    pieces = cut(text, data.draw(st.lists(st.integers(0, 1000), max_size=6)))
    for whole_calls in (True, False):
        whole = parse(family, [text], whole_calls)
        assert parse(family, pieces, whole_calls) == whole
        assert parse(family, list(text), whole_calls) == whole


@pytest.mark.parametrize("name", FAMILIES)
@settings(max_examples=12)
@given(data=st.data())
def test_parsers_lose_no_text_and_make_json_of_calls(name: str, data: st.DataObject) -> None:
    family = FAMILIES[name]
    text = data.draw(outputs(family))
    parts = parse(family, [text], True)
    for part in parts:
        if part[0] == "ToolCall":
            assert isinstance(json.loads(part[3]), dict)
    if family.messages is None and (family.tools is None or family.tools.section is None):  # those drop some by intent
        assert sorted(re.findall(r"zq\d+", text)) == sorted(re.findall(r"zq\d+", str(parts)))


def _strict(text: str) -> object:
    """Return the value of JSON as its standard has it."""

    def refuse(name: str) -> object:
        raise AssertionError(f"{name} is not JSON")

    return json.loads(text, parse_constant=refuse)


@pytest.mark.parametrize("name", FAMILIES)
@settings(max_examples=20)
@given(data=st.data())
def test_values_that_json_lacks_break_nothing(name: str, data: st.DataObject) -> None:
    family = FAMILIES[name]
    form = family.tools or family.messages
    assert form is not None
    arguments = data.draw(st.sampled_from(NOTATIONS)).replace("VALUE", data.draw(st.sampled_from(HARD)))
    arguments = data.draw(st.sampled_from([arguments, json.dumps(arguments)]))
    called = data.draw(st.sampled_from(["f", r"f\ud83d"]))
    call = form.write.replace("NAME", called).replace("INDEX", "0").replace("ARGUMENTS", arguments)
    text = call if family.tools is None else call.join(family.tools.write_section)
    for whole_calls in (True, False):
        parts = parse(family, [text], whole_calls)
        assert parse(family, cut(text, data.draw(st.lists(st.integers(0, 1000), max_size=3))), whole_calls) == parts
        for part in parts:
            if part[0] == "ToolCall" and whole_calls:
                assert isinstance(_strict(part[3]), dict)


@pytest.mark.parametrize(
    ("name", "text", "call"),
    [
        ("hermes", r"""<tool_call>{"name": "f", "arguments": "{\"a\":\"\\ud83d\"}"}</tool_call>""", ("f", {"a": "�"})),
        ("hermes", r'<tool_call>{"name": "f\ud83d", "arguments": {}}</tool_call>', ("f�", {})),
        ("hermes", r"""<tool_call>{"name": "f", "arguments": "{\"a\": NaN}"}</tool_call>""", None),
        ("hermes", r"""<tool_call>{"name": "f", "arguments": "{\"a\": 1e999}"}</tool_call>""", None),
        ("llama4_pythonic", r'[f(x="\ud83d")]', ("f", {"x": "�"})),
        ("llama4_pythonic", r'[f(x="\ud83d\ude00")]', ("f", {"x": "😀"})),
        ("llama4_pythonic", "[f(x=-1e999)]", None),
        ("llama4_pythonic", f"[f(x=0x{'9' * 6000})]", None),
        (
            "qwen3_coder",
            r'<tool_call><function=g><parameter=x>"\ud83d"</parameter></function></tool_call>',
            ("g", {"x": "�"}),
        ),
        (
            "qwen3_coder",
            "<tool_call><function=g><parameter=x>[1e999]</parameter></function></tool_call>",
            ("g", {"x": "[1e999]"}),
        ),
    ],
)
def test_values_that_json_lacks_are_replaced_or_make_no_call(
    name: str, text: str, call: tuple[str, dict[str, object]] | None
) -> None:
    found = parse(FAMILIES[name], [text], True)
    if call is None:
        assert found == [("Text", text)]
    else:
        ((_, _, called, arguments),) = found
        assert (called, _strict(arguments)) == call


@pytest.mark.parametrize("name", FAMILIES)
@settings(max_examples=5)
@given(text=st.text(st.characters(exclude_categories=("Cs",), exclude_characters="<[{◁`f")))
def test_text_without_markers_is_text(name: str, text: str) -> None:
    family = FAMILIES[name]
    if family.reasoning is None or not family.reasoning.implied:
        assert parse(family, list(text), False) == ([("Text", text)] if text else [])


def tokenizer_with(markers: Sequence[str]) -> Tokenizer:
    backend = byte_tokenizer().backend
    backend.add_special_tokens([AddedToken(marker, special=True) for marker in markers])
    return Tokenizer(backend, {})


@pytest.mark.parametrize("name", ["hermes", "mistral", "kimi_k3", "gemma4", "gpt_oss", "llama3_json"])
@settings(max_examples=8)
@given(data=st.data())
def test_token_ids_do_for_markers_what_text_does(name: str, data: st.DataObject) -> None:
    """Also if the detokenizer drops special tokens, and if its text comes late."""
    family = FAMILIES[name]
    tokenizer = tokenizer_with(family.markers)
    text = data.draw(outputs(family))
    ids = tokenizer.encode(text)
    expected = parse(family, [text], True)
    for skip in (False, True):
        size = data.draw(st.integers(1, 5))
        delay = data.draw(st.integers(0, 9))
        detokenizer = Detokenizer(tokenizer, skip)
        parser = FamilyParser(family, NAMES, tokenizer=tokenizer, skip_special_tokens=skip, whole_calls=True)
        parts: list[Part] = []
        late = ""
        for start in range(0, len(ids), size):
            late += detokenizer.feed(ids[start : start + size])
            ready = max(0, len(late) - delay)
            parts += parser.feed(ids[start : start + size], late[:ready])
            late = late[ready:]
        parts += parser.feed((), late + detokenizer.flush())
        assert joined(parts + parser.finish()) == expected
