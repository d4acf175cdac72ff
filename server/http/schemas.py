"""Schemas of the wire types, completed: with descriptions, examples, ranges, defaults and marks on what is refused.

Each comes from where it is written once: descriptions and examples from the docstrings in `protocol/`, ranges from
`multimodal/request.py`, the settings and the engine, defaults from the neutral request, refusals from `routers/`.
"""

import ast
import copy
import dataclasses
import inspect
import json
import re
from collections.abc import Collection, Iterator
from itertools import pairwise
from types import ModuleType
from typing import Any

from pydantic import BaseModel

from engine.types import GUIDE_KINDS, EngineInfo, GuideKind
from multimodal.request import BIAS, MAX_STRING, MAX_TOKENS, RANGES, TOKEN_ID, Ask
from protocol import (
    batches,
    chat,
    chunks,
    common,
    completions,
    errors,
    messages,
    models,
    responses,
    tokenize,
    transcriptions,
    visual,
)
from protocol.common import GenerationFields, ModelFields, Wire
from routers.chat import REFUSED_PARTS
from routers.fields import GUIDES, STRUCTURED_OUTPUTS, refused
from server.settings import Settings

Schema = dict[str, Any]

_MODULES: tuple[ModuleType, ...] = (
    *(common, chat, completions, messages, batches, responses),
    *(tokenize, chunks, errors, models, transcriptions, visual),
)
_EXAMPLE = re.compile(r"(?s)(.*?)\s*Example: (.*)")
_KEYWORDS = {
    "integer": ("minimum", "maximum", "exclusiveMinimum", "not"),
    "number": ("minimum", "maximum", "exclusiveMinimum", "not"),
    "string": ("minLength", "maxLength"),
    "array": ("minItems", "maxItems", "items"),
    "object": ("maxProperties", "propertyNames", "additionalProperties"),
}
"""Keywords that bound values of a type."""
_TEXT: Schema = {"type": "string"}
_OBJECT: Schema = {"type": "object"}
_ARRAY: Schema = {"type": "array"}
_NULL: Schema = {"type": "null"}
_NAME: Schema = {"type": "string", "minLength": 1}
_TEXT_OR_PARTS: Schema = {"type": ["string", "array"]}


def _needs(**fields: Schema) -> Schema:
    """Return the schema of an object that has these fields."""
    return {"properties": fields, "required": list(fields)}


def _source(**fields: Schema) -> Schema:
    return _OBJECT | _needs(**fields)


