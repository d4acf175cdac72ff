"""Request fields that are refused by name, and those that nobody knows."""

import logging
from collections.abc import Iterator
from typing import Any

from multimodal.errors import RequestError
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
_unknown_seen: set[str] = set()


def check_fields(body: GenerationFields, *, strict: bool) -> None:
    """Raise RequestError for the first field that this server must not ignore; with `strict`, for unknown ones too."""
    for name, harmless in _REFUSED.items():
        value = getattr(body, name, None) if name != "echo" or "messages" in type(body).model_fields else None
        if value is not None and value not in harmless and not (name == "best_of" and value == (body.n or 1)):
            raise _unsupported(name)
    if body.structured_outputs is not None and body.structured_outputs.structural_tag is not None:
        raise _unsupported("structured_outputs.structural_tag")
    _check_tools(body)
    for name in _unknown_fields(body):
        _unknown(name, strict=strict)


def _unsupported(name: str) -> RequestError:
    return RequestError(f"This server does not support {name!r}.", name, "unsupported_parameter")


def _unknown_fields(value: object) -> Iterator[str]:
    """Dotted names of the fields that no model knows, nested ones included; lists leave no trace in them."""
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


def _unknown(name: str, *, strict: bool) -> None:
    shown = "".join(c if c.isprintable() else "?" for c in name[:64])
    if strict:
        raise RequestError(f"Unknown field {shown!r}.", shown, "unknown_parameter")
    if shown not in _unknown_seen and len(_unknown_seen) < _MAX_UNKNOWN:
        _unknown_seen.add(shown)
        log.warning("ignoring the unknown request field %r; this is said once", shown)
