"""/openapi.json: everything is described, and what it allows is accepted."""

import asyncio
import json
from collections.abc import Iterator
from contextlib import AsyncExitStack
from typing import Any

import httpx
import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.fake.engine import FakeEngine
from engine.types import GUIDE_KINDS
from protocol.chunks import ChatCompletionChunk, CompletionChunk
from server.app import create_app
from server.settings import Settings
from tests.support.http import application

Schema = dict[str, Any]
Document = dict[str, Any]
MESSAGES = [{"role": "user", "content": "hello"}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"model": "fake", "messages": MESSAGES, "max_tokens": 4},
    "/v1/completions": {"model": "fake", "prompt": "hello", "max_tokens": 4},
    "/tokenize": {"prompt": "hello"},
    "/v1/tokenize": {"messages": MESSAGES},
    "/v1/detokenize": {"tokens": [40, 41]},
}
"""A body of each route, to which fields are added."""
NARROWED = {
    "max_tokens": {"maximum": 32},  # with the prompt, the largest exceeds the context
    "max_completion_tokens": {"maximum": 32},
    "min_tokens": {"maximum": 4},  # at most max_tokens
    "n": {"maximum": 8},
    "logit_bias": {"propertyNames": {"pattern": "^(0|[1-9][0-9]{0,2})$"}, "maxProperties": 9},  # below 512, below
}
"""What a schema cannot say since it depends on other fields, or what would take long."""
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


class App:
    """An application whose clients need no running loop."""

    def __init__(self) -> None:
        self._runner = asyncio.Runner()
        self._stack = AsyncExitStack()
        self._client: httpx.AsyncClient

    def __enter__(self) -> "App":
        self._client, _ = self._runner.run(self._stack.enter_async_context(application()))
        return self

    def __exit__(self, *_: object) -> None:
        self._runner.run(self._stack.aclose())
        self._runner.close()

    def get(self, path: str) -> Any:
        return self._runner.run(self._client.get(path)).json()

    def post(self, path: str, body: Any) -> httpx.Response:
        content = json.dumps(body).encode()
        return self._runner.run(
            self._client.post(path, content=content, headers={"content-type": "application/json"}, timeout=30)
        )


@pytest.fixture(scope="module")
def app() -> Iterator[App]:
    with App() as app:
        yield app


@pytest.fixture(scope="module")
def document(app: App) -> Document:
    return app.get("/openapi.json")


def resolved(schema: Schema, document: Document) -> Schema:
    """A schema without a reference at its top."""
    if "$ref" not in schema:
        return schema
    rest = {key: value for key, value in schema.items() if key != "$ref"}
    return document["components"]["schemas"][schema["$ref"].rpartition("/")[2]] | rest


def body_schema(path: str, document: Document) -> Schema:
    content = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]
    return resolved(content["schema"], document)


def merged(schema: Schema, more: Schema) -> Schema:
    """A schema that satisfies both, as far as these documents need it."""
    both = {**schema, **more, "required": [*schema.get("required", ()), *more.get("required", ())]}
    properties = dict(schema.get("properties", {}))
    for name, narrower in more.get("properties", {}).items():
        known = properties.get(name, {})
        kinds = narrower.get("type", ())
        if "anyOf" in known and kinds:  # those branches that are of one of the types
            branches = [branch for branch in known["anyOf"] if branch.get("type", "object") in kinds]
            properties[name] = {**known, "anyOf": branches}
        else:
            properties[name] = {**known, **narrower}
    return both | {"properties": properties}


def instances(schema: Schema, document: Document) -> st.SearchStrategy[Any]:
    """Values that a schema allows."""
    schema = resolved(schema, document)
    for combined in ("oneOf", "anyOf"):
        if combined in schema:
            rest = {key: value for key, value in schema.items() if key != combined}
            branches = [merged(rest, resolved(branch, document)) for branch in schema[combined]]
            return st.one_of([instances(branch, document) for branch in branches])
    if "const" in schema or "enum" in schema:
        return st.sampled_from(schema.get("enum", [schema.get("const")]))
    kinds = schema.get("type")
    if isinstance(kinds, list):
        return st.one_of([instances(schema | {"type": kind}, document) for kind in kinds])
    if kinds == "null":
        return st.none()
    if kinds == "boolean":
        return st.booleans()
    if kinds == "integer":
        numbers = st.integers(schema.get("minimum"), schema.get("maximum"))
        unwanted = schema.get("not", {}).get("const")
        return numbers.filter(lambda number: number != unwanted)
    if kinds == "number":
        low = schema.get("exclusiveMinimum", schema.get("minimum"))
        return st.floats(
            low, schema.get("maximum"), exclude_min="exclusiveMinimum" in schema, allow_nan=False, allow_infinity=False
        )
    if kinds == "string":
        if "pattern" in schema:
            return st.from_regex(schema["pattern"].replace("$", r"\Z"))
        return st.text(min_size=schema.get("minLength", 0), max_size=min(20, schema.get("maxLength", 20)))
    if kinds == "array":
        most = min(4, schema.get("maxItems", 4))
        return st.lists(instances(schema.get("items", {}), document), min_size=schema.get("minItems", 0), max_size=most)
    if kinds == "object":
        return objects(schema, document)
    return json_values


