"""Fields that all generating APIs share: checks beyond their types, and conversion into the neutral request."""

import dataclasses
import logging
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any, cast

from engine.types import GuideKind
from multimodal.errors import ModelNotFound, RequestError, shown
from multimodal.request import Ask, AskedGuide, Conversation
from protocol.common import GenerationFields, ModelFields, Prediction, ResponseFormat, SamplingFields, Wire
from protocol.messages import PromptFields
from protocol.transcriptions import SpeechFields
from protocol.visual import DrawingFields
from routers.errors import WrongReplica

log = logging.getLogger(__name__)

_REFUSED: dict[str, tuple[object, ...]] = {
    "best_of": (1,),
    "structural_tag": (),
    "use_beam_search": (False,),
    "prompt_embeds": (),
    "logits_processors": ([],),
    "lora_request": (),
    "disaggregated_params": (),
    "modalities": (["text"], []),
    "audio": (),
    "web_search_options": (),
    "moderation": (),
    "echo": (False,),
    "chat_template": (),
    "suffix": ("",),
    "mcp_servers": ([],),
    "container": (),
    "thread": (),
    "prompt": (),
    "context_management": ([],),
    "return_tokens_as_token_ids": (False,),
}
"""Refused fields, which would change the meaning of the answer; each with the values, other than null, that have no
effect."""

STRUCTURED_OUTPUTS: dict[str, GuideKind] = {
    "json_": "json_schema",
    "regex": "regex",
    "choice": "choice",
    "grammar": "grammar",
    "structural_tag": "structural_tag",
}
"""Fields of `structured_outputs`, and the kind of guide that each names."""
GUIDES: dict[str, GuideKind] = {
    **{f"guided_{name.strip('_')}": kind for name, kind in STRUCTURED_OUTPUTS.items() if kind != "structural_tag"},
    **{kind: kind for kind in ("regex", "grammar", "choice")},
}
"""The same for other fields."""
_SAME = tuple(
    sorted(
        {entry.name for entry in dataclasses.fields(Ask)}
        & GenerationFields.model_fields.keys() - {"stop", "prediction"}
    )
)
"""Fields that bodies and `Ask` share; null means the default of `Ask`."""
_MAX_UNKNOWN = 100


@cache
def refused(body: type[ModelFields]) -> dict[str, tuple[object, ...]]:
    """Return the fields of an API that `FieldCheck` refuses, each with the values that have no effect."""
    fields = body.model_fields.keys()
    accepted = {"echo", "prompt"} if "echo" in fields and "messages" not in fields else set()
    if issubclass(body, PromptFields):
        accepted = {"context_management"}  # Claude Code asks for nothing else than to keep all
    if issubclass(body, SpeechFields | DrawingFields):
        accepted = {"prompt", "moderation"}
    return {name: harmless for name, harmless in _REFUSED.items() if name in fields - accepted}


class FieldCheck:
    """Checks the bodies for one model. With `strict` unknown fields are refused, otherwise each is logged once. With
    `model_optional` a body that generates may omit the model's name. A model that `transcribes` does nothing else.
    """

    def __init__(self, model_name: str, *, strict: bool, model_optional: bool, transcribes: bool = False) -> None:
        self._model_name = model_name
        self._strict = strict
        self._model_optional = model_optional
        self._transcribes = transcribes
        self._seen: set[str] = set()

    def check_model(self, name: str | None) -> None:
        """Raise ModelNotFound if the body names another model."""
        if name and name != self._model_name:
            raise ModelNotFound(name, self._model_name)

    def check(self, body: ModelFields) -> None:
        """Raise RequestError for a missing or wrong model, and for the first field that this server must not ignore."""
        if not body.model and not self._model_optional:
            raise RequestError(f"'model' must name a model; this server serves '{shown(self._model_name)}'.", "model")
        self.check_model(body.model)
        if self._transcribes and not isinstance(body, SpeechFields):
            raise WrongReplica(
                f"The model '{shown(self._model_name)}' transcribes speech and does nothing else: send audio to "
                "/v1/audio/transcriptions.",
                "model",
            )
        for name, harmless in refused(type(body)).items():
            value = getattr(body, name)
            if name == "best_of" and isinstance(body, GenerationFields):
                harmless = (body.n or 1,)
            if value is not None and value not in harmless:
                raise _unsupported(name)
        asked = body.kv_transfer_params if isinstance(body, SamplingFields) else None
        if asked is not None and asked.model_extra:
            raise _unsupported("kv_transfer_params")
        for name in _unknown_fields(body):
            self._note_unknown(shown(name))
        if isinstance(body, GenerationFields) and body.stream_options is not None and not body.stream:
            raise RequestError("'stream_options' needs 'stream': true.", "stream_options")

    def _note_unknown(self, name: str) -> None:
        if self._strict:
            raise RequestError(f"Unknown field {name!r}.", name, "unknown_parameter")
        if name not in self._seen and len(self._seen) < _MAX_UNKNOWN:
            self._seen.add(name)
            log.warning("ignoring the unknown request field %r; this is logged once", name)


