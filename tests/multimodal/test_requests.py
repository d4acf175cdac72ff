"""Requests through the processor on FakeEngine.

Every field is honoured, ignored or refused by name, and every answer has OpenAI's shape.
"""

import asyncio
import dataclasses
import json
from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from msgspec.structs import replace
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.chat.completion_create_params import CompletionCreateParamsBase as ChatParams
from openai.types.completion import Completion
from openai.types.completion_create_params import CompletionCreateParamsBase as CompletionParams
from prometheus_client import CollectorRegistry
from pydantic import ValidationError

from engine.base import DeltaStream
from engine.config import FakeConfig
from engine.errors import ContextOverflow, InvalidRequest
from engine.fake.engine import FakeEngine
from engine.types import Delta, GenerateRequest
from multimodal.answers.formats import AnswerFormat
from multimodal.answers.parsers.choose import family
from multimodal.errors import DeadlineExceeded, ModelNotFound, RequestError
from multimodal.metrics import GenerationMetrics
from multimodal.processor import Generation, Processor, fingerprint
from multimodal.request import Limits, SamplingDefaults
from multimodal.text.prompts import Prompts
from multimodal.text.templates import ChatTemplate
from multimodal.text.tokenizer import Tokenizer, byte_tokenizer
from protocol.chat import ChatCompletionRequest
from protocol.completions import CompletionRequest
from protocol.tokenize import TokenizeRequest
from routers import tokenize
from routers.fields import FieldCheck
from tests.support.requests import prepare

CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}]}
COMPLETION: dict[str, Any] = {"prompt": "hello wörld "}


class Setup:
    """A processor, its engine, and the metrics it writes."""

    def __init__(self, engine: FakeEngine, strict: bool = False, **limits: Any) -> None:
        tokenizer = byte_tokenizer()
        assert tokenizer.chat_template is not None
        self.engine = engine
        self.registry = CollectorRegistry()
        self.check = FieldCheck("fake", strict=strict, model_optional=True)
        self.processor = Processor(
            engine,
            Prompts(tokenizer, ChatTemplate(tokenizer.chat_template, tokenizer.special_tokens)),
            Limits(**{"chat_template_kwargs": ("enable_thinking",), **limits}),
            "fake",
            GenerationMetrics(self.registry, "fake"),
            format=AnswerFormat(family("hermes")),
        )

    async def prepare(self, body: dict[str, Any]) -> Generation:
        return await prepare(self.processor, body, self.check)

    async def complete(self, body: dict[str, Any]) -> dict[str, Any]:
        return json.loads(await (await self.prepare(body)).complete())

    async def stream(self, body: dict[str, Any]) -> list[dict[str, Any]]:
        async with aclosing((await self.prepare({**body, "stream": True})).stream()) as chunks:
            return [json.loads(chunk) async for chunk in chunks]

    def count(self, name: str, **labels: str) -> float:
        return self.registry.get_sample_value(f"trtllm_{name}", {"model_name": "fake", **labels}) or 0.0


@pytest.fixture
async def setup() -> AsyncIterator[Setup]:
    engine = FakeEngine(FakeConfig(vocab_size=259, context_length=256))
    await engine.start()
    yield Setup(engine)
    await engine.close()


