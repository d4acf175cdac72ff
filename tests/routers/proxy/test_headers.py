"""Headers that a router passes on to replicas and clients."""

import asyncio

import pytest

from tests.support.routing import Bare, before


async def raw(url: str, head: bytes, body: bytes = b"{}") -> bytes:
    """What comes back for a request that is written as it is."""
    host, _, port = url.removeprefix("http://").partition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(head + b"content-length: %d\r\nconnection: close\r\n\r\n" % len(body) + body)
    answer = await reader.read()
    writer.close()
    return answer


@pytest.mark.parametrize(
    ("line", "gone"),
    [
        (b"connection: x-secret, keep-alive\r\nx-secret: 1", b"x-secret"),
        (b"transfer-encoding: identity", b"transfer-encoding"),
        (b"te: trailers", b"te:"),
        (b"proxy-authorization: Basic x", b"proxy-auth"),
        (b"upgrade: h2c", b"upgrade"),
        (b"x-trellis-replica: 7", b"x-trellis"),
        (b"x-trellis-dp-rank: 1", b"x-trellis"),
        (b"x-trellis-internal: secret", b"x-trellis"),
        (b"expect: 100-continue", b"expect"),
        (b"x-a: \x01\x02", b"x-a"),
        (b"x-request-id: a b\x7f", b"a b"),
    ],
)
async def test_headers_of_a_connection_stay_with_it(line: bytes, gone: bytes) -> None:
    said = (
        b"HTTP/1.1 200 OK\r\nconnection: x-inner\r\nx-inner: 1\r\n"
        b"keep-alive: 5\r\nx-trellis-replica: 9\r\ncontent-length: 2\r\n\r\n{}"
    )
    async with Bare(said) as bare, before(bare.url) as (client, _):
        answer = await raw(
            str(client.base_url).rstrip("/"), b"POST /v1/x HTTP/1.1\r\nhost: evil\r\nx-b: kept\r\n" + line + b"\r\n"
        )
    if answer.startswith(b"HTTP/1.1 400"):
        assert bare.requests == []
        return
    (request,) = bare.requests
    head = request.partition(b"\r\n\r\n")[0].lower()
    assert gone not in head
    assert b"x-b: kept" in head
    assert head.count(b"\r\nhost:") == head.count(b"content-length:") == head.count(b"x-request-id:") == 1
    assert b"evil" not in head
    assert b"x-inner" not in answer
    assert b"x-trellis-replica: 0" in answer
    assert b"x-trellis-replica: 9" not in answer


@pytest.mark.parametrize(
    ("path", "target"),
    [
        (b"/v1/a%20b%0d%0aGET%20/?q=1", None),  # no route of ours has an end of line
        (b"/v1/a%20b?q=1&r=%0d", b"/v1/a%20b?q=1&r=%0d"),
        (b"/v1/%c3%a4?x=y%20z", b"/v1/%C3%A4?x=y%20z"),
        (b"/v1/a%3fb", b"/v1/a%3Fb"),
        (b"/v1/..%2fprefill", b"/v1/../prefill"),
    ],
)
async def test_paths_are_one_path_on_the_other_side_too(path: bytes, target: bytes | None) -> None:
    async with Bare(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}") as bare, before(bare.url) as (client, _):
        await raw(str(client.base_url).rstrip("/"), b"POST " + path + b" HTTP/1.1\r\nhost: h\r\n")
    lines = [request.partition(b"\r\n")[0] for request in bare.requests]
    assert lines == ([] if target is None else [b"POST " + target + b" HTTP/1.1"])


@pytest.mark.parametrize("path", ["/prefill", "/encode", "/health/live", "/metrics", "/v2/x"])
async def test_only_public_routes_are_forwarded(path: str) -> None:
    async with Bare(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}") as bare, before(bare.url) as (client, _):
        await client.post(path, json={})
        assert bare.requests == []
