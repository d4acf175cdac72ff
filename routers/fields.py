"""Checks of a body besides its types: the model that it names, and fields that are refused or unknown."""

import logging
from collections.abc import Iterator
from typing import Any

from multimodal.errors import ModelNotFound, RequestError
from protocol.common import GenerationFields, Wire

log = logging.getLogger(__name__)

_REFUSED: dict[str, tuple[object, ...]] = {
    "best_of": (),
    "structural_tag": (),
    "use_beam_search": (False,),
    "prompt_embeds": (),
    "logits_processors": ([],),
    "lora_request": (),
    "disaggregated_params": (),
    "kv_transfer_params": (),
    "functions": ([],),
    "function_call": ("none",),
    "modalities": (["text"], []),
    "audio": (),
    "web_search_options": (),
    "moderation": (),
    "echo": (False,),
    "chat_template": (),
    "mm_processor_kwargs": ({},),
    "suffix": ("",),
}
"""Fields that would change the meaning of the answer, each with the values (besides null) that ask for nothing."""

_MAX_UNKNOWN = 1000


class FieldCheck:
    """Checks the bodies for one model. With `strict` unknown fields are refused, else each is logged once."""

    def __init__(self, model_name: str, *, strict: bool) -> None:
        self._model_name = model_name
        self._strict = strict
        self._seen: set[str] = set()

    def check_model(self, name: str | None) -> None:
        """Raise ModelNotFound if the body names another model."""
        if name and name != self._model_name:
            raise ModelNotFound(self._model_name)

    def check(self, body: GenerationFields) -> None:
        """Raise RequestError for another model, and for the first field that this server must not ignore."""
        self.check_model(body.model)
        for name, harmless in _REFUSED.items():
            value = getattr(body, name, None) if name != "echo" or "messages" in type(body).model_fields else None
            if value is not None and value not in harmless and not (name == "best_of" and value == (body.n or 1)):
                raise _unsupported(name)
        if body.structured_outputs is not None and body.structured_outputs.structural_tag is not None:
            raise _unsupported("structured_outputs.structural_tag")
        _check_tools(body)
        for name in _unknown_fields(body):
            self._note_unknown("".join(c if c.isprintable() else "?" for c in name[:64]))
        if body.stream_options is not None and not body.stream:
            raise RequestError("'stream_options' needs 'stream': true.", "stream_options")

    def _note_unknown(self, name: str) -> None:
        if self._strict:
            raise RequestError(f"Unknown field {name!r}.", name, "unknown_parameter")
        if name not in self._seen and len(self._seen) < _MAX_UNKNOWN:
            self._seen.add(name)
            log.warning("ignoring the unknown request field %r; this is said once", name)


def _unsupported(name: str) -> RequestError:
    return RequestError(f"This server does not support {name!r}.", name, "unsupported_parameter")


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


def _check_tools(body: GenerationFields) -> None:
    tools: Any = getattr(body, "tools", None)
    choice: Any = getattr(body, "tool_choice", None)
    if tools and choice != "none":
        raise RequestError(
            "This server does not support 'tools' yet; send tool_choice 'none' to have them ignored.",
            "tools",
            "unsupported_parameter",
        )
    if not tools and choice not in (None, "none", "auto"):
        raise RequestError("'tool_choice' needs 'tools'.", "tool_choice")
