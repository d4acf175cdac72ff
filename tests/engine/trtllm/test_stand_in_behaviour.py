"""The stand-in for TensorRT-LLM behaves as the contract says.

Covers results, aborts, disaggregation, events, faults and encoders.
"""

import asyncio
import json
import pickle
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from engine.trtllm.library import is_alive
from tests.support.engine_cases import FAKE_TRTLLM
from tests.support.environment import bare, python_path
from tests.support.trtllm import (  # noqa: F401
    API,
    BOTH_VERSIONS,
    NEWEST,
    PROMPT,
    ROOT,
    disaggregated,
    disaggregating,
    faults,
    found,
    llm,
    sampling,
    trt,
)
from tests.support.waiting import until


async def test_streaming_yields_one_mutated_object_with_cumulative_tokens() -> None:
    with llm() as engine:
        result = engine.generate_async(PROMPT, sampling(max_tokens=4, logprobs=2, prompt_logprobs=1), streaming=True)
        seen = [
            (step is result, list(step.outputs[0].token_ids), step.outputs[0].token_ids_diff) async for step in result
        ]
        assert seen == [(True, [5], [5]), (True, [5, 6], [6]), (True, [5, 6, 7], [7]), (True, [5, 6, 7, 5], [5])]
        output = result.outputs[0]
        assert (
            result.finished and not result.aborted() and (output.finish_reason, output.stop_reason) == ("length", None)
        )
        assert [set(entry) for entry in output.logprobs][:2] == [{5, 6}, {6, 7}] and output.logprobs[0][6].rank == 2
        assert [set(entry) for entry in output.prompt_logprobs] == [{6}, {7}]
        again = await engine.generate_async(PROMPT * 30, sampling(prompt_logprobs=1))
        once_more = await engine.generate_async(PROMPT * 30, sampling(prompt_logprobs=1))
        counts = [len(each.outputs[0].prompt_logprobs) for each in (again, once_more)]
        assert counts == [89, 89 - 64], "there are none of the two blocks that were cached"
        assert len([step async for step in engine.generate_async(PROMPT, sampling())]) == 1
        assert (await engine.generate_async(PROMPT, sampling(logprobs=0))).outputs[0].logprobs == []


def test_synchronous_use() -> None:
    with llm() as engine:
        one, two = engine.generate([PROMPT, [8, 9]], [sampling(), sampling(max_tokens=2)])
        assert (one.outputs[0].length, two.outputs[0].token_ids) == (8, [8, 9])
        assert engine.generate(PROMPT, sampling(n=2, temperature=1.0)).outputs[1].token_ids == one.outputs[0].token_ids
        assert [step.finished for step in engine.generate_async(PROMPT, sampling(max_tokens=2), streaming=True)] == [
            False,
            True,
        ]


async def test_without_a_running_loop_there_is_nothing_to_await() -> None:
    with llm() as engine:
        result = await asyncio.to_thread(engine.generate_async, PROMPT, sampling())
        with pytest.raises(AssertionError, match="event loop was not present"):
            await result


async def test_stop_tokens_are_trimmed_and_reported_and_the_end_id_is_neither() -> None:
    with llm() as engine:
        output = (await engine.generate_async(PROMPT, sampling(stop_token_ids=[7]))).outputs[0]
        assert (output.token_ids, output.finish_reason, output.stop_reason) == ([5, 6], "stop", 7)
        output = (
            await engine.generate_async(PROMPT, sampling(stop_token_ids=[7], include_stop_str_in_output=True))
        ).outputs[0]
        assert output.token_ids == [5, 6, 7]
        output = (await engine.generate_async(PROMPT, sampling(end_id=6))).outputs[0]
        assert (output.token_ids, output.finish_reason, output.stop_reason) == ([5, 6], "stop", None)
        assert (await engine.generate_async(PROMPT, sampling(end_id=6, ignore_eos=True))).outputs[
            0
        ].finish_reason == "length"


async def test_end_id_and_strings() -> None:
    with llm() as engine:
        with pytest.raises(RuntimeError, match="not processed by tokenizer"):
            engine.generate_async(PROMPT, sampling(stop="x"))
        with pytest.raises(ValueError, match="tokenizer is required"):
            engine.generate_async(PROMPT)


async def test_long_prompts() -> None:
    error = found("tensorrt_llm.llmapi.RequestError")
    with llm(max_num_tokens=10) as engine, pytest.raises(error, match="max_num_tokens"):
        engine.generate_async([5] * 11, sampling())
    with llm(max_seq_len=20, enable_chunked_prefill=True, max_num_tokens=10) as engine:
        result = engine.generate_async([5] * 30, sampling())
        with pytest.raises(error):
            await result
        assert (await engine.generate_async([5] * 15, sampling())).outputs[0].length == 5


