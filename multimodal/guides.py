"""The ways in which a request constrains its output, as one guide for the engine."""

import json
from typing import Any

from engine.types import Guide, GuideKind
from multimodal.errors import RequestError
from multimodal.request import Ask


def guide_of(ask: Ask, kinds: tuple[GuideKind, ...], max_bytes: int, max_depth: int) -> Guide | None:
    """Return the one guide that the request asks for, checked for size; None if it asks for none."""
    if not ask.guides:
        return None
    name, kind, value = ask.guides[0]
    if len(ask.guides) > 1:
        names = " and ".join(repr(guide.field) for guide in ask.guides)
        raise RequestError(
            f"A request may constrain its output in one way only; this one has {names}.", ask.guides[1].field
        )
    if ask.allowed_token_ids:
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
    """Count levels of nesting, no further than just past the limit."""
    if limit < 0:
        return 0
    children = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    nested = (child for child in children if isinstance(child, (dict, list)))
    return 1 + max((_depth(child, limit - 1) for child in nested), default=0)
