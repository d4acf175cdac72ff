"""What the conversions of all generating APIs share: from a body's common fields to the neutral request."""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

from multimodal.errors import RequestError
from multimodal.request import Ask, AskedGuide
from multimodal.text.messages import Conversation
from protocol.common import GenerationFields, ResponseFormat

_SAME = tuple(
    sorted({entry.name for entry in dataclasses.fields(Ask)} & GenerationFields.model_fields.keys() - {"stop"})
)
"""Fields that are the same here and there; null means the default of `Ask`."""


def to_ask(
    body: GenerationFields, prompt: Conversation | Sequence[str | list[int]], fields: dict[str, str], **own: Any
) -> Ask:
    """Return the request of a body. `own` has the fields that its API spells in its own way. Raises RequestError."""
    given = {name: value for name in _SAME if (value := getattr(body, name)) is not None}
    guides = tuple(_guides(body))
    options = body.stream_options
    return Ask(
        prompt=prompt,
        fields={**fields, "guide": guides[0].field} if guides else fields,
        guides=guides,
        stop=(body.stop,) if isinstance(body.stop, str) else body.stop or (),
        include_usage=bool(options and options.include_usage),
        continuous_usage=bool(options and options.continuous_usage_stats),
        **given | own,
    )


def _guides(body: GenerationFields) -> Iterator[AskedGuide]:
    if body.response_format is not None:
        yield from _response_format(body.response_format)
    nested = body.structured_outputs
    candidates = (
        AskedGuide("structured_outputs", "json_schema", nested and nested.json_),
        AskedGuide("structured_outputs", "regex", nested and nested.regex),
        AskedGuide("structured_outputs", "choice", nested and nested.choice),
        AskedGuide("structured_outputs", "grammar", nested and nested.grammar),
        AskedGuide("guided_json", "json_schema", body.guided_json),
        AskedGuide("guided_regex", "regex", body.guided_regex),
        AskedGuide("guided_choice", "choice", body.guided_choice),
        AskedGuide("guided_grammar", "grammar", body.guided_grammar),
        AskedGuide("regex", "regex", body.regex),
        AskedGuide("grammar", "grammar", body.grammar),
        AskedGuide("choice", "choice", body.choice),
    )
    yield from (candidate for candidate in candidates if candidate.value is not None)
    if nested and nested.json_object:
        yield AskedGuide("structured_outputs", "json_object", None)


def _response_format(form: ResponseFormat) -> Iterator[AskedGuide]:
    name = "response_format"
    if form.type == "text":
        return
    if form.type == "json_object" and form.schema_ is not None:
        yield AskedGuide(name, "json_schema", form.schema_)
    elif form.type == "json_object":
        yield AskedGuide(name, "json_object", None)
    elif form.type == "json_schema":
        schema = form.json_schema.schema_ if form.json_schema else form.schema_
        if schema is None:
            raise RequestError("'response_format.json_schema.schema' is missing.", name)
        yield AskedGuide(name, "json_schema", schema)
    elif form.type == "regex" and form.regex is not None:
        yield AskedGuide(name, "regex", form.regex)
    elif form.type in ("grammar", "ebnf") and form.grammar is not None:
        yield AskedGuide(name, "grammar", form.grammar)
    elif form.type == "choice" and form.choices is not None:
        yield AskedGuide(name, "choice", form.choices)
    else:
        raise RequestError(
            "'response_format.type' must be text, json_object, json_schema, regex, grammar or choice, "
            "each with what it names.",
            name,
        )
