"""The ways in which a request can ask for structured output, as one guide for the engine."""

import json
from collections.abc import Iterator
from typing import Any

from engine.types import Guide, GuideKind
from multimodal.errors import RequestError
from protocol.common import GenerationFields, ResponseFormat

Asked = tuple[str, GuideKind, Any]
"""The field, the kind, and the schema, expression, grammar or choices."""


def guide_field(body: GenerationFields) -> str | None:
    """The field by which the request constrains its output, if it does."""
    return next((name for name, _, _ in _asked(body)), None)


def guide_of(body: GenerationFields, kinds: tuple[GuideKind, ...], max_bytes: int, max_depth: int) -> Guide | None:
    """The one guide that the request asks for, checked for size; None if it asks for none."""
    asked = list(_asked(body))
    if not asked:
        return None
    name, kind, value = asked[0]
    if len(asked) > 1:
        names = " and ".join(repr(name) for name, _, _ in asked)
        raise RequestError(f"A request may constrain its output in one way only; this one has {names}.", asked[1][0])
    if body.allowed_token_ids:
        raise RequestError(f"'allowed_token_ids' and {name!r} exclude each other.", "allowed_token_ids")
    if kind not in kinds:
        raise RequestError(f"The engine cannot constrain output by {kind}.", name, "unsupported_parameter")
    if kind == "choice" and (not value or not all(value)):
        raise RequestError(f"{name!r} needs at least one choice, and none may be empty.", name)
    spec = _spec(name, kind, value, max_depth)
    try:
        size = len(spec.encode())
    except UnicodeEncodeError as error:  # JSON text inside the JSON can spell half a surrogate pair
        raise RequestError(f"{name!r} is not valid Unicode.", name) from error
    if size > max_bytes:
        raise RequestError(f"{name!r} may have {max_bytes // 1024} KiB at most.", name)
    return Guide(kind, spec)


def _asked(body: GenerationFields) -> Iterator[Asked]:
    yield from _response_format(body.response_format)
    yield from _extensions(body)


def _response_format(form: ResponseFormat | None) -> Iterator[Asked]:
    if form is None or form.type == "text":
        return
    if form.type == "json_object" and form.schema_ is not None:
        yield "response_format", "json_schema", form.schema_
    elif form.type == "json_object":
        yield "response_format", "json_object", None
    elif form.type == "json_schema":
        schema = form.json_schema.schema_ if form.json_schema else form.schema_
        if schema is None:
            raise RequestError("'response_format.json_schema.schema' is missing.", "response_format")
        yield "response_format", "json_schema", schema
    elif form.type == "regex" and form.regex is not None:
        yield "response_format", "regex", form.regex
    elif form.type in ("grammar", "ebnf") and form.grammar is not None:
        yield "response_format", "grammar", form.grammar
    elif form.type == "choice" and form.choices is not None:
        yield "response_format", "choice", form.choices
    else:
        raise RequestError(
            "'response_format.type' must be text, json_object, json_schema, regex, grammar or choice, each with what it names.",
            "response_format",
        )


def _extensions(body: GenerationFields) -> Iterator[Asked]:
    nested = body.structured_outputs
    candidates: list[tuple[str, GuideKind, Any]] = [
        ("structured_outputs", "json_schema", nested and nested.json_),
        ("structured_outputs", "regex", nested and nested.regex),
        ("structured_outputs", "choice", nested and nested.choice),
        ("structured_outputs", "grammar", nested and nested.grammar),
        ("guided_json", "json_schema", body.guided_json),
        ("guided_regex", "regex", body.guided_regex),
        ("guided_choice", "choice", body.guided_choice),
        ("guided_grammar", "grammar", body.guided_grammar),
        ("regex", "regex", body.regex),
        ("grammar", "grammar", body.grammar),
        ("choice", "choice", body.choice),
    ]
    yield from (candidate for candidate in candidates if candidate[2] is not None)
    if nested and nested.json_object:
        yield "structured_outputs", "json_object", None


def _spec(name: str, kind: GuideKind, value: Any, max_depth: int) -> str:
    if kind in ("regex", "grammar"):
        return str(value)
    if kind == "json_object":
        return ""
    if kind == "json_schema" and isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise RequestError(f"{name!r} is not valid JSON.", name) from error
    if _depth(value, max_depth) > max_depth:
        raise RequestError(f"{name!r} is nested more than {max_depth} levels deep.", name)
    return json.dumps(value, ensure_ascii=False)


def _depth(value: Any, limit: int) -> int:
    """Levels of nesting, counted no further than just past the limit."""
    children = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return (
        0
        if limit < 0
        else 1 + max((_depth(child, limit - 1) for child in children if isinstance(child, (dict, list))), default=0)
    )