_INNER_BLOCKS = [
    _needs(type={"enum": ["text"]}, text=_TEXT),
    _needs(
        type={"enum": ["image"]},
        source=_source(type={"enum": ["base64"]}, media_type=_TEXT | {"pattern": "^image/[a-z]{1,32}$"}, data=_TEXT),
    ),
    _needs(type={"enum": ["image"]}, source=_source(type={"enum": ["url"]}, url=_TEXT)),
    _needs(type={"enum": ["document"]}, source=_source(type={"enum": ["text"]}, data=_TEXT)),
    _needs(
        type={"enum": ["document"]}, source=_source(type={"enum": ["content"]}, content={"type": ["string", "array"]})
    ),
]
_BLOCKS = [
    *_INNER_BLOCKS,
    _needs(type={"enum": ["tool_use"]}, id=_TEXT, name=_TEXT, input=_OBJECT),
    _needs(type={"enum": ["tool_result"]}, tool_use_id=_TEXT),
    _needs(type={"enum": ["thinking"]}, thinking=_TEXT),
    _needs(type={"enum": ["redacted_thinking"]}),
]
_MEMBERS = [_needs(type={"enum": ["function"]}, name=_NAME), _needs(type={"enum": ["custom"]}, name=_NAME)]
_CONDITIONS: dict[str, Schema] = {
    "TextBlock": {"oneOf": [_needs(type={"enum": ["text"]})]},
    "InnerBlock": {"oneOf": _INNER_BLOCKS},
    "ContentBlock": {"oneOf": _BLOCKS},
    "MessageTool": {"oneOf": [_needs(name=_TEXT) | {"properties": {"type": {"enum": [None, "custom"]}}}]},
    "MessageToolChoice": {
        "oneOf": [_needs(type={"enum": ["auto", "any", "none"]}), _needs(type={"enum": ["tool"]}, name=_TEXT)]
    },
    "InputPart": {
        "oneOf": [
            _needs(type={"enum": ["input_text", "output_text", "text"]}, text=_TEXT),
            _needs(type={"enum": ["refusal"]}, refusal=_TEXT),
            _needs(type={"enum": ["input_image"]}, image_url=_TEXT | {"minLength": 1}),
            _needs(type={"enum": ["input_audio"]}, input_audio=_OBJECT),
        ]
    },
    "InputItem": {
        "oneOf": [
            _needs(type={"enum": ["message"]}, role=_TEXT, content=_TEXT_OR_PARTS),
            _needs(type={"enum": ["function_call"]}, call_id=_NAME, name=_NAME, arguments=_TEXT),
            _needs(type={"enum": ["custom_tool_call"]}, call_id=_NAME, name=_NAME, input=_TEXT),
            _needs(
                type={"enum": ["function_call_output", "custom_tool_call_output"]}, call_id=_NAME, output=_TEXT_OR_PARTS
            ),
        ]
    },
    "MemberTool": {"oneOf": _MEMBERS},
    "ResponsesTool": {"oneOf": [*_MEMBERS, _needs(type={"enum": ["namespace"]}, name=_NAME, tools=_ARRAY)]},
    "ToolGrammar": {
        "oneOf": [
            _needs(type={"enum": ["text"]}),
            _needs(type={"enum": ["grammar"]}, syntax={"enum": ["lark"]}, definition=_NAME),
            _needs(type={"enum": ["grammar"]}, syntax={"enum": ["regex"]}, definition=_NAME),
        ]
    },
    "TextFormat": {
        "oneOf": [
            _needs(type={"enum": ["text"]}),
            _needs(type={"enum": ["json_object"]}),
            _needs(type={"enum": ["json_schema"]}, schema=_OBJECT),
        ]
    },
    "MessageFormat": {"oneOf": [_needs(type={"enum": ["json_schema"]}, schema=_OBJECT)]},
    "ContentPart": {
        "oneOf": [
            _needs(type={"enum": ["text", "input_text"]}, text=_TEXT),
            _needs(type={"enum": ["refusal"]}, refusal=_TEXT),
            _needs(type={"enum": ["image_url"]}, image_url={"type": ["object", "string"], "minLength": 1}),
            _needs(type={"enum": ["video_url"]}, video_url={"type": ["object", "string"], "minLength": 1}),
            _needs(type={"enum": ["audio_url"]}, audio_url={"type": ["object", "string"], "minLength": 1}),
            _needs(type={"enum": ["input_audio"]}, input_audio=_OBJECT),
        ]
    },
    "ChatMessage": {
        "oneOf": [
            _needs(role={"enum": ["assistant"]}),
            _needs(
                role={"enum": ["system", "developer", "user", "tool", "function"]},
                content={"type": ["string", "array"]},
            ),
        ]
    },
    "ResponseFormat": {
        "oneOf": [
            _needs(type={"enum": ["text"]}),
            _needs(type={"enum": ["json_object"]}),
            _needs(
                type={"enum": ["json_schema"]},
                json_schema=_OBJECT | _needs(schema={"type": ["object", "boolean"]}),
            ),
            _needs(type={"enum": ["regex"]}, regex=_TEXT),
            _needs(type={"enum": ["grammar", "ebnf"]}, grammar=_TEXT),
            _needs(type={"enum": ["choice"]}, choices=_ARRAY),
            _needs(type={"enum": ["structural_tag"]}, format=_OBJECT),
            _needs(type={"enum": ["structural_tag"]}, structures=_ARRAY) | {"not": _needs(format=_OBJECT)},
        ]
    },
    "StructuredOutputs": {"maxProperties": 1},
    "FunctionTool": {"oneOf": [_needs(type={"enum": ["function"]}, function=_OBJECT)]},
    "TokenizeRequest": {
        "oneOf": [
            _needs(prompt=_TEXT) | {"not": _needs(messages=_ARRAY)},
            _needs(messages=_ARRAY) | {"not": _needs(prompt=_TEXT)},
        ]
    },
}
"""Rules between the fields of an object."""
_DEPENDENT: Schema = {
    "top_logprobs": _needs(logprobs={"const": True}),
    "stream_options": _needs(stream={"const": True}),
    "best_of": {"anyOf": [{"properties": {"best_of": {"const": None}}}, {"properties": {"n": {"enum": [None, 1]}}}]},
}
"""Fields of a request that need others."""


