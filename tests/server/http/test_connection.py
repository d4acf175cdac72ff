"""The edges of HTTP/1.1 on bare sockets: half-closed, pipelined, oversized and malformed; directly and by a router."""

import json
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from http.client import HTTPResponse
from typing import Any

import httpx
import pytest

from tests.support.servers import CHAT, ServerThread

BRIEF = {**CHAT, "max_tokens": 4, "ignore_eos": True}
LONG = {**BRIEF, "max_tokens": 20000}
GET = b"GET /version HTTP/1.1\r\nhost: x\r\n\r\n"
CHUNKED = (
    b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n"
)


@pytest.fixture(scope="module")
def replica() -> Iterator[ServerThread]:
    """A token every 40 ms."""
    with ServerThread(fake_token_delay_ms=40) as server:
        yield server


@pytest.fixture(scope="module")
def router(replica: ServerThread) -> Iterator[ServerThread]:
    settings: dict[str, Any] = {"disaggregation_mode": "router", "route_urls": (replica.url,)}
    with ServerThread(**settings) as server:
        yield server


@pytest.fixture(params=["replica", "router"])
def server(request: pytest.FixtureRequest) -> ServerThread:
    """Either: both have to behave alike."""
    server: ServerThread = request.getfixturevalue(request.param)
    return server


def connect(server: ServerThread) -> socket.socket:
    return socket.create_connection(("127.0.0.1", server.port), timeout=30)


def post(body: dict[str, Any]) -> bytes:
    content = json.dumps(body).encode()
    head = "POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    return f"{head}content-length: {len(content)}\r\n\r\n".encode() + content


class Answers:
    """The answers on a connection, as Python's own client reads them."""

    def __init__(self, connection: socket.socket) -> None:
        self._file = connection.makefile("rb")

    def next(self, method: str = "GET") -> HTTPResponse:
        """The head of the next answer; interim responses are skipped, as every client has to."""
        answer = HTTPResponse(self, method=method)  # type: ignore[arg-type]
        answer.begin()
        return answer

    def makefile(self, _: str) -> "Answers":
        return self

    def readline(self, limit: int = -1) -> bytes:
        return self._file.readline(limit)

    def read(self, size: int = -1) -> bytes:
        return self._file.read(size)

    def readinto(self, buffer: Any) -> int:
        return self._file.readinto(buffer) or 0  # type: ignore[attr-defined,no-any-return]

    def flush(self) -> None:
        pass

    def close(self) -> None:
        """Keep the connection: more answers may follow."""

    def rest(self) -> bytes:
        return self._file.read()


def refused(answer: HTTPResponse, status: int) -> str:
    """The message of a refusal with this status, after which the connection ends."""
    assert answer.status == status
    assert answer.headers["content-type"] == "application/json"
    assert answer.headers["connection"] == "close"
    assert answer.headers["x-request-id"]
    error = json.loads(answer.read())["error"]
    assert set(error) == {"message", "type", "param", "code"}
    message: str = error["message"]
    return message


def running(server: ServerThread) -> int:
    return server.replica.running


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def counted(server: ServerThread, status: str) -> float:
    page = httpx.get(f"{server.url}/metrics").text
    mark = f'http_requests_total{{handler="/v1/chat/completions",method="POST",status="{status}"}} '
    return float(page.partition(mark)[2].partition("\n")[0] or 0)


@pytest.mark.parametrize("stream", [False, True])
def test_half_closed_connection_gets_its_answer(server: ServerThread, stream: bool) -> None:
    with connect(server) as connection:
        connection.sendall(post({**BRIEF, "stream": stream}))
        connection.shutdown(socket.SHUT_WR)
        answers = Answers(connection)
        answer = answers.next()
        assert answer.status == 200
        content = answer.read()
        assert content.endswith(b"data: [DONE]\n\n") if stream else json.loads(content)["choices"]
        assert answers.rest() == b""


