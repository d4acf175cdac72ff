"""Prefill and decode replicas as processes against one aggregated server.

OpenAI's client asks both. Some tests measure what a fault costs its users.
"""

import asyncio
import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest

from tests.support.disaggregated import BEARER, cluster, servers, wait_empty
from tests.support.servers import CHAT, ROOT, ServerProcess
from tests.support.waiting import slowness

LONG = {**CHAT, "max_tokens": 30, "ignore_eos": True, "stream": True}
SLOW = ("--fake-token-delay-ms", "30")


@pytest.fixture(scope="module")
def replicas() -> Iterator[tuple[list[ServerProcess], ServerProcess, ServerProcess]]:
    with cluster(2) as (prefill, decode), servers(()) as (whole,):
        yield prefill, decode, whole


def client_of(server: ServerProcess) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=20)


def said(answer: dict[str, Any]) -> dict[str, Any]:
    """An answer without its id, times and other unique values."""
    return {name: value for name, value in answer.items() if name not in ("id", "created", "system_fingerprint")}


def streamed(client: openai.OpenAI, fields: dict[str, Any]) -> list[Any]:
    """The chunks by choice, since those of several come in any order, and the usage."""
    stream = client.chat.completions.create(model="fake", stream=True, stream_options={"include_usage": True}, **fields)
    chunks = [said(chunk.model_dump()) for chunk in stream]
    text: dict[int, str] = {}
    ends: dict[int, Any] = {}
    for choice in (choice for chunk in chunks for choice in chunk["choices"]):
        text[choice["index"]] = text.get(choice["index"], "") + (choice["delta"]["content"] or "")
        ends[choice["index"]] = choice["finish_reason"] or ends.get(choice["index"])
    return [text, ends, chunks[-1]["usage"]]


CASES: list[dict[str, Any]] = [
    {"max_tokens": 40},
    {"max_tokens": 1},
    {"max_tokens": 30, "stop": ["wor"]},
    {"max_tokens": 30, "stop": ["hel", "zzz"]},
    {"max_tokens": 25, "logprobs": True, "top_logprobs": 2},
    {"max_tokens": 12, "n": 3},
    {"max_tokens": 20, "temperature": 0.8, "seed": 7, "presence_penalty": 0.4},
    {"max_tokens": 20, "extra_body": {"min_tokens": 5, "ignore_eos": True}},
    {"max_tokens": 5, "extra_body": {"prompt_logprobs": 1, "return_token_ids": True}},
]


@pytest.mark.parametrize("fields", CASES, ids=lambda fields: ",".join(fields))
def test_answers_are_those_of_one_server(replicas: Any, fields: dict[str, Any]) -> None:
    """Each twice, so that the second finds the prefix cached."""
    _, decode, whole = replicas
    clients = client_of(decode), client_of(whole)
    messages = [{"role": "user", "content": f"hello world, {json.dumps(fields)} " + "and so on " * 20}]
    for _ in range(2):
        answers = [
            said(client.chat.completions.create(model="fake", messages=messages, **fields).model_dump())
            for client in clients
        ]
        if fields.get("n") or "prompt_logprobs" in str(
            fields
        ):  # which finds another's blocks is a matter of time, or of the peer asked
            for answer in answers:
                del answer["usage"]["prompt_tokens_details"]
        assert answers[0] == answers[1]
    streams = [streamed(client, {"messages": messages, **fields}) for client in clients]
    if not fields.get("n") and "prompt_logprobs" not in str(fields):
        assert streams[0] == streams[1]
    assert streams[0][:2] == streams[1][:2]


def test_completions_of_several_prompts_are_those_of_one_server(replicas: Any) -> None:
    prompts = ["one " * 30, "two " * 50, "x"]
    answers = [
        said(
            client_of(server)
            .completions.create(model="fake", prompt=prompts, max_tokens=9, logprobs=1, n=2)
            .model_dump()
        )["choices"]
        for server in replicas[1:]
    ]
    assert answers[0] == answers[1] and len(answers[0]) == 6