async def test_abort_goes_on_until_the_end_is_reported() -> None:
    with llm() as engine:
        result = engine.generate_async(PROMPT, sampling(max_tokens=5000), streaming=True)
        async for step in result:
            if step.outputs[0].length == 3 and not step.aborted():
                step.abort()
                assert step.aborted() and not step.finished
        assert result.outputs[0].finish_reason == "cancelled" and result.outputs[0].length < 100
        result.abort()


async def test_disaggregated_runs_continue_as_aggregated_ones() -> None:
    with disaggregating() as engine:
        whole = (await engine.generate_async(PROMPT, sampling())).outputs[0].token_ids
        asked, params = disaggregated("context_only"), sampling()
        context = await engine.generate_async(PROMPT, params, disaggregated_params=asked)
        assert params.max_tokens == 1 and asked.opaque_state is None
        output = context.outputs[0]
        handed = output.disaggregated_params
        assert (
            output.finish_reason == "not_finished"
            and handed.first_gen_tokens == whole[:1]
            and handed.request_type == "context_only"
        )
        assert isinstance(handed.opaque_state, bytes) and isinstance(handed.ctx_request_id, int)
        handed.request_type = "generation_only"
        assert (await engine.generate_async(PROMPT, sampling(), disaggregated_params=handed)).outputs[
            0
        ].token_ids == whole
        result = engine.generate_async(PROMPT, sampling(max_tokens=5000), streaming=True, disaggregated_params=handed)
        result.abort()
        await result
        assert result.outputs[0].token_ids[:1] == whole[:1] and result.outputs[0].finish_reason == "cancelled"
        with pytest.raises(RuntimeError, match="opaque_state"):
            await engine.generate_async(PROMPT, sampling(), disaggregated_params=disaggregated("generation_only"))
        with pytest.raises(ValueError, match="generation_only"):
            engine.generate_async(
                PROMPT,
                sampling(),
                disaggregated_params=disaggregated("generation_only", multimodal_embedding_handles=[{}]),
            )
    with llm() as engine, pytest.raises(RuntimeError, match="cache_transceiver_config"):
        await engine.generate_async(PROMPT, sampling(), disaggregated_params=disaggregated("context_only"))


async def test_statistics_and_events_are_drained() -> None:
    with llm(
        enable_iter_perf_stats=True, kv_cache_config={"event_buffer_max_size": 100, "tokens_per_block": 4}
    ) as engine:
        assert engine.get_stats(0.05) == []
        assert [item async for item in engine.get_kv_cache_events_async()] == []
        await engine.generate_async(list(range(3, 12)), sampling())
        stats = [item async for item in engine.get_stats_async(timeout=0.05)]
        assert set(stats[-1]) == set(API["json_schemas"]["iteration_stats"]) - {"requestStats", "notes"}
        assert stats[-1]["kvCacheStats"].keys() == API["json_schemas"]["iteration_stats"]["kvCacheStats"].keys()
        events = [item async for item in engine.get_kv_cache_events_async(timeout=0.05)]
        assert [item["event_id"] for item in events] == list(range(len(events))) and events[0]["data"][
            "type"
        ] == "created"
        block = events[1]["data"]["blocks"][0]
        assert block.keys() == API["json_schemas"]["kv_cache_event"]["data"]["oneOf"][1]["blocks"][0].keys()
        assert [token["token_id"] for token in block["tokens"]] == [3, 4, 5, 6] and "attention_dp_rank" not in events[0]
        await until(lambda: engine.get_kv_cache_events(0.05) == [] == engine.get_stats(0.05))
        faults().event_poll_error = "'NoneType' object has no attribute 'new_value'"
        assert engine.get_kv_cache_events(0.05) == []
        assert engine.get_kv_cache_events(0.05) == []


async def test_one_failed_request_leaves_the_others_alone() -> None:
    with llm() as engine:
        faults().request_error, faults().request_error_after = "no memory", 2
        result = engine.generate_async(PROMPT, sampling(), streaming=True)
        with pytest.raises(found("tensorrt_llm.executor.RequestError"), match="no memory"):
            await result
        assert result.outputs[0].length == 2 and is_alive(engine)
        assert (await engine.generate_async(PROMPT, sampling())).finished


async def test_a_background_exception_is_the_end() -> None:
    with llm() as engine:
        result = engine.generate_async(PROMPT, sampling(max_tokens=5000), streaming=True)
        await anext(result)
        found("tensorrt_llm._test").kill_executors(OSError("CUDA error"))
        with pytest.raises(OSError, match="CUDA error"):
            await result
        assert not is_alive(engine)
        with pytest.raises(RuntimeError, match="LLM is shutting down"):
            engine.generate_async(PROMPT, sampling())
        assert engine.get_stats() == [] == engine.get_kv_cache_events()
        result.abort()
    engine.shutdown()


def test_construction_can_fail_and_take_time() -> None:
    faults().construction_error = "out of memory"
    with pytest.raises(RuntimeError, match="out of memory"):
        llm()
    faults().construction_seconds = 0.05
    started = time.monotonic()
    with llm() as engine:
        assert time.monotonic() - started >= 0.05 and found("tensorrt_llm._test").live() == 1 and is_alive(engine)


