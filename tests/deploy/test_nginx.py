"""The shipped nginx configuration, run by nginx before an upstream of streams and before the server."""

import asyncio
import json
import os
import re
import shutil
import ssl
import subprocess
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import openai
import pytest
from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosed, InvalidStatus

from engine.process.sockets import free_port
from tests.support.servers import ServerThread, serving

ROOT = Path(__file__).resolve().parents[2]
CONFIGURATION = (ROOT / "deploy/nginx/trellis.conf").read_text()
NGINX = shutil.which("nginx", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/local/sbin")
needs_nginx = pytest.mark.skipif(NGINX is None, reason="nginx is not installed")
EVENTS = 5


class Upstream:
    """An HTTP/1.1 server.

    `/events` sends each event only when the test has set `go`; every other path echoes the head of the request.
    """

    def __init__(self) -> None:
        self.go = asyncio.Semaphore(0)
        self.gone = asyncio.Event()
        self.body_started = asyncio.Event()
        self.connections = 0
        self._tasks: set[asyncio.Task[None]] = set()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                await self._answer(head.decode(), reader, writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    async def _answer(self, head: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        request, *lines = head.strip().split("\r\n")
        headers = {name.lower(): value for name, value in (line.split(": ", 1) for line in lines)}
        path = request.split(" ")[1]
        if path == "/events":
            await self._events(reader, writer)
            return
        left = int(headers.get("content-length", 0))
        while left:
            left -= len(await reader.readexactly(min(left, 1000)))
            self.body_started.set()
        body = json.dumps({"request": request, "headers": headers}).encode()
        writer.write(
            b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)
        )
        await writer.drain()

    async def _events(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")
        for index in range(EVENTS):
            async with asyncio.TaskGroup() as group:
                end = group.create_task(reader.read(1))
                step = group.create_task(self.go.acquire())
                await asyncio.wait({end, step}, return_when=asyncio.FIRST_COMPLETED)
                if end.done():
                    self.gone.set()
                    step.cancel()
                    raise ConnectionResetError
                end.cancel()
            event = b"data: %d\n\n" % index
            writer.write(b"%x\r\n%b\r\n" % (len(event), event))
            await writer.drain()
        writer.write(b"0\r\n\r\n")
        await writer.drain()


@asynccontextmanager
async def behind_nginx(folder: Path) -> AsyncIterator[tuple[Upstream, int]]:
    """Upstream and port of nginx before it."""
    upstream = Upstream()
    server = await asyncio.start_server(upstream.serve, "127.0.0.1", 0, limit=1 << 20)
    try:
        async with nginx_before(f"127.0.0.1:{server.sockets[0].getsockname()[1]}", folder) as port:
            yield upstream, port
    finally:
        server.close()
        await server.wait_closed()


@asynccontextmanager
async def nginx_before(address: str, folder: Path) -> AsyncIterator[int]:
    """Port of nginx with the shipped configuration but for addresses and folders."""
    port, text = free_port(), CONFIGURATION
    for old, new in (("server:8000", address), ("listen 8080", f"listen 127.0.0.1:{port}"), ("/tmp/", f"{folder}/")):
        assert old in text
        text = text.replace(old, new)
    (folder / "nginx.conf").write_text(text)
    directives = "daemon off;" + (" user root;" if os.geteuid() == 0 else "")
    with (folder / "nginx.log").open("wb") as log:
        command = (str(NGINX), "-e", "stderr", "-p", str(folder), "-c", str(folder / "nginx.conf"), "-g", directives)
        process = await asyncio.create_subprocess_exec(*command, stdout=log, stderr=log)
    try:
        async with asyncio.timeout(10):
            while process.returncode is None:
                try:
                    (await asyncio.open_connection("127.0.0.1", port))[1].close()
                    break
                except ConnectionRefusedError:
                    await asyncio.sleep(0.02)
        assert process.returncode is None, (folder / "nginx.log").read_text()
        yield port
    finally:
        if process.returncode is None:
            process.terminate()
        await process.wait()


class Client:
    """One kept connection to nginx."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    async def request(self, line: str, *headers: str, body: bytes = b"") -> tuple[int, dict[str, str]]:
        """Send a request; its status and headers, the body unread."""
        self.writer.write("\r\n".join([f"{line} HTTP/1.1", "Host: trellis.test", *headers, "", ""]).encode() + body)
        await self.writer.drain()
        return await self.head()

    async def head(self) -> tuple[int, dict[str, str]]:
        status, *lines = (await self.reader.readuntil(b"\r\n\r\n")).decode().strip().split("\r\n")
        return int(status.split()[1]), {name.lower(): value for name, value in (line.split(": ", 1) for line in lines)}

    async def json(self, line: str, *headers: str, expected: int = 200) -> dict[str, dict[str, str]]:
        status, answered = await self.request(line, *headers)
        assert (status, answered["content-type"]) == (expected, "application/json")
        value: dict[str, dict[str, str]] = json.loads(await self.reader.readexactly(int(answered["content-length"])))
        return value

    async def event(self) -> bytes:
        size = int(await self.reader.readline(), 16)
        return (await self.reader.readexactly(size + 2))[:-2]


@asynccontextmanager
async def client(port: int) -> AsyncIterator[Client]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        async with asyncio.timeout(20):
            yield Client(reader, writer)
    finally:
        writer.close()


@needs_nginx
async def test_events_pass_one_by_one(tmp_path: Path) -> None:
    """Events arrive one by one: nothing waits in a buffer.

    Headers come before the first event, and each event before the upstream may send the next.
    """
    async with behind_nginx(tmp_path) as (upstream, port), client(port) as http:
        status, headers = await http.request("POST /events", "Content-Length: 0", "Accept-Encoding: gzip")
        assert (status, headers["content-type"]) == (200, "text/event-stream")
        assert "content-encoding" not in headers
        for index in range(EVENTS):
            upstream.go.release()
            assert await http.event() == b"data: %d\n\n" % index
        assert await http.event() == b""


@needs_nginx
async def test_a_client_that_goes_is_felt_upstream(tmp_path: Path) -> None:
    async with behind_nginx(tmp_path) as (upstream, port):
        async with client(port) as http:
            await http.request("POST /events", "Content-Length: 0")
            upstream.go.release()
            await http.event()
            assert not upstream.gone.is_set()
        await asyncio.wait_for(upstream.gone.wait(), 10)


@needs_nginx
async def test_connections_upstream_are_kept(tmp_path: Path) -> None:
    async with behind_nginx(tmp_path) as (upstream, port), client(port) as http:
        for _ in range(5):
            answer = await http.json("GET /v1/models")
            assert answer["request"] == "GET /v1/models HTTP/1.1"
            assert "connection" not in answer["headers"]
        assert upstream.connections == 1


@needs_nginx
async def test_nginx_passes_on_the_clients_id_key_and_address(tmp_path: Path) -> None:
    async with behind_nginx(tmp_path) as (_, port), client(port) as http:
        headers = (await http.json("GET /v1/models", "X-Request-ID: mine", "Authorization: Bearer k"))["headers"]
        assert (headers["x-request-id"], headers["authorization"], headers["host"]) == (
            "mine",
            "Bearer k",
            "trellis.test",
        )
        assert (headers["x-forwarded-for"], headers["x-forwarded-proto"]) == ("127.0.0.1", "http")
        given = (await http.json("GET /v1/models"))["headers"]["x-request-id"]
        assert re.fullmatch("[0-9a-f]{32}", given)


@needs_nginx
@pytest.mark.parametrize(
    "path",
    [
        "/prefill",
        "/encode",
        "/prefill/x",
        "/%70refill",
        "//encode",
        "/v1/../prefill",
        "/metrics",
        "/prometheus/metrics",
    ],
)
async def test_internal_routes_are_closed(tmp_path: Path, path: str) -> None:
    async with behind_nginx(tmp_path) as (upstream, port), client(port) as http:
        answer = await http.json(f"POST {path}", "Content-Length: 0", expected=404)
        assert (answer["error"]["code"], upstream.connections) == ("unknown_url", 0)


@needs_nginx
async def test_bodies_are_limited_and_not_held_back(tmp_path: Path) -> None:
    """A body over 64 MiB is refused unread; the start of a smaller one is upstream before its end is sent."""
    limit = 64 << 20
    async with behind_nginx(tmp_path) as (upstream, port):
        async with client(port) as http:
            answered = await http.json("POST /v1/chat/completions", f"Content-Length: {limit + 1}", expected=413)
            assert (answered["error"]["code"], upstream.connections) == ("request_too_large", 0)
        async with client(port) as http:
            answer = asyncio.create_task(
                http.request("POST /v1/chat/completions", f"Content-Length: {limit}", body=b" " * 1000)
            )
            await upstream.body_started.wait()
            assert not answer.done()
            http.writer.write(b" " * (limit - 1000))
            await http.writer.drain()
            assert (await answer)[0] == 200


@needs_nginx
@pytest.mark.parametrize(
    ("sent", "status", "code"),
    [
        (b"garbage\r\n\r\n", 400, None),
        (b"GET /x HTTP/1.1\r\n\r\n", 400, None),
        (b"GET /x HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n", 400, None),
        (b"GET /%00 HTTP/1.1\r\nHost: x\r\n\r\n", 400, None),
        (b"POST /x HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n-1\r\n", 400, None),
        (b"TRACE /x HTTP/1.1\r\nHost: x\r\n\r\n", 405, "method_not_allowed"),
        (b"GET /" + b"x" * 20_000 + b" HTTP/1.1\r\nHost: x\r\n\r\n", 414, "headers_too_large"),
        (b"GET /x HTTP/1.1\r\nHost: x\r\na: " + b"x" * 20_000 + b"\r\n\r\n", 431, "headers_too_large"),
        (b"POST /x HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: xchunked\r\n\r\n", 501, None),
        (b"GET /x HTTP/2.0\r\nHost: x\r\n\r\n", 505, None),
    ],
)
async def test_refusals_of_nginx_have_the_error_envelope(
    tmp_path: Path, sent: bytes, status: int, code: str | None
) -> None:
    """Also behind a request that is answered."""
    async with behind_nginx(tmp_path) as (_, port):
        for before in (b"", b"GET /v1/models HTTP/1.1\r\nHost: x\r\n\r\n"):
            async with client(port) as http:
                http.writer.write(before + sent)
                for expected in (200, status) if before else (status,):
                    found, headers = await http.head()
                    assert (found, headers["content-type"]) == (expected, "application/json")
                    body = json.loads(await http.reader.readexactly(int(headers["content-length"])))
                error = body["error"]
                assert set(error) == {"message", "type", "param", "code"}
                assert error["type"] == ("server_error" if status >= 500 else "invalid_request_error")
                assert error["code"] == code


@needs_nginx
async def test_errors_below_messages_have_anthropics_envelope(tmp_path: Path) -> None:
    head = "Host: x\r\nX-Request-ID: {}\r\nContent-Length: {}\r\n\r\n"
    cases = (
        ("POST /v1/messages HTTP/1.1", (64 << 20) + 1, 413, "request_too_large", {"error_code": "request_too_large"}),
        ("POST /v1/messages/batches?a=b HTTP/1.1", 0, 503, "overloaded_error", {"error_code": "unavailable"}),
        ("TRACE /v1/messages HTTP/1.1", 0, 405, "invalid_request_error", {"error_code": "method_not_allowed"}),
    )
    async with nginx_before(f"127.0.0.1:{free_port()}", tmp_path) as port:
        for line, length, status, kind, details in cases:
            for given, shown in (("mine", "mine"), ('"', None)):
                async with client(port) as http:
                    http.writer.write(f"{line}\r\n{head.format(given, length)}".encode())
                    found, headers = await http.head()
                    body = json.loads(await http.reader.readexactly(int(headers["content-length"])))
                assert (found, headers["content-type"]) == (status, "application/json")
                assert set(body) == {"type", "error", "request_id"} and body["type"] == "error"
                assert (body["error"]["type"], body["error"]["details"]) == (kind, details)
                assert body["request_id"] == shown or (
                    shown is None and re.fullmatch("[0-9a-f]{32}", body["request_id"])
                )
        async with client(port) as http:  # another path
            answer = await http.json("POST /v1/messagesx", "Content-Length: 0", expected=503)
            assert answer["error"]["type"] == "server_error"


@needs_nginx
async def test_websockets_pass(tmp_path: Path) -> None:
    """Both ways, with closing codes; the client's key goes with the handshake."""
    with ServerThread(api_keys="one", max_body_mb=1) as server:
        async with nginx_before(f"127.0.0.1:{server.port}", tmp_path) as port:
            url = f"ws://127.0.0.1:{port}/v1/responses"
            with pytest.raises(InvalidStatus) as refused:
                await connect(url)
            assert refused.value.response.status_code == 401
            async with connect(url, additional_headers={"authorization": "Bearer one"}) as websocket:
                for _ in range(2):
                    await websocket.send('{"type": "response.create", "input": "hi", "max_output_tokens": 4}')
                    while json.loads(await websocket.recv())["type"] != "response.incomplete":
                        pass
                with pytest.raises(ConnectionClosed) as closed:
                    await websocket.send(b"x" * (1 << 20) + b"x")
                    await websocket.recv()
                # The code is lost if the connection is reset while the message is on its way.
                assert closed.value.rcvd is None or closed.value.rcvd.code == 1009


@needs_nginx
async def test_a_server_that_is_away_is_worth_another_try(tmp_path: Path) -> None:
    async with nginx_before(f"127.0.0.1:{free_port()}", tmp_path) as port, client(port) as http:
        status, headers = await http.request("GET /v1/models")
        assert (status, headers["retry-after"], headers["x-should-retry"]) == (503, "2", "true")
        assert (
            json.loads(await http.reader.readexactly(int(headers["content-length"])))["error"]["code"] == "unavailable"
        )


def make_certificate(folder: Path) -> None:
    """Make a certificate for 127.0.0.1, signed by itself."""
    kind = ["-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2"]
    name = ["-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1"]
    files = ["-keyout", str(folder / "privkey.pem"), "-out", str(folder / "fullchain.pem")]
    subprocess.run(["openssl", "req", *kind, *name, *files], check=True, capture_output=True)


@needs_nginx
@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl is not installed")
async def test_tls(tmp_path: Path) -> None:
    """With the shipped tls.conf beside the configuration the same server speaks TLS."""
    make_certificate(tmp_path)
    text, port = (ROOT / "deploy/nginx/tls.conf").read_text(), free_port()
    (tmp_path / "tls").mkdir()
    text = text.replace("/etc/nginx/certificates", str(tmp_path)).replace("listen 8443", f"listen 127.0.0.1:{port}")
    (tmp_path / "tls/tls.conf").write_text(text)
    trusted = ssl.create_default_context(cafile=str(tmp_path / "fullchain.pem"))
    async with behind_nginx(tmp_path), httpx.AsyncClient(verify=trusted) as http:
        answer = (await http.get(f"https://127.0.0.1:{port}/v1/models")).json()
        assert answer["headers"]["x-forwarded-proto"] == "https"
        assert (await http.get(f"https://127.0.0.1:{port}/metrics")).status_code == 404


@needs_nginx
async def test_the_server_behind_nginx_streams_to_openais_client(tmp_path: Path) -> None:
    """Chunks arrive while tokens are generated, not together at the end.

    What the server refuses passes through unchanged.
    """
    tokens, pause = 20, 0.05
    with serving("--fake-token-delay-ms", str(pause * 1e3), "--max-body-mb", "1") as server:
        async with (
            nginx_before(server.url.removeprefix("http://"), tmp_path) as port,
            openai.AsyncOpenAI(
                base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0, timeout=30
            ) as http,
        ):
            stream = await http.completions.create(
                model="fake", prompt="hello", max_tokens=tokens, stream=True, extra_body={"ignore_eos": True}
            )
            times = [time.monotonic() async for _ in stream]
            assert len(times) >= tokens
            assert times[-1] - times[0] > tokens * pause / 2
            with pytest.raises(openai.APIStatusError, match="exceeds") as refused:
                await http.completions.create(model="fake", prompt="x" * (1 << 20))
            assert refused.value.status_code == 413
