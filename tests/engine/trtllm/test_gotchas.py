"""Gotchas 1 to 8 of TensorRT-LLM 1.2.1, in the order of its contract's list.

Tests show what our adapter makes of requests, on the stand-in.
"""

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from engine.config import TrtllmEncoderConfig
from engine.errors import InvalidRequest
from engine.kit.handoff import decode_handoff, encode, handoff_of
from engine.trtllm import disaggregation, library
from engine.trtllm.encoder import TrtllmEncoder
from engine.trtllm.outputs import Outputs
from engine.trtllm.versions import version_of
from engine.types import Delta, Logprob
from tests.support import trtllm_gotchas as trtllm_gotchas_support
from tests.support.trtllm import API, IMAGE, PROMPT, found, handed_over, model_folder, picture, travelled
from tests.support.trtllm_contract_api import signature
from tests.support.trtllm_gotchas import FACTS, SOURCES, arguments_of, request, running, tokens
from tests.support.waiting import until

VERSION = version_of("1.2.1")
trt, folder, calls = trtllm_gotchas_support.trt, trtllm_gotchas_support.folder, trtllm_gotchas_support.calls  # fixtures


async def test_gotcha_01_generate_async_is_a_plain_def(folder: Path, calls: list[Any]) -> None:
    """`generate_async` is not awaited and gets only keywords that 1.2.1 has.

    They mean the same where newer versions have moved positions.
    """
    async with running(folder) as engine:
        assert await tokens(engine, request(cache_salt="salt", priority=3)) == [5, 6, 7, 5, 6, 7]
    for args, kwargs in calls:
        assert args == () and kwargs.keys() <= signature("tensorrt_llm.LLM.generate_async").parameters.keys()
        newer = signature("newer-main-only: tensorrt_llm.LLM.generate_async").bind(None, **kwargs).arguments
        assert newer["cache_salt"] == kwargs["cache_salt"] and "conversation_params" not in newer
    assert calls[-1][1]["cache_salt"] == "salt"