def test_refusals_are_those_of_one_server(replicas: Any) -> None:
    for fields in ({"max_tokens": 99_999}, {"response_format": {"type": "json_object"}}):
        errors = []
        for server in replicas[1:]:
            with pytest.raises(openai.BadRequestError) as caught:
                client_of(server).chat.completions.create(model="fake", messages=CHAT["messages"], **fields)
            errors.append((caught.value.message, caught.value.code, caught.value.param))
        assert errors[0] == errors[1]


def test_prefill_replicas_are_for_decode_replicas(replicas: Any) -> None:
    prefill, decode, _ = replicas
    for server, expected in ((prefill[0], 404), (decode, 200)):
        assert httpx.get(f"{server.url}/v1/models").status_code == expected
    for headers in ({}, {"authorization": "Bearer wrong"}):
        assert httpx.post(f"{prefill[0].url}/prefill", headers=headers).status_code == 401
        assert httpx.get(f"{prefill[0].url}/prefill", headers=headers).status_code == 401
    assert httpx.post(f"{prefill[0].url}/prefill", headers=BEARER).status_code == 415
    assert "/prefill" not in httpx.get(f"{prefill[0].url}/openapi.json").text


def test_metrics_count_handoffs_and_no_blocks_are_held_afterwards(replicas: Any) -> None:
    prefill, decode, _ = replicas
    handed_over = [
        f'trtllm_prefill_requests_total{{model_name="fake",outcome="ok",peer="{peer.url}"}}' for peer in prefill
    ]
    page = ""
    while not all(line in page for line in handed_over):  # what both have not seen yet goes to each in turn
        before = decode.metric("trtllm_prefill_seconds_count")
        new = {**CHAT, "messages": [{"role": "user", "content": f"the question after {before} others"}]}
        assert httpx.post(f"{decode.url}/v1/chat/completions", json=new).status_code == 200
        assert decode.metric("trtllm_prefill_seconds_count") > before
        page = httpx.get(f"{decode.url}/metrics").text
    decode.wait_metric("trtllm_prefill_peer_available", len(prefill))
    page = httpx.get(f"{decode.url}/metrics").text
    for peer in prefill:
        assert f'trtllm_prefill_peer_available{{model_name="fake",peer="{peer.url}"}} 1.0' in page
    wait_empty(*prefill, decode)


def ask(server: ServerProcess) -> tuple[float, str]:
    """Seconds that a streaming request took, and the text it gave, or the error."""
    began = time.monotonic()
    try:
        with httpx.stream("POST", f"{server.url}/v1/chat/completions", json=LONG) as answer:
            events = [line.removeprefix("data: ") for line in answer.iter_lines() if line.startswith("data: ")]
    except httpx.HTTPError as error:
        return time.monotonic() - began, repr(error)
    if answer.status_code != 200 or events[-1] != "[DONE]":
        return time.monotonic() - began, f"{answer.status_code} {events}"
    choices = [choice for event in events[:-1] for choice in json.loads(event)["choices"]]
    return time.monotonic() - began, "".join(choice["delta"].get("content") or "" for choice in choices)


def test_killed_and_hung_prefill_replicas_cost_no_request() -> None:
    """Three prefill replicas under load: one is killed, another stopped.

    Each request ends well within ten seconds, and the replica that lives holds nothing.
    """
    with cluster(3, SLOW) as (prefill, decode):
        expected = ask(decode)[1]
        with ThreadPoolExecutor(24) as threads:
            asked = [threads.submit(ask, decode) for _ in range(24)]
            time.sleep(0.3)
            prefill[0].process.kill()
            asked += [threads.submit(ask, decode) for _ in range(24)]
            prefill[1].process.send_signal(signal.SIGSTOP)
            answers = [each.result() for each in asked]
        prefill[1].process.send_signal(signal.SIGCONT)
        assert {text for _, text in answers} == {expected}
        assert max(seconds for seconds, _ in answers) < 10 * slowness()
        wait_empty(prefill[1], prefill[2], decode)


