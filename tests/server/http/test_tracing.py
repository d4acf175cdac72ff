"""Traces as a collector gets them: one for each request, from its client through every replica, with its stages and
without its text.
"""

import asyncio
import itertools
import json
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from websockets.sync.client import connect

from tests.support.disaggregated import replica, servers
from tests.support.media import data_url, png
from tests.support.otel import Collector, Span, collector
from tests.support.routing import Bare, router
from tests.support.servers import CHAT, ServerThread, application
from tests.support.trtllm import trt  # noqa: F401 - the stand-in for TensorRT-LLM

CLIENT = "0af7651916cd43dd8448eb211c80319c"
PARENT = f"00-{CLIENT}-b7ad6b7169203331-01"
UNSAMPLED = f"00-{CLIENT}-b7ad6b7169203331-00"
SERVER = "POST /v1/chat/completions"


@pytest.fixture
def spans() -> Iterator[Collector]:
    with collector() as receiver:
        yield receiver


async def ask(client: httpx.AsyncClient, headers: dict[str, str] | None = None, **fields: Any) -> httpx.Response:
    return await client.post("/v1/chat/completions", json=CHAT | fields, headers=headers or {})


def picture_chat() -> dict[str, Any]:
    parts = [{"type": "text", "text": "Secret?"}, {"type": "image_url", "image_url": {"url": data_url(png(8, 8))}}]
    return {"messages": [{"role": "user", "content": parts}], "max_tokens": 8, "temperature": 0, "ignore_eos": True}


def assert_within(inner: Span, outer: Span) -> None:
    assert inner.parent == outer.id and outer.start <= inner.start <= inner.end <= outer.end + 1e-3


@pytest.mark.slow
def test_one_trace_of_all_replicas_that_a_request_passes(spans: Collector) -> None:
    """As processes of their own: decode asks encode, then prefill; every span has the parent that caused it."""
    traced = ("--otel-endpoint", spans.url)
    encode, prefill = (("--disaggregation-mode", role, *traced) for role in ("encode", "prefill"))
    with servers((*encode, "--encode-inline-kb", "0"), prefill) as (encoding, prefilling):
        peers = (
            "--encode-urls",
            encoding.url,
            "--prefill-urls",
            prefilling.url,
            "--prefill-min-tokens",
            "0",
            "--encode-fallback",
            "refuse",
        )
        with servers(("--disaggregation-mode", "decode", *peers, *traced)) as (front,):
            answer = httpx.post(
                f"{front.url}/v1/chat/completions",
                json=picture_chat(),
                headers={"traceparent": PARENT, "tracestate": "vendor=one"},
                timeout=20,
            )
            assert answer.status_code == 200, answer.text
    assert {span.trace for span in spans.spans} == {CLIENT} and spans.paths == {"/v1/traces"}
    request = spans.one(SERVER, "decode")
    assert request.parent == PARENT.split("-")[2] and request.kind == "server"
    prompt, encoder = spans.one("prompt"), spans.one("POST /encode", "decode")
    assert_within(prompt, request)
    assert_within(spans.one("fetch"), prompt)
    assert_within(spans.one("encode", "decode"), prompt)
    assert_within(encoder, spans.one("encode", "decode"))
    remote_encode, asked = spans.one("POST /encode", "encode"), spans.one("POST /prefill", "decode")
    assert (encoder.kind, remote_encode.kind, remote_encode.parent) == ("client", "server", encoder.id)
    assert_within(spans.one("encode", "encode"), remote_encode)
    assert_within(asked, request)
    remote = spans.one("POST /prefill", "prefill")
    assert (asked.kind, remote.kind, remote.parent) == ("client", "server", asked.id)
    for name in ("queue", "prefill"):
        assert spans.one(name, "prefill").parent == remote.id
    stages = [spans.one(name, "decode") for name in ("queue", "prefill", "transfer", "decode")]
    for stage in stages:
        assert_within(stage, request)
    assert [stage.start for stage in stages] == sorted(stage.start for stage in stages)
    assert not any(span.failed for span in spans.spans)
    assert not any(b"Secret" in span.raw for span in spans.spans)


