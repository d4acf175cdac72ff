"""The stand-in for TensorRT-LLM with media and with speculation.

Embeddings go from an encoder to a context worker, and on to generation.
"""

from pathlib import Path
from typing import Any

import pytest

from tests.support.trtllm import (  # noqa: F401
    BOTH_VERSIONS,
    IMAGE,
    NEWEST,
    PROMPT,
    disaggregated,
    disaggregating,
    faults,
    found,
    llm,
    model_folder,
    sampling,
    trt,
)

INPUTS = {"prompt": "w5 <image> w6 <image>", "multi_modal_data": {"image": [b"cat", b"dog"]}}
ONE = {"prompt": "w5 <image> w6", "multi_modal_data": {"image": [b"cat"]}}


async def encoded(inputs: Any = ONE) -> Any:
    with found("tensorrt_llm.llmapi.MultimodalEncoder")(model="fake") as encoder:
        return await encoder.generate_async(inputs)


@BOTH_VERSIONS
async def test_an_encoders_handles_are_the_results_and_not_the_outputs(trt: Any) -> None:  # noqa: F811
    result = await encoded(INPUTS)
    handles = result.disaggregated_params.multimodal_embedding_handles
    sizes = [[16, 64], [16, 64]] if trt.__version__ == NEWEST else [[32, 64]]
    assert [handle["tensor_size"] for handle in handles] == sizes, "1.2.1 has one for all images"
    assert result.finished and result.outputs[0].disaggregated_params is None
    assert [len(entry) for entry in result.disaggregated_params.multimodal_hashes] == [8, 8]
    assert result.mm_embedding_handle == result.disaggregated_params.multimodal_embedding_handles[0]


async def test_an_encoder_takes_media_alone_and_no_parameters() -> None:
    with found("tensorrt_llm.llmapi.MultimodalEncoder")(model="fake") as encoder:
        for inputs in ("w5", PROMPT, {"prompt": "w5"}):
            with pytest.raises(ValueError, match="multi_modal_data"):
                encoder.generate_async(inputs)
        with pytest.raises(TypeError, match="disaggregated_params"):
            encoder.generate_async(INPUTS, disaggregated_params=None)


async def test_an_encoding_llm_wraps_the_handles_of_a_request_with_parameters_in_a_tuple() -> None:
    with llm(mm_encoder_only=True) as encoder:
        clean = (await encoder.generate_async(INPUTS)).disaggregated_params.multimodal_embedding_handles
        wrapped = await encoder.generate_async(INPUTS, disaggregated_params=disaggregated("context_and_generation"))
        handles = wrapped.disaggregated_params.multimodal_embedding_handles
        assert (
            isinstance(clean, list)
            and isinstance(handles, tuple)
            and [len(handles), handles[0]] == [1, [wrapped.mm_embedding_handle, *handles[0][1:]]]
        )


async def test_embeddings_expand_the_prompt_of_the_context_worker_and_generation_refuses_them(tmp_path: Path) -> None:
    params = (await encoded()).disaggregated_params
    params.request_type = "context_only"
    with found("tensorrt_llm.LLM")(
        model=str(model_folder(tmp_path)),
        cache_transceiver_config={"backend": "DEFAULT"},
        disable_overlap_scheduler=True,
    ) as engine:
        for wrong, said in (
            ({"prompt_token_ids": [5, IMAGE]}, "embedding"),
            ({"prompt": "w5 <image> <image>"}, "must match number of mm_handles"),
        ):
            with pytest.raises((AssertionError, ValueError), match=said):
                engine.generate_async(wrong, sampling(), disaggregated_params=params)
        context = await engine.generate_async({"prompt": ONE["prompt"]}, sampling(), disaggregated_params=params)
        assert context.prompt_token_ids == [5, *[IMAGE] * 16, 6]
        handed = context.outputs[0].disaggregated_params
        assert handed.multimodal_embedding_handles is None and handed.multimodal_hashes == params.multimodal_hashes
        handed.request_type = "generation_only"
        rest = await engine.generate_async(context.prompt_token_ids, sampling(), disaggregated_params=handed)
        raw = await engine.generate_async(ONE, sampling())
        assert (
            raw.prompt_token_ids == context.prompt_token_ids and raw.outputs[0].token_ids == rest.outputs[0].token_ids
        )
        handed.multimodal_embedding_handles = [{}]
        with pytest.raises(ValueError, match="generation_only"):
            engine.generate_async(context.prompt_token_ids, sampling(), disaggregated_params=handed)


