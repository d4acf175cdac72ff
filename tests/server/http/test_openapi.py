"""/openapi.json: everything is described, and its examples and bounds are those of the server."""

import json
from typing import Any

import httpx
import pytest

from protocol.chunks import ChatCompletionChunk, CompletionChunk
from server.app import create_app
from server.http.schemas import wire_types
from server.settings import Settings
from tests.support.openapi import BODIES, App, Document, body_schema, property_of, resolved, shows_media, with_field
from tests.support.servers import application


@pytest.mark.parametrize("path", BODIES)
def test_each_field_is_described_with_an_example_or_marked_as_unsupported(path: str, document: Document) -> None:
    schema = body_schema(path, document)
    assert schema["description"] and schema["properties"]
    for name, part in schema["properties"].items():
        assert part["description"].endswith("."), name
        assert "title" not in part
        if part.get("x-unsupported"):
            assert part["deprecated"] and None in part["enum"]
        else:
            assert part["examples"] or name == "model", name
            assert not {"integer", "number"} & set(part.get("type", ())) or {"maximum"} <= part.keys(), name


def test_each_schema_describes_its_fields(document: Document) -> None:
    schemas = document["components"]["schemas"]
    ours = {cls.__name__ for cls in wire_types()} & schemas.keys()
    assert {"ErrorBody", "ChatCompletionChunk", "Runtime", "Usage"} < ours
    for name in ours:
        assert schemas[name]["description"], name
        for field, part in schemas[name].get("properties", {}).items():
            assert part.get("description"), (name, field)


@pytest.mark.parametrize("path", BODIES)
def test_examples_and_bounds_are_accepted(path: str, app: App, document: Document) -> None:
    schema = body_schema(path, document)
    for name in schema["properties"]:
        part = property_of(schema, name)
        values = [*part.get("examples", ()), *part.get("enum", ())]
        values += [part[key] for key in ("minimum", "maximum") if key in part]
        values += [part["default"]] if "default" in part else []
        for value in values:
            if path.endswith("tokenize") and name in ("prompt", "messages"):
                body = {name: value}
            else:
                body = with_field(path, schema, name, value)
            named = name in ("model", "previous_response_id")  # which must exist
            if not shows_media(body) and "structured_outputs" not in body and not named:
                answer = app.post(path, body)
                assert answer.status_code == 200, (name, value, answer.text)


@pytest.mark.parametrize("path", BODIES)
def test_beyond_the_bounds_is_refused(path: str, app: App, document: Document) -> None:
    """The bounds are where the server's are, not far within them."""
    schema = body_schema(path, document)
    refused = 0
    for name, part in schema["properties"].items():
        past = {"minimum": -1, "maximum": 1, "exclusiveMinimum": 0}
        for key in past.keys() & part.keys():
            answer = app.post(path, with_field(path, schema, name, part[key] + past[key]))
            assert answer.status_code == 400, (name, key)
            refused += 1
    assert refused > (6 if path == "/v1/messages" else 20) or "token" in path or "compact" in path


@pytest.mark.parametrize(
    ("path", "chunk"), [("/v1/chat/completions", ChatCompletionChunk), ("/v1/completions", CompletionChunk)]
)
def test_events_of_streams_are_as_described(path: str, chunk: Any, app: App, document: Document) -> None:
    content = document["paths"][path]["post"]["responses"]["200"]["content"]
    assert list(content) == ["application/json", "text/event-stream"]
    events = content["text/event-stream"]["schema"]
    assert events["anyOf"][0] == {"$ref": f"#/components/schemas/{chunk.__name__}"}
    assert "[DONE]" in events["description"]
    options = {"include_usage": True, "continuous_usage_stats": True}
    logprobs = {"logprobs": True, "top_logprobs": 1} if "chat" in path else {"logprobs": 1, "echo": True}
    for more in ({}, {"stream_options": options, "return_token_ids": True, "n": 2}, logprobs):
        lines = app.post(path, BODIES[path] | {"stream": True} | more).text.split("\n\n")
        payloads = [line.removeprefix("data: ") for line in lines if line.startswith("data: {")]
        assert payloads
        for payload in payloads:
            chunk.model_validate_json(payload)
            choices = resolved(events["anyOf"][0], document)["properties"]["choices"]["items"]
            for choice in json.loads(payload)["choices"]:
                assert choice.keys() <= resolved(choices, document)["properties"].keys()


def test_every_error_is_json(document: Document) -> None:
    for path, operations in document["paths"].items():
        for operation in operations.values():
            for status in ("4XX", "5XX"):
                assert list(operation["responses"][status]["content"]) == ["application/json"], path
    assert list(document["paths"]["/metrics"]["get"]["responses"]["200"]["content"]) == ["text/plain"]


def test_operations_have_ids_of_their_own(document: Document) -> None:
    ids = [operation["operationId"] for path in document["paths"].values() for operation in path.values()]
    assert len(ids) == len(set(ids)) and {"/v1/tokenize", "/v1/detokenize"} <= document["paths"].keys()
    assert all(word in document["info"]["description"] for word in ("text/event-stream", "[DONE]", "x-unsupported"))


async def test_keys_and_the_model_are_required_as_the_settings_say(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MODEL_OPTIONAL")
    async with application(api_keys="secret") as (client, _):
        document = (await client.get("/openapi.json", headers={"authorization": "Bearer secret"})).json()
    assert document["components"]["securitySchemes"]["bearer"]["scheme"] == "bearer"
    assert document["security"] == [{"bearer": []}]
    assert all(document["paths"][path]["get"]["security"] == [] for path in ("/health/live", "/health", "/metrics"))
    assert body_schema("/v1/completions", document)["required"] == ["model", "prompt"]
    assert body_schema("/v1/completions", document)["examples"] == [{"model": "fake", "prompt": "Once upon a time"}]
    async with application(model_optional=True, open_probes=False) as (client, _):
        document = (await client.get("/openapi.json")).json()
    assert "security" not in document["paths"]["/metrics"]["get"]
    assert document["security"] == [{"bearer": []}, {}]
    assert body_schema("/v1/completions", document)["required"] == ["prompt"]


async def test_the_document_is_there_before_the_engine_and_behind_a_proxy() -> None:
    app = create_app(Settings(engine="fake"))
    async with app.router.lifespan_context(app) as state:
        assert state is not None

        async def with_state(scope: Any, receive: Any, send: Any) -> None:
            await app(
                {**scope, "root_path": "/llm", "path": "/llm" + scope["path"], "state": dict(state)}, receive, send
            )

        async with httpx.AsyncClient(transport=httpx.ASGITransport(with_state), base_url="http://test") as client:
            document = (await client.get("/openapi.json")).json()
    assert document["servers"] == [{"url": "/llm"}]
    assert "maximum" in document["components"]["schemas"]["CompletionRequest"]["properties"]["max_tokens"]
