"""The whole server on TensorRT-LLM's backend.

The engine process runs the fake package, with the default model's real tokens.
"""

import json
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import pytest

from tests.support.engine_cases import FAKE_TRTLLM
from tests.support.environment import python_path
from tests.support.servers import ServerProcess, serving

EMBEDDED = {"dtype": "float32", "device": "cpu", "threads": 1, "kv_cache_memory_mb": 128}
ENVIRONMENT = {
    "PYTHONPATH": python_path(FAKE_TRTLLM),
    "FAKE_TRTLLM_ENGINE": "embedded",
    "FAKE_TRTLLM_CONFIG": json.dumps(EMBEDDED),
}
LONG = {"messages": [{"role": "user", "content": "Count."}], "max_tokens": 400, "ignore_eos": True}


@pytest.fixture(scope="module")
def server(smollm2: Path) -> Iterator[ServerProcess]:
    flags = (
        "--engine",
        "trtllm",
        "--model",
        str(smollm2),
        "--served-model-name",
        "smol",
        "--publish-kv-events",
        "true",
        "--trtllm-sampling",
        "processors",
    )
    with serving(*flags, environment=ENVIRONMENT) as server:
        yield server


@pytest.fixture
def client(server: ServerProcess) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


def test_chat_streamed_and_whole_are_the_same(client: openai.OpenAI) -> None:
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    whole = client.chat.completions.create(model="smol", messages=messages, max_tokens=20, temperature=0)
    assert "Paris" in (whole.choices[0].message.content or "")
    assert whole.choices[0].finish_reason == "stop" and whole.usage is not None
    stream = client.chat.completions.create(
        model="smol",
        messages=messages,
        max_tokens=20,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    assert (
        "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
        == whole.choices[0].message.content
    )
    usage = chunks[-1].usage
    assert usage is not None and usage.completion_tokens == whole.usage.completion_tokens


def test_logprobs_seeds_stops_and_several_choices(client: openai.OpenAI) -> None:
    answer = client.completions.create(
        model="smol", prompt="One, two, three,", max_tokens=6, temperature=0, logprobs=2, n=2
    )
    assert answer.choices[0].text == answer.choices[1].text
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None and logprobs.tokens is not None and "".join(logprobs.tokens) == answer.choices[0].text
    stopped = client.completions.create(
        model="smol", prompt="One, two, three,", max_tokens=20, temperature=0, stop=" five"
    )
    assert stopped.choices[0].finish_reason == "stop" and " five" not in stopped.choices[0].text
    drawn = [
        client.completions.create(model="smol", prompt="Once", max_tokens=8, seed=5).choices[0].text for _ in range(2)
    ]
    assert drawn[0] == drawn[1]


def test_structured_output(client: openai.OpenAI) -> None:
    messages = [{"role": "user", "content": "Is the sky blue?"}]
    answer = client.chat.completions.create(
        model="smol", messages=messages, max_tokens=10, extra_body={"guided_choice": ["yes.", "no."]}
    )
    assert answer.choices[0].message.content in ("yes.", "no.")


def test_prefixes_are_reused_and_reported(client: openai.OpenAI) -> None:
    prompt = "A long story about a fox. " * 20
    for expected in (False, True):
        usage = client.completions.create(model="smol", prompt=prompt, max_tokens=1).usage
        assert usage is not None and usage.prompt_tokens_details is not None
        assert bool(usage.prompt_tokens_details.cached_tokens) == expected


def test_a_client_that_goes_frees_the_engine(server: ServerProcess) -> None:
    with httpx.stream(
        "POST", f"{server.url}/v1/chat/completions", json={**LONG, "max_tokens": 2500, "stream": True}, timeout=30
    ) as answer:
        lines = answer.iter_lines()  # kept: the stream is closed with it
        next(lines)
        server.wait_metric("trtllm_num_requests_running", 1, timeout=20)
    server.wait_metric("trtllm_num_requests_running", 0, timeout=20)


def test_too_long_is_400_and_the_next_request_is_answered(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model="smol", prompt="x", max_tokens=9000)
    assert caught.value.code == "context_length_exceeded"
    assert client.completions.create(model="smol", prompt="x", max_tokens=1).choices[0].text is not None


def test_a_killed_engine_comes_back(server: ServerProcess) -> None:
    with httpx.stream("POST", f"{server.url}/v1/chat/completions", json={**LONG, "stream": True}, timeout=30) as answer:
        lines = answer.iter_lines()
        next(lines)
        server.child("engine.process.host").kill()
        last = [line for line in lines if line.startswith("data: ")][-1]
    assert json.loads(last.removeprefix("data: "))["error"]["code"] == "engine_died"
    deadline = time.monotonic() + 60
    while httpx.get(f"{server.url}/health/ready").status_code != 200:
        assert time.monotonic() < deadline, server.log
        time.sleep(0.1)
    answered = httpx.post(f"{server.url}/v1/chat/completions", json={**LONG, "max_tokens": 2}, timeout=30)
    assert answered.status_code == 200