TOOLS = [{"type": "function", "function": {"name": "f"}}]
HONOURED_BY_TYPE = {
    "model": "fake", "max_tokens": 3, "temperature": 0.5, "top_p": 0.9, "n": 2, "stop": ["x"], "seed": 1,
    "presence_penalty": 0.1,
    "frequency_penalty": -0.1, "logit_bias": {"5": 1}, "response_format": {"type": "text"}, "logprobs": True,
    "top_logprobs": 2, "tools": TOOLS, "tool_choice": "auto", "functions": [{"name": "f"}],
    "parallel_tool_calls": False,
    "max_completion_tokens": 3, "reasoning_effort": "low", "stream": False, "messages": CHAT["messages"],
    "prompt": "hi", "echo": True, "prediction": {"type": "content", "content": [{"type": "text", "text": "x"}]},
}  # fmt: skip
IGNORED = {
    "user": "u", "store": True, "metadata": {"a": "b"}, "service_tier": "auto", "safety_identifier": "s",
    "prompt_cache_key": "k",
    "prompt_cache_retention": "24h", "prompt_cache_options": {}, "verbosity": "low",
    "modalities": ["text"], "function_call": "none",
    "best_of": 1, "suffix": "",
}  # fmt: skip
REFUSED = {
    "tool_choice": {"type": "function", "function": {"name": "f"}},
    "function_call": {"name": "f"}, "modalities": ["text", "audio"],
    "audio": {"voice": "a", "format": "wav"},
    "web_search_options": {}, "moderation": {"type": "x"}, "suffix": "tail", "best_of": 3, "use_beam_search": True,
    "prompt_embeds": "AAAA",
    "chat_template": "{{ x }}", "mm_processor_kwargs": {"a": 1}, "logits_processors": ["x"], "lora_request": {"a": 1},
    "disaggregated_params": {"request_type": "context_only"}, "kv_transfer_params": {"a": 1},
    "return_tokens_as_token_ids": True,
}  # fmt: skip
EXTENSIONS = {
    "top_k": 5, "min_p": 0.1, "repetition_penalty": 1.1, "min_tokens": 1, "ignore_eos": True, "stop_token_ids": [7],
    "include_stop_str_in_output": True, "skip_special_tokens": False, "bad_words": ["no"],
    "allowed_token_ids": [50, 51],
    "prompt_logprobs": 1, "return_token_ids": True, "truncate_prompt_tokens": 5, "priority": 1, "cache_salt": "s",
    "request_id": "mine", "kv_transfer_params": {"lmcache.skip_save": True},
    "add_special_tokens": False, "spaces_between_special_tokens": True,
}  # fmt: skip


@pytest.mark.parametrize("base", [CHAT, COMPLETION], ids=["chat", "completion"])
async def test_every_field_of_openai_is_honoured_ignored_or_refused(base: dict[str, Any]) -> None:
    engine = FakeEngine(FakeConfig(vocab_size=259, context_length=1024))
    await engine.start()
    setup = Setup(engine)
    schema = ChatParams if base is CHAT else CompletionParams
    for name in schema.__annotations__:
        if name == "stream_options":
            continue
        needed = {"top_logprobs": {"logprobs": True}, "tool_choice": {"tools": TOOLS}}
        body = {**base, **needed.get(name, {})}
        value = IGNORED.get(name, HONOURED_BY_TYPE.get(name))
        if base is COMPLETION and name == "logprobs":
            value = 2
        if value is not None:
            await setup.complete({**body, "max_tokens": 2, name: value})
        if name in REFUSED:
            with pytest.raises(RequestError) as caught:
                await setup.prepare({**body, name: REFUSED[name]})
            assert caught.value.param == name
        assert value is not None or name in REFUSED, f"{name} is in OpenAI's schema and nobody knows what becomes of it"
    await engine.close()


@pytest.mark.parametrize("name", list(REFUSED))
async def test_refused_by_name(setup: Setup, name: str) -> None:
    base = COMPLETION if name == "suffix" else CHAT
    with pytest.raises(RequestError) as caught:
        await setup.prepare({**base, name: REFUSED[name]})
    assert caught.value.param == name and repr(name) in str(caught.value)


@pytest.mark.parametrize("base", [CHAT, COMPLETION], ids=["chat", "completion"])
async def test_extensions_and_nulls_are_taken(setup: Setup, base: dict[str, Any]) -> None:
    answer = await setup.complete({**base, "max_tokens": 2, **EXTENSIONS})
    assert answer["id"].endswith("-mine")
    fields = (ChatCompletionRequest if base is CHAT else CompletionRequest).model_fields
    await setup.complete({**dict.fromkeys(fields), **base, "max_tokens": 2})


