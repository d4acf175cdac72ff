"""Every route, without a socket: its answers, and who may call it when."""

import hashlib
import hmac
import itertools
import re
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from fastapi.routing import iter_route_contexts

from server.app import create_app
from server.http.routes import INTERNAL
from server.settings import Settings
from tests.support.servers import CHAT, application, page_with_stats

KEYS = "first-key, second-key"


def routes(app: FastAPI) -> list[tuple[str, str]]:
    """Method and path of every mounted route."""
    found = [
        (method, re.sub(r"\{[^}]*\}", "x", str(context.path)))
        for context in iter_route_contexts(app.routes)
        for method in sorted(getattr(context, "methods", None) or [])
    ]
    assert ("POST", "/v1/chat/completions") in found
    assert ("GET", "/docs") in found
    assert ("GET", "/openapi.json") in found
    return found


PAGES = ("/", "/docs", "/static/x")
PROBES = ("/health", "/health/live", "/health/ready", "/metrics", "/prometheus/metrics")


@pytest.mark.parametrize(("open_probes", "probes"), [(True, PROBES), (False, ("/health/live",))])
async def test_key_covers_every_route_but_probes_and_pages(open_probes: bool, probes: tuple[str, ...]) -> None:
    paths = [*routes(create_app(Settings(engine="fake"))), ("GET", "/unknown"), ("OPTIONS", "/v1/models")]
    wrong = [
        None,
        "Bearer ",
        "Bearer wrong",
        "Bearer first-ke",
        "first-key",
        "Basic first-key",
        "Bearer first-key,second-key",
        "Bearer ключ".encode(),
    ]
    async with application(api_keys=KEYS, wait=False, open_probes=open_probes) as (client, _):
        for (method, path), authorization in itertools.product(paths, wrong):
            response = await client.request(
                method, path, headers={} if authorization is None else {"authorization": authorization}
            )
            if path in PAGES or path in probes:
                assert response.status_code in ((404,) if path == "/static/x" else (200, 503))
                continue
            assert response.status_code == 401, (method, path, authorization)
            assert response.headers["www-authenticate"] == "Bearer"
            if method != "HEAD":
                error = response.json()["error"]
                assert "invalid_api_key" in (error.get("code"), error.get("details", {}).get("error_code"))
            assert "x-request-id" in response.headers


async def test_any_key_opens_every_route() -> None:
    for key in ("first-key", "second-key"):
        async with application(api_keys=KEYS, wait=False) as (client, _):
            for method, path in routes(create_app(Settings(engine="fake"))):
                response = await client.request(method, path, headers={"authorization": f"bearer {key}"})
                assert (response.status_code == 401) == (path in INTERNAL), (method, path)


async def test_any_key_opens_every_route_as_anthropics_clients_send_it() -> None:
    async with application(api_keys=KEYS, wait=False) as (client, _):
        for key, status in (("second-key", 200), ("wrong", 401), ("", 401), ("Bearer second-key", 401)):
            assert (await client.get("/version", headers={"x-api-key": key})).status_code == status
        twice = [("x-api-key", "first-key"), ("x-api-key", "second-key")]
        assert (await client.get("/version", headers=twice)).status_code == 401
        both = {"x-api-key": "first-key", "authorization": "Bearer another"}
        assert (await client.get("/version", headers=both)).status_code == 200


async def test_two_authorization_headers_are_none() -> None:
    async with application(api_keys=KEYS, wait=False) as (client, _):
        headers = [("authorization", "Bearer first-key"), ("authorization", "Bearer second-key")]
        assert (await client.get("/version", headers=headers)).status_code == 401


