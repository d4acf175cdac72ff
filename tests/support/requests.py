"""Bodies on the way that the routes give them: checked, converted, prepared."""

import json
from typing import Any

from multimodal.processor import Generation, Processor
from multimodal.request import Ask
from routers import chat, completions
from routers.endpoint import Endpoint
from routers.fields import FieldCheck


def endpoint_of(body: dict[str, Any]) -> Endpoint[Any]:
    return chat.ENDPOINT if "messages" in body else completions.ENDPOINT


def ask_of(body: dict[str, Any], check: FieldCheck | None = None) -> Ask:
    """The neutral request of a body, by the fields that it has."""
    endpoint = endpoint_of(body)
    parsed = endpoint.body.model_validate_json(json.dumps(body))
    (check or FieldCheck("fake", strict=False, model_optional=True)).check(parsed)
    return endpoint.convert(parsed)


async def prepare(processor: Processor, body: dict[str, Any], check: FieldCheck | None = None) -> Generation:
    return await processor.prepare(ask_of(body, check), endpoint_of(body).shape, "id")
