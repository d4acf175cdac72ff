"""A fuzzer that reads /openapi.json finds no valid request that is refused for its shape, and no 5xx."""

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from engine.base import DeltaStream
from engine.fake.engine import FakeEngine
from engine.types import GUIDE_KINDS, GenerateRequest
from tests.support.openapi import (
    BODIES,
    App,
    Document,
    body_schema,
    contradicts,
    instances,
    property_of,
    shows_media,
    with_field,
)


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
        if shows_media(body) or contradicts(body) or (name in alone and value is None):
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
    """The fake engine has none; here it says that it does, and ignores them."""
    info, generate = FakeEngine.info.fget, FakeEngine.generate
    assert info is not None

    def unguided(self: FakeEngine, request: GenerateRequest) -> DeltaStream:
        return generate(self, replace(request, sampling=replace(request.sampling, guide=None)))

    before = app.get("/openapi.json")["components"]["schemas"]
    assert before["CompletionRequest"]["properties"]["guided_regex"]["x-unsupported"]
    assert [case["properties"]["type"]["enum"] for case in before["ResponseFormat"]["oneOf"]] == [["text"]]
    monkeypatch.setattr(FakeEngine, "info", property(lambda self: replace(info(self), guides=GUIDE_KINDS)))
    monkeypatch.setattr(FakeEngine, "generate", unguided)
    document = app.get("/openapi.json")
    schemas = document["components"]["schemas"]
    assert schemas["CompletionRequest"]["properties"]["guided_regex"]["type"] == ["string", "null"]
    assert len(schemas["ResponseFormat"]["oneOf"]) == 8
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
