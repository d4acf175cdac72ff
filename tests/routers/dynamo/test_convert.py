"""Conversion of Dynamo's requests and outputs, with requests as recorded from the frontend of Dynamo 1.6.1."""

from typing import Any

import pytest

from engine.errors import ContextOverflow, InvalidRequest
from engine.types import Delta, EngineInfo, GenerateRequest, Guide, Handoff, Held, Logprob, PromptReport
from multimodal.request import Limits, SamplingDefaults
from routers.dynamo.convert import GraphOutputs, engine_requests, image_refs, read_request

INFO = EngineInfo(
    backend="fake", model="m", dtype="float32", device="cpu", context_length=64, vocab_size=300, eos_token_ids=(2,),
    block_size=16, num_blocks=8, max_num_seqs=4, max_num_tokens=64, guides=("json_schema", "json_object", "regex"),
)  # fmt: skip


def body(**changes: Any) -> dict[str, Any]:
    """A request as the frontend sends one: every option is there, most of them None."""
    return {
        "model": "m",
        "token_ids": [5, 6, 7],
        "stop_conditions": {
            "max_tokens": 8, "stop": ["x"], "stop_token_ids": None, "stop_token_ids_visible": None,
            "stop_token_ids_hidden": [2], "min_tokens": None, "ignore_eos": None, "max_thinking_tokens": None,
            **changes.pop("stop_conditions", {}),
        },
        "sampling_options": {
            "n": None, "best_of": None, "presence_penalty": None, "temperature": None, "top_p": None, "top_k": None,
            "seed": None, "use_beam_search": None, "guided_decoding": None, **changes.pop("sampling_options", {}),
        },
        "output_options": {"logprobs": None, "prompt_logprobs": None, **changes.pop("output_options", {})},
        "eos_token_ids": [2],
        "mdc_sum": "993b9a321da16815",
        "annotations": [],
        "routing": {"dp_rank": 0},
        "router_config_override": None,
        **changes,
    }  # fmt: skip


def converted(
    info: EngineInfo = INFO, limits: Limits | None = None, *, prefill_only: bool = False, **changes: Any
) -> list[GenerateRequest]:
    asked = read_request(body(**changes))
    return engine_requests(asked, info, limits or Limits(), "r", prefill_only=prefill_only)


def test_missing_fields_take_our_defaults() -> None:
    (request,) = converted()
    assert request.prompt_token_ids == (5, 6, 7)
    assert (request.sampling.max_tokens, request.sampling.temperature, request.sampling.top_p) == (8, 1.0, 1.0)
    assert request.sampling.stop_token_ids == (2,)
    assert request.sampling.logprobs is None and request.sampling.seed is None
    assert (request.group, request.dp_rank, request.cache_salt) == ("", None, "")


def test_missing_sampling_fields_take_the_models_defaults() -> None:
    defaults = SamplingDefaults(temperature=0.7, top_p=0.8, top_k=20, min_p=0.1, repetition_penalty=1.1)
    asked = read_request(body(sampling_options={"top_p": 1.0}))
    (request,) = engine_requests(asked, INFO, Limits(), "r", defaults=defaults)
    own = request.sampling
    assert (own.temperature, own.top_p, own.top_k, own.min_p, own.repetition_penalty) == (0.7, 1.0, 20, 0.1, 1.1)


def test_without_max_tokens_the_context_is_filled() -> None:
    (request,) = converted(stop_conditions={"max_tokens": None})
    assert request.sampling.max_tokens == 61


