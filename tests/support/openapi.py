"""A reader of /openapi.json: generates bodies that its schemas allow, and sends them."""

import asyncio
import json
import tempfile
from collections.abc import Iterator
from contextlib import AsyncExitStack
from typing import Any

import httpx
from hypothesis import strategies as st

from routers.chat import MEDIA_PARTS
from tests.support.servers import application

Schema = dict[str, Any]
Document = dict[str, Any]
MESSAGES = [{"role": "user", "content": "hello"}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"model": "fake", "messages": MESSAGES, "max_tokens": 4},
    "/v1/completions": {"model": "fake", "prompt": "hello", "max_tokens": 4},
    "/v1/messages": {"model": "fake", "messages": MESSAGES, "max_tokens": 4},
    "/v1/messages/count_tokens": {"model": "fake", "messages": MESSAGES},
    "/v1/responses": {"model": "fake", "input": "hello", "max_output_tokens": 4},
    "/v1/responses/input_tokens": {"model": "fake", "input": "hello"},
    "/v1/responses/compact": {"model": "fake", "input": "hello"},
    "/tokenize": {"prompt": "hello"},
    "/v1/tokenize": {"messages": MESSAGES},
    "/v1/detokenize": {"tokens": [40, 41]},
}
"""A body of each route, to which fields are added."""
NARROWED = {
    "max_tokens": {"maximum": 32},  # with the prompt, the largest exceeds the context
    "max_completion_tokens": {"maximum": 32},
    "max_output_tokens": {"maximum": 32},
    "min_tokens": {"maximum": 4},  # at most max_tokens
    "n": {"maximum": 8},
    "logit_bias": {"propertyNames": {"pattern": "^(0|[1-9][0-9]?|[1-4][0-9]{2})$"}, "maxProperties": 9},  # below 512
}
"""What a schema cannot say since it depends on other fields, or what would take long."""
_json_values = st.recursive(
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
        folder = self._stack.enter_context(tempfile.TemporaryDirectory())
        served = application(cache_dir=folder, responses_store_mb=64)
        self._client, _ = self._runner.run(self._stack.enter_async_context(served))
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


def resolved(schema: Schema, document: Document) -> Schema:
    """A schema without a reference at its top."""
    if "$ref" not in schema:
        return schema
    rest = {key: value for key, value in schema.items() if key != "$ref"}
    return document["components"]["schemas"][schema["$ref"].rpartition("/")[2]] | rest


def body_schema(path: str, document: Document) -> Schema:
    content = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]
    return resolved(content["schema"], document)


def merged(schema: Schema, more: Schema, document: Document) -> Schema:
    """A schema that satisfies both, as far as these documents need it."""
    both = {**schema, **more, "required": [*schema.get("required", ()), *more.get("required", ())]}
    both["properties"] = dict(schema.get("properties", {}))
    for name, narrower in more.get("properties", {}).items():
        known = resolved(both["properties"].get(name, {}), document)
        kinds = narrower.get("type", ())
        if "anyOf" in known and kinds:  # those branches that are of one of the types
            rest = {key: value for key, value in narrower.items() if key != "type"}
            branches = [resolved(branch, document) for branch in known["anyOf"]]
            branches = [merged(branch, rest, document) for branch in branches if branch["type"] in kinds]
            both["properties"][name] = {**known, "anyOf": branches}
        else:
            both["properties"][name] = merged(known, narrower, document)
    return both


def instances(schema: Schema, document: Document) -> st.SearchStrategy[Any]:
    """Values that a schema allows."""
    schema = resolved(schema, document)
    for combined in ("oneOf", "anyOf"):
        if combined in schema:
            rest = {key: value for key, value in schema.items() if key != combined}
            branches = [merged(rest, resolved(branch, document), document) for branch in schema[combined]]
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
    return _json_values


def objects(schema: Schema, document: Document) -> st.SearchStrategy[dict[str, Any]]:
    most = schema.get("maxProperties", 4)
    if schema.get("properties"):
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


def shows_media(value: Any) -> bool:
    """Whether a body has an image, a video or a recording, which this model does not take."""
    text = json.dumps(value)
    return any(f'"{name}"' in text for name in ("image", *MEDIA_PARTS))


def contradicts(body: dict[str, Any]) -> bool:
    """Whether the fields of a body exclude each other in a way that no schema says."""
    tools = [one for tool in body.get("tools") or () for one in (tool, *(tool.get("tools") or ()))]
    functions = [tool.get("function", tool) for tool in tools] + list(body.get("functions") or ())
    names = [function["name"] for function in functions]
    chooses = any(body.get(name) not in (None, "none", "auto") for name in ("tool_choice", "function_call"))
    guided = any(function.get("strict") for function in functions)
    guided = guided or bool((body.get("output_config") or {}).get("format"))
    return bool(
        (body.get("continue_final_message") and body.get("add_generation_prompt"))
        or (body.get("tools") is not None and body.get("functions") is not None)
        or len(set(names)) < len(names)
        or chooses
        or guided
        or not all(map(_is_object, _arguments(body)))
        or not all(map(_fits_role, body.get("messages") or ()))
        or ("input" in body and body["input"] is None)
        or body.get("previous_response_id") is not None
        or _answers_no_call(body.get("input"))
    )


def _answers_no_call(items: Any) -> bool:
    """Whether an output among a response's items is of a call that is not before it."""
    calls: set[Any] = set()
    for item in items if isinstance(items, list) else ():
        if str(item.get("type")).endswith("_call_output") and item.get("call_id") not in calls:
            return True
        calls.add(item.get("call_id"))
    return False


def _fits_role(message: dict[str, Any]) -> bool:
    """Whether the blocks of a message, if it has any, are those of its role."""
    known = {
        "user": {"text", "document", "tool_result"},
        "assistant": {"text", "thinking", "redacted_thinking"},  # a call must not be the last message's
        "system": {"text"},
    }
    content = message.get("content")
    blocks = content if isinstance(content, list) and "tool_calls" not in message else ()
    others = {"input_text", "refusal", "image_url"}  # of OpenAI's chats
    return all(block["type"] in known.get(message["role"], {block["type"]}) | others for block in blocks)


def _arguments(body: dict[str, Any]) -> Iterator[str]:
    """Yield the JSON texts of the arguments of calls that a body's messages have."""
    items = given if isinstance(given := body.get("input"), list) else ()
    yield from (text for item in items if (text := item.get("arguments")))
    for message in body.get("messages") or ():
        functions = [call["function"] for call in message.get("tool_calls") or ()]
        functions += [function] if (function := message.get("function_call")) else []
        yield from (text for function in functions if isinstance(text := function.get("arguments"), str) and text)


def _is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except ValueError:
        return False
