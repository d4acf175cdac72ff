"""Dataclasses built from the contract."""

import dataclasses
from typing import Any

from tensorrt_llm._contract import API, parse_type


def build_dataclass(name: str, *bases: type[Any], hidden: dict[str, Any] | None = None) -> Any:
    """Build the dataclass `name` of the contract on top of `bases`.

    The bases bring its methods and have empty `__slots__`. `hidden` are the fields that are not parameters, with their
    defaults.
    """
    entry = API["dataclasses"][name]
    fields: list[tuple[str, Any, Any]] = [
        (key, _annotation(field["type"]), _field(field)) for key, field in entry["fields"].items()
    ]
    fields += [
        (key, Any, dataclasses.field(default=default, init=False, repr=False))
        for key, default in (hidden or {}).items()
    ]
    made = dataclasses.make_dataclass(
        name,
        fields,
        bases=bases,
        slots=entry.get("slots", False),
        kw_only=entry.get("kw_only", False),
        namespace={"__doc__": None},
    )
    made.__module__ = entry["module"].split()[0]
    return made


def _annotation(text: str) -> Any:
    try:
        return parse_type(text, {})
    except ValueError:  # names a class that is not built, which nothing checks
        return Any


def _field(field: dict[str, Any]) -> Any:
    if "default_factory" in field:
        return dataclasses.field(default_factory={"list": list, "dict": dict}[field["default_factory"]])
    return dataclasses.field(default=field["default"]) if "default" in field else dataclasses.field()
