"""The WebSocket mode of /v1/responses, on servers in threads: OpenAI's SDK and plain clients."""

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pydantic
import pytest
from openai.types.responses import ResponsesServerEvent
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import ClientConnection, connect

from routers.responses import websocket as sessions
from tests.support.servers import ServerThread
from tests.support.waiting import slowness

PATH = "/v1/responses"
EVENT: pydantic.TypeAdapter[Any] = pydantic.TypeAdapter(ResponsesServerEvent)
HANDSHAKE = f"GET {PATH} HTTP/1.1\r\nhost: x\r\nconnection: upgrade\r\nupgrade: websocket\r\n"
KEY = "sec-websocket-version: 13\r\nsec-websocket-key: AAAAAAAAAAAAAAAAAAAAAA==\r\n"
LONG = {"max_output_tokens": 20000, "ignore_eos": True}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerThread]:
    """A token every 5 ms; responses are stored."""
    with ServerThread(
        fake_token_delay_ms=5,
        cache_dir=tmp_path_factory.mktemp("cache"),
        responses_store_mb=64,
        max_body_mb=0.25,
        cors_origins="https://chat.example.com",
    ) as found:
        yield found


def opened(server: ServerThread, path: str = PATH, **options: Any) -> ClientConnection:
    return connect(f"ws://127.0.0.1:{server.port}{path}", compression=None, max_queue=None, **options)


def ask(client: ClientConnection, **fields: Any) -> None:
    body = {"type": "response.create", "model": "fake", "input": "hi", "max_output_tokens": 4}
    client.send(json.dumps(body | fields))


def event(client: ClientConnection) -> dict[str, Any]:
    """The next event, as the SDK's types allow it."""
    found: dict[str, Any] = json.loads(client.recv(timeout=20 * slowness()))
    EVENT.validate_python(found)
    return found


def events(client: ClientConnection) -> list[dict[str, Any]]:
    """All events to the end of a response, which are numbered one after the other."""
    found = [event(client)]
    while found[-1]["type"] not in ("response.completed", "response.incomplete", "response.failed", "error"):
        found.append(event(client))
    assert [one["sequence_number"] for one in found if one["type"] != "error"] == list(
        range(len(found) - (found[-1]["type"] == "error"))
    )
    return found


def answer(client: ClientConnection, **fields: Any) -> dict[str, Any]:
    ask(client, **fields)
    last = events(client)[-1]
    assert last["type"] != "error", last
    response: dict[str, Any] = last["response"]
    return response


def error(client: ClientConnection, **fields: Any) -> dict[str, Any]:
    ask(client, **fields)
    found = event(client)
    assert found["type"] == "error", found
    return found


def receive(client: socket.socket) -> bytes:
    found = client.recv(1 << 16)
    assert found, "the connection has ended"
    return found


def wait_for(done: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20 * slowness()
    while not done():
        assert time.monotonic() < deadline
        time.sleep(0.005)


@pytest.mark.filterwarnings("ignore:connect.. must be used as a context manager")
def test_the_sdk_connects_and_continues(server: ServerThread) -> None:
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="unused")
    with client.responses.connect() as connection:
        previous = None
        for _ in range(2):
            connection.response.create(
                model="fake", input="hi", max_output_tokens=4, store=False, previous_response_id=previous
            )
            seen = []
            for found in connection:
                seen.append(found.type)
                if found.type == "response.incomplete":
                    assert found.response.previous_response_id == previous
                    previous = found.response.id
                    break
            assert seen[:2] == ["response.created", "response.in_progress"]
            assert "response.output_text.delta" in seen


def test_events_are_those_of_a_stream(server: ServerThread) -> None:
    body = {"model": "fake", "input": "hi", "max_output_tokens": 4, "seed": 1}
    lines = httpx.post(f"{server.url}{PATH}", json=body | {"stream": True}).text.splitlines()
    streamed = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    with opened(server) as client:
        ask(client, **body)
        found = events(client)
    assert [one["type"] for one in found] == [one["type"] for one in streamed]
    assert [one.get("delta") for one in found] == [one.get("delta") for one in streamed]
    assert httpx.get(f"{server.url}{PATH}/{found[-1]['response']['id']}").json() == found[-1]["response"]


