"""A16: the performance metrics of requests, which 1.2.1 has with `return_perf_metrics` only, and its own traces."""

from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from prometheus_client import CollectorRegistry

from engine.errors import EngineUnavailable
from engine.trtllm.engine import TrtllmEngine
from engine.types import Delta, GenerateRequest, Performance
from multimodal.metrics import ChoiceTimer, GenerationMetrics
from tests.support import trtllm_gotchas as trtllm_gotchas_support
from tests.support.trtllm import BOTH_VERSIONS, faults, found, handed_over
from tests.support.trtllm_gotchas import request, running
from tests.support.waiting import until

trt, folder = trtllm_gotchas_support.trt, trtllm_gotchas_support.folder  # fixtures
TRACE = {"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"}
NGRAM = {"decoding_type": "NGram", "max_draft_len": 3, "max_matching_ngram_size": 2}


async def deltas(engine: TrtllmEngine, wanted: GenerateRequest) -> list[Delta]:
    return [delta async for delta in engine.generate(wanted)]


@BOTH_VERSIONS
async def test_the_engine_measures_requests(folder: Path) -> None:
    async with running(folder) as engine:
        first, *_, last = await deltas(engine, request(max_tokens=6))
    assert first.prompt is not None and first.prompt.queue_seconds > 0
    measured = last.performance
    assert measured is not None and 0 < measured.token_seconds < measured.seconds
    assert first.prompt.queue_seconds <= measured.first_token_seconds < measured.seconds
    assert (measured.transfer_seconds, measured.transfer_bytes, measured.draft_tokens) == (0, 0, 0)


async def test_without_metrics_nothing_is_claimed(folder: Path) -> None:
    async with running(folder, return_perf_metrics=False) as engine:
        first, *_, last = await deltas(engine, request(max_tokens=6))
    assert first.prompt is not None and first.prompt.queue_seconds == 0 and last.performance is None


@BOTH_VERSIONS
async def test_a_transfer_is_measured_and_counted(folder: Path) -> None:
    transceiver: dict[str, Any] = {"cache_transceiver_config": {"backend": "DEFAULT"}}
    async with running(folder, "prefill", **transceiver) as prefill, running(folder, "decode", **transceiver) as decode:
        wanted = request(max_tokens=6)
        handed = await handed_over(prefill, wanted)
        *_, last = await deltas(decode, replace(wanted, handoff=handed))
        assert last.performance is not None and last.performance.transfer_seconds > 0
        assert last.performance.transfer_bytes > 0
        faults().request_error = "Error in kv cache transfer for generation requests"
        with pytest.raises(EngineUnavailable, match="in kv cache transfer"):
            await deltas(decode, replace(wanted, handoff=handed))
        newest = await anext(decode.stats())
    assert (newest.kv_transfer_success_total, newest.kv_transfer_failure_total) == (1, 1)
    assert newest.kv_transfer_bytes == last.performance.transfer_bytes
    assert newest.kv_transfer_latency_seconds == last.performance.transfer_seconds


async def test_speculation_is_measured(folder: Path) -> None:
    async with running(folder, speculative_config=NGRAM) as engine:
        *_, last = await deltas(engine, request(max_tokens=6))
    assert last.performance is not None
    assert (last.performance.draft_tokens, last.performance.accepted_tokens) == (18, 0)


@BOTH_VERSIONS
async def test_its_own_tracer_sends_spans_of_our_trace(folder: Path) -> None:
    """Without metrics it warns of each request, and sends nothing."""
    sent = found("tensorrt_llm._test")
    async with running(folder, otlp_traces_endpoint="http://collector:4317") as engine:
        await deltas(engine, request(trace=TRACE))
        await until(lambda: any(span["context"] == TRACE for span in sent.spans))
    assert sent.untraced == 0 and all(span["gen_ai.latency.e2e"] > 0 for span in sent.spans)
    sent.spans.clear()
    async with running(folder, otlp_traces_endpoint="http://collector:4317", return_perf_metrics=False) as engine:
        await deltas(engine, request(trace=TRACE))
    assert sent.spans == [] and sent.untraced > 0


def test_the_engines_measurements_reach_the_histograms() -> None:
    registry = CollectorRegistry()
    timer = ChoiceTimer(GenerationMetrics(registry, "m"))
    timer.measured(Performance(0.2, 0.02, 1.0, 0.05, 1 << 20, 30, 12))
    timer.measured(Performance(first_token_seconds=0.4))

    def value(name: str) -> float | None:
        return registry.get_sample_value(f"trtllm_{name}", {"model_name": "m"})

    assert (value("engine_time_to_first_token_seconds_sum"), value("engine_time_to_first_token_seconds_count")) == (
        0.2 + 0.4,
        2,
    )
    assert value("engine_time_per_output_token_seconds_sum") == 0.02 and value("engine_e2e_request_latency_seconds_sum")
    assert value("request_kv_transfer_seconds_sum") == 0.05 and value("request_kv_transfer_seconds_count") == 1
    assert value("request_kv_transfer_bytes_sum") == 1 << 20
    assert (value("spec_decode_num_draft_tokens_total"), value("spec_decode_num_accepted_tokens_total")) == (30, 12)
    assert value("request_spec_decode_acceptance_rate_sum") == 0.4
