"""Answers from parts: reasoning and tool calls in chats, streamed and whole, from a scripted parser."""

import json
from collections.abc import Collection, Sequence
from typing import Any

import pytest
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from prometheus_client import CollectorRegistry

from engine.config import FakeConfig
from engine.fake.engine import FakeEngine
from engine.types import GuideKind
from multimodal.answers.formats import AnswerFormat, PlainText
from multimodal.answers.parts import Part, Reasoning, Text, ToolCall
from multimodal.metrics import GenerationMetrics
from multimodal.processor import Processor
from multimodal.request import Ask, Limits
from multimodal.text.prompts import Prompts
from multimodal.text.templates import ChatTemplate
from multimodal.text.tokenizer import CHATML, Tokenizer, byte_tokenizer
from tests.support.requests import prepare

CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 6, "ignore_eos": True}
CALLS: list[list[Part]] = [
    [Reasoning("Think", tokens=1)],
    [Reasoning(" twice.", tokens=1), Text("Let me")],
    [Text(" look.")],
    [ToolCall(0, "call-1", "find", "")],
    [ToolCall(0, arguments='{"a": '), ToolCall(0, arguments="1}")],
    [ToolCall(1, "call-2", "stop", "{}")],
]


class Scripted:
    """Returns the parts of a script for one token after the other, and the rest at the end."""

    malformed = 0

    def __init__(self, script: Sequence[list[Part]]) -> None:
        self._script = list(script)

    def feed(self, token_ids: Sequence[int], text: str) -> list[Part]:
        return [part for _ in token_ids for part in (self._script.pop(0) if self._script else [])]

    def finish(self) -> list[Part]:
        return [part for parts in self._script for part in parts]


class ScriptedFormat(AnswerFormat):
    """All chats have the parts of a script; without one, text."""

    def __init__(self, script: Sequence[list[Part]] | None) -> None:
        super().__init__()
        object.__setattr__(self, "script", script)
        self.script: Sequence[list[Part]] | None

    def parser(self, ask: Ask, kinds: Collection[GuideKind], tokenizer: Tokenizer, opening: str) -> Any:
        return PlainText() if self.script is None else Scripted(self.script)


async def answers(script: Sequence[list[Part]] | None, **fields: Any) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The answer to one chat, whole and as chunks."""
    engine = FakeEngine(FakeConfig(vocab_size=259))
    await engine.start()
    tokenizer = byte_tokenizer()

    prompts = Prompts(tokenizer, ChatTemplate(CHATML, tokenizer.special_tokens))
    metrics = GenerationMetrics(CollectorRegistry(), "fake")
    processor = Processor(engine, prompts, Limits(), "fake", metrics, format=ScriptedFormat(script))
    whole = json.loads(await (await prepare(processor, {**CHAT, **fields})).complete())
    generation = await prepare(processor, {**CHAT, **fields, "stream": True})
    chunks = [json.loads(chunk) async for chunk in generation.stream()]
    await engine.close()
    return whole, chunks


def joined(chunks: list[dict[str, Any]]) -> dict[str, Any]:
    """What a client makes of the deltas of one choice."""
    found: dict[str, Any] = {"content": "", "reasoning_content": "", "tool_calls": {}}
    for chunk in chunks:
        delta = chunk["choices"][0]["delta"]
        found["content"] += delta.get("content", "")
        found["reasoning_content"] += delta.get("reasoning_content", "")
        for call in delta.get("tool_calls", []):
            if "id" in call:
                assert call["type"] == "function"
                assert call["index"] not in found["tool_calls"]
                found["tool_calls"][call["index"]] = [call["id"], call["function"]["name"], ""]
            found["tool_calls"][call["index"]][2] += call["function"]["arguments"]
    return found


@pytest.mark.parametrize("fields", [{}, {"logprobs": True}, {"return_token_ids": True}, {"stop": ["never"]}])
async def test_a_chat_spells_reasoning_and_tool_calls(fields: dict[str, Any]) -> None:
    whole, chunks = await answers(CALLS, **fields)
    ChatCompletion.model_validate(whole)
    message = whole["choices"][0]["message"]
    assert (message["content"], message["reasoning_content"]) == ("Let me look.", "Think twice.")
    assert message["tool_calls"] == [
        {"id": "call-1", "type": "function", "function": {"name": "find", "arguments": '{"a": 1}'}},
        {"id": "call-2", "type": "function", "function": {"name": "stop", "arguments": "{}"}},
    ]
    assert whole["usage"]["completion_tokens_details"] == {"reasoning_tokens": 2}
    for chunk in chunks:
        ChatCompletionChunk.model_validate(chunk)
    streamed = joined(chunks)
    assert (streamed["content"], streamed["reasoning_content"]) == ("Let me look.", "Think twice.")
    assert streamed["tool_calls"] == {0: ["call-1", "find", '{"a": 1}'], 1: ["call-2", "stop", "{}"]}


async def test_a_call_alone_has_no_content() -> None:
    whole, chunks = await answers([[ToolCall(0, "call-1", "find", "{}")]])
    assert whole["choices"][0]["message"]["content"] is None
    assert all("content" not in chunk["choices"][0]["delta"] for chunk in chunks[1:])


async def test_text_that_a_parser_holds_back_comes_at_the_end() -> None:
    script: list[list[Part]] = [[] for _ in range(6)]
    whole, chunks = await answers([*script, [Text("late")]])
    assert whole["choices"][0]["message"]["content"] == "late"
    assert [chunk["choices"][0]["delta"].get("content") for chunk in chunks] == ["", "late", None]


@pytest.mark.parametrize(("end", "reason"), [("stop", "tool_calls"), ("length", "length")])
async def test_a_choice_that_stops_with_a_call_says_so(end: str, reason: str) -> None:
    stop = {"stop_token_ids": byte_tokenizer().encode("s")} if end == "stop" else {}
    script: list[list[Part]] = [[ToolCall(0, "call-1", "find", "{}")]]
    whole, chunks = await answers(script, **stop)
    assert whole["choices"][0]["finish_reason"] == chunks[-1]["choices"][0]["finish_reason"] == reason


async def test_the_fast_path_gives_what_the_slow_one_gives() -> None:
    """A part of its own kind beside a text takes the slow path; empty, it changes nothing but that."""
    script: list[list[Part]] = [[Text('a "quoted"\n')], [Text("\x00text\x00")], [Text("ü🙂")]]
    slow = [[*parts, Text("")] for parts in script]
    _, fast_chunks = await answers(script)
    _, slow_chunks = await answers(slow)
    for chunk in (*fast_chunks, *slow_chunks):
        chunk["id"] = chunk["created"] = chunk["system_fingerprint"] = None
    assert fast_chunks == slow_chunks