def test_half_closed_connection_gets_all_answers(replica: ServerThread) -> None:
    with connect(replica) as connection:
        connection.sendall(post(BRIEF) + GET + post({**BRIEF, "stream": True}) + b"GET /vers")
        connection.shutdown(socket.SHUT_WR)
        answers = Answers(connection)
        for mark in (b"choices", b"version", b"data: [DONE]"):
            answer = answers.next()
            assert answer.status == 200
            assert mark in answer.read()
        assert answers.rest() == b""


def test_half_closed_in_the_middle_of_a_body_is_a_client_that_left(replica: ServerThread) -> None:
    with connect(replica) as connection:
        connection.sendall(post(BRIEF)[:-1])
        connection.shutdown(socket.SHUT_WR)
        assert Answers(connection).rest() == b""
    wait_for(lambda: running(replica) == 0)


@pytest.fixture
def full(replica: ServerThread) -> Iterator[None]:
    """The replica's KV cache is reserved, so that further requests wait for their first token."""
    with connect(replica) as connection:
        connection.sendall(post({**LONG, "max_tokens": 32_000, "n": 65, "stream": True}))
        wait_for(lambda: running(replica) == 1)
        yield
    wait_for(lambda: running(replica) == 0)


@pytest.mark.usefixtures("full")
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("half", [False, True])
def test_client_that_leaves_before_the_first_token_counts_as_4xx(
    server: ServerThread, replica: ServerThread, half: bool, stream: bool
) -> None:
    """Whether it closes at once, or has half-closed the connection before."""
    before = [(counted(each, "4xx"), counted(each, "5xx")) for each in (server, replica)]
    with connect(server) as connection:
        connection.sendall(post({**LONG, "stream": stream}))
        if half:
            connection.shutdown(socket.SHUT_WR)
        wait_for(lambda: running(replica) == 2)
    wait_for(lambda: running(replica) == 1)
    for each, (before_4xx, before_5xx) in zip((server, replica), before, strict=True):
        wait_for(lambda each=each, count=before_4xx + 1: counted(each, "4xx") == count)
        assert counted(each, "5xx") == before_5xx


@pytest.mark.parametrize("stream", [False, True])
def test_client_that_half_closes_and_leaves_later_is_noticed(server: ServerThread, stream: bool) -> None:
    with connect(server) as connection:
        connection.sendall(post({**LONG, "stream": stream}))
        connection.shutdown(socket.SHUT_WR)
        wait_for(lambda: running(server) == 1)
        assert connection.recv(10).startswith(b"HTTP/1.1 ")
        time.sleep(0.1)
        assert running(server) == 1
    wait_for(lambda: running(server) == 0)


def test_client_that_leaves_ends_the_request_before_a_pipelined_one(replica: ServerThread) -> None:
    with connect(replica) as connection:
        connection.sendall(post(LONG) + post(LONG))
        wait_for(lambda: running(replica) == 1)
        time.sleep(0.05)
    wait_for(lambda: running(replica) == 0)


def test_next_head_that_comes_in_part_does_not_cost_the_answer(server: ServerThread) -> None:
    with connect(server) as connection:
        connection.sendall(post({**BRIEF, "metadata": {"a": "x" * 120_000}}) + GET[:20])
        answers = Answers(connection)
        assert json.loads(answers.next().read())["choices"]
        connection.sendall(GET[20:])
        assert json.loads(answers.next().read())["version"]


def test_next_head_that_never_ends_is_refused_after_the_answer() -> None:
    """It times out while the stream before it is sent."""
    with ServerThread(fake_token_delay_ms=40, body_timeout_seconds=0.3) as server, connect(server) as connection:
        connection.sendall(post({**BRIEF, "max_tokens": 12, "stream": True}) + GET[:20])
        answers = Answers(connection)
        assert answers.next().read().endswith(b"data: [DONE]\n\n")
        refused(answers.next(), 408)
        assert answers.rest() == b""