def test_unstored_responses_are_known_to_their_connection_alone(server: ServerThread) -> None:
    with opened(server) as client, opened(server) as other:
        first = answer(client, store=False)
        second = answer(client, store=False, previous_response_id=first["id"])
        third = answer(client, previous_response_id=second["id"])
        assert third["usage"]["input_tokens"] > second["usage"]["input_tokens"] > first["usage"]["input_tokens"]
        assert answer(client, previous_response_id=third["id"])["status"] == "incomplete"
        item = {"type": "item_reference", "id": first["output"][0]["id"]}
        assert answer(client, input=[item, {"role": "user", "content": "go on"}])["status"] == "incomplete"
        found = error(other, previous_response_id=first["id"])
        assert (found["status"], found["error"]["code"]) == (400, "previous_response_not_found")
        assert httpx.get(f"{server.url}{PATH}/{first['id']}").status_code == 404


def test_what_cannot_be_stored_is_known_to_the_connection(tmp_path: Path) -> None:
    (tmp_path / "responses.sqlite3").write_text("this is no database, and long enough to be looked at" * 100)
    with ServerThread(cache_dir=tmp_path, responses_store_mb=64) as server, opened(server) as client:
        first = answer(client)
        assert first["store"] is False
        assert answer(client, previous_response_id=first["id"])["status"] == "incomplete"


def test_a_failed_continuation_forgets_what_it_continues(server: ServerThread) -> None:
    with opened(server) as client:
        first = answer(client, store=False)
        output = {"type": "function_call_output", "call_id": "call_of_nobody", "output": "1"}
        assert error(client, previous_response_id=first["id"], input=[output])["error"]["param"] == "input.0.call_id"
        found = error(client, previous_response_id=first["id"])
        assert found["error"]["code"] == "previous_response_not_found"
        second = answer(client, store=False)
        assert error(client, previous_response_id=second["id"], temperature=-1)["error"]["param"] == "temperature"
        found = error(client, previous_response_id=second["id"])
        assert found["error"]["code"] == "previous_response_not_found"
        assert answer(client)["status"] == "incomplete"


def test_the_oldest_unstored_responses_are_forgotten(server: ServerThread, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions, "MAX_KEPT", 1)
    with opened(server) as client:
        first, second = answer(client, store=False), answer(client, store=False)
        assert error(client, previous_response_id=first["id"])["error"]["code"] == "previous_response_not_found"
        assert answer(client, store=False, previous_response_id=second["id"])["status"] == "incomplete"


def test_the_bytes_of_unstored_responses_are_bounded(server: ServerThread) -> None:
    with opened(server) as client:
        first = answer(client, store=False)
        for _ in range(9):
            answer(client, store=False, input="x" * 30_000)
        assert error(client, previous_response_id=first["id"])["error"]["code"] == "previous_response_not_found"


@pytest.mark.parametrize(
    ("sent", "status", "param"),
    [
        ("no JSON", 400, None),
        ("[]", 400, None),
        ('{"type": "response.steer", "stream_id": "a"}', 400, "type"),
        ('{"model": "fake", "input": "hi"}', 400, "type"),
        ('{"type": "response.create", "model": "fake", "input": "hi", "background": true}', 400, "background"),
        ('{"type": "response.create", "model": "other", "input": "hi"}', 404, "model"),
        (b'{"type": "response.create"}', 400, None),
        (json.dumps([1] * 300_000)[:200_000], 400, None),
    ],
)
def test_errors_keep_the_connection(server: ServerThread, sent: str | bytes, status: int, param: str | None) -> None:
    with opened(server) as client:
        client.send(sent)
        found = event(client)
        assert (found["type"], found["status"], found["error"]["param"]) == ("error", status, param)
        assert found.get("stream_id") == ("a" if "steer" in str(sent) else None)
        assert answer(client)["status"] == "incomplete"