async def test_keys_are_compared_as_digests_with_all(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[tuple[bytes, bytes]] = []
    real = hmac.compare_digest

    def compare(left: bytes, right: bytes) -> bool:
        compared.append((left, right))
        return real(left, right)

    monkeypatch.setattr(hmac, "compare_digest", compare)
    async with application(api_keys=KEYS, wait=False) as (client, _):
        assert (await client.get("/version", headers={"authorization": "Bearer first-key"})).status_code == 200
    digests = [hashlib.sha256(key.encode()).digest() for key in ("first-key", "second-key")]
    assert compared == [(digests[0], digest) for digest in digests]


@pytest.mark.parametrize("given", ["abc-123", "!~" * 64])
async def test_sane_request_id_is_echoed(given: str) -> None:
    async with application() as (client, _):
        response = await client.post("/v1/chat/completions", json=CHAT, headers={"x-request-id": given})
    assert response.headers["x-request-id"] == given
    assert response.json()["id"] == f"chatcmpl-{given}"
    assert response.headers["openai-processing-ms"].isdecimal()


@pytest.mark.parametrize("given", [b"", b"a b", b"a\tb", b"x" * 129, b"\xc3\xa4", b"a\x7f", b"\x1b[31m"])
async def test_other_request_id_is_replaced(given: bytes) -> None:
    async with application(wait=False) as (client, _):
        first = await client.get("/health/live", headers={"x-request-id": given})
        second = await client.get("/health/live", headers={"x-request-id": given})
    assert re.fullmatch("[0-9a-f]{32}", first.headers["x-request-id"])
    assert first.headers["x-request-id"] != second.headers["x-request-id"]


async def test_gate_is_closed_until_ready_and_while_draining() -> None:
    async with application() as (client, state):
        replica = state["replica"]
        service, replica.service = replica.service, None
        await _check_closed(client, "loading")
        replica.service, replica.draining = service, True
        await _check_closed(client, "shutting down")
        replica.draining = False
        assert (await client.get("/health/ready")).status_code == 200
        assert (await client.get("/v1/models")).status_code == 200


async def _check_closed(client: httpx.AsyncClient, why: str) -> None:
    for method, path in [
        ("GET", "/v1/models"),
        ("POST", "/v1/chat/completions"),
        ("POST", "/tokenize"),
        ("GET", "/health"),
        ("GET", "/health/ready"),
    ]:
        response = await client.request(method, path)
        assert response.status_code == 503, path
        assert int(response.headers["retry-after"]) > 0
        assert response.headers["x-should-retry"] == "true"
        assert why in response.json()["error"]["message"]
    for path in ("/health/live", "/metrics", "/version"):
        assert (await client.get(path)).status_code == 200


async def test_unhealthy_engine_is_not_ready() -> None:
    async with application() as (client, state):
        await state["replica"].engine.close()
        assert (await client.get("/health")).status_code == 503
        assert (await client.get("/health/live")).status_code == 200
        assert (await client.post("/v1/chat/completions", json=CHAT)).status_code == 503


async def test_models() -> None:
    async with application(served_model_name="org/name") as (client, _):
        models = (await client.get("/v1/models")).json()
        assert [model["id"] for model in models["data"]] == ["org/name"]
        assert (await client.get("/v1/models/org/name")).json() == models["data"][0]
        missing = await client.get("/v1/models/other")
        assert (missing.status_code, missing.json()["error"]["code"]) == (404, "model_not_found")
        wrong = await client.post("/v1/chat/completions", json={**CHAT, "model": "other"})
        assert (wrong.status_code, wrong.json()["error"]["code"]) == (404, "model_not_found")


@pytest.mark.parametrize("named", [{}, {"model": None}, {"model": ""}], ids=str)
@pytest.mark.parametrize(("api", "body"), [("chat/completions", CHAT), ("completions", {"prompt": "a"})])
async def test_a_request_must_name_a_model_unless_a_setting_says_otherwise(
    api: str, body: dict[str, Any], named: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MODEL_OPTIONAL")
    async with application(served_model_name="served") as (client, _):
        refused = await client.post(f"/v1/{api}", json=body | named)
        assert refused.status_code == 400
        assert refused.json()["error"] == {
            "message": "'model' must name a model; this server serves 'served'.",
            "type": "invalid_request_error",
            "param": "model",
            "code": None,
        }
        assert (await client.post(f"/v1/{api}", json=body | {"model": "served"})).status_code == 200
        assert (await client.post("/tokenize", json={"prompt": "a"} | named)).status_code == 200
    async with application(served_model_name="served", model_optional=True) as (client, _):
        assert (await client.post(f"/v1/{api}", json=body | named)).status_code == 200
        assert (await client.post(f"/v1/{api}", json=body | {"model": "other"})).status_code == 404


@pytest.mark.parametrize("prefix", ["", "/v1"])
async def test_tokenize_and_back(prefix: str) -> None:
    async with application() as (client, _):
        tokens = (await client.post(f"{prefix}/tokenize", json={"prompt": "héllo"})).json()
        assert tokens["count"] == len(tokens["tokens"]) == len("héllo".encode())
        assert (await client.post(f"{prefix}/detokenize", json={"tokens": tokens["tokens"]})).json() == {
            "prompt": "héllo"
        }


async def test_whole_answers() -> None:
    async with application() as (client, _):
        chat = (await client.post("/v1/chat/completions", json=CHAT)).json()
        assert chat["choices"][0]["message"]["role"] == "assistant"
        completion = (await client.post("/v1/completions", json={"prompt": "abc", "max_tokens": 3})).json()
        assert completion["choices"][0]["text"] == "abc"


@pytest.mark.parametrize("prompts", [1, 2])
async def test_choices_wait_for_their_siblings_without_a_limit(prompts: int) -> None:
    """One request with eight times the choices that the engine takes at once, on a server with nothing else to do."""
    body = {"model": "fake", "prompt": ["abc"] * prompts, "n": 16 // prompts, "max_tokens": 20}
    async with application(max_batch_size=2, queue_timeout_seconds=0.02, fake_token_delay_ms=1) as (client, _):
        answer = await client.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    assert len(answer.json()["choices"]) == 16


@pytest.mark.parametrize("path", ["/metrics", "/prometheus/metrics"])
async def test_metrics(path: str) -> None:
    async with application() as (client, _):
        for _ in range(3):
            await client.post("/v1/chat/completions", json=CHAT)
        await page_with_stats(client)
        response = await client.get(path)
    assert response.headers["content-type"].startswith("text/plain")
    page = response.text
    assert 'http_requests_total{handler="/v1/chat/completions",method="POST",status="2xx"} 3.0' in page
    assert 'trtllm_generation_tokens_total{model_name="fake"} 24.0' in page
    for name in (
        "num_requests_running",
        "num_requests_waiting",
        "kv_cache_utilization",
        "kv_cache_used_blocks",
        "num_preemptions_total",
    ):
        assert f'trtllm_{name}{{model_name="fake"}} 0.0' in page
    assert "trellis_event_loop_lag_seconds_bucket" in page


async def test_model_name_cannot_break_the_metrics_page() -> None:
    async with application(served_model_name='a"} 1\nevil_metric 2\n\\') as (client, _):
        page = (await client.get("/metrics")).text
    assert not [line for line in page.splitlines() if line.startswith("evil")]


async def test_openapi_document_has_the_bodies_and_no_422() -> None:
    async with application(wait=False) as (client, _):
        document: dict[str, Any] = (await client.get("/openapi.json")).json()
    schemas = document["components"]["schemas"]
    for path, name in [
        ("/v1/chat/completions", "ChatCompletionRequest"),
        ("/v1/completions", "CompletionRequest"),
        ("/tokenize", "TokenizeRequest"),
    ]:
        operation = document["paths"][path]["post"]
        assert (
            operation["requestBody"]["content"]["application/json"]["schema"]["$ref"] == f"#/components/schemas/{name}"
        )
        assert "422" not in operation["responses"]
        assert "ErrorEnvelope" in str(operation["responses"]["4XX"])
    assert "messages" in schemas["ChatCompletionRequest"]["properties"]
    references = set(re.findall(r"#/components/schemas/(\w+)", str(document)))
    assert references <= set(schemas)


async def test_docs_can_be_left_out() -> None:
    async with application(wait=False, docs=False, page=False) as (client, _):
        for path in ("/docs", "/openapi.json"):
            assert (await client.get(path)).status_code in (404, 503)


async def test_no_cors_by_default() -> None:
    async with application(wait=False) as (client, _):
        response = await client.get("/version", headers={"origin": "https://evil"})
        assert not [name for name in response.headers if name.startswith("access-control")]


@pytest.mark.parametrize("origins", ["https://good", "*"])
async def test_cors_preflight(origins: str) -> None:
    """It takes no key, allows the headers of OpenAI's client, and never credentials."""
    async with application(wait=False, cors_origins=origins, api_keys=KEYS) as (client, _):
        preflight = {
            "origin": "https://good",
            "access-control-request-method": "POST",
            "access-control-request-headers": "authorization,content-type,x-stainless-lang",
        }
        response = await client.options("/v1/chat/completions", headers=preflight)
        assert response.status_code == 200
        assert response.headers["access-control-allow-origin"] == ("*" if origins == "*" else "https://good")
        assert response.headers["access-control-allow-headers"] == preflight["access-control-request-headers"]
        assert "POST" in response.headers["access-control-allow-methods"]
        assert "access-control-allow-credentials" not in response.headers
        response = await client.options("/v1/chat/completions", headers={**preflight, "origin": "https://evil"})
        assert (response.status_code == 200) == (origins == "*")
        assert response.headers.get("access-control-allow-origin") == ("*" if origins == "*" else None)


@pytest.mark.parametrize("origins", ["https://good", "*"])
async def test_cors_of_answers(origins: str) -> None:
    """A page reads whole answers, streams and errors, with the headers that it may act on."""
    chat = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 2}
    key = {"authorization": "Bearer first-key"}
    async with application(cors_origins=origins, api_keys=KEYS) as (client, _):
        for origin in ("https://good", "https://evil"):
            for status, body, headers in (
                (200, chat, key),
                (200, {**chat, "stream": True}, key),
                (400, {}, key),
                (401, chat, {}),
            ):
                response = await client.post("/v1/chat/completions", json=body, headers={**headers, "origin": origin})
                assert response.status_code == status
                allowed = response.headers.get("access-control-allow-origin")
                if origins == "*":
                    assert allowed == "*"
                else:
                    assert allowed == (origin if origin == origins else None)
                    assert "origin" in response.headers["vary"].lower()
                assert "retry-after" in response.headers["access-control-expose-headers"]
                assert "access-control-allow-credentials" not in response.headers


async def test_root_path_of_a_proxy() -> None:
    """As uvicorn has it: the prefix is put back before the path."""
    app = create_app(Settings(engine="fake", api_keys=KEYS))
    transport = httpx.ASGITransport(app, root_path="/llm")
    async with httpx.AsyncClient(transport=transport, base_url="http://test/llm") as client:
        assert (await client.get("/health/live")).status_code == 200
        assert (await client.get("/version")).status_code == 401
        assert 'src="static/' in (await client.get("/docs")).text, "relative, so that the prefix stays"