def test_options_arrive() -> None:
    (request,) = converted(
        stop_conditions={"min_tokens": 2, "ignore_eos": True, "stop_token_ids": [9], "stop_token_ids_visible": [9, 11]},
        sampling_options={
            "temperature": 0.5, "top_p": 0.9, "top_k": -1, "min_p": 0.1, "repetition_penalty": 1.5, "seed": -1,
            "frequency_penalty": 0.25, "bad_words_token_ids": [[3, 4]],
        },
        output_options={"logprobs": 2, "prompt_logprobs": 0},
        routing={"dp_rank": 3, "cache_salt": "s", "priority": 4},
    )  # fmt: skip
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0.5, 0.9, 0, 0.1)
    assert (sampling.repetition_penalty, sampling.frequency_penalty, sampling.seed) == (1.5, 0.25, (1 << 63) - 1)
    assert (sampling.min_tokens, sampling.ignore_eos, sampling.stop_token_ids) == (2, True, (9, 11))
    assert (sampling.bad_words, sampling.logprobs, sampling.prompt_logprobs) == (((3, 4),), 2, 0)
    assert request.cache_salt == "s"
    assert request.priority == 0, "no client may go before what the operator allows"
    assert request.dp_rank is None, "one rank: nothing was chosen"
    (urgent,) = converted(limits=Limits(min_priority=-10), routing={"priority": 4})
    assert urgent.priority == -4, "Dynamo serves higher ones first, we lower ones"


def test_choices_are_sequences_of_one_group() -> None:
    requests = converted(sampling_options={"n": 3, "seed": 7})
    assert [request.request_id for request in requests] == ["r-0", "r-1", "r-2"]
    assert {(request.group, request.group_size) for request in requests} == {("r", 3)}
    assert [request.sampling.seed for request in requests] == [7, 8, 9]


@pytest.mark.parametrize(
    ("guides", "expected"),
    [
        ({"json": {"type": "string"}}, Guide("json_schema", '{"type": "string"}')),
        ({"json": '{"type": "string"}'}, Guide("json_schema", '{"type": "string"}')),
        ({"json": {"type": "object"}}, Guide("json_object")),
        ({"regex": "a+", "json": None}, Guide("regex", "a+")),
        ({}, None),
    ],
)
def test_guides(guides: dict[str, Any], expected: Guide | None) -> None:
    (request,) = converted(sampling_options={"guided_decoding": guides})
    assert request.sampling.guide == expected


def test_prefill_computes_a_token_whatever_decode_may_do() -> None:
    """The frontend asks it for one token, which must not end the sequence."""
    (request,) = converted(prefill_only=True, stop_conditions={"max_tokens": 1, "min_tokens": 5})
    assert request.prefill_only and request.sampling.max_tokens == 61 and request.sampling.min_tokens == 1


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"token_ids": []}, "empty"),
        ({"token_ids": "text"}, "token ids"),
        ({"stop_conditions": {"max_tokens": 0}}, "max_tokens"),
        ({"stop_conditions": {"max_thinking_tokens": 5}}, "reasoning"),
        ({"stop_conditions": {"stop_token_ids": [300]}}, "stop_token_ids"),
        ({"stop_conditions": {"stop_token_ids": [-1]}}, "stop_token_ids"),
        ({"sampling_options": {"allowed_token_ids": [-1]}}, "allowed_token_ids"),
        ({"sampling_options": {"bad_words_token_ids": [[5, 300]]}}, "bad_words_token_ids"),
        ({"sampling_options": {"bad_words_token_ids": [[5]] * 10_000}}, "bad_words_token_ids"),
        ({"sampling_options": {"n": 0}}, "'n'"),
        ({"sampling_options": {"temperature": 3.0}}, "temperature"),
        ({"sampling_options": {"use_beam_search": True}}, "Beam"),
        ({"sampling_options": {"guided_decoding": {"regex": "a", "json": {}}}}, "one way"),
        ({"sampling_options": {"guided_decoding": {"grammar": "root ::= a"}}}, "cannot constrain"),
        ({"output_options": {"logprobs": 99}}, "logprobs"),
        ({"prompt_embeds": "AAAA"}, "embeddings"),
    ],
)
def test_unsupported_requests_are_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidRequest, match=words):
        converted(**changes)


def test_too_long_a_prompt_is_the_requests_fault() -> None:
    with pytest.raises(ContextOverflow, match="64 tokens"):
        converted(token_ids=[5] * 60)