def test_a_prompt_is_computed_without_output(server: ServerThread) -> None:
    with opened(server) as client:
        ask(client, generate=False, store=False, max_output_tokens=None)
        found = events(client)
        assert [one["type"] for one in found] == ["response.created", "response.in_progress", "response.completed"]
        warm = found[-1]["response"]
        assert (warm["output"], warm["usage"]["output_tokens"]) == ([], 1)
        response = answer(client, previous_response_id=warm["id"], input="go on")
        assert response["usage"]["input_tokens"] > warm["usage"]["input_tokens"]


def test_lanes_run_beside_each_other_and_each_in_order(server: ServerThread) -> None:
    with opened(server) as client:
        ask(client, stream_id="slow", **LONG)
        assert event(client)["stream_id"] == "slow"
        ask(client, stream_id="slow", metadata={"n": "2"})
        for number in ("1", "2"):
            ask(client, stream_id="fast", metadata={"n": number})
        done: list[str] = []
        while len(done) < 2:
            found = event(client)
            if found["stream_id"] == "fast":
                if found["type"] == "response.incomplete":
                    done.append(found["response"]["metadata"]["n"])
            else:
                assert "response" not in found or found["response"]["metadata"] == {}
        assert done == ["1", "2"]


def test_turns_and_lanes_are_limited(server: ServerThread, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions, "MAX_TURNS", 2)
    monkeypatch.setattr(sessions, "MAX_LANES", 1)

    def refused(client: ClientConnection, **fields: Any) -> str:
        ask(client, **fields)
        while (found := event(client))["type"] != "error":
            pass
        return str(found["error"]["message"])

    with opened(server) as client:
        ask(client, stream_id="a", **LONG)
        assert "lanes" in refused(client, stream_id="b")
        ask(client, **LONG)
        assert "At most 2 responses" in refused(client)
    wait_for(lambda: server.replica.running == 0)
    with opened(server) as client:
        ask(client, **LONG)
        assert "bytes of requests" in refused(client, input="x" * 262_000)


def test_a_client_that_leaves_ends_its_responses(server: ServerThread) -> None:
    for leave in (lambda client: client.close(), lambda client: client.socket.shutdown(socket.SHUT_RDWR)):
        with opened(server) as client:
            ask(client, **LONG)
            ask(client, **LONG)  # waits
            event(client)
            assert server.replica.running == 1
            leave(client)
            wait_for(lambda: server.replica.running == 0)


def test_messages_are_limited_as_bodies_are(server: ServerThread) -> None:
    with opened(server) as client:
        client.send("x" * (1 << 18) + "x")
        with pytest.raises(ConnectionClosed) as closed:
            client.recv(timeout=20 * slowness())
    assert closed.value.rcvd is not None
    assert closed.value.rcvd.code == 1009


def test_pages_of_other_origins_are_refused(server: ServerThread) -> None:
    own = f"http://127.0.0.1:{server.port}"
    for origin in (own, "https://chat.example.com"):
        with opened(server, origin=origin) as client:
            assert answer(client)["status"] == "incomplete"
    for origin in ("https://evil.example.com", "null", "http://127.0.0.1", "http://["):
        with pytest.raises(InvalidStatus) as refused:
            opened(server, origin=origin)
        assert refused.value.response.status_code == 403
        assert json.loads(refused.value.response.body or b"")["error"]["type"] == "permission_error"


def test_other_routes_and_handshakes(server: ServerThread) -> None:
    for path, status in (("/v1/models", 200), ("/v1/responses/x", 404), ("/nowhere", 404), ("/v1/completions", 405)):
        with pytest.raises(InvalidStatus) as refused:
            opened(server, path)
        assert refused.value.response.status_code == status, path
    with pytest.raises(InvalidStatus) as refused:
        opened(server, additional_headers={f"x-{number}": "1" for number in range(200)})
    assert refused.value.response.status_code == 400
    for more in ("host: y\r\n", "", KEY.replace("13", "12"), KEY + "content-length: 1\r\n"):
        with socket.create_connection(("127.0.0.1", server.port), timeout=20 * slowness()) as client:
            client.sendall(f"{HANDSHAKE}{more}\r\n".encode())
            assert client.recv(64).startswith(b"HTTP/1.1 400"), more
    with socket.create_connection(("127.0.0.1", server.port), timeout=20 * slowness()) as client:
        post = f"GET /version HTTP/1.1\r\nhost: x\r\n\r\n{HANDSHAKE}\r\n"
        client.sendall(post.encode())
        found = b""
        while b"405" not in found:  # an offer behind a request whose answer is due is declined
            found += receive(client)


