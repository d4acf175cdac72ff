"""A server in a process of its own, with OpenAI's client and with bare sockets."""

import asyncio
import contextlib
import json
import socket
import threading
import time
from collections.abc import Iterator

import httpx
import openai
import pytest

from tests.support.servers import CHAT, ServerProcess, serving
from tests.support.waiting import slowness

MESSAGES: list[openai.types.chat.ChatCompletionMessageParam] = [{"role": "user", "content": "hello"}]
LONG = {**CHAT, "max_tokens": 20000, "ignore_eos": True}


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with serving() as server:
        yield server


@pytest.fixture(scope="module")
def slow() -> Iterator[ServerProcess]:
    """A token every half second."""
    with serving(
        "--fake-token-delay-ms",
        "500",
        "--sse-ping-seconds",
        "0.1",
        "--body-timeout-seconds",
        "0.3",
        "--max-queue-size",
        "0",
        "--keep-alive-seconds",
        "1",
    ) as server:
        yield server


def client_of(server: ServerProcess) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


def test_sdk(server: ServerProcess) -> None:
    with client_of(server) as client:
        assert [model.id for model in client.models.list()] == ["fake"]
        assert client.models.retrieve("fake").id == "fake"
        chat = client.chat.completions.create(model="fake", messages=MESSAGES, max_tokens=9)
        assert chat.usage is not None
        assert chat.usage.completion_tokens == 9
        assert client.completions.create(model="fake", prompt="abc", max_tokens=3).choices[0].text == "abc"
        raw = client.chat.completions.with_raw_response.create(
            model="fake", messages=MESSAGES, max_tokens=1, extra_headers={"x-request-id": "mine"}
        )
        assert raw.request_id == "mine"


def test_sdk_stream(server: ServerProcess) -> None:
    with client_of(server) as client:
        whole = client.chat.completions.create(model="fake", messages=MESSAGES, max_tokens=50)
        options: openai.types.chat.ChatCompletionStreamOptionsParam = {"include_usage": True}
        stream = client.chat.completions.create(
            model="fake", messages=MESSAGES, max_tokens=50, stream=True, stream_options=options
        )
        chunks = list(stream)
    assert (
        "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
        == whole.choices[0].message.content
    )
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices and chunk.choices[0].finish_reason] == [
        "length"
    ]
    assert chunks[-1].usage == whole.usage


async def test_sdk_async(server: ServerProcess) -> None:
    async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
        answers = await asyncio.gather(
            *(client.completions.create(model="fake", prompt=f"{n}", max_tokens=1) for n in range(10))
        )
        assert [answer.choices[0].text for answer in answers] == [str(n) for n in range(10)]
        stream = await client.completions.create(model="fake", prompt="abc", max_tokens=6, stream=True)
        assert "".join([chunk.choices[0].text async for chunk in stream]) == "abcabc"


def test_sdk_errors(server: ServerProcess) -> None:
    with client_of(server) as client:
        with pytest.raises(openai.NotFoundError) as missing:
            client.chat.completions.create(model="gpt-7", messages=MESSAGES)
        assert missing.value.code == "model_not_found"
        for stream in (False, True):
            with pytest.raises(openai.BadRequestError) as long:
                client.completions.create(model="fake", prompt="x", max_tokens=10**6, stream=stream)
            assert long.value.code == "context_length_exceeded"
    with serving("--api-keys", "right") as closed:
        wrong = openai.OpenAI(base_url=f"{closed.url}/v1", api_key="wrong")
        with wrong as client, pytest.raises(openai.AuthenticationError):
            client.models.list()
        with openai.OpenAI(base_url=f"{closed.url}/v1", api_key="right") as client:
            assert client.models.retrieve("fake").id == "fake"


def test_500_streams_at_once(server: ServerProcess) -> None:
    async def one() -> int:
        reader, writer = await asyncio.open_connection("127.0.0.1", int(server.url.rpartition(":")[2]))
        writer.write(raw_request({**CHAT, "max_tokens": 60, "stream": True, "stream_options": {"include_usage": True}}))
        received = await reader.readuntil(b"data: [DONE]\n\n")
        writer.close()
        return int(received.rpartition(b'"completion_tokens":')[2].partition(b",")[0])

    async def all_at_once() -> list[int]:
        return await asyncio.gather(*(one() for _ in range(500)))

    assert asyncio.run(all_at_once()) == [60] * 500
    server.wait_metric("trtllm_kv_cache_used_blocks", 0)
    server.wait_metric("trtllm_num_requests_running", 0)


def request(server: ServerProcess, body: dict[str, object]) -> socket.socket:
    """A connection that has sent a request."""
    connection = socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2])), timeout=10)
    connection.sendall(raw_request(body))
    return connection


def raw_request(body: dict[str, object]) -> bytes:
    content = json.dumps(body).encode()
    head = "POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    return f"{head}content-length: {len(content)}\r\n\r\n".encode() + content


def until(connection: socket.socket, mark: bytes) -> bytes:
    """All that is received up to `mark`, or to the end of the connection."""
    received = b""
    while mark not in received and (data := connection.recv(65536)):
        received += data
    return received


@pytest.mark.parametrize("stream", [True, False])
def test_client_gone_frees_the_engine(slow: ServerProcess, stream: bool) -> None:
    aborted = slow.metric("trtllm_engine_aborted_requests_total")
    connections = [request(slow, {**LONG, "stream": stream, "n": 2}) for _ in range(5)]
    slow.wait_metric("trtllm_num_requests_running", 10)
    for connection in connections:
        connection.close()
    slow.wait_metric("trtllm_num_requests_running", 0)
    slow.wait_metric("trtllm_kv_cache_used_blocks", 0)
    assert slow.metric("trtllm_engine_aborted_requests_total") == aborted + 10