_REFUSED: dict[type[Wire], Collection[str]] = {
    messages.BlockSource: ("file_id",),
    responses.InputPart: ("file_id",),
    chat.ChatMessage: ("audio",),
    chat.ContentPart: REFUSED_PARTS,
}
"""Unsupported fields, in addition to those of requests."""


def complete(schemas: dict[str, Schema], settings: Settings, model_name: str, info: EngineInfo | None) -> None:
    """Complete the schemas of wire types, by name, for this server and, once it is known, its engine."""
    kinds = GUIDE_KINDS if info is None else info.guides
    ranges = _ranges(settings, info)
    written = _all_texts()
    for cls in wire_types():
        if (schema := schemas.get(cls.__name__)) is None:
            continue
        properties: dict[str, Schema] = schema.get("properties", {})
        texts = {name: text for base in reversed(cls.__mro__) for name, text in written.get(base.__name__, {}).items()}
        for name, field in cls.model_fields.items():
            found = properties.get(alias := field.alias or name)
            if found is not None:
                properties[alias] = _documented(found, texts.get(name, ""))
        if issubclass(cls, Wire):
            for name, found in properties.items():
                properties[name] = _bounded(found, ranges.get(f"{cls.__name__}.{name}", ranges.get(name, {})))
            schema |= copy.deepcopy(_CONDITIONS.get(cls.__name__, {}))
            for name, harmless in _refused(cls).items():
                properties[name] = _marked(properties[name], "", harmless)
            for name in _unguided(cls, kinds):
                properties[name] = _marked(properties[name], " This server's engine does not support it.", ())
            if "model" in properties:
                properties["model"]["examples"] = [model_name]
        if issubclass(cls, ModelFields):
            _finish_request(schema, settings)
    if "structural_tag" not in kinds:
        schemas["ToolGrammar"]["oneOf"].pop()
    for name in ("ResponseFormat", "TextFormat"):
        cases = schemas[name]["oneOf"]
        schemas[name]["oneOf"] = [case for case in cases if case["properties"]["type"]["enum"][0] in ("text", *kinds)]


def wire_types() -> Iterator[type[BaseModel]]:
    """Yield the wire types."""
    for module in _MODULES:
        for value in vars(module).values():
            if isinstance(value, type) and issubclass(value, BaseModel) and value.__module__ == module.__name__:
                yield value


def _all_texts() -> dict[str, dict[str, str]]:
    """Return the docstrings below the fields of each class."""
    found: dict[str, dict[str, str]] = {}
    for module in _MODULES:
        for cls in ast.parse(inspect.getsource(module)).body:
            if isinstance(cls, ast.ClassDef):
                found[cls.name] = dict(_texts(cls))
    return found


def _texts(cls: ast.ClassDef) -> Iterator[tuple[str, str]]:
    for field, below in pairwise(cls.body):
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and isinstance(below, ast.Expr):
            assert isinstance(below.value, ast.Constant), "a docstring"
            yield field.target.id, " ".join(str(below.value.value).split())


def _documented(schema: Schema, text: str) -> Schema:
    """Return the schema of a field with its description and example."""
    match = _EXAMPLE.fullmatch(text)
    description, examples = (match[1], {"examples": [json.loads(match[2])]}) if match else (text, {})
    plain = {key: value for key, value in schema.items() if key != "title" and (key, value) != ("default", None)}
    return {"description": description, **plain, **examples}


def _bounded(schema: Schema, keywords: Schema) -> Schema:
    """Return the schema of a field with the keywords that its types have; a type or null becomes one schema."""
    branches: list[Schema] = schema.get("anyOf", [schema])
    branches = [_with(branch, keywords) for branch in branches]
    if "anyOf" not in schema:
        return branches[0]
    rest: Schema = {key: value for key, value in schema.items() if key != "anyOf"}
    typed = [branch for branch in branches if branch != _NULL]
    if len(typed) == 1 and "type" in typed[0] and len(branches) == 2:
        return rest | typed[0] | {"type": [typed[0]["type"], "null"]}
    return rest | {"anyOf": branches}


def _with(schema: Schema, keywords: Schema) -> Schema:
    more = {key: keywords[key] for key in _KEYWORDS.get(schema.get("type", ""), ()) if key in keywords}
    if "items" in more and isinstance(schema.get("items"), dict):
        more["items"] = _with(schema["items"], more["items"])
    return schema | more