async def test_fields_that_a_request_leaves_out_take_the_models_defaults(setup: Setup) -> None:
    setup.processor = dataclasses.replace(setup.processor, defaults=SamplingDefaults(0.7, 0.8, 20, 0.1, 1.1))

    async def sampled(**fields: Any) -> list[float]:
        (choice,) = (await setup.prepare({**CHAT, **fields})).choices
        own = choice.request.sampling
        return [own.temperature, own.top_p, own.top_k, own.min_p, own.repetition_penalty]

    plain = {"temperature": 1, "top_p": 1, "top_k": 0, "min_p": 0, "repetition_penalty": 1}
    assert await sampled() == await sampled(**dict.fromkeys(plain)) == [0.7, 0.8, 20, 0.1, 1.1]
    assert await sampled(temperature=0) == [0, 0.8, 20, 0.1, 1.1]
    assert await sampled(**plain) == [1, 1, 0, 0, 1]


async def test_a_request_keeps_its_blocks_from_tiers(setup: Setup) -> None:
    for asked in (True, False, None):
        generation = await setup.prepare({**CHAT, "kv_transfer_params": {"lmcache.skip_save": asked}})
        assert [choice.request.skip_save for choice in generation.choices] == [bool(asked)]


async def test_unknown_fields_are_ignored_or_with_strict_fields_refused(
    setup: Setup, caplog: pytest.LogCaptureFixture
) -> None:
    await setup.complete({**CHAT, "max_tokens": 1, "frobnicate\n": 1})
    await setup.complete({**CHAT, "max_tokens": 1, "frobnicate\n": 1})
    assert caplog.text.count("frobnicate?") == 1
    with pytest.raises(RequestError, match="frobnicate"):
        await Setup(setup.engine, strict=True).prepare({**CHAT, "frobnicate": 1})