async def test_media_expand_the_prompt_and_change_the_answer(tmp_path: Path) -> None:
    with found("tensorrt_llm.LLM")(model=str(model_folder(tmp_path))) as engine:
        answers = []
        for images in ([b"cat", b"dog"], [b"dog", b"cat"], [b"cat", b"dog"]):
            result = await engine.generate_async({**INPUTS, "multi_modal_data": {"image": images}}, sampling())
            assert result.prompt_token_ids == [5, *[IMAGE] * 16, 6, *[IMAGE] * 16]
            answers.append(result.outputs[0].token_ids)
        assert answers[0] != answers[1] and answers[0] == answers[2]
        with pytest.raises(ValueError, match="1 placeholders for 2"):
            engine.generate_async({**INPUTS, "prompt": "w5 <image>"}, sampling())


async def test_token_ids_drop_embeddings_that_come_with_them(tmp_path: Path) -> None:
    import torch  # noqa: PLC0415 - most tests do without

    embeddings = {"multi_modal_embeddings": {"image": [torch.ones(16, 64)]}}
    with found("tensorrt_llm.LLM")(model=str(model_folder(tmp_path))) as engine:
        dropped = await engine.generate_async({"prompt_token_ids": [5, IMAGE], **embeddings}, sampling())
        kept = await engine.generate_async({"prompt": "w5 <image>", **embeddings}, sampling())
    assert (dropped.prompt_token_ids, kept.prompt_token_ids) == ([5, IMAGE], [5, *[IMAGE] * 16])


async def test_a_model_with_mrope_has_positions_written_for_it(tmp_path: Path) -> None:
    folder = str(model_folder(tmp_path, rope_scaling={"mrope_section": [2, 3, 3]}))
    with found("tensorrt_llm.llmapi.MultimodalEncoder")(model=folder) as encoder:
        encoded = (await encoder.generate_async(INPUTS)).disaggregated_params
    with found("tensorrt_llm.LLM")(
        model=folder, cache_transceiver_config={"backend": "DEFAULT"}, disable_overlap_scheduler=True
    ) as engine:
        context = await engine.generate_async(INPUTS, sampling(), disaggregated_params=disaggregated("context_only"))
    for params in (encoded, context.outputs[0].disaggregated_params):
        assert params.mrope_position_ids_handle["method_key"] == params.mrope_position_deltas_handle["method_key"] == 2


def test_position_handles_come_in_pairs() -> None:
    with disaggregating() as engine, pytest.raises(RuntimeError, match="both"):
        engine.generate_async(
            PROMPT, sampling(), disaggregated_params=disaggregated("context_only", mrope_position_ids_handle={})
        )


@pytest.mark.parametrize("reason", ["not_finished", "length"])
async def test_a_speculating_context_worker_hands_its_draft_on(reason: str) -> None:
    faults().context_finish_reason = reason
    with disaggregating(speculative_config={"decoding_type": "MTP", "max_draft_len": 2}) as engine:
        context = await engine.generate_async(PROMPT, sampling(), disaggregated_params=disaggregated("context_only"))
        handed = context.outputs[0].disaggregated_params
        assert (context.outputs[0].finish_reason, handed.first_gen_tokens, handed.draft_tokens) == (reason, [5], [5, 5])
        handed.request_type = "generation_only"
        assert (await engine.generate_async(PROMPT, sampling(), disaggregated_params=handed)).outputs[0].length == 8
        handed.draft_tokens = None
        with pytest.raises(RuntimeError, match="kv cache transfer"):
            await engine.generate_async(PROMPT, sampling(), disaggregated_params=handed)