def test_requests_on_a_websocket_are_traced_and_measured_as_those_of_http(spans: Collector) -> None:
    with ServerThread(otel_endpoint=spans.url) as server:
        headers = {"traceparent": PARENT, "x-request-id": "mine"}
        with connect(f"ws://127.0.0.1:{server.port}/v1/responses", additional_headers=headers) as client:
            for wrong in ({}, {"temperature": -1}, {"max_output_tokens": "many"}):
                client.send(json.dumps({"type": "response.create", "input": "hi", "max_output_tokens": 4} | wrong))
                while json.loads(client.recv(timeout=20))["type"] not in ("response.incomplete", "error"):
                    pass
        page = httpx.get(f"{server.url}/metrics").text
    spans.wait(lambda: len(spans.named("WEBSOCKET /v1/responses")) == 3)
    answered, refused, malformed = sorted(spans.named("WEBSOCKET /v1/responses"), key=lambda span: span.start)
    assert (answered.parent, answered.kind) == (PARENT.split("-")[2], "server")
    assert answered.attributes["gen_ai.usage.output_tokens"] == 4
    assert [span.attributes["http.response.status_code"] for span in (answered, refused, malformed)] == [200, 400, 400]
    assert [span.attributes["trellis.request_id"] for span in (answered, malformed)] == ["mine-1", "mine-3"]
    for stage in ("prefill", "decode"):
        assert_within(spans.one(stage), answered)
    for status, count in (("2xx", 1.0), ("4xx", 2.0)):
        labels = f'handler="/v1/responses",method="WEBSOCKET",status="{status}"'
        assert f"http_requests_total{{{labels}}} {count}" in page
    assert 'http_request_duration_seconds_count{handler="/v1/responses",method="WEBSOCKET"} 3.0' in page


async def test_a_request_is_described_in_the_words_of_generative_ai(spans: Collector) -> None:
    async with application(otel_endpoint=spans.url, otel_service_name="mine") as (client, _):
        answer = await ask(client, {"x-request-id": "of-mine"}, n=2, temperature=0.5, seed=7, ignore_eos=True)
    request, usage = spans.one(SERVER), answer.json()["usage"]
    expected = {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "trellis",
        "gen_ai.request.model": "fake",
        "gen_ai.request.max_tokens": 8,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.choice.count": 2,
        "gen_ai.usage.input_tokens": usage["prompt_tokens"],
        "gen_ai.usage.output_tokens": 16,
        "gen_ai.response.finish_reasons": ["length", "length"],
        "gen_ai.response.id": answer.json()["id"],
        "http.response.status_code": 200,
        "http.route": "/v1/chat/completions",
        "trellis.request_id": "of-mine",
    }
    assert {name: request.attributes.get(name) for name in expected} == expected
    queued, first = (request.attributes[f"gen_ai.latency.{name}"] for name in ("time_in_queue", "time_to_first_token"))
    assert 0 <= queued <= first <= request.end - request.start
    assert (request.of["service.name"], request.of["trellis.role"], request.of["gen_ai.request.model"]) == (
        "mine",
        "aggregated",
        "fake",
    )
    assert sorted(span.attributes["trellis.choice"] for span in spans.named("decode")) == [0, 1]
    assert not any(CHAT["messages"][0]["content"].encode() in span.raw for span in spans.spans)


@pytest.mark.parametrize(
    "given",
    [
        "",
        "nonsense",
        "00-" + "0" * 32 + "-b7ad6b7169203331-01",
        PARENT.replace("00-", "ff-", 1),
        PARENT + "-more",
        PARENT.upper() + "\u00e9",
    ],
)
async def test_a_malformed_parent_begins_a_new_trace(spans: Collector, given: str) -> None:
    async with application(otel_endpoint=spans.url) as (client, _):
        answer = await client.post("/v1/completions", json={"prompt": "x"}, headers=[(b"traceparent", given.encode())])
        assert answer.status_code == 200
    request = spans.one("POST /v1/completions")
    assert (
        request.parent == ""
        and request.trace != CLIENT
        and request.attributes["gen_ai.operation.name"] == "text_completion"
    )


async def test_sampling_is_the_clients_or_by_ratio(spans: Collector) -> None:
    async with application(otel_endpoint=spans.url, otel_sample_ratio=0.0) as (client, _):
        for headers in ({}, {"traceparent": UNSAMPLED}, {"traceparent": PARENT}):
            await ask(client, headers)
    assert {span.trace for span in spans.spans} == {CLIENT} and len(spans.named(SERVER)) == 1


