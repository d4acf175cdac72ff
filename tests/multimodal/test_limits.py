"""Requests that are too large or contradict themselves are refused early; no field is dropped silently."""

import asyncio
import json
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest
from prometheus_client import CollectorRegistry
from pydantic import ValidationError

from engine.admission import AdmissionEngine
from engine.base import DeltaStream, Engine
from engine.config import FakeConfig
from engine.errors import InvalidRequest
from engine.fake.engine import FakeEngine
from engine.types import GUIDE_KINDS, GenerateRequest, Guide
from multimodal.errors import RequestError
from multimodal.metrics import GenerationMetrics
from multimodal.processor import Generation, Processor
from multimodal.request import Limits, guide_of
from multimodal.text.prompts import Prompts
from multimodal.text.templates import ChatTemplate
from multimodal.text.tokenizer import CHATML, Tokenizer, byte_tokenizer
from protocol.chat import ChatCompletionRequest
from protocol.completions import CompletionRequest
from routers.body import parsed
from routers.fields import FieldCheck
from tests.support.requests import ask_of, prepare
from tests.support.servers import application
from tests.support.waiting import slowness

CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
PROMPT: dict[str, Any] = {"prompt": "hi", "max_tokens": 2}


class CountingTokenizer(Tokenizer):
    """Counts the texts that it encodes."""

    encoded = 0

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        self.encoded += 1
        return super().encode(text, add_special_tokens)


class Setup:
    def __init__(self, engine: Engine, **limits: Any) -> None:
        self.engine = engine
        tokens = byte_tokenizer()
        self.tokenizer = CountingTokenizer(tokens.backend, tokens.special_tokens, CHATML)
        template = ChatTemplate(CHATML, tokens.special_tokens)
        metrics = GenerationMetrics(CollectorRegistry(), "fake")
        self.processor = Processor(engine, Prompts(self.tokenizer, template), Limits(**limits), "fake", metrics)

    async def prepare(self, body: dict[str, Any]) -> Generation:
        return await prepare(self.processor, body)