BAD = [
    ("temperature", 2.1), ("temperature", -1), ("top_p", 0), ("top_p", 1.5), ("top_k", -2), ("min_p", 2),
    ("presence_penalty", 3), ("n", 0),
    ("n", 129), ("max_tokens", 0), ("max_tokens", -1), ("stop", ["x"] * 17), ("stop", ""), ("logit_bias", {"999": 1}),
    ("logit_bias", {"x": 1}),
    ("logit_bias", {"5": 101}), ("top_logprobs", 21), ("min_tokens", 400), ("stop_token_ids", [999]),
    ("prompt_logprobs", -1),
    ("truncate_prompt_tokens", 0), ("repetition_penalty", 0), ("messages", [{"role": "user", "content": None}]),
    ("model", "gpt-4"),
    ("messages", [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://x"}}]}]),
    ("stream_options", {"include_usage": True}),
    ("chat_template_kwargs", {"tokenize": True}), ("response_format", {"type": "json_schema"}),
    ("response_format", {"type": "nonsense"}),
    ("response_format", {"type": "json_object"}),
]  # fmt: skip


@pytest.mark.parametrize(("name", "value"), BAD, ids=[f"{name}={json.dumps(value)[:40]}" for name, value in BAD])
async def test_values_out_of_range_name_their_field(setup: Setup, name: str, value: object) -> None:
    with pytest.raises(InvalidRequest) as caught:
        await setup.prepare({**CHAT, "logprobs": True, name: value})
    assert caught.value.param is not None and caught.value.param.partition(".")[0] == name
    assert len(str(caught.value)) <= 300


@pytest.mark.parametrize("text", ["NaN", "Infinity", "1e999", '"0.5"', "true"])
def test_numbers_must_be_finite_numbers(text: str) -> None:
    with pytest.raises(ValidationError):
        ChatCompletionRequest.model_validate_json(json.dumps(CHAT)[:-1] + f', "temperature": {text}}}')


async def test_the_context_is_filled_or_the_numbers_are_said(setup: Setup) -> None:
    answer = await setup.complete(CHAT)
    assert answer["usage"]["total_tokens"] == 256 and answer["choices"][0]["finish_reason"] == "length"
    assert (await setup.complete(COMPLETION))["usage"]["completion_tokens"] == 16
    with pytest.raises(ContextOverflow, match=r"256.* 300 "):
        await setup.prepare({**CHAT, "max_completion_tokens": 300})
    with pytest.raises(ContextOverflow, match="has 256 prompt tokens, which leaves no room for an answer"):
        await setup.prepare({"prompt": "x" * 256})
    assert (await setup.complete({"prompt": "x" * 300, "truncate_prompt_tokens": -1, "max_tokens": 6}))["usage"][
        "prompt_tokens"
    ] == 250
    with pytest.raises(ModelNotFound):
        await setup.prepare({**CHAT, "model": "other"})


async def test_chat_answers_parse_with_the_sdk_and_hold_what_it_expects(setup: Setup) -> None:
    answer = await setup.complete(
        {**CHAT, "max_tokens": 12, "logprobs": True, "top_logprobs": 2, "n": 2, "skip_special_tokens": False}
    )
    parsed = ChatCompletion.model_validate(answer)
    assert [choice.index for choice in parsed.choices] == [0, 1]
    assert {"refusal", "content", "role"} <= answer["choices"][0]["message"].keys()
    assert parsed.usage is not None and parsed.usage.completion_tokens == 24
    logprobs = parsed.choices[0].logprobs
    assert logprobs is not None and logprobs.content is not None
    assert (
        b"".join(bytes(entry.bytes or []) for entry in logprobs.content).decode() == parsed.choices[0].message.content
    )
    assert all(len(entry.top_logprobs) == 2 for entry in logprobs.content)


async def test_replicas_that_compute_alike_have_one_fingerprint(setup: Setup) -> None:
    info = setup.engine.info
    own = fingerprint("", "fake", info)
    assert (await setup.complete(CHAT))["system_fingerprint"] == own and own.startswith("fp_")
    alike = {"load_seconds": 7.5, "num_blocks": 9, "model": "/another/folder/" + Path(info.model).name}
    assert fingerprint("", "fake", replace(info, **alike)) == own
    others: list[dict[str, Any]] = [{"quantization": "int8"}, {"instruction_set": "amx"}, {"model": "/another"}]
    assert own not in [fingerprint("", "fake", replace(info, **other)) for other in others]
    assert own != fingerprint("2.0.0", "fake", info)


async def test_chat_streams_role_deltas_finish_and_usage(setup: Setup) -> None:
    body = {**CHAT, "max_tokens": 9, "n": 2}
    chunks = await setup.stream({**body, "stream_options": {"include_usage": True}})
    whole = await setup.complete(body)
    *middle, last = chunks
    assert len({(chunk["id"], chunk["created"], chunk["model"], chunk["object"]) for chunk in chunks}) == 1
    assert last["choices"] == [] and last["usage"]["completion_tokens"] == 18
    assert all(chunk["usage"] is None for chunk in middle)
    for index in range(2):
        deltas = [chunk["choices"][0] for chunk in middle if chunk["choices"][0]["index"] == index]
        assert deltas[0]["delta"] == {"role": "assistant", "content": ""}
        assert all("role" not in delta["delta"] for delta in deltas[1:])
        assert [delta["finish_reason"] for delta in deltas] == [None] * (len(deltas) - 1) + ["length"]
        assert deltas[-1]["delta"] == {}
        assert (
            "".join(delta["delta"].get("content", "") for delta in deltas)
            == whole["choices"][index]["message"]["content"]
        )
    for chunk in chunks:
        ChatCompletionChunk.model_validate(chunk)


async def test_continuous_usage_grows(setup: Setup) -> None:
    chunks = await setup.stream(
        {**COMPLETION, "max_tokens": 5, "stream_options": {"continuous_usage_stats": True, "include_usage": True}}
    )
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts) and counts[-1] == 5


async def test_continuous_usage_counts_what_its_choice_has_been_sent(setup: Setup) -> None:
    options = {"continuous_usage_stats": True, "include_usage": True}
    chunks = await setup.stream({**CHAT, "max_tokens": 6, "n": 3, "return_token_ids": True, "stream_options": options})
    sent = [0, 0, 0]
    for chunk in chunks[:-1]:
        choice = chunk["choices"][0]
        sent[choice["index"]] += len(choice.get("token_ids", []))
        prompt = chunks[-1]["usage"]["prompt_tokens"]
        completion = sent[choice["index"]]
        counts = {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}
        assert chunk["usage"] == counts
    assert sent == [6, 6, 6] and chunks[-1]["usage"]["completion_tokens"] == 18


async def test_continuous_usage_needs_usage(setup: Setup) -> None:
    for options in ({"continuous_usage_stats": True}, {"continuous_usage_stats": True, "include_usage": False}):
        chunks = await setup.stream({**COMPLETION, "max_tokens": 5, "stream_options": options})
        assert chunks and not [chunk for chunk in chunks if "usage" in chunk or not chunk["choices"]]


async def test_completions_take_many_prompts_and_echo_them(setup: Setup) -> None:
    answer = await setup.complete({"prompt": ["ab", "cd"], "n": 2, "max_tokens": 4, "echo": True})
    Completion.model_validate(answer)
    assert [choice["text"] for choice in answer["choices"]] == ["ababab"] * 2 + ["cdcdcd"] * 2
    assert answer["usage"]["prompt_tokens"] == 4
    ids = byte_tokenizer().encode("ab")
    for prompt in (ids, [ids, ids]):
        assert (await setup.complete({"prompt": prompt, "max_tokens": 2}))["choices"][0]["text"] == "ab"


@pytest.mark.parametrize("max_tokens", [0, 1])
async def test_echo_with_logprobs_scores_the_prompt(setup: Setup, max_tokens: int) -> None:
    body = {"prompt": "wörld", "echo": True, "logprobs": 1, "max_tokens": max_tokens}
    answer = await setup.complete(body)
    logprobs = answer["choices"][0]["logprobs"]
    assert len(logprobs["tokens"]) == 6 + max_tokens == len(logprobs["token_logprobs"]) == len(logprobs["text_offset"])
    assert logprobs["token_logprobs"][0] is None and logprobs["top_logprobs"][0] is None
    assert logprobs["tokens"][1:3] == ["bytes:\\xc3", "bytes:\\xb6"]
    assert answer["usage"]["completion_tokens"] == max_tokens
    chunks = await setup.stream(body)
    streamed = [part for chunk in chunks if (part := chunk["choices"][0]["logprobs"])]
    assert [token for part in streamed for token in part["tokens"]] == logprobs["tokens"]
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == answer["choices"][0]["text"]


@pytest.mark.parametrize("echo", [False, True])
@pytest.mark.parametrize("prompts", [["a🎉b c"], ["é", "x", "日本 y"]])
async def test_text_offsets_count_the_whole_characters_before_a_token(
    setup: Setup, prompts: list[str], echo: bool
) -> None:
    body = {"prompt": prompts, "echo": echo, "logprobs": 0, "max_tokens": 11, "n": 2}
    choices = (await setup.complete(body))["choices"]
    expected = []
    for prompt in prompts:
        raw = prompt.encode()
        generated = (raw * 11)[:11]  # what the fake engine says
        before, whole = (len(prompt), raw) if echo else (0, b"")
        offsets = [len(whole[:end].decode(errors="ignore")) for end in range(len(whole))]
        offsets += [before + len(generated[:end].decode(errors="ignore")) for end in range(11)]
        expected += [offsets] * 2
    assert [choice["logprobs"]["text_offset"] for choice in choices] == expected
    streamed: list[list[int]] = [[] for _ in choices]
    for chunk in await setup.stream(body):
        choice = chunk["choices"][0]
        streamed[choice["index"]] += choice["logprobs"]["text_offset"] if choice["logprobs"] else []
    assert streamed == expected


async def test_text_offsets_of_a_tokenizer_that_strips_the_first_space() -> None:
    vocabulary = {"<s>": 0, "</s>": 1, "<unk>": 2, "▁ab": 3, "▁c": 4}
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<unk>"))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace()
    backend.decoder = tokenizers.decoders.Metaspace()
    engine = FakeEngine(FakeConfig())
    setup = Setup(engine)
    setup.processor.prompts = Prompts(Tokenizer(backend, {}), None)
    await engine.start()
    answer = await setup.complete({"prompt": "ab c", "echo": True, "logprobs": 0, "max_tokens": 2})
    choice = answer["choices"][0]
    assert choice["text"] == "ab c ab c"
    assert choice["logprobs"]["tokens"] == [" ab", " c"] * 2
    assert choice["logprobs"]["text_offset"] == [0, 2, 4, 7]
    await engine.close()


async def test_token_ids_come_with_prompt_and_output(setup: Setup) -> None:
    body = {**COMPLETION, "max_tokens": 4, "return_token_ids": True}
    choice = (await setup.complete(body))["choices"][0]
    tokenizer = byte_tokenizer()
    assert choice["prompt_token_ids"] == tokenizer.encode(COMPLETION["prompt"])
    assert tokenizer.decode(choice["token_ids"]) == choice["text"]
    chunks = await setup.stream(body)
    assert [token for chunk in chunks for token in chunk["choices"][0].get("token_ids", [])] == choice["token_ids"]


@pytest.mark.parametrize("include", [False, True])
async def test_stop_strings_end_one_choice_and_free_it(setup: Setup, include: bool) -> None:
    answer = await setup.complete(
        {**COMPLETION, "max_tokens": 200, "stop": ["wö"], "include_stop_str_in_output": include}
    )
    choice = answer["choices"][0]
    assert choice["text"] == ("hello wö" if include else "hello ")
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", "wö")
    assert answer["usage"]["completion_tokens"] == len("hello wö".encode())


async def test_stop_token_ids_are_hidden_unless_asked_for(setup: Setup) -> None:
    [token] = byte_tokenizer().encode("w")
    body = {**COMPLETION, "max_tokens": 50, "stop_token_ids": [token]}
    answer = await setup.complete(body)
    assert (answer["choices"][0]["text"], answer["choices"][0]["stop_reason"]) == ("hello ", token)
    assert answer["usage"]["completion_tokens"] == 7
    assert (await setup.complete({**body, "include_stop_str_in_output": True}))["choices"][0]["text"] == "hello w"


async def test_logprobs_leave_out_the_token_that_ended_the_sequence() -> None:
    """Also when it comes in one delta with others."""
    engine = FakeEngine(FakeConfig(vocab_size=259))
    await engine.start()
    generation = await Setup(engine).prepare(
        {"prompt": "abc", "logprobs": 1, "stop_token_ids": byte_tokenizer().encode("c"), "stream": True}
    )
    async with aclosing(generation.stream()) as stream:
        chunks = [json.loads(await anext(stream))]
        await asyncio.sleep(0.05)
        chunks += [json.loads(chunk) async for chunk in stream]
    shown = [part for chunk in chunks if (part := chunk["choices"][0]["logprobs"])]
    assert [token for part in shown for token in part["tokens"]] == ["a", "b"]
    assert all(len(part["tokens"]) == len(part["token_logprobs"]) for part in shown)
    await engine.close()


class Drafting(FakeEngine):
    """The fake engine, with drafts of two tokens of which the first is right."""

    asked: GenerateRequest

    def generate(self, request: GenerateRequest) -> DeltaStream:
        self.asked = request
        found = super().generate(request)

        async def drafted() -> AsyncIterator[Delta]:
            async for delta in found:
                yield replace(delta, draft_tokens=2, accepted_tokens=1)

        return drafted()  # type: ignore[return-value]


@pytest.mark.parametrize("stream", [True, False])
async def test_a_prediction_reaches_the_engine_and_usage_says_what_became_of_it(stream: bool) -> None:
    engine = Drafting(FakeConfig(vocab_size=259, context_length=64))
    await engine.start()
    setup = Setup(engine)
    body = {**CHAT, "max_tokens": 3, "stream": stream, "stream_options": {"include_usage": True} if stream else None}
    parts = [{"type": "text", "text": "ab"}, {"type": "text", "text": "c" * 100}]
    for content, tokens in (("hi", b"hi"), (parts, b"ab" + b"c" * 62), ("", b"")):
        asked = {**body, "prediction": {"type": "content", "content": content}}
        answer = (await setup.stream(asked))[-1] if stream else await setup.complete(asked)
        found = bytes(token - 3 for token in engine.asked.prediction)
        assert found == tokens, "no more of it than the context holds"
        details = answer["usage"]["completion_tokens_details"]
        assert (details["accepted_prediction_tokens"], details["rejected_prediction_tokens"]) == (3, 3)
    answer = (await setup.stream(body))[-1] if stream else await setup.complete(body)
    assert answer["usage"]["completion_tokens_details"] == {"reasoning_tokens": 0}
    with pytest.raises(ValidationError, match="prediction"):
        await setup.prepare({**body, "prediction": {"type": "image", "content": "x"}})
    await engine.close()


async def test_cached_tokens_are_reported(setup: Setup) -> None:
    body = {"prompt": "x" * 100, "max_tokens": 1}
    first, second = await setup.complete(body), await setup.complete(body)
    assert first["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] == 96
    assert setup.count("prompt_cached_tokens_total") == 96


async def test_closing_a_stream_aborts_every_choice() -> None:
    engine = FakeEngine(FakeConfig(vocab_size=259, token_delay=0.005))
    await engine.start()
    setup = Setup(engine)
    async with aclosing(
        (await setup.prepare({**COMPLETION, "n": 5, "max_tokens": 5000, "stream": True})).stream()
    ) as chunks:
        await anext(chunks)
    stats = await anext(engine.stats())
    assert stats.num_active_requests + stats.num_queued_requests == 0 and stats.num_aborted_requests == 5
    task = asyncio.create_task((await setup.prepare({**COMPLETION, "n": 5, "max_tokens": 5000})).complete())
    await asyncio.sleep(0.05)
    task.cancel()
    await asyncio.wait([task])
    stats = await anext(engine.stats())
    assert stats.num_active_requests == 0 and stats.num_aborted_requests == 10
    assert setup.count("num_aborted_requests_total") == 10
    await engine.close()


@pytest.mark.parametrize("n", [1, 3])
async def test_the_deadline_ends_a_request_with_an_error(n: int) -> None:
    engine = FakeEngine(FakeConfig(vocab_size=259, token_delay=0.01))
    await engine.start()
    setup = Setup(engine, request_timeout_seconds=0.1)
    with pytest.raises(DeadlineExceeded):
        await setup.complete({**COMPLETION, "n": n, "max_tokens": 5000})
    stats = await anext(engine.stats())
    assert stats.num_active_requests == 0
    assert setup.count("request_error_total") == n
    await engine.close()


async def test_tokenize_and_detokenize(setup: Setup) -> None:
    async def ids_of(body: dict[str, Any]) -> list[int]:
        return await setup.processor.tokenize(tokenize.convert(TokenizeRequest.model_validate(body)))

    ids = await ids_of({"prompt": "hé"})
    assert len(ids) == 3
    assert "".join(await setup.processor.strings(ids[:1])) == "h"
    assert await setup.processor.detokenize(ids) == "hé"
    assert (await setup.complete({**CHAT, "max_tokens": 1}))["usage"]["prompt_tokens"] == len(await ids_of(CHAT))
    for wrong in ({}, {"prompt": "a", **CHAT}):
        with pytest.raises(RequestError):
            await ids_of(wrong)
    with pytest.raises(RequestError):
        await setup.processor.detokenize([999])
