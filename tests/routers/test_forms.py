"""Parsing of forms as HTTP clients send them."""

import time
from typing import Any

import httpx
import pytest
from fastapi import FastAPI, HTTPException, Request
from fastapi.exceptions import RequestValidationError
from hypothesis import given, settings
from hypothesis import strategies as st

from multimodal.errors import RequestError
from protocol.common import Wire
from routers.forms import Form, read_form
from routers.state import HttpOptions
from tests.support.waiting import slowness

OPTIONS = HttpOptions(
    max_body_bytes=1 << 20,
    body_timeout=5,
    ping_interval=0,
    lease_seconds=1,
    max_images=1,
    max_image_bytes=1 << 20,
    max_video_bytes=1 << 20,
    max_audio_bytes=1 << 20,
    max_text_bytes=1 << 20,
    max_values=100,
)


class Asked(Wire):
    prompt: str
    n: int | None = None
    scale: float | None = None
    stream: bool | None = None


async def sent(request: httpx.Request) -> Form:
    """What the server makes of a request."""
    body = request.read()

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": body, "more_body": False}

    headers = [(name.lower(), value) for name, value in request.headers.raw]
    scope = {"type": "http", "method": "POST", "path": "/", "headers": headers, "state": {"http": OPTIONS}}
    return await read_form(Request(scope | {"app": FastAPI(), "query_string": b""}, receive))


def form(**parts: Any) -> httpx.Request:
    return httpx.Request("POST", "http://test/", **parts)


@settings(max_examples=20)
@given(data=st.binary(max_size=200), name=st.text(max_size=20), text=st.text(max_size=50))
async def test_any_file_and_text_arrive_as_they_were_sent(data: bytes, name: str, text: str) -> None:
    found = await sent(form(data={"prompt": text}, files={"image": (name or "x", data, "image/png")}))
    assert found.fields == {"prompt": [text]}
    image = found.file("image")
    assert image is not None
    assert bytes(image) == data


async def test_fields_get_the_types_of_the_model() -> None:
    found = await sent(form(data={"prompt": "5", "n": "2", "scale": "1.5", "stream": "false"}, files={"x": b""}))
    asked = found.parsed(Asked)
    assert (asked.prompt, asked.n, asked.scale, asked.stream) == ("5", 2, 1.5, False)


@pytest.mark.parametrize("value", ["two", "", "1.5", "1e400"])
async def test_a_field_of_another_type_is_named(value: str) -> None:
    found = await sent(form(data={"prompt": "a", "n": value}, files={"x": b""}))
    with pytest.raises(RequestValidationError) as error:
        found.parsed(Asked)
    assert [entry["loc"] for entry in error.value.errors()] == [("n",)]


async def test_files_of_one_name() -> None:
    found = await sent(form(files=[("image[]", b"1"), ("image[]", b"2"), ("mask", b"3")]))
    with pytest.raises(RequestError, match="'image' may be one file; there are 2"):
        found.file("image")
    assert bytes(found.file("mask") or b"") == b"3"
    assert found.file("other") is None


async def test_a_field_that_comes_twice_is_refused() -> None:
    found = await sent(form(data={"prompt": ["a", "b"]}, files={"x": b""}))
    with pytest.raises(RequestError, match="'prompt' comes 2 times"):
        found.parsed(Asked)


async def test_parameters_are_read_as_clients_write_them() -> None:
    heads = (
        b'form-data; name="a"; x*' + b"1" * 5000 + b"=2",  # a number that int() refuses
        b"form-data; NAME=b ; x",
        b'form-data; name="c \\" ; d"; y="',
    )
    body = b"".join(b"--x\r\nContent-Disposition: " + head + b"\r\n\r\n1\r\n" for head in heads) + b"--x--"
    found = await sent(form(content=body, headers={"content-type": 'multipart/form-data; charset=utf-8; boundary="x"'}))
    assert found.fields == {"a": ["1"], "b": ["1"], 'c " ; d': ["1"]}
    named = b"--x\r\nContent-Disposition: form-data; name=f; filename*=UTF-8''%e2%82%ac.wav\r\n\r\n1\r\n--x--"
    found = await sent(form(content=named, headers={"content-type": "multipart/form-data; boundary=x"}))
    assert found.file("f") == b"1"


async def test_a_long_header_takes_no_time() -> None:
    """Of what may be a head: email's parser takes seconds."""
    header = 'multipart/form-data; boundary="' + ";" * 60_000
    began = time.perf_counter()
    with pytest.raises(RequestError):
        await sent(form(content=b"", headers={"content-type": header}))
    assert time.perf_counter() - began < 0.3 * slowness()


async def test_as_many_parts_as_are_allowed() -> None:
    body = b"".join(b"--x\r\n" + HEAD + b"1\r\n" for _ in range(128)) + b"--x--"
    found = await sent(form(content=body, headers={"content-type": "multipart/form-data; boundary=x"}))
    assert len(found.fields["a"]) == 128


HEAD = b'Content-Disposition: form-data; name="a"\r\n\r\n'


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"--x",
        b"--x\r\n" + HEAD,
        b"--x\r\n" + HEAD + b"value",
        b"--x\r\n\r\nno name\r\n--x--",
        b"--y\r\n" + HEAD + b"1\r\n--y--",
        b"--x\r\n" + b"A: " + b"b" * 9000 + b"\r\n\r\n\r\n--x--",
        b"--x\r\n" + b"".join(HEAD + b"1\r\n--x\r\n" for _ in range(200)),
    ],
)
async def test_malformed_forms_are_refused(body: bytes) -> None:
    with pytest.raises(RequestError, match="cannot be read"):
        await sent(form(content=body, headers={"content-type": "multipart/form-data; boundary=x"}))


async def test_other_bodies_are_refused() -> None:
    with pytest.raises(HTTPException) as error:
        await sent(form(json={}))
    assert error.value.status_code == 415
    with pytest.raises(HTTPException, match="Compressed") as error:
        await sent(form(files={"a": b"1"}, headers={"content-encoding": "gzip"}))
    assert error.value.status_code == 415
    with pytest.raises(RequestError, match="boundary"):
        await sent(form(content=b"", headers={"content-type": "multipart/form-data"}))