@pytest.fixture
async def setup() -> AsyncIterator[Setup]:
    engine = FakeEngine(FakeConfig(vocab_size=259, context_length=256))
    await engine.start()
    yield Setup(engine)
    await engine.close()


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({**PROMPT, "prompt": "x" * 5000}, "prompt"),
        ({**CHAT, "messages": [{"role": "user", "content": "x" * 5000}]}, "messages"),
        ({**PROMPT, "prompt": ["x"] * 65, "n": 2}, "n"),
    ],
)
async def test_prompts_that_cannot_fit_are_refused_untokenised(setup: Setup, body: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        await setup.prepare(body)
    assert caught.value.param == param
    assert setup.tokenizer.encoded == 0


async def test_truncated_prompts_may_be_of_any_length(setup: Setup) -> None:
    for prompt in ("x" * 5000, [5] * 5000, [5000] * 500 + [5] * 300):
        generation = await setup.prepare({"prompt": prompt, "truncate_prompt_tokens": -1, "max_tokens": 6})
        assert len(generation.choices[0].request.prompt_token_ids) == 250
    for more, left in (
        ({"max_completion_tokens": 56}, 200),
        ({"max_completion_tokens": 56, "max_tokens": 5}, 200),
        ({}, 255),
    ):
        body = {"messages": [{"role": "user", "content": "x" * 5000}], "truncate_prompt_tokens": -1, **more}
        assert len((await setup.prepare(body)).choices[0].request.prompt_token_ids) == left
    generation = await setup.prepare({"prompt": "x" * 5000, "truncate_prompt_tokens": -1})
    assert len(generation.choices[0].request.prompt_token_ids) == 240, (
        "room for the 16 tokens that a completion has by default"
    )


async def test_words_are_tokenised_once_for_all_choices(setup: Setup) -> None:
    generation = await setup.prepare({**PROMPT, "n": 100, "bad_words": ["no"], "seed": 7})
    assert setup.tokenizer.encoded == 3
    assert [choice.request.sampling.seed for choice in generation.choices] == list(range(7, 107))
    with pytest.raises(RequestError, match="1024 characters"):
        await setup.prepare({**PROMPT, "bad_words": ["x" * 1025]})


@pytest.mark.parametrize("key", ["05", "+5", " 5", "\u0665", "1" * 5000])
async def test_a_token_has_one_spelling_in_logit_bias(setup: Setup, key: str) -> None:
    with pytest.raises(RequestError, match="logit_bias"):
        await setup.prepare({**PROMPT, "logit_bias": {key: 1, "5": 2}})


def test_a_long_list_of_wrong_values_is_one_error() -> None:
    started = time.monotonic()
    for body in (
        {"prompt": [1] * 200_000 + ["x"]},
        {"prompt": ["x"] * 200_000},
        {"prompt": [["x"]] * 200_000},
        {**PROMPT, "stop": [1] * 200_000},
        {**PROMPT, "allowed_token_ids": ["x"] * 200_000},
    ):
        with pytest.raises(ValidationError) as caught:
            CompletionRequest.model_validate_json(json.dumps(body))
        assert caught.value.error_count() < 5
    assert time.monotonic() - started < 5 * slowness()


async def test_a_body_of_millions_of_values_is_refused() -> None:
    async with application() as (client, _):
        values = "The body is too complex: it has more than 262144 JSON values (MAX_BODY_VALUES)."
        for body, reason in (
            ('{"prompt": [' + "[]," * 700_000 + "[]]}", values),
            ('{"prompt": "' + "," * 1_400_000 + '"}', "characters"),  # text, whatever it consists of
            ('{"prompt": "' + '\\"[],' * 200_000 + '"}', "characters"),
            ('{"prompt": "' + '\\"[],' * 200_000, "JSON"),
            ('{"prompt": "x", "metadata": [' + "12" * 200 + "1]}", "a number has more than 400 digits"),
            ('{"prompt": "' + "12" * 200_000 + '"}', "400000 prompt tokens"),
            ('{"prompt": "x", "metadata": {' + '"a": {},' * 20_000 + '"b": 1}}', values),
            (
                '{"prompt": "' + "x" * (4 << 20) + '"}',
                "The body has 4.1 MiB of text; at most 4 MiB are allowed (MAX_TEXT_MB).",
            ),
        ):
            response = await client.post("/v1/completions", content=body, headers={"content-type": "application/json"})
            error = response.json()["error"]
            assert reason in error["message"]
            large = "MAX_" in reason
            assert (response.status_code, error["code"] == "request_too_large") == (413 if large else 400, large)


async def test_as_many_messages_as_are_allowed_may_have_two_parts_each() -> None:
    parts = [{"type": "text", "text": "x"}] * 2
    messages = [{"role": "user", "content": parts}] * Limits.max_messages
    body = {"model": "fake", "messages": messages, "max_tokens": 1, "temperature": 0.5, "stream": False}
    assert len((await parsed(ChatCompletionRequest, json.dumps(body).encode())).messages) == Limits.max_messages


async def test_tokens_of_tokenize_and_detokenize_are_limited() -> None:
    """By numbers that the error names. A text that cannot fit is refused before it is tokenised."""
    async with application(max_tokenize_tokens=100) as (client, _):
        for path, body, found in (
            (
                "/tokenize",
                {"prompt": "x" * 101},
                "too long to tokenise: it has more than 100 tokens (MAX_TOKENIZE_TOKENS).",
            ),
            ("/tokenize", {"prompt": "x" * 50_000}, "its 50000 characters are always more than 100 tokens"),
            (
                "/tokenize",
                {"messages": [{"role": "user", "content": "x" * 50_000}]},
                "characters are always more than 100 tokens",
            ),
            ("/detokenize", {"tokens": [7] * 101}, "100 entries at most; it has 101"),
        ):
            response = await client.post(path, json=body)
            assert response.status_code == 400 and found in response.json()["error"]["message"]
        ids = (await client.post("/tokenize", json={"prompt": "x" * 100})).json()["tokens"]
        assert len(ids) == 100
        assert (await client.post("/detokenize", json={"tokens": ids})).json() == {"prompt": "x" * 100}


def guide(**fields: Any) -> Guide | None:
    return guide_of(ask_of({**CHAT, **fields}), GUIDE_KINDS, 1 << 16, 32)


def test_a_schema_beside_json_object_is_a_schema() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    expected = Guide("json_schema", json.dumps(schema))
    assert guide(response_format={"type": "json_object", "schema": schema}) == expected
    assert guide(response_format={"type": "json_schema", "schema": schema}) == expected
    assert guide(response_format={"type": "json_object"}) == Guide("json_object")


def test_structural_tags_are_passed_on_as_they_are() -> None:
    old = {"type": "structural_tag", "structures": [{"begin": "<f>", "schema": {}, "end": "</f>"}], "triggers": ["<f"]}
    new = {"type": "structural_tag", "format": {"type": "any_text"}}
    for tag in (old, new):
        expected = Guide("structural_tag", json.dumps(tag))
        assert guide(structured_outputs={"structural_tag": tag}) == expected
        assert guide(structured_outputs={"structural_tag": json.dumps(tag)}) == expected
        assert json.loads(guide_spec(response_format=tag)) == tag
    kinds = tuple(kind for kind in GUIDE_KINDS if kind != "structural_tag")
    with pytest.raises(RequestError, match="cannot constrain output by structural_tag") as caught:
        guide_of(ask_of({**CHAT, "response_format": new}), kinds, 1 << 16, 32)
    assert caught.value.param == "response_format"


def guide_spec(**fields: Any) -> str:
    found = guide(**fields)
    assert found is not None and found.kind == "structural_tag"
    return found.spec


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"regex": "a+", "allowed_token_ids": [5]}, "allowed_token_ids"),
        ({"structural_tag": {"structures": []}}, "structural_tag"),
        ({"structured_outputs": {"structural_tag": "{"}}, "structured_outputs"),
        ({"response_format": {"type": "structural_tag"}}, "response_format.format"),
        ({"guided_json": r'{"const": "\ud800"}'}, "guided_json"),
        ({"guided_choice": ["a"], "regex": "b"}, "regex"),
    ],
)
def test_guides_that_cannot_be_are_refused_by_name(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestError) as caught:
        guide(**fields)
    assert caught.value.param == param