async def test_gotcha_02_abort_is_synchronous_and_there_is_no_aabort(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    results: list[Any] = []
    submit = library.submit
    monkeypatch.setattr(
        library, "submit", lambda *args, **kwargs: results.append(submit(*args, **kwargs)) or results[-1]
    )
    async with running(folder) as engine:
        stream = engine.generate(request(max_tokens=4000))
        await anext(stream)
        await stream.aclose()
        assert results[-1].aborted(), "the engine was told before the close returned"
        await until(lambda: results[-1].finished)
        assert results[-1].outputs[0].finish_reason == "cancelled", "it was followed to its end"
    waiting = {name for name, source in SOURCES.items() if re.search(r"aabort|\.a?result\(", source)}
    assert waiting <= {"visual.py"}, "no wait for an LLM is left to a timeout"


async def test_gotcha_03_streaming_yields_one_object_with_all_tokens_so_far(folder: Path) -> None:
    """Deltas come of lengths that we keep, so that nothing is lost or said twice if responses are skipped."""
    async with running(folder) as engine:
        wanted = request(max_tokens=10, logprobs=0)
        deltas = [delta async for delta in engine.generate(wanted)]
        outputs, seen, skipped = Outputs(wanted, FACTS.eos_token_ids), set(), []
        async for response in library.submit(engine.llm, wanted, FACTS):
            seen.add(id(response))
            if response.finished or len(response.outputs[0].token_ids) % 4 == 0:
                skipped.append(outputs.feed(response))
    assert len(seen) == 1 and [len(delta.token_ids) for delta in skipped if delta] == [4, 4, 2]
    for found_here in (deltas, [delta for delta in skipped if delta]):
        assert [token for delta in found_here for token in delta.token_ids] == [5, 6, 7, 5, 6, 7, 5, 6, 7, 5]
        assert [entry[0].token_id for delta in found_here for entry in delta.logprobs] == [5, 6, 7, 5, 6, 7, 5, 6, 7, 5]


async def test_gotcha_04_sampling_params_are_mutated(folder: Path, calls: list[Any]) -> None:
    """A request has objects of its own, so one request's prefill does not change the next.

    No value is left to its default: the defaults are 32 tokens and greedy.
    """
    async with running(folder, "prefill") as engine:
        shared = request().sampling
        handed = await handed_over(engine, request(sampling=shared))
        assert handed.first.token_ids == (5,) and calls[-1][1]["sampling_params"].max_tokens == 1
        assert await tokens(engine, request(sampling=shared, request_id="s")) == [5, 6, 7, 5, 6, 7]
        assert len(await tokens(engine, request(max_tokens=40, temperature=1.0, request_id="t"))) == 40
    assert calls[-1][1]["sampling_params"].temperature == 1.0
    for name in ("sampling_params", "disaggregated_params"):
        made = [kwargs[name] for _, kwargs in calls if kwargs[name] is not None]
        assert len({id(value) for value in made}) == len(made)


async def test_gotcha_05_an_explicit_end_id_leaves_the_tokenizer_out(
    folder: Path, calls: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other ids that end a sequence are named, and strings are never passed.

    Log-probabilities are asked for with 1, not 0.
    """
    model_folder(folder, eos_token_id=[2, 6])
    monkeypatch.setenv(
        "FAKE_TRTLLM_CONFIG", json.dumps({"eos_token_ids": [2]})
    )  # so that it stops at 6 if it is told to
    async with running(folder) as engine:
        (delta,) = [delta async for delta in engine.generate(request(bad_words=((9,),), logprobs=0))][-1:]
        assert (delta.token_ids[-1], delta.finish_reason, delta.stop_reason) == (6, "stop", None)
    params = calls[-1][1]["sampling_params"]
    assert (params.end_id, params.stop_token_ids, params.stop, params.bad, params.logprobs) == (2, [6], None, None, 1)
    assert params.bad_token_ids is None and params.embedding_bias[9] < -1e8, "the TorchSampler of 1.2.1 ignores them"


def test_gotcha_06_disaggregated_params_of_1_2_1_have_nine_fields() -> None:
    """What a newer version adds is not passed on, and what the official wire form loses is not lost."""
    newer = API["dataclasses"]["DisaggregatedParams"]["newer_fields_not_in_1_2_1"]
    hashes = [[1] * 8]
    handle = {"method_key": 1}
    theirs = found("tensorrt_llm.llmapi.DisaggregatedParams")(
        request_type="context_only", first_gen_tokens=[5], ctx_request_id=1, opaque_state=b"\x00\xff", draft_tokens=[6],
        multimodal_embedding_handles=None, multimodal_hashes=hashes, mrope_position_ids_handle=handle,
        mrope_position_deltas_handle=handle,
    )  # fmt: skip
    result = SimpleNamespace(outputs=[SimpleNamespace(disaggregated_params=theirs)], prompt_token_ids=PROMPT)
    held = disaggregation.held_of(result, Delta((5,), finish_reason="length"), request(), VERSION)
    handed = decode_handoff(encode(handoff_of("trtllm", held)))
    later = msgspec.msgpack.decode(handed.state) | {"a_later_field_of_ours": 1}
    for state in (handed.state, msgspec.msgpack.encode(later)):
        keywords = disaggregation.generation_keywords(msgspec.structs.replace(handed, state=state), VERSION, Logprob)
        assert not keywords.keys() & set(newer)
        params = found("tensorrt_llm.llmapi.DisaggregatedParams")(**keywords)
        assert (params.request_type, params.opaque_state, params.draft_tokens) == ("generation_only", b"\x00\xff", [6])
        assert (params.multimodal_hashes, params.mrope_position_ids_handle, params.mrope_position_deltas_handle) == (
            hashes,
            handle,
            handle,
        )


@pytest.mark.parametrize(
    "said", [{}, {"cache_transceiver_config": {"backend": None}, "disable_overlap_scheduler": False}]
)
async def test_gotcha_07_disaggregation_needs_a_transceiver_and_prefill_no_overlap(
    folder: Path, said: dict[str, Any]
) -> None:
    """The role has the last word; and an engine that was started otherwise says what it lacks."""
    for role in ("prefill", "decode"):
        arguments = arguments_of(role, said)
        assert arguments["cache_transceiver_config"]["backend"] == "DEFAULT"
        assert bool(arguments.get("disable_overlap_scheduler")) == (role == "prefill")
    async with running(folder, "prefill", **said) as prefill, running(folder, "decode", **said) as decode:
        handed = await handed_over(prefill, request())
        assert await tokens(decode, request(handoff=handed)) == [6, 7, 5, 6, 7]
    chosen = arguments_of("prefill", {"cache_transceiver_config": {"backend": "UCX"}})["cache_transceiver_config"]
    assert chosen == {"backend": "UCX", "kv_transfer_timeout_ms": 60_000}, (
        "or blocks that nobody fetches are kept for ever"
    )
    async with running(folder) as aggregated:
        with pytest.raises(InvalidRequest, match=r"cache_transceiver_config\.backend"):
            await handed_over(aggregated, request())


async def test_gotcha_08_an_encoders_handles_go_to_prefill_with_text_and_no_further(
    folder: Path, calls: list[Any]
) -> None:
    """Handles are read from the result, unwrapped if they come in a tuple.

    They are passed with text so that they are not dropped, and not passed to generation, which gets the expanded
    prompt.
    """
    encoder = TrtllmEncoder(TrtllmEncoderConfig(model=str(folder)))
    await encoder.start()
    try:
        encoding = travelled(await encoder.encode([picture()], "w5 <image> w6"))
    finally:
        await encoder.close()
    wanted = request(prompt_token_ids=(5, IMAGE, 6), ignore_eos=True)
    async with running(folder, "prefill") as prefill, running(folder, "decode") as decode:
        handed = decode_handoff(encode(await handed_over(prefill, msgspec.structs.replace(wanted, media=encoding))))
        context = calls[-1][1]
        assert handed.prompt_token_ids == (5, *[IMAGE] * 16, 6)
        rest = await tokens(decode, msgspec.structs.replace(wanted, handoff=handed))
        assert len(rest) == 5 and handed.first.prompt is not None and handed.first.prompt.prompt_tokens == 18
        generation = calls[-1][1]
    assert (
        context["inputs"] == {"prompt": "w5 <image> w6"} and len(context["disaggregated_params"].multimodal_hashes) == 1
    )
    assert generation["inputs"] == list(handed.prompt_token_ids)
    assert generation["disaggregated_params"].multimodal_embedding_handles is None
    with found("tensorrt_llm.LLM")(model=str(folder), mm_encoder_only=True) as wrapping:
        params = found("tensorrt_llm.llmapi.DisaggregatedParams")(request_type="context_and_generation")
        inputs = {"prompt": "w5 <image> w6", "multi_modal_data": {"image": [b"cat"]}}
        wrapped = await wrapping.generate_async(inputs, disaggregated_params=params)
        assert isinstance(wrapped.disaggregated_params.multimodal_embedding_handles, tuple)
        handles = disaggregation.context_keywords(disaggregation.encoding_of(wrapped, ""), VERSION)[
            "multimodal_embedding_handles"
        ]
        assert isinstance(handles, list) and handles[0]["method_key"] == 2