def test_request_ids_are_repeated(server: ServerThread) -> None:
    with opened(server, additional_headers={"x-request-id": "mine"}) as client:
        assert client.response is not None
        assert client.response.headers["x-request-id"] == "mine"


def test_an_old_connection_ends_after_what_runs(server: ServerThread, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions, "MAX_SECONDS", 0.05)
    with opened(server) as client:
        ask(client, max_output_tokens=50, ignore_eos=True)
        assert events(client)[-1]["type"] == "response.incomplete"
        found = event(client)
        assert found["error"]["code"] == "websocket_connection_limit_reached"
        with pytest.raises(ConnectionClosed) as closed:
            client.recv(timeout=20 * slowness())
    assert closed.value.rcvd is not None
    assert closed.value.rcvd.code == 1001


def test_keys_are_required_and_own_what_they_store(tmp_path: Path) -> None:
    with ServerThread(cache_dir=tmp_path, responses_store_mb=64, api_keys="one,two") as server:
        for headers in ({}, {"authorization": "Bearer three"}):
            with pytest.raises(InvalidStatus) as refused:
                opened(server, additional_headers=headers)
            assert refused.value.response.status_code == 401
            assert json.loads(refused.value.response.body or b"")["error"]["code"] == "invalid_api_key"
        with opened(server, additional_headers={"authorization": "Bearer one"}) as client:
            mine = answer(client)
        with opened(server, additional_headers={"x-api-key": "two"}) as client:
            assert error(client, previous_response_id=mine["id"])["error"]["code"] == "previous_response_not_found"
        with opened(server, additional_headers={"x-api-key": "one"}) as client:
            assert answer(client, previous_response_id=mine["id"])["status"] == "incomplete"


def test_a_server_that_drains_refuses_and_closes() -> None:
    with ServerThread(fake_token_delay_ms=5) as server, opened(server) as client, opened(server) as idle:
        ask(client, **LONG)
        event(client)
        server.replica.draining = True
        with pytest.raises(InvalidStatus) as refused:
            opened(server)
        assert refused.value.response.status_code == 503
        found = error(idle)
        assert (found["status"], found["error"]["code"]) == (503, "not_ready")
        stopping = threading.Thread(target=server.__exit__)
        stopping.start()
        for each in (client, idle):
            with pytest.raises(ConnectionClosed) as closed:
                while True:
                    each.recv(timeout=20 * slowness())
            assert closed.value.rcvd is not None
            assert closed.value.rcvd.code == 1012
        stopping.join()


def test_slow_clients_are_cut_off() -> None:
    """One that sends half a message, and one that reads no answers to its pings."""
    with ServerThread(body_timeout_seconds=0.2, send_timeout_seconds=0.2) as server:
        with opened(server) as client:
            client.socket.sendall(b"\x81\xfe\xff\xff" + bytes(4) + b"half")
            with pytest.raises(ConnectionClosed) as closed:
                client.recv(timeout=20 * slowness())
            assert closed.value.rcvd is not None
            assert closed.value.rcvd.code == 1008
        with socket.socket() as raw:
            raw.settimeout(60 * slowness())
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            raw.connect(("127.0.0.1", server.port))
            raw.sendall(f"{HANDSHAKE}{KEY}\r\n".encode())
            ping = b"\x89\xfd" + bytes(4) + b"x" * 125
            with pytest.raises((ConnectionResetError, BrokenPipeError)):
                while True:
                    raw.sendall(ping * 1000)


def test_idle_connections_are_pinged() -> None:
    with (
        ServerThread(sse_ping_seconds=0.02) as server,
        socket.create_connection(("127.0.0.1", server.port), timeout=20 * slowness()) as client,
    ):
        client.sendall(f"{HANDSHAKE}{KEY}\r\n".encode())
        found = b""
        while found.count(b"\x89\x04") < 2:  # without a pong
            found += receive(client)