def test_pipelined_requests_are_all_answered(replica: ServerThread) -> None:
    """More of them than one read takes, so that heads come in parts."""
    count = 400
    one = b"GET /health/live HTTP/1.1\r\nhost: x\r\na: " + b"x" * 1000 + b"\r\n\r\n"
    with connect(replica) as connection:
        threading.Thread(target=connection.sendall, args=(one * count,)).start()
        answers = Answers(connection)
        for _ in range(count):
            assert json.loads(answers.next().read()) == {"status": "live"}


@pytest.mark.parametrize("stream", [False, True])
def test_requests_before_garbage_are_answered(server: ServerThread, stream: bool) -> None:
    with connect(server) as connection:
        connection.sendall(post({**BRIEF, "stream": stream}) + GET + b"\x00garbage\r\n\r\n")
        answers = Answers(connection)
        for _ in range(2):
            answer = answers.next()
            assert answer.status == 200
            answer.read()
        refused(answers.next(), 400)
        assert answers.rest() == b""


@pytest.mark.parametrize(
    "chunks",
    [b"fffffffffffffffff\r\n", b"-1\r\n", b"2\r\n{}XX", b"2\n{}\n0\n\n", b"2\r\n{}\r\nx\r\n", b"\r\n\r\n"],
)
def test_malformed_chunks(server: ServerThread, chunks: bytes) -> None:
    for sent in (CHUNKED + chunks, CHUNKED + b"1\r\n{\r\n" + chunks, GET + CHUNKED + chunks):
        with connect(server) as connection:
            connection.sendall(sent)
            answers = Answers(connection)
            if sent.startswith(GET):
                assert json.loads(answers.next().read())["version"]
            refused(answers.next(), 400)
            assert answers.rest() == b""
    wait_for(lambda: running(server) == 0)


@pytest.mark.parametrize("coding", [b"xchunked", b"chunked, x", b"chunked\r\ncontent-length: 2"])
def test_malformed_transfer_encoding(server: ServerThread, coding: bytes) -> None:
    with connect(server) as connection:
        connection.sendall(CHUNKED.replace(b"chunked", coding) + b"2\r\n{}\r\n0\r\n\r\n")
        answers = Answers(connection)
        refused(answers.next(), 400)
        assert answers.rest() == b""


def test_malformed_body_of_a_request_that_has_its_answer() -> None:
    """It gets no second one."""
    with ServerThread(api_keys=("key",)) as server, connect(server) as connection:
        connection.sendall(CHUNKED)
        answers = Answers(connection)
        answer = answers.next()
        assert (answer.status, json.loads(answer.read())["error"]["code"]) == (401, "invalid_api_key")
        connection.sendall(b"-1\r\n")
        assert answers.rest() == b""


@pytest.mark.parametrize("size", [10 << 20, 100_000])
def test_oversized_head_is_refused_readably(server: ServerThread, size: int) -> None:
    """Nothing of it is left unread, so that no reset overtakes the answer."""
    failures = []

    def send() -> None:
        try:
            connection.sendall(b"GET / HTTP/1.1\r\nhost: x\r\na: " + b"x" * size + b"\r\n\r\n")
        except OSError as error:
            failures.append(error)

    with connect(server) as connection:
        sender = threading.Thread(target=send)
        sender.start()
        sender.join()
        answers = Answers(connection)
        assert "65536 bytes" in refused(answers.next(), 431)
        assert answers.rest() == b""
    assert not failures


@pytest.mark.parametrize("extra", [-1000, 1, 4464])
def test_head_that_ends_in_one_read_has_the_same_limit(server: ServerThread, extra: int) -> None:
    """The body that comes with it does not count. Behind a router the head is a little larger."""
    body = b"{" + b" " * 100_000
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\na: %b\r\n\r\n"
    padding = (64 << 10) + extra - len(head % (len(body), b""))
    with connect(server) as connection:
        connection.sendall(head % (len(body), b"x" * padding) + body)
        answer = Answers(connection).next()
        if extra < 0:
            assert answer.status == 415
        else:
            assert "65536 bytes" in refused(answer, 431)