def objects(schema: Schema, document: Document) -> st.SearchStrategy[dict[str, Any]]:
    most = schema.get("maxProperties", 4)
    if "properties" in schema:
        required = set(schema.get("required", ()))
        all_fields = {name: instances(part, document) for name, part in schema["properties"].items()}
        must = {name: strategy for name, strategy in all_fields.items() if name in required}
        may = {name: strategy for name, strategy in all_fields.items() if name not in required}
        if not may:
            return st.fixed_dictionaries(must)
        some = st.lists(st.sampled_from(sorted(may)), max_size=min(most, 4), unique=True)
        return some.flatmap(lambda names: st.fixed_dictionaries(must | {name: may[name] for name in names}))
    keys = instances({"type": "string", **schema.get("propertyNames", {})}, document)
    values = schema.get("additionalProperties", {})
    return st.dictionaries(keys, instances({} if values is True else values, document), max_size=min(most, 4))


def with_field(path: str, schema: Schema, name: str, value: Any) -> dict[str, Any]:
    """A body with this field, and with what the schema says that the field needs."""
    needs = schema.get("dependentSchemas", {}).get(name, {})
    body = BODIES[path] | {field: part["const"] for field, part in needs.get("properties", {}).items()}
    return body | {name: value}


def property_of(schema: Schema, name: str) -> Schema:
    return schema["properties"][name] | NARROWED.get(name, {})


def shows_images(value: Any) -> bool:
    """Whether a body has an image, which this model does not take."""
    return '"image_url"' in json.dumps(value)


def contradicts(path: str, body: dict[str, Any]) -> bool:
    """Whether the fields of a body exclude each other in a way that no schema says."""
    return bool(body.get("continue_final_message") and body.get("add_generation_prompt"))


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
    from server.http import schemas  # noqa: PLC0415

    ours = {cls.__name__ for cls in schemas._classes()}
    for name in ours & document["components"]["schemas"].keys() - {"Runtime", "Model", "ModelList", "ServerInfo"}:
        for field, part in document["components"]["schemas"][name].get("properties", {}).items():
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
            if not shows_images(body) and "structured_outputs" not in body and name != "model":
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
    assert refused > 20 or "tokenize" in path


@pytest.mark.parametrize("path", BODIES)
def test_no_valid_body_is_refused_for_its_shape(path: str, app: App, document: Document) -> None:
    schema = body_schema(path, document)
    names = sorted(name for name, part in schema["properties"].items() if name != "model")
    strategies = {name: instances(property_of(schema, name), document) for name in names}
    alone = ("prompt", "messages") if path.endswith("/tokenize") else ()

    @settings(max_examples=150, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(st.data())
    def accepts(data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(names))
        value = data.draw(strategies[name])
        body = {name: value} if name in alone and value is not None else with_field(path, schema, name, value)
        if shows_images(body) or contradicts(path, body):
            return
        answer = app.post(path, body)
        assert answer.status_code == 200, answer.text

    accepts()


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_no_valid_combination_of_fields_fails(path: str, app: App, document: Document) -> None:
    """Fields may exclude each other, which is a 400; nothing is a 5xx."""
    schema = body_schema(path, document)
    schema = schema | {"properties": {name: property_of(schema, name) for name in schema["properties"]}}

    @settings(max_examples=80, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(instances(schema, document))
    def answers(body: dict[str, Any]) -> None:
        assert app.post(path, {**body, "model": "fake", "max_tokens": 4}).status_code in (200, 400)

    answers()


def test_guides_are_as_the_engine_has_them(app: App, monkeypatch: pytest.MonkeyPatch) -> None:
    with_guides = msgspec.structs.replace
    real = FakeEngine.info.fget
    assert real is not None
    before = app.get("/openapi.json")["components"]["schemas"]
    assert before["CompletionRequest"]["properties"]["guided_regex"]["x-unsupported"]
    assert [case["properties"]["type"]["enum"] for case in before["ResponseFormat"]["oneOf"]] == [["text"]]
    monkeypatch.setattr(FakeEngine, "info", property(lambda self: with_guides(real(self), guides=GUIDE_KINDS)))
    document = app.get("/openapi.json")
    schemas = document["components"]["schemas"]
    assert schemas["CompletionRequest"]["properties"]["guided_regex"]["type"] == ["string", "null"]
    assert len(schemas["ResponseFormat"]["oneOf"]) == 6
    schema = body_schema("/v1/completions", document)
    for name in ("guided_json", "guided_choice", "guided_regex", "structured_outputs", "response_format", "grammar"):
        for example in schema["properties"][name]["examples"]:
            assert app.post("/v1/completions", with_field("/v1/completions", schema, name, example)).status_code == 200
    cases = [part["properties"]["type"]["enum"][0] for part in schemas["ResponseFormat"]["oneOf"]]
    strategy = instances({"$ref": "#/components/schemas/ResponseFormat"}, document)

    @settings(max_examples=60, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(strategy)
    def accepts(form: dict[str, Any]) -> None:
        assert form["type"] in [*cases, "ebnf"]
        answer = app.post("/v1/completions", BODIES["/v1/completions"] | {"response_format": form})
        assert answer.status_code == 200, answer.text

    accepts()


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
    assert document["paths"]["/health/live"]["get"]["security"] == []
    assert body_schema("/v1/completions", document)["required"] == ["model", "prompt"]
    assert body_schema("/v1/completions", document)["examples"] == [{"model": "fake", "prompt": "Once upon a time"}]
    async with application(model_optional=True) as (client, _):
        document = (await client.get("/openapi.json")).json()
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
