"""One envelope for everything that is not a success."""

import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from fastapi import HTTPException
from starlette.requests import ClientDisconnect

import engine.errors
import multimodal.errors
import routers.errors
from engine.config import FakeConfig
from server.http.errors import render
from tests.support.servers import CHAT, application

JSON = {"content-type": "application/json"}
CONTEXT = FakeConfig().context_length


@pytest.fixture
async def client() -> AsyncIterator[httpx.AsyncClient]:
    async with application(max_body_mb=0.001, body_timeout_seconds=0.2, page=False) as (client, _):
        yield client


def check(response: httpx.Response, status: int, code: str | None = None, param: str | None = None) -> dict[str, Any]:
    """The error of a response that must have this status and the envelope."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    assert response.headers["x-request-id"]
    assert "server" not in response.headers
    error: dict[str, Any] = response.json()["error"]
    assert list(response.json()) == ["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    assert (error["code"], error["param"]) == (code, param)
    return error


async def test_unknown_route(client: httpx.AsyncClient) -> None:
    for path in ("/nope", "/v1", "/", "/v1/chat/completions/"):
        assert check(await client.get(path), 404, "unknown_url")["type"] == "not_found_error"


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("/v1/chat/completion", "There is no route /v1/chat/completion; did you mean /v1/chat/completions?"),
        ("/chat/completions", "There is no route /chat/completions; did you mean /v1/chat/completions?"),
        ("/v1/v1/completions", "There is no route /v1/v1/completions; did you mean /v1/completions?"),
        ("/v1/chat/completions/", "There is no route /v1/chat/completions/; did you mean /v1/chat/completions?"),
        ("/V1/Models", "There is no route /V1/Models; did you mean /v1/models?"),
        ("/api/chat/completions", "There is no route /api/chat/completions; did you mean /v1/chat/completions?"),
        ("/healthz", "There is no route /healthz; did you mean /health?"),
        ("/nope", "There is no route /nope."),
        ("/", "There is no route /; see /docs and /v1/models. PAGE=true serves a page to chat here."),
        ("/%1b[31m" + "a" * 5000, "There is no route /?[31m" + "a" * 58 + "…."),
        ("/v1/embeddings", "This server does not support OpenAI's /v1/embeddings."),
        ("/v1/audio/speech", "This server does not support OpenAI's /v1/audio/speech."),
        ("/responses", "There is no route /responses; did you mean /v1/responses?"),
        ("/v1/chat/completions/chatcmpl-1", "This server does not support OpenAI's stored chat completions."),
    ],
    ids=lambda text: text[:32],
)
async def test_an_unknown_route_says_which_one_was_meant(client: httpx.AsyncClient, path: str, message: str) -> None:
    for method in ("GET", "POST"):
        assert check(await client.request(method, path), 404, "unknown_url")["message"] == message


async def test_no_model_has_an_empty_name(client: httpx.AsyncClient) -> None:
    error = check(await client.get("/v1/models/"), 404, "unknown_url")
    assert error["message"] == "There is no route /v1/models/; did you mean /v1/models?"


async def test_routes_between_replicas_are_never_suggested() -> None:
    async with application(disaggregation_mode="prefill", internal_secret="secret") as (client, _):
        assert check(await client.get("/prefil"), 404, "unknown_url")["message"] == "There is no route /prefil."


async def test_wrong_method(client: httpx.AsyncClient) -> None:
    response = await client.get("/v1/chat/completions")
    error = check(response, 405, "method_not_allowed")
    assert error["message"] == "/v1/chat/completions takes POST, not GET."
    assert response.headers["allow"] == "POST"
    response = await client.delete("/v1/models")
    error = check(response, 405, "method_not_allowed")
    assert error["message"] == "/v1/models takes GET, not DELETE."
    assert response.headers["allow"] == "GET, HEAD"


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize"])
async def test_wrong_content_type(client: httpx.AsyncClient, path: str) -> None:
    for content_type in ("", "text/plain", "application/x-www-form-urlencoded", "application/jsonp"):
        response = await client.post(path, content=b"{}", headers={"content-type": content_type})
        error = check(response, 415, "unsupported_media_type")
        assert "'Content-Type: application/json'" in error["message"]
    check(
        await client.post(path, content=b"{}", headers={**JSON, "content-encoding": "gzip"}),
        415,
        "unsupported_media_type",
    )


async def test_content_type_with_parameters(client: httpx.AsyncClient) -> None:
    content = json.dumps(CHAT).encode()
    for headers in ({"content-type": "Application/JSON; charset=utf-8"}, {"content-type": "application/vnd.x+json"}):
        assert (await client.post("/v1/chat/completions", content=content, headers=headers)).status_code == 200


async def test_body_too_large(client: httpx.AsyncClient) -> None:
    check(await client.post("/v1/chat/completions", content=b" " * 2000, headers=JSON), 413, "request_too_large")
    response = await client.post("/v1/chat/completions", content=_pieces(b" " * 100, 20), headers=JSON)
    check(response, 413, "request_too_large")
    assert response.headers["connection"] == "close"


async def test_body_of_the_largest_size(client: httpx.AsyncClient) -> None:
    content = json.dumps(CHAT).encode().ljust(1048)
    assert (await client.post("/v1/chat/completions", content=content, headers=JSON)).status_code == 200


async def test_validation_names_the_field_and_not_the_branch(client: httpx.AsyncClient) -> None:
    cases: list[tuple[dict[str, Any], str]] = [
        ({**CHAT, "temperature": "hot"}, "temperature"),
        ({**CHAT, "stop": [1]}, "stop.0"),
        ({**CHAT, "messages": [{"role": "user", "content": [{"text": "no type"}]}]}, "messages.0.content.0.type"),
        ({**CHAT, "messages": [{"role": "wizard", "content": ""}]}, "messages.0.role"),
        ({**CHAT, "logit_bias": {"5": "x"}}, "logit_bias.5"),
        (
            {**CHAT, "messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": 5}}]}]},
            "messages.0.content.0.image_url.url",
        ),
        ({"max_tokens": 5}, "messages"),
        ({**CHAT, "messages": []}, "messages"),
    ]
    for body, param in cases:
        error = check(await client.post("/v1/chat/completions", json=body), 400, None, param)
        assert error["type"] == "invalid_request_error"


IMAGE = {"type": "image_url", "image_url": {"url": "http://x/", "detail": "huge"}}


async def test_the_same_bound_holds_for_max_tokens_wherever_it_is_named(client: httpx.AsyncClient) -> None:
    schemas = (await client.get("/openapi.json")).json()["components"]["schemas"]
    for name in ("max_tokens", "max_completion_tokens"):
        assert f'"maximum":{CONTEXT}' in json.dumps(
            schemas["ChatCompletionRequest"]["properties"][name], separators=(",", ":")
        )
        for asked, message in (
            (0, f"'{name}' must be from 1 to {CONTEXT}."),
            (1 << 40, f"This model's maximum context length is {CONTEXT} tokens. However, "),
        ):
            response = await client.post("/v1/chat/completions", json={**CHAT, name: asked})
            assert response.status_code == 400 and message in response.json()["error"]["message"]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"prompt": None}, "'prompt' must be a string or an array."),
        ({}, "'prompt' is missing."),
        ({"prompt": 5}, "'prompt' must be a string or an array."),
        ({"prompt": [1, "a"]}, "'prompt.1' must be an integer."),
        ({"prompt": ["a", 1]}, "'prompt.1' must be a string."),
        ({"prompt": [None]}, "'prompt.0' must be an integer, a string or an array."),
        ({"prompt": [[1, "a"]]}, "'prompt.0.1' must be an integer."),
        ({"prompt": [1, -1]}, "'prompt.1' must be at least 0."),
        ({"prompt": [1, 1 << 31]}, "'prompt.1' must be at most 2147483647."),
        ({"messages": []}, "'messages' must have 1 or more entries."),
        ({"messages": [5]}, "'messages.0' must be an object."),
        ({"messages": [{"role": "user", "content": 5}]}, "'messages.0.content' must be a string or an array."),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}, IMAGE]}]},
            "'messages.0.content.1.image_url.detail' must be 'auto', 'low', 'high' or 'original'.",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": 5}, {"type": "text", "text": 6}]}]},
            "'messages.0.content.0.text' must be a string.",
        ),
        (
            {"messages": [{"role": "user", "content": "a"}], "stop": 5, "n": 1.5},
            "'stop' must be a string or an array. 'n' must be an integer.",
        ),
        ({"prompt": "a", "stop": [1]}, "'stop.0' must be a string."),
        ({"prompt": "a", "response_format": {"type": "json_schema", "json_schema": {"schema": 3}}},
         "'response_format.json_schema.schema' must be an object or true or false."),
        ({"prompt": "a", "stream": "yes"}, "'stream' must be true or false."),
        ({"prompt": "a", "max_tokens": 0}, "'max_tokens' must be from 1 to 32768."),
        ({"prompt": "a", "response_format": {"type": "choice"}}, "'response_format.choices' is missing."),
        ({"prompt": "a", "response_format": {"type": "ebnf"}}, "'response_format.grammar' is missing."),
        ({"prompt": "a", "response_format": {"type": "xml"}},
         "'response_format.type' must be text, json_object, json_schema, regex, grammar, choice or structural_tag."),
        ({"prompt": "a", "temperature": 2.5}, "'temperature' must be from 0 to 2."),
        ({"prompt": "a", "top_k": -2}, "'top_k' must be from -1 to 1073741824."),
        ({"prompt": "a", "repetition_penalty": 0}, "'repetition_penalty' must be from 0.01 to 100."),
        ({"prompt": "a", "request_id": "ä"}, "'request_id' must match ^[!-~]+$."),
        ({"prompt": "a", "request_id": ""}, "'request_id' must have 1 or more characters."),
        ({"prompt": "a", "cache_salt": "a" * 1025}, "'cache_salt' must have 1024 or fewer characters."),
        ({"prompt": "a", "logit_bias": {"5": 101}}, "'logit_bias.5' must be from -100 to 100."),
        ({"prompt": "a", "logit_bias": {"5": 1, "x": 1}},
         "The key 'x' of 'logit_bias' must be a token id from 0 to 511."),
        ({"prompt": "a", "top_p": 2}, "'top_p' must be above 0 and at most 1."),
        ({"prompt": "a", "max_tokens": 1, "min_tokens": 5},
         "'min_tokens' must be from 0 to 1, the most tokens that the answer may have."),
        ({"prompt": "a", "model": "other"}, "The model 'other' does not exist; this server serves 'fake'."),
    ],
)  # fmt: skip
async def test_messages_are_plain_and_name_what_was_meant(fields: dict[str, Any], message: str) -> None:
    route = "chat/completions" if "messages" in fields else "completions"
    async with application() as (client, _):
        response = await client.post(f"/v1/{route}", json={"model": "fake"} | fields)
    error = response.json()["error"]
    assert error["message"] == message
    assert error["param"] == {"The key": "logit_bias.x", "The mod": "model"}.get(message[:7], message.split("'")[1])


@pytest.mark.parametrize(
    ("content", "start"),
    [(b"[]", "The body must be an object."), (b"{", "The body is not valid JSON: "),
     (b'{"prompt": NaN}', "The body is not valid JSON: ")],
)  # fmt: skip
async def test_messages_about_the_whole_body(client: httpx.AsyncClient, content: bytes, start: str) -> None:
    error = check(await client.post("/v1/completions", content=content, headers=JSON), 400)
    assert error["message"].startswith(start) and "Input" not in error["message"]


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b"\xff",
        b'{"messages":' + b"[" * 400 + b"]" * 400 + b"}",
        b'{"n":' * 150 + b"1" + b"}" * 150,
    ],
)
async def test_not_json_or_too_deep(client: httpx.AsyncClient, content: bytes) -> None:
    response = await client.post("/v1/chat/completions", content=content, headers=JSON)
    check(response, 400, None, response.json()["error"]["param"])


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity"])
@pytest.mark.parametrize("field", ["temperature", "metadata", "unknown_field"])
async def test_numbers_that_are_none(client: httpx.AsyncClient, field: str, number: str) -> None:
    content = f'{json.dumps(CHAT)[:-1]},"{field}":{number}}}'.encode()
    check(await client.post("/v1/chat/completions", content=content, headers=JSON), 400)


async def test_words_that_look_like_them(client: httpx.AsyncClient) -> None:
    body = {**CHAT, "messages": [{"role": "user", "content": "NaN is not Infinity"}]}
    assert (await client.post("/v1/chat/completions", json=body)).status_code == 200


async def test_validation_message_is_bounded_and_echoes_nothing() -> None:
    secret = "s3cret\n" * 50
    bodies: list[dict[str, Any]] = [
        {**CHAT, "messages": [{"role": secret, "content": {secret: secret}}] * 400},
        {**CHAT, "logit_bias": {secret * 20 + str(i): secret for i in range(50)}},
        {**CHAT, "stop": [1] * 5000},
    ]
    async with application() as (client, _):
        for body in bodies:
            response = await client.post("/v1/chat/completions", json=body)
            assert response.status_code == 400
            assert len(response.content) < 3000
            assert "\n" not in response.json()["error"]["message"]
        assert "s3cret" not in (await client.post("/v1/chat/completions", json=bodies[0])).text


def test_messages_begin_with_a_capital() -> None:
    for error in (engine.errors.EngineNotReady("the engine is closing"), engine.errors.QueueTimeout("the request")):
        assert json.loads(render(error).body)["error"]["message"].startswith("The ")


async def _pieces(piece: bytes, count: int) -> AsyncIterator[bytes]:
    for _ in range(count):
        yield piece


STATUS: dict[type[Exception], tuple[int, bool]] = {
    engine.errors.InvalidRequest: (400, False),
    routers.errors.NotFound: (404, False),
    engine.errors.ContextOverflow: (400, False),
    engine.errors.EngineUnavailable: (503, True),
    engine.errors.EngineNotReady: (503, True),
    engine.errors.EngineAsleep: (503, True),
    engine.errors.EngineWoken: (409, False),
    engine.errors.NotSupported: (501, False),
    engine.errors.EngineDied: (503, True),
    engine.errors.EmbeddingsLost: (503, True),
    engine.errors.QueueFull: (429, True),
    engine.errors.QueueTimeout: (503, True),
    engine.errors.EngineFailure: (500, False),
    engine.errors.EngineError: (500, False),
    multimodal.errors.RequestError: (400, False),
    multimodal.errors.ModelNotFound: (404, False),
    multimodal.errors.MediaError: (400, False),
    multimodal.errors.MediaTimeout: (408, False),
    multimodal.errors.InvalidMedia: (400, False),
    multimodal.errors.UnsupportedMedia: (415, False),
    multimodal.errors.DeadlineExceeded: (504, False),
    routers.errors.NotReady: (503, True),
    routers.errors.WrongReplica: (404, False),
    routers.errors.ReplicasDiffer: (409, False),
}


def test_table_covers_every_error() -> None:
    declared = [value for module in (engine, multimodal, routers) for value in vars(module.errors).values()]
    assert {cls for cls in declared if isinstance(cls, type) and issubclass(cls, Exception)} == set(STATUS)


@pytest.mark.parametrize("cls", STATUS)
def test_status_and_retry(cls: type[Exception]) -> None:
    arguments = {
        multimodal.errors.DeadlineExceeded: (1.5,),
        multimodal.errors.ModelNotFound: ("asked", "served"),
        routers.errors.NotReady: ([routers.errors.Missing("engine", "why")],),
    }
    error = cls(*arguments.get(cls, ("why",)))
    answer = render(error)
    status, again = STATUS[cls]
    assert answer.status == status
    assert ("retry-after" in answer.headers) == again
    if status >= 429:
        assert answer.headers["x-should-retry"] == str(again).lower()
    body = json.loads(answer.body)["error"]
    assert status >= 500 or status == 429 or body["type"] in ("invalid_request_error", "not_found_error")
    assert body["code"] == "context_length_exceeded" or not isinstance(error, engine.errors.ContextOverflow)


def test_bug_is_answered_without_its_text(caplog: pytest.LogCaptureFixture) -> None:
    answer = render(ZeroDivisionError("at 0x7fffdeadbeef"))
    assert answer.status == 500
    assert answer.headers == {"x-should-retry": "false"}
    assert b"0x7fff" not in answer.body
    assert "0x7fffdeadbeef" in caplog.text


def test_client_gone_and_other_statuses() -> None:
    assert render(ClientDisconnect()).status == 499
    assert render(HTTPException(418, "teapot")).status == 418
    assert json.loads(render(HTTPException(403)).body)["error"]["type"] == "permission_error"