@pytest.mark.parametrize(
    ("line", "hosts", "status"),
    [
        (b"GET /version HTTP/1.1", 0, 400),
        (b"GET /version HTTP/1.1", 1, 200),
        (b"GET /version HTTP/1.1", 2, 400),
        (b"GET /version HTTP/1.0", 0, 200),
        (b"GET /version HTTP/1.0", 2, 400),
        (b"GET /version HTTP/2.0", 1, 505),
        (b"GET /version HTTP/3.0", 1, 505),
        (b"GET /version HTTP/0.9", 1, 505),
    ],
)
def test_hosts_and_versions(server: ServerThread, line: bytes, hosts: int, status: int) -> None:
    with connect(server) as connection:
        connection.sendall(b"\r\n".join([line, *[b"Host: x"] * hosts, b"", b""]))
        answer = Answers(connection).next()
        if status == 200:
            assert answer.status == 200
        else:
            assert ("Host" if status == 400 else "HTTP/1.1") in refused(answer, status)


@pytest.mark.parametrize("chunked", [False, True])
def test_offer_of_http_2_is_declined(server: ServerThread, chunked: bool) -> None:
    """As Java's client makes it with every request, those with a body included."""
    offer = b"\r\nconnection: upgrade, http2-settings\r\nupgrade: h2c\r\nhttp2-settings: AAMAAABk\r\n"
    sent = post(BRIEF)
    if chunked:
        head, _, body = sent.partition(b"\r\n\r\n")
        head = head.rpartition(b"\r\n")[0] + b"\r\ntransfer-encoding: chunked"
        sent = head + b"\r\n\r\n%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)
    with connect(server) as connection:
        connection.sendall((sent + GET + sent).replace(b"\r\n", offer, 1))
        answers = Answers(connection)
        for mark in (b"choices", b"version", b"choices"):
            answer = answers.next()
            assert answer.status == 200
            assert mark in answer.read()


@pytest.mark.parametrize(
    "line", [b"CONNECT x:1 HTTP/1.1", b"PRI * HTTP/2.0", b"BREW / HTTP/1.1", b"GET /\xff HTTP/1.1"]
)
def test_malformed_heads(server: ServerThread, line: bytes) -> None:
    with connect(server) as connection:
        connection.sendall(line + b"\r\nhost: x\r\n\r\n")
        answers = Answers(connection)
        assert refused(answers.next(), 400)
        assert answers.rest() == b""


def test_head_is_get_without_the_body(server: ServerThread) -> None:
    """Also in the length that it gives, on a connection that serves further requests."""
    paths = (
        "/ /health/live /health/ready /health /metrics /prometheus/metrics /server_info /version /docs /openapi.json"
    )
    with connect(server) as connection:
        answers = Answers(connection)
        for path in (*paths.split(), "/v1/models", "/v1/models/fake", "/v1/models/other", "/nowhere"):
            found = {}
            for method in ("HEAD", "GET"):
                connection.sendall(f"{method} {path} HTTP/1.1\r\nhost: x\r\n\r\n".encode())
                found[method] = answers.next(method)
                found[method].read()
            head, get = found["HEAD"], found["GET"]
            assert head.status == get.status == (404 if path in ("/v1/models/other", "/nowhere") else 200), path
            assert head.headers["content-type"] == get.headers["content-type"]
            assert int(head.headers["content-length"])
            if "metrics" not in path:
                assert head.headers["content-length"] == get.headers["content-length"], path


def test_head_of_a_post_route(server: ServerThread) -> None:
    answer = httpx.head(f"{server.url}/v1/completions")
    assert (answer.status_code, answer.headers["allow"], answer.content) == (405, "POST", b"")


def test_a_client_that_resets_is_no_error(replica: ServerThread) -> None:
    """In each state of a refusal: while it waits for an answer, and once it has been sent."""
    for sent in (post(LONG) + b"\x00", b"\x00"):
        with connect(replica) as connection:
            connection.sendall(sent)
            time.sleep(0.02)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    wait_for(lambda: running(replica) == 0)
    assert httpx.get(f"{replica.url}/version").status_code == 200