@pytest.mark.slow
def test_client_gone_before_the_first_token() -> None:
    """Its sequence waits in the queue, since another has the engine's only place."""
    seconds = 2 * slowness()
    flags = ("--fake-token-delay-ms", "200", "--engine-process", "false", "--queue-timeout-seconds", str(seconds))
    with serving(*flags) as server:
        with contextlib.ExitStack() as running:
            for _ in range(8):
                running.enter_context(request(server, {**LONG, "max_tokens": 500, "stream": True, "n": 128}))
            server.wait_metric("trtllm_num_requests_running", 1024)
            with request(server, {**LONG, "stream": True}):
                server.wait_metric("trtllm_num_requests_waiting", 1)
            server.wait_metric("trtllm_num_requests_waiting", 0, timeout=0.75 * seconds)
            late = httpx.post(f"{server.url}/v1/chat/completions", json={**LONG, "stream": True}, timeout=10 * seconds)
            assert (late.status_code, late.json()["error"]["code"]) == (503, "queue_timeout")
            assert late.headers["retry-after"]
        server.wait_metric("trtllm_num_requests_running", 0)


def test_keep_alive_comments(slow: ServerProcess) -> None:
    with request(slow, {**CHAT, "stream": True, "max_tokens": 3}) as connection:
        received = until(connection, b"[DONE]")
    assert received.count(b": keep-alive\n\n") >= 4
    assert b"\r\ndata: {" in received


def test_slow_body(slow: ServerProcess) -> None:
    port = int(slow.url.rpartition(":")[2])
    with socket.create_connection(("127.0.0.1", port), timeout=20) as connection:
        connection.sendall(
            b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: 50\r\n\r\n{"
        )
        answer = until(connection, b"never")
    assert answer.startswith(b"HTTP/1.1 408 ")
    assert b'"code":"request_timeout"' in answer


def test_headers_too_large(slow: ServerProcess) -> None:
    port = int(slow.url.rpartition(":")[2])
    for head in (
        b"GET /" + b"x" * (1 << 20),
        b"GET / HTTP/1.1\r\na: " + b"x" * (1 << 20),
        b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * (1 << 17),
    ):
        with socket.create_connection(("127.0.0.1", port), timeout=20) as connection:
            sender = threading.Thread(target=_send_ignoring_reset, args=(connection, head))
            sender.start()
            with contextlib.suppress(ConnectionResetError):
                assert until(connection, b"431").startswith(b"HTTP/1.1 431 ")
            sender.join()
    assert httpx.get(f"{slow.url}/health").status_code == 200


@pytest.mark.parametrize(
    ("sent", "status", "code"),
    [
        (b"GET / HTTP/1.1\r\nhost: x\r\n", 408, "request_timeout"),
        (b"PO", 408, "request_timeout"),
        (b"nonsense\r\n\r\n", 400, None),
        (b"GET /\xff HTTP/1.1\r\n\r\n", 400, None),
        (b"GET / HTTP/1.1\r\na: " + b"x" * 70_000, 431, "headers_too_large"),
    ],
)
def test_malformed_requests_get_the_error_envelope(
    slow: ServerProcess, sent: bytes, status: int, code: str | None
) -> None:
    with connected(slow) as connection:
        connection.sendall(sent)
        head, _, body = until(connection, b"never").partition(b"\r\n\r\n")
    assert head.startswith(f"HTTP/1.1 {status} ".encode())
    assert b"x-request-id: " in head
    error = json.loads(body)["error"]
    assert (error["type"], error["code"]) == ("invalid_request_error", code)


@pytest.mark.parametrize("sent", [b"", b"\r\n", b"GET /health/live HTTP/1.1\r\nhost: x\r\n\r\n"])
def test_silent_connections_are_closed(slow: ServerProcess, sent: bytes) -> None:
    with connected(slow) as connection:
        connection.sendall(sent)
        until(connection, b"never")


def connected(server: ServerProcess) -> socket.socket:
    return socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2])), timeout=20)


def _send_ignoring_reset(connection: socket.socket, data: bytes) -> None:
    with contextlib.suppress(OSError):
        connection.sendall(data)


def test_engine_killed_ends_streams_with_an_error_and_comes_back(slow: ServerProcess) -> None:
    host = slow.child("engine.process.host")
    with request(slow, {**LONG, "stream": True}) as connection:
        until(connection, b"data: ")
        whole = threading.Thread(target=_expect_engine_died, args=(slow,))
        whole.start()
        slow.wait_metric("trtllm_num_requests_running", 2)
        host.kill()
        received = until(connection, b"\r\n0\r\n\r\n")
    whole.join()
    assert b"[DONE]" not in received
    last = received.rpartition(b"data: ")[2].partition(b"\n\n")[0]
    assert json.loads(last)["error"]["code"] == "engine_died"
    answer = httpx.get(f"{slow.url}/health/ready")
    assert answer.status_code == 503
    assert answer.headers["retry-after"]
    deadline = time.monotonic() + 20
    while httpx.get(f"{slow.url}/health/ready").status_code != 200:
        assert time.monotonic() < deadline
        time.sleep(0.1)
    assert httpx.post(f"{slow.url}/v1/chat/completions", json={**CHAT, "max_tokens": 1}, timeout=10).status_code == 200


def _expect_engine_died(server: ServerProcess) -> None:
    answer = httpx.post(f"{server.url}/v1/chat/completions", json=LONG, timeout=30)
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "engine_died")