def test_each_choice_has_a_handoff_of_its_own() -> None:
    first, second = converted(prefill_only=True, sampling_options={"n": 2})
    assert first.request_id != second.request_id and first.prefill_only and second.prefill_only
    handoffs = [Handoff(version=1, backend="fake", first=Delta((token,)), state=b"") for token in (8, 9)]
    asked = read_request(body(sampling_options={"n": 3}))
    found = engine_requests(asked, INFO, Limits(), "r", handoffs=handoffs)
    assert [request.handoff for request in found] == [*handoffs, None], "the last one is computed by decode"


def test_images_are_named_by_their_urls() -> None:
    images = {"image_url": [{"Url": "https://a.test/1.png"}, {"RawUrl": "data:image/png;base64,AA=="}]}
    parts = [{"type": "text", "text": "see"}, {"type": "image_url", "image_url": {"url": "", "detail": "low"}}]
    chat = [{"role": "system", "content": "s"}, {"role": "user", "content": [*parts, {"type": "image_url"}]}]
    refs = image_refs(read_request(body(multi_modal_data=images, extra_args={"messages": chat})))
    assert [(ref.url, ref.detail) for ref in refs] == [
        ("https://a.test/1.png", "low"),
        ("data:image/png;base64,AA==", "auto"),
    ]
    unknown = image_refs(read_request(body(multi_modal_data=images)))
    assert [ref.detail for ref in unknown] == ["auto", "auto"]
    assert image_refs(read_request(body(multi_modal_data={"video_url": []}))) == []


@pytest.mark.parametrize(
    ("media", "words"),
    [
        ({"video_url": [{"Url": "https://a.test/1.mp4"}]}, "video_url"),
        ({"image_url": [{"Decoded": {"shape": [1, 2, 3]}}]}, "by their URL"),
        ({"image_url": [{"Url": 5}]}, "by their URL"),
    ],
)
def test_other_media_are_refused(media: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidRequest, match=words):
        image_refs(read_request(body(multi_modal_data=media)))


def test_outputs_end_with_the_usage() -> None:
    asked = read_request(body())
    outputs = GraphOutputs(asked, 3, 2)
    assert outputs.of(Delta((8,), prompt=PromptReport(cached_tokens=2)), 0) == {"token_ids": [8], "index": 0}
    assert outputs.of(Delta((9,), finish_reason="stop", stop_reason=9), 1) == {
        "token_ids": [9], "index": 1, "finish_reason": "stop", "stop_reason": 9,
    }  # fmt: skip
    assert outputs.of(Delta((7, 7), finish_reason="length"), 0) == {
        "token_ids": [7, 7],
        "index": 0,
        "finish_reason": "length",
        "completion_usage": {
            "prompt_tokens": 3,
            "completion_tokens": 4,
            "total_tokens": 7,
            "prompt_tokens_details": {"cached_tokens": 2},
        },
    }


def test_a_held_prompt_is_the_end_of_prefill() -> None:
    output = GraphOutputs(read_request(body()), 3, 1).of(Delta((8,), held=Held(b"here")))
    assert output["finish_reason"] == "length" and output["completion_usage"]["completion_tokens"] == 1


def test_log_probabilities_have_an_entry_for_each_token() -> None:
    position = (Logprob(8, -0.5, 1), Logprob(8, -0.5, 1), Logprob(9, -1.5, 2))
    report = PromptReport(logprobs=(None, (Logprob(6, -2.0, 4),)))
    delta = Delta((8, 8), logprobs=(position, position), prompt=report, finish_reason="stop")
    output = GraphOutputs(read_request(body(output_options={"logprobs": 2, "prompt_logprobs": 0})), 3, 1).of(delta)
    assert output["log_probs"] == [-0.5, -0.5]
    best = {"rank": 1, "token_id": 8, "token": None, "logprob": -0.5}
    assert output["top_logprobs"] == [[best, {"rank": 2, "token_id": 9, "token": None, "logprob": -1.5}]] * 2
    assert output["engine_data"] == {"prompt_logprobs": [None, {"6": {"logprob": -2.0, "rank": 4}}]}
    chosen = GraphOutputs(read_request(body(output_options={"logprobs": 0})), 3, 1).of(delta)
    assert chosen["log_probs"] == [-0.5, -0.5] and "top_logprobs" not in chosen