def to_ask(
    body: GenerationFields, prompt: Conversation | Sequence[str | list[int]], fields: dict[str, str], **own: Any
) -> Ask:
    """Return the request of a body. `own` has the fields that differ between APIs. Raises RequestError."""
    guides = tuple(_guides(body))
    options = body.stream_options
    return Ask(
        prompt=prompt,
        fields={**fields, "guide": guides[0].field} if guides else fields,
        guides=guides,
        include_usage=bool(options and options.include_usage),
        continuous_usage=bool(options and options.include_usage and options.continuous_usage_stats),
        prediction=_prediction(body.prediction),
        **sampling_of(body) | own,
    )


def effort_of(effort: str | None) -> dict[str, Any]:
    """Return the variables of a chat template for an effort of reasoning. `none` turns reasoning off, as in SGLang."""
    if effort is None:
        return {}
    off = dict.fromkeys(("enable_thinking", "thinking"), False)
    return {"reasoning_effort": effort, **(off if effort == "none" else {})}


def sampling_of(body: SamplingFields) -> dict[str, Any]:
    """Return the fields of a body that are the same for all APIs, as `Ask` has them."""
    names = (name for name in _SAME if name in type(body).model_fields)
    given = {name: value for name in names if (value := getattr(body, name)) is not None}
    stop = (body.stop,) if isinstance(body.stop, str) else body.stop or ()
    kept = body.kv_transfer_params
    return given | {"stop": stop, "skip_save": bool(kept and kept.skip_save)}


def _prediction(prediction: Prediction | None) -> str | None:
    if prediction is None:
        return None
    content = prediction.content
    return content if isinstance(content, str) else "".join(part.text for part in content)


def _unsupported(name: str) -> RequestError:
    code = "thread_unsupported_request" if name == "thread" else "unsupported_parameter"
    return RequestError(f"This server does not support {name!r}.", name, code)


def _unknown_fields(value: object) -> Iterator[str]:
    """Yield dotted names of the fields that no model knows, nested ones included; lists leave no trace in them."""
    if isinstance(value, Wire):
        yield from value.model_extra or ()
        for field, child in value:
            if isinstance(child, Wire | list):
                yield from (f"{field}.{name}" for name in _unknown_fields(child))
    elif isinstance(value, list) and value and isinstance(value[0], Wire):
        for child in value:
            yield from _unknown_fields(child)


def _guides(body: GenerationFields) -> Iterator[AskedGuide]:
    if body.response_format is not None:
        yield from _response_format(body.response_format)
    if (nested := body.structured_outputs) is not None:
        for name, kind in STRUCTURED_OUTPUTS.items():
            if (value := getattr(nested, name)) is not None:
                yield AskedGuide("structured_outputs", kind, value)
    for name, kind in GUIDES.items():
        if (value := getattr(body, name)) is not None:
            yield AskedGuide(name, kind, value)
    if nested is not None and nested.json_object:
        yield AskedGuide("structured_outputs", "json_object", None)


def _response_format(form: ResponseFormat) -> Iterator[AskedGuide]:
    name = "response_format"
    kind = "grammar" if form.type == "ebnf" else form.type
    values = {"regex": ("regex", form.regex), "grammar": ("grammar", form.grammar), "choice": ("choices", form.choices)}
    if kind == "json_object" and form.schema_ is None:
        yield AskedGuide(name, "json_object", None)
    elif kind in ("json_object", "json_schema"):
        schema = form.json_schema.schema_ if kind == "json_schema" and form.json_schema else form.schema_
        if schema is None:
            raise RequestError("'response_format.json_schema.schema' is missing.", name)
        yield AskedGuide(name, "json_schema", schema)
    elif kind == "structural_tag":
        tag = {"format": form.format, "structures": form.structures, "triggers": form.triggers}
        given = {field: value for field, value in tag.items() if value is not None}
        if not given:
            raise RequestError(f"'{name}' needs 'format', or 'structures' and 'triggers'.", f"{name}.format")
        yield AskedGuide(name, "structural_tag", {"type": kind} | given)
    elif kind in values:
        field, value = values[kind]
        if value is None:
            raise RequestError(f"'{name}.{field}' is missing.", f"{name}.{field}")
        yield AskedGuide(name, cast(GuideKind, kind), value)
    elif kind != "text":
        raise RequestError(
            "'response_format.type' must be text, json_object, json_schema, regex, grammar, choice or structural_tag.",
            f"{name}.type",
        )