def test_a_client_that_goes_frees_decode_and_prefill_and_so_does_a_killed_decode_replica() -> None:
    with cluster(1, ("--fake-token-delay-ms", "200")) as (prefill, decode):

        async def leave() -> None:
            async with httpx.AsyncClient() as client:
                tasks = [
                    asyncio.create_task(client.post(f"{decode.url}/v1/chat/completions", json=LONG)) for _ in range(20)
                ]
                await asyncio.sleep(0.5)
                for task in tasks:
                    task.cancel()
                await asyncio.wait(tasks)

        asyncio.run(leave())
        wait_empty(*prefill, decode)
        with ThreadPoolExecutor(8) as threads:
            asked = [threads.submit(ask, decode) for _ in range(8)]
            time.sleep(0.3)
            decode.process.kill()
            wait_empty(*prefill)
            assert all("Error" in each.result()[1] for each in asked)


def test_a_draining_prefill_replica_finishes_its_hand_overs() -> None:
    """SIGTERM arrives while prompts are held for a decode that is slow to begin.

    The decode replica computes the prompts that come later.
    """
    with cluster(1, ("--fake-token-delay-ms", "400")) as (prefill, decode), ThreadPoolExecutor(12) as threads:
        fields = {**LONG, "max_tokens": 3, "stream": False}
        asked = [
            threads.submit(httpx.post, f"{decode.url}/v1/chat/completions", json=fields, timeout=20) for _ in range(8)
        ]
        prefill[0].wait_metric("trtllm_num_requests_completed_total", 0)
        time.sleep(0.15)
        prefill[0].process.terminate()
        assert prefill[0].wait() == 0
        later = httpx.post(f"{decode.url}/v1/chat/completions", json=fields, timeout=20)
        assert {each.result().status_code for each in asked} == {later.status_code} == {200}
        assert {each.result().json()["choices"][0]["message"]["content"] for each in asked} == {
            later.json()["choices"][0]["message"]["content"]
        }
        assert decode.metric("trtllm_prefill_local_total") >= 1
        assert "cut off" not in prefill[0].log


def test_a_decode_replica_without_prefill_and_local_prompts_is_not_ready() -> None:
    """It becomes ready with its first peer, and again refuses when that has gone."""
    with servers(("--disaggregation-mode", "prefill")) as (prefill,):
        flags = ("--disaggregation-mode", "decode", "--prefill-urls", prefill.url, "--prefill-fallback", "refuse")
        with servers(flags) as (decode,):
            assert httpx.get(f"{decode.url}/health/ready").status_code == 200
            assert httpx.post(f"{decode.url}/v1/chat/completions", json=CHAT).status_code == 200
            prefill.process.kill()
            refused = httpx.post(f"{decode.url}/v1/chat/completions", json=CHAT, timeout=20)
            assert refused.status_code == 503 and refused.headers["retry-after"]
            assert "http" not in refused.text and "cannot be reached" in refused.json()["error"]["message"]
            assert httpx.get(f"{decode.url}/health/ready").status_code == 503
            assert httpx.get(f"{decode.url}/health/live").status_code == 200


def test_one_command_says_that_it_lacks_the_api_key_and_stops_what_it_started() -> None:
    command = [sys.executable, str(ROOT / "deploy/disaggregated.py"), "--engine", "fake", "--api-keys", "secret"]
    command += ["--prefill", "1", "--decode", "1"]
    command += ["--open-probes", "false"]  # else nothing is asked that needs a key
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (
        ended.returncode == 1 and "set API_KEYS in the environment" in ended.stderr and "Traceback" not in ended.stderr
    )