async def test_errors_of_the_engine_name_the_fields_of_the_request(
    setup: Setup, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(request: GenerateRequest) -> DeltaStream:
        return DeltaStream.failed(InvalidRequest("no", parts[-1]))

    parts: list[str] = []
    monkeypatch.setattr(setup.engine, "generate", refuse)
    monkeypatch.setattr("multimodal.request.guide_of", lambda *_: None)
    for part, body, param in (
        ("guide", {**CHAT, "structured_outputs": {"regex": "a"}}, "structured_outputs"),
        ("guide", {**CHAT, "guided_regex": "a", "stream": True}, "guided_regex"),
        ("prompt", CHAT, "messages"),
        ("prompt", PROMPT, "prompt"),
        ("request_id", PROMPT, "request_id"),
    ):
        with pytest.raises(InvalidRequest) as caught:
            parts.append(part)
            await (await setup.prepare(body)).complete()
        assert caught.value.param == param


def test_unknown_fields_are_found_at_any_depth(caplog: pytest.LogCaptureFixture) -> None:
    body = {
        **CHAT,
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "x", "cache_control": {}}], "annotations": []}
        ],
        "response_format": {"type": "json_schema", "json_schema": {"schema": {"free": 1}, "stricter": True}},
    }
    ask_of(body)
    for name in ("messages.content.cache_control", "response_format.json_schema.stricter"):
        assert repr(name) in caplog.text
    assert "annotations" not in caplog.text and "free" not in caplog.text
    with pytest.raises(RequestError, match=r"response_format\.json_schema\.stricter"):
        ask_of(body, FieldCheck("fake", strict=True, model_optional=True))


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({"role": "assistant", "content": None, "audio": {"id": "a"}}, "messages"),
        (
            {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]},
            "messages.1.tool_calls.0",
        ),
        (
            {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "1"}}]},
            "messages.1.tool_calls.0",
        ),
    ],
)
async def test_messages_that_cannot_be_shown_are_refused(setup: Setup, message: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestError) as caught:
        await setup.prepare({**CHAT, "messages": [*CHAT["messages"], message]})
    assert caught.value.param == param


@pytest.mark.parametrize("calls", [{"function_call": {"arguments": "{}"}}, {"tool_calls": [{"id": "1"}]}])
def test_calls_without_a_name_or_a_function_are_refused(calls: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match="Field required"):
        ask_of({**CHAT, "messages": [*CHAT["messages"], {"role": "assistant", **calls}]})


def test_half_a_surrogate_pair_in_a_tool_call_is_refused() -> None:
    call = {"function": {"name": "f", "arguments": {"x": "\ud800"}}}
    template = ChatTemplate("{{ messages[0].tool_calls[0].function.arguments | tojson }}", {})
    with pytest.raises(RequestError, match="surrogates"):
        template.render([{"role": "assistant", "content": "", "tool_calls": [call]}])


@pytest.mark.parametrize("least", [0, -1000])
async def test_an_urgent_flood_delays_others_only_if_the_settings_let_it(least: int) -> None:
    """Four clients ask as urgently as they can, again and again, an engine that runs one sequence at a time."""
    engine = AdmissionEngine(FakeEngine(FakeConfig(max_num_seqs=1, token_delay=0.001)), 100, 60)
    await engine.start()
    setup = Setup(engine, min_priority=least)
    served: list[str] = []

    async def ask(name: str, priority: int) -> None:
        generation = await setup.prepare({**PROMPT, "priority": priority})
        async for _ in engine.generate(generation.choices[0].request):
            pass
        served.append(name)

    async def flood() -> None:
        while len(served) < 40:
            await ask("urgent", -1000)

    flooding = [asyncio.create_task(flood()) for _ in range(4)]
    await ask("urgent", -1000)
    before = len(served)
    await ask("other", 0)
    await asyncio.gather(*flooding)
    await engine.close()
    if least == 0:
        assert served.index("other") <= before + 4, "behind those that came before"
    else:
        assert served.index("other") >= 40
