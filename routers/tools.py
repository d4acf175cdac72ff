"""Tools of a request of any API: those that the model may call, and their form in templates."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from multimodal.errors import RequestError, shown
from multimodal.request import Tool, Tools
from protocol.chat import FunctionDefinition


def chosen_tools(
    offered: Mapping[str, Tool],
    mode: str,
    allowed: Sequence[str] | None,
    *,
    parallel: bool,
    field: str,
    param: str,
    schemas: Sequence[str],
) -> Tools:
    """Return the tools that the model may call: all of those offered, or the `allowed`. `field` has the choice, `param`
    the tools. Raises RequestError.
    """
    for missing in (other for other in allowed or () if other not in offered):
        raise RequestError(f"{field!r} names '{shown(missing)}', which is not in {param!r}.", field)
    chosen = offered if allowed is None else {name: offered[name] for name in offered if name in allowed}
    strict = (
        re.sub(r"[^.]+\Z", "format" if tool.text is not None else "strict", place)
        for tool, place in zip(offered.values(), schemas, strict=True)
        if tool.strict and tool.name in chosen
    )
    guided = next(strict, "")
    return Tools(
        offered=chosen,
        mode="auto" if mode == "auto" else "required",
        parallel=parallel and mode != "function",
        guided=field if mode != "auto" or len(chosen) < len(offered) else guided,
        param=param,
        schemas=tuple(schemas),
    )


def template_tools(functions: Sequence[FunctionDefinition]) -> list[dict[str, Any]]:
    """Return tools as templates expect them, without `strict`."""
    return [
        {"type": "function", "function": function.model_dump(exclude_unset=True, exclude={"strict"})}
        for function in functions
    ]