@BOTH_VERSIONS
async def test_differences_of_the_main_branch_other_than_handoffs(trt: Any) -> None:  # noqa: F811
    newest = trt.__version__ == NEWEST
    with llm(enable_iter_perf_stats=True) as engine:
        output = (await engine.generate_async(PROMPT, sampling(logprobs=0))).outputs[0]
        assert [len(entry) for entry in output.logprobs] == ([1] * 8 if newest else []), "0 asks for the sampled token"
        poll = engine.get_stats_async(timeout=0.05)
        assert (poll.later is not None) == newest, "1.2.1 has waited in the call"
        assert [item async for item in poll]
        faults().device_error = "CUDA error: an illegal memory access was encountered"
        with pytest.raises(RuntimeError, match="CUDA error"):
            await engine.generate_async(PROMPT, sampling())
        await until(lambda: is_alive(engine) != newest)


async def test_performance_metrics() -> None:
    with llm() as engine:
        result = await engine.generate_async(PROMPT, sampling(return_perf_metrics=True))
        assert result.metrics_dict["finished_reason"] == "length"
        assert result.metrics_dict[found("tensorrt_llm.metrics.MetricNames").E2E] > 0
        assert result.outputs[0].request_perf_metrics.timing_metrics.first_token_time.total_seconds() > 0


async def test_the_encoder_gives_shared_tensors_that_are_equal_for_equal_media() -> None:
    container = found("tensorrt_llm._torch.shared_tensor.SharedTensorContainer")
    with found("tensorrt_llm.llmapi.MultimodalEncoder")("fake") as encoder:
        assert encoder.args.mm_encoder_only and encoder.args.max_num_tokens == 16384
        inputs = {"prompt": "what is it?", "multi_modal_data": {"image": [b"cat"]}}
        results = [await encoder.generate_async(inputs) for _ in range(2)]
        tensors = [container.from_dict(result.mm_embedding_handle).get_local_view() for result in results]
        assert tensors[0].shape == (16, 64) and tensors[0].equal(tensors[1])
        assert results[0].mm_embedding_handle.keys() == API["json_schemas"]["shared_tensor_cpu"].keys()
        params = results[0].disaggregated_params
        assert (
            params.multimodal_embedding_handles == [results[0].mm_embedding_handle]
            and len(params.multimodal_hashes[0]) == 8
        )
        json.dumps(results[0].mm_embedding_handle)


class Forces:
    """A logits processor that allows the token 42 alone and records in vain: it runs on a copy."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def __call__(self, req_id: int, logits: Any, token_ids: list[list[int]], stream_ptr: None, client_id: None) -> None:
        self.calls.append(req_id)
        assert logits.shape == (1, 1, 384) and token_ids[0][:3] == PROMPT and stream_ptr is client_id is None
        logits[0, 0, :42], logits[0, 0, 43:] = -1e9, -1e9


async def test_the_embedded_engine_generates_with_bias_and_processors(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch  # noqa: PLC0415 - most tests do without

    monkeypatch.setenv("FAKE_TRTLLM_ENGINE", "embedded")
    monkeypatch.setenv(
        "FAKE_TRTLLM_CONFIG", json.dumps({"threads": 1, "device": "cpu", "dtype": "float32", "num_blocks": 64})
    )
    with found("tensorrt_llm.LLM")(model=str(tiny_model)) as engine:
        processor, bias = Forces(), torch.zeros(384)
        bias[9] = 1e6
        output = (await engine.generate_async(PROMPT, sampling(logits_processor=processor))).outputs[0]
        assert output.token_ids == [42] * 8 and processor.calls == []
        assert (await engine.generate_async(PROMPT, sampling(embedding_bias=bias.tolist()))).outputs[0].token_ids == [
            9
        ] * 8
        with pytest.raises((pickle.PicklingError, AttributeError)):
            engine.generate_async(PROMPT, sampling(logits_processor=lambda a, b, c, d, e: None))
        guide = found("tensorrt_llm.llmapi.GuidedDecodingParams")(regex="a")
        with pytest.raises(RuntimeError, match="guided_decoding_backend"):
            await engine.generate_async(PROMPT, sampling(guided_decoding=guide))


def test_in_a_child_process_faults_come_from_the_environment() -> None:
    code = "from tensorrt_llm import LLM; LLM(model='fake')"
    path = python_path(FAKE_TRTLLM)
    environment = bare(PYTHONPATH=path, FAKE_TRTLLM_FAULTS='{"construction_error": "no GPU"}')
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 1 and "RuntimeError: no GPU" in done.stderr
    code += ".generate([5, 6], __import__('tensorrt_llm').SamplingParams(end_id=2))"  # not shut down: atexit does
    assert subprocess.run([sys.executable, "-c", code], env=bare(PYTHONPATH=path), check=False).returncode == 0