async def test_no_span_ends_before_it_starts_when_the_clock_is_set_back(
    spans: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, hours = time.time_ns(), itertools.count()
    monkeypatch.setattr(time, "time_ns", lambda: now - next(hours) * 3600 * 10**9)
    async with application(otel_endpoint=spans.url) as (client, _):
        assert (await ask(client)).status_code == 200
    assert len(spans.spans) >= 4 and all(span.start <= span.end for span in spans.spans)
    assert spans.one(SERVER).attributes["gen_ai.latency.time_to_first_token"] >= 0


async def test_replicas_do_not_trace_what_the_first_does_not(spans: Collector) -> None:
    async with (
        replica("prefill", otel_endpoint=spans.url) as (url, _),
        replica(
            "decode", otel_endpoint=spans.url, otel_sample_ratio=0.0, prefill_urls=(url,), prefill_min_tokens=0
        ) as (front, _),
        httpx.AsyncClient(base_url=front) as client,
    ):
        assert (await ask(client)).status_code == 200
    assert spans.spans == []


async def test_errors_have_their_code_and_no_text(spans: Collector) -> None:
    async with application(otel_endpoint=spans.url, api_keys=("key",)) as (client, _):
        key = {"authorization": "Bearer key"}
        await ask(client)
        await ask(client, key, temperature="my secret")
        await ask(client, key, model="my secret")
        await ask(client, key, max_tokens=10**6)
        await client.post("/v1/my-secret", headers=key)
        await client.get("/v1/models", headers=key)
    codes = [
        (span.attributes["http.response.status_code"], span.attributes["error.type"])
        for span in spans.spans
        if span.kind == "server"
    ]
    assert codes == [
        (401, "invalid_api_key"),
        (400, "invalid_request_error"),
        (404, "model_not_found"),
        (400, "context_length_exceeded"),
        (404, "unknown_url"),
    ]
    assert spans.named("POST") and not any(b"secret" in span.raw for span in spans.spans)
    assert not any(span.failed for span in spans.spans), "the client's mistakes"


async def test_an_error_within_a_stream_fails_the_span(spans: Collector) -> None:
    async with application(otel_endpoint=spans.url, fake_token_delay_ms=5, request_timeout_seconds=0.1) as (client, _):
        answer = await ask(client, stream=True, max_tokens=1000, ignore_eos=True)
        assert "deadline_exceeded" in answer.text
    request, decode = spans.one(SERVER), spans.one("decode")
    assert (request.failed, request.attributes["error.type"], request.attributes["http.response.status_code"]) == (
        True,
        "deadline_exceeded",
        200,
    )
    assert (decode.failed, decode.attributes["error.type"]) == (True, "DeadlineExceeded")


async def test_a_client_that_goes_leaves_a_trace_and_no_error(spans: Collector) -> None:
    async with (
        replica("aggregated", otel_endpoint=spans.url, fake_token_delay_ms=5) as (url, _),
        httpx.AsyncClient(base_url=url) as client,
    ):
        body = CHAT | {"stream": True, "max_tokens": 1000, "ignore_eos": True}
        async with client.stream("POST", "/v1/chat/completions", json=body) as answer:
            await anext(answer.aiter_lines())
        decode = await asyncio.to_thread(spans.one, "decode")
    assert decode.attributes["trellis.cancelled"] and not decode.failed and not spans.one(SERVER).failed


async def test_requests_that_wait_for_their_turn_keep_their_traces(spans: Collector) -> None:
    """One sequence runs at a time: each request is let in by the end of another."""
    async with (
        replica("prefill", otel_endpoint=spans.url) as (url, _),
        replica("decode", otel_endpoint=spans.url, max_batch_size=1, prefill_urls=(url,), prefill_min_tokens=0) as (
            front,
            _,
        ),
        httpx.AsyncClient(base_url=front) as client,
    ):
        await asyncio.gather(*(ask(client, fake=index) for index in range(5)))
    by_trace: dict[str, set[str]] = {}
    for span in spans.spans:
        by_trace.setdefault(span.trace, set()).add(f"{span.of['trellis.role']} {span.name}")
    assert len(by_trace) == 5
    for names in by_trace.values():
        assert {
            f"decode {SERVER}",
            "decode POST /prefill",
            "prefill POST /prefill",
            "prefill prefill",
            "decode decode",
        } <= names


async def test_a_prefill_replica_that_fails_is_in_the_trace(spans: Collector) -> None:
    async with (
        replica("prefill", otel_endpoint=spans.url) as (url, life),
        replica("decode", otel_endpoint=spans.url, prefill_urls=(url,), prefill_min_tokens=0) as (front, _),
        httpx.AsyncClient(base_url=front) as client,
    ):
        assert life.engine is not None
        await life.engine.close()
        assert (await ask(client)).status_code == 200
    asked = spans.one("POST /prefill", "decode")
    assert asked.failed and asked.attributes["error.type"] == "EngineNotReady"
    assert not spans.one(SERVER, "decode").failed


async def test_the_context_goes_on_into_tensorrt_llm(
    spans: Collector,
    trt: Any,  # noqa: F811
    tmp_path: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from engine.config import TrtllmConfig  # noqa: PLC0415
    from engine.trtllm.engine import TrtllmEngine  # noqa: PLC0415
    from engine.types import GenerateRequest, SamplingParams  # noqa: PLC0415

    (tmp_path / "config.json").write_text('{"vocab_size": 512, "max_position_embeddings": 4096, "eos_token_id": 2}')
    generate, headers = trt.LLM.generate_async, list[Any]()

    def noting(self: Any, *args: Any, **keywords: Any) -> Any:
        result = generate(self, *args, **keywords)
        headers.append(result.trace_headers)
        return result

    monkeypatch.setattr(trt.LLM, "generate_async", noting)
    engine = TrtllmEngine(TrtllmConfig(model=str(tmp_path), arguments={"enable_iter_perf_stats": True}))
    await engine.start()
    try:
        for trace in ({}, {"traceparent": PARENT, "tracestate": "vendor=one"}):
            request = GenerateRequest(
                request_id="r", prompt_token_ids=(5, 6), sampling=SamplingParams(max_tokens=2), trace=trace
            )
            assert [delta async for delta in engine.generate(request)]
    finally:
        await engine.close()
    assert headers[-2:] == [None, {"traceparent": PARENT, "tracestate": "vendor=one"}]


async def test_the_engine_is_told_the_context_of_its_replica(spans: Collector) -> None:
    """On prefill: that of its own span, not of the decode replica's."""
    async with (
        replica("prefill", otel_endpoint=spans.url) as (url, life),
        replica("decode", otel_endpoint=spans.url, prefill_urls=(url,), prefill_min_tokens=0) as (front, _),
        httpx.AsyncClient(base_url=front) as client,
    ):
        assert life.engine is not None
        told, generate = list[str](), life.engine.generate

        def noting(request: Any) -> Any:
            told.append(request.trace["traceparent"])
            return generate(request)

        life.engine.generate = noting  # type: ignore[method-assign]
        await ask(client)
    request = spans.one("POST /prefill", "prefill")
    assert [context.split("-")[:3] for context in told] == [["00", request.trace, request.id]]


async def test_a_router_is_in_the_trace_with_each_replica_that_it_asks(spans: Collector) -> None:
    async with (
        Bare(b"") as bare,
        replica("aggregated", otel_endpoint=spans.url) as (url, _),
        router([bare.url, url], otel_endpoint=spans.url, route_policy="round_robin") as (front, _),
        httpx.AsyncClient(base_url=front) as client,
    ):
        assert (await ask(client, {"traceparent": PARENT}, stream=True)).headers["x-trellis-replica"] == "1"
    routed, answered = spans.one(SERVER, "router"), spans.one(SERVER, "aggregated")
    first, second = sorted(spans.named("route"), key=lambda span: span.start)
    assert {span.trace for span in (routed, answered, first, second)} == {CLIENT}
    assert (first.parent, second.parent, answered.parent) == (routed.id, routed.id, second.id)
    assert (first.failed, first.attributes["error.type"], second.failed) == (True, "ConnectionFailed", False)
    assert [span.attributes["trellis.replica"] for span in (first, second)] == [0, 1]
    assert_within(second, routed)