def _ranges(settings: Settings, info: EngineInfo | None) -> dict[str, Schema]:
    """Return the keywords of fields whose values this server bounds."""
    context = info.context_length if info is not None else MAX_TOKENS
    last_id = (info.vocab_size if info is not None else MAX_TOKENS) - 1
    logprobs = min(settings.max_top_logprobs, info.max_logprobs if info is not None else settings.max_top_logprobs)
    most = settings.max_logit_bias
    tokens: Schema = {"minimum": 1, "maximum": context}
    alternatives: Schema = {"minimum": 0, "maximum": logprobs}
    ids: Schema = {"minimum": 0, "maximum": last_id}
    choices: Schema = {"minItems": 1, "items": {"minLength": 1}}
    string: Schema = {"minLength": 1, "maxLength": MAX_STRING}
    low, high = BIAS
    bias: Schema = {"type": "number", "minimum": low, "maximum": high}
    prompt: Schema = {"minLength": 1, "minItems": 1}
    stops = string | {"maxItems": settings.max_stop, "items": string}
    return {
        **{name: {"minimum": low, "maximum": high} for name, (low, high) in RANGES.items()},
        "top_p": {"exclusiveMinimum": RANGES["top_p"][0], "maximum": RANGES["top_p"][1]},
        "n": {"minimum": 1, "maximum": settings.max_n},
        "max_tokens": tokens,
        "max_output_tokens": tokens,
        "input": {"minItems": 1},
        "MessagesRequest.max_tokens": {},
        "max_completion_tokens": tokens,
        "min_tokens": tokens | {"minimum": 0},
        "stop": stops,
        "stop_sequences": stops,
        "bad_words": {"maxItems": most, "items": {"maxLength": MAX_STRING}},
        "allowed_token_ids": {"maxItems": last_id + 1, "items": ids},
        "stop_token_ids": {"maxItems": most, "items": ids},
        "tokens": {"items": ids},
        "logit_bias": {
            "maxProperties": most,
            "propertyNames": {"pattern": f"^({TOKEN_ID.pattern})$"},
            "additionalProperties": bias,
        },
        "logprobs": alternatives,
        "top_logprobs": alternatives,
        "prompt_logprobs": alternatives,
        "truncate_prompt_tokens": {"minimum": -1, "maximum": context, "not": {"const": 0}},
        "messages": {"maxItems": settings.max_messages},
        "tools": {"maxItems": settings.max_tools},
        "functions": {"maxItems": settings.max_tools},
        "prompt": prompt | {"items": ids | prompt | {"items": ids}},
        "chat_template_kwargs": {"propertyNames": {"enum": list(settings.chat_template_kwargs)}},
        **dict.fromkeys(("choice", "choices", "guided_choice"), choices),
    }


def _refused(cls: type[Wire]) -> dict[str, tuple[object, ...]]:
    """Return the fields of a class that are not supported, each with the values, other than null, that have no
    effect."""
    if issubclass(cls, ModelFields):
        return refused(cls)
    return dict.fromkeys(_REFUSED.get(cls, ()), ())


def _unguided(cls: type[Wire], kinds: Collection[GuideKind]) -> Iterator[str]:
    """Yield the fields of a class whose kind of constraint is not in `kinds`."""
    if issubclass(cls, GenerationFields):
        yield from (name for name, kind in GUIDES.items() if kind not in kinds)
    elif cls is common.StructuredOutputs:
        guides = {**STRUCTURED_OUTPUTS, "json_object": "json_object"}
        yield from (name.strip("_") for name, kind in guides.items() if kind not in kinds)


def _marked(schema: Schema, why: str, harmless: tuple[object, ...]) -> Schema:
    return {
        "description": schema["description"] + why,
        "enum": [None, *harmless],
        "deprecated": True,
        "x-unsupported": True,
    }


def _finish_request(schema: Schema, settings: Settings) -> None:
    """Add what concerns a whole request: its defaults, the model, fields that need others, and an example."""
    properties: dict[str, Schema] = schema["properties"]
    for field in dataclasses.fields(Ask):
        found = properties.get(field.name, {})
        if isinstance(field.default, bool | int | float) and "Default:" not in found.get("description", ""):
            found["default"] = field.default
    required: list[str] = schema.setdefault("required", [])
    if not settings.model_optional:
        required.insert(0, "model")
        properties["model"] |= {"type": "string", "minLength": 1}
    named = properties.keys()
    dependent = {name: needs for name, needs in _DEPENDENT.items() if {name, *needs.get("properties", ())} <= named}
    schema["dependentSchemas"] = dependent
    schema["examples"] = [{name: properties[name]["examples"][0] for name in dict.fromkeys(["model", *required])}]
